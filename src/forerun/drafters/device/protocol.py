"""DeviceDrafter: the one protocol of a drafter that runs on a GPU. Engine, compositions and targets use nothing else.

A round of such a drafter: `launch` leaves one tree for each sequence in the memory of the device, the target's pass
reads the trees there, `observe` sees the verdict. With overlap the engine calls `launch` again before the verdict is
read: the drafter then goes on from what the device itself has decided (`Unread`). Heads (eagle.py) and draft models
(model.py) implement it; `OnDevice` (drafter.py) makes a `Drafter` of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from torch import Tensor

from forerun.core.types import Form, Menu, Needs, Scores, Seq, TreeBatch, Verdict

if TYPE_CHECKING:
    from forerun.models.base import Target


class Unread(NamedTuple):
    """A round that was launched and that the host has not read."""

    trees: TreeBatch  # of a form, or lone roots
    hidden: Mapping[int, Tensor]  # the rows of its pass, by layer


Seats = Sequence[tuple[Seq, int]]  # sequences, and their places in the unread round; -1 = they are not in it


class DeviceMenu(Menu, Protocol):
    """The forms that are captured, and for which batch sizes."""

    @property
    def switches(self) -> bool:
        """Does it draft behind any unread round: lone roots, trees of another form, sequences that start?

        Else behind its own trees alone, in the form of these.
        """

    @property
    def complete_to(self) -> int:
        """Batches up to this size have all graphs that they will get, or get them later; 0 = nothing was captured."""

    def take_price(self, price: tuple[float, ...] | None) -> None:
        """What nodes cost from now on (`Budget.price`): drafts that can leave out nodes that gain less."""

    def fitting(self, batch: int, nodes: int, depth: int, width: int) -> Form | None:
        """A form as large as asked for, cut to what a pass can hold; None = there is none."""

    def holds(self, length: int) -> bool:
        """Can sequences of so many tokens be drafted for without a new graph, in forms that are known?"""

    def knows(self, form: Form, batch: int) -> bool:
        """Can this form be drafted for so many sequences without a new graph?"""

    def drafting(self, form: Form, batch: int) -> float:
        """Seconds of a draft of any form, on the menu or not."""


class DeviceDrafter(Protocol):
    """Drafts trees of chosen tokens on the device of its target.

    It never waits for the device, and it writes to no memory but its own: trees stay valid until its next draft, which
    runs behind the pass that reads them. What it drafts changes no text. A call that raises leaves the drafter of no
    use; `OnDevice` then drafts by the host.
    """

    @property
    def needs(self) -> Needs:
        """Hidden rows of the target's passes that it reads."""

    @property
    def menu(self) -> DeviceMenu:
        """The forms that it drafts in, with what each takes and should bring."""

    def is_ready(self, seq: Seq) -> bool:
        """Can it draft for this sequence now? Others may be in the batch: they get some tree behind their root."""

    def launch(self, seats: Seats, form: Form | None, behind: Unread | None = None) -> TreeBatch | None:
        """Start the draft of one tree of this form for each sequence; a new form is captured first.

        With `behind` the draft goes on from a round that was not read, which adds tokens that only the device knows;
        form None = that of its trees. None = it cannot: that round must be read first, and nothing has changed.
        """

    def observe(self, seqs: Sequence[Seq], trees: TreeBatch, scores: Scores, verdict: Verdict) -> None:
        """Learn from a round that was read, as `Drafter.observe`; the next draft may start here."""

    def rest(self, seats: Seats, behind: Unread) -> None:
        """A plain round follows unread trees: keep what a later draft needs of their pass (if the menu switches)."""

    def rehearse(
        self,
        target: Target,
        max_batch: int,
        max_length: int,
        at_once: int = ...,
        failed: Callable[[Exception], None] = ...,
    ) -> None:
        """Capture and time all that drafts for so many sequences replay, and the target's passes over their trees.

        What batches of more than `at_once` sequences replay is left to `CapturesLater.later` of the target; `failed`
        is told where the first of it cannot be captured. Only padding is drafted for. Without graphs, as on a CPU,
        there is nothing to do.
        """

    def forget(self, seq: Seq) -> None:
        """Free what is held for a sequence; trees that were launched for it may still be verified."""
