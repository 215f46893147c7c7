"""The Target protocol: a model that scores trees and keeps the KV cache of accepted tokens.

Beside it is what drafters may read of a target: its abilities, its weights (`SharedWeights`), and some of its layers
(`LayerSubset`) as a draft model.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.core.clock import WALL, Clock
from forerun.core.errors import InvalidInput, VocabularyMismatch
from forerun.core.request import SourceRules
from forerun.core.types import Needs, Prompts, Scores, Seq, TreeBatch, Verdict
from forerun.models.attention import SparseContext
from forerun.models.config import DecoderConfig
from forerun.models.layers import Rotations
from forerun.models.load.quants import Blocks


@dataclass(frozen=True, slots=True)
class PrefillPace:
    """How many rows of prompts share a pass with running sequences, before any such pass was timed."""

    start: int  # rows
    least: int  # rows: fewer cost nearly as much
    # (waiting requests, their share of the running ones) from which on a pass takes twice, four times as many rows
    more: tuple[tuple[int, float], ...]
    early: bool  # prefill some prompts before a place in the batch is free


@dataclass(frozen=True, slots=True)
class Abilities:
    """What a target can do, stated once by the target: rounds, drafters and controllers never ask for its device."""

    overlap: int  # rounds that may be under way behind one that is not finished: see forerun.engine.round.Timeline
    prefill: PrefillPace
    captures: bool  # work beside its passes, such as heads, is captured as graphs
    # it decides about chosen drafts on the device, also above temperature 0: drawn drafts would wait for the host
    decides: bool
    row_dtype: torch.dtype  # of hidden rows and heads, where its weights do not say
    awaited: bool  # its passes run while the host does other work, and who reads a verdict waits for them
    clock: Clock = WALL  # what its passes are timed by, and all work around them

    @classmethod
    def of(cls, device: torch.device) -> Abilities:
        """What every target on this kind of device can do."""
        return ON_CPU if device.type == "cpu" else ON_GPU


ON_CPU = Abilities(
    overlap=0,
    # a CPU passes 16 rows in nearly the time of one; running sequences would wait for a prompt that is read early
    prefill=PrefillPace(start=32, least=16, more=((4, 1 / 8), (8, 1 / 2)), early=False),
    captures=False,
    decides=False,
    row_dtype=torch.float32,
    awaited=False,
)
ON_GPU = Abilities(
    overlap=2,
    # trees fill its passes, so that rows of prompts cost the same in larger passes
    prefill=PrefillPace(start=256, least=256, more=((2, 1 / 12), (6, 1 / 6)), early=True),
    captures=True,
    decides=True,
    row_dtype=torch.bfloat16,
    awaited=True,
)


class Target(Protocol):
    """A language model with a KV cache that commits and rolls back.

    A sequence of n committed tokens has n - 1 of them cached; the last is the root of the next tree. `score`
    leaves the cache of committed tokens as it was; `commit` keeps the keys and values of root and path and makes
    the rest unreachable. What must hold (forerun.testing.check_target): scoring a tree gives each node the
    logits of a plain pass over its own path; score-then-commit equals prefilling the committed tokens; after
    `release` every slot is free again; a sequence's scores do not depend on its neighbours in the batch, nor on the
    chunks in which its prompt was cached, nor on what they shared a pass with.
    """

    @property
    def vocab_size(self) -> int: ...
    @property
    def max_length(self) -> int:
        """Tokens one sequence can hold: the model's context."""

    @property
    def device(self) -> torch.device: ...

    @property
    def can(self) -> Abilities:
        """What it can do; `Abilities.of(self.device)` is right for most targets."""

    @property
    def used_slots(self) -> int:
        """Slots for keys and values of one token each that sequences hold now, all together."""

    @property
    def cached_slots(self) -> int:
        """Slots with finished texts, for sequences that start alike: they are free to be taken."""

    @property
    def slots(self) -> int | None:
        """Slots that there can be in all: no sequence can be longer; None = no limit."""

    @property
    def source_rules(self) -> SourceRules | None:
        """What an encoder-decoder asks of requests, whose prompts are its sources; None = a decoder alone."""

    def shared(self) -> SharedWeights | None:
        """Weights that drafters may read; None where there are none to read. Made anew at every call."""

    @property
    def pass_rows(self) -> int:
        """Rows of prompts that one pass takes at best: more would be read in several."""

    def prefill(self, seqs: Sequence[Seq], needs: Needs, rows: int | None = None) -> tuple[TreeBatch, Scores]:
        """Cache committed tokens that are not cached yet, but the last: at most `rows` of all sequences together.

        The first sequence comes first; None = all tokens of all. Returns those that were cached now as chains (a round
        in which everything was accepted) with hidden rows as needed and no logits. Where there was nothing to cache
        (a prompt of one token) the chain is empty. What a new sequence shares with one before it, of the same
        `cache_salt`, need not be computed: it counts for no row, and is returned all the same.
        """

    def score(self, seqs: Sequence[Seq], trees: TreeBatch, needs: Needs, prompts: Prompts | None = None) -> Scores:
        """One pass over every node of every tree; positions by depth, each node sees its own ancestors only.

        `prompts` are prefilled by the same pass where that can be, and `Scores.read` has what prefill would return.
        """

    def commit(self, seqs: Sequence[Seq], trees: TreeBatch, verdict: Verdict) -> None:
        """Keep root and path of the trees scored last; forget the other nodes."""

    def truncate(self, seq: Seq, length: int) -> None:
        """Forget cached tokens beyond the first `length`; unknown sequences are ignored."""

    def warm_up(self, needs: Needs, max_batch: int, max_length: int) -> None:
        """Do now, before texts are written, what the first of them would otherwise wait for."""

    def has_room(self, *lengths: int) -> bool:
        """Could sequences of these lengths, each with a tree on top, be prefilled now, together and in this order?

        No answer reserves anything: the next question must name all sequences again.
        """

    def make_room(self, seqs: Sequence[Seq], rows: Sequence[int]) -> bool:
        """Slots for trees of `rows` nodes behind these sequences; False = they do not all fit, and none was given."""

    def reused_tokens(self, seq: Seq) -> int:
        """How many tokens of a sequence were found, and not computed, when it was first prefilled."""

    def reaches(self, seqs: Sequence[Seq]) -> Sequence[int] | None:
        """How long each may become as it is cached; None = as long as any. Beyond, positions mean something else.

        A sequence that has become longer is released and prefilled anew, and no tree goes beyond.
        """

    def cached_tokens(self, seq: Seq) -> int:
        """How many tokens of a sequence are cached: it grows while a long prompt is prefilled, pass by pass.

        Unknown sequences have none. The only question that may come from another thread.
        """

    def release(self, seq: Seq) -> None:
        """Free everything held for a sequence; unknown sequences are ignored.

        Called after a pass over it has failed at any point, too: it must then free whatever was taken, leave other
        sequences as they are, and, where it is interrupted itself, do the rest when it is called again.
        """


class _OnDevice(Protocol):
    @property
    def device(self) -> torch.device: ...


class BaseTarget:
    """The answers that most targets give."""

    source_rules: SourceRules | None = None

    @property
    def can(self: _OnDevice) -> Abilities:
        return Abilities.of(self.device)

    def shared(self) -> SharedWeights | None:
        return None

    def reaches(self, seqs: Sequence[Seq]) -> Sequence[int] | None:
        return None

    def warm_up(self, needs: Needs, max_batch: int, max_length: int) -> None:
        """Nothing is prepared."""


@runtime_checkable
class StartsWithPrompts(Protocol):
    """A target whose pass may score a root behind the last tokens of its prompt, which the same pass caches.

    Beside lone roots it is one itself, beside trees of a form it has a tree of that form.

    `score` then takes sequences that are among its trees and among its prompts: these are read to their end.
    """

    def prompt_rows(self, nodes: int, rows: int, waiting: int) -> int:
        """Rows of prompts that a pass over `nodes` nodes takes: about `rows` of the `waiting` ones."""


@runtime_checkable
class HoldsUnread(Protocol):
    """A target that can hold a context which it has not computed: to time passes behind a long one."""

    def occupy(self, seq: Seq) -> None:
        """Hold the KV of a new sequence's tokens, but the last, as zeros."""


@runtime_checkable
class CompilesAhead(Protocol):
    """A target whose kernels are compiled on this machine: side by side, before the first pass needs one."""

    def compile_ahead(self, max_length: int) -> None: ...


class Later(Protocol):
    """Captures that wait for a spare moment."""

    def __len__(self) -> int: ...
    def left(self, batch: int) -> int:
        """Captures for batches of this size."""

    def is_first(self, batch: int | None) -> bool:
        """Is the next capture, for a batch of this size or the smallest, of a drafter that has none?"""

    def wants(self, batch: int, waits: bool = True) -> bool:
        """Is there something for batches of this size, now or (`waits`) once its kernels are compiled?"""

    def next(self, batch: int | None = None, waits: bool = False) -> bool:
        """Make one, for a batch of this size or the smallest; False = nothing can be done now.

        `waits`: for kernels that are being compiled.
        """


@runtime_checkable
class CapturesLater(Protocol):
    """A target that writes before all its graphs are captured."""

    @property
    def later(self) -> Later: ...
    def capture_few_first(self) -> None:
        """Have `warm_up` leave to `later` all graphs but those of short texts: other passes run without meanwhile."""


@runtime_checkable
class ServedByProcesses(Protocol):
    """A target that other processes compute a part of: they may end, and they are to be ended."""

    @property
    def problem(self) -> str | None:
        """Why it cannot compute any more; None while it can. May be asked from any thread."""

    def close(self) -> None:
        """End the other processes; later passes raise. A second call changes nothing."""


class MakesPartial(Protocol):
    """Makes a draft model of some of a target's layers, which reads the target's own KV cache."""

    def __call__(
        self, layers: LayerSubset, leave: Callable[[Tensor], Tensor] | None = None, context: SparseContext | None = None
    ) -> Target:
        """`leave` turns what leaves the last of them [M, D] into what the LM head reads; None = the final norm.

        `context` says which pages of a sequence are read; None = all.
        """


@dataclass(frozen=True, slots=True)
class SharedWeights:
    """Tables are read row by row: a target may hold neither as one tensor."""

    embed: Callable[[Tensor], Tensor]  # [N] ids -> [N, D] rows of the embedding
    head_rows: Callable[[Tensor], Tensor]  # [N] ids -> [N, D] rows of the LM head
    vocab_size: int
    width: int
    dtype: torch.dtype  # of rows: weights may be held in fewer bits
    table: Tensor | Blocks | None = None  # [V, D] what `embed` reads, where others can read it in place
    head_table: Tensor | Blocks | None = None  # [V, D] what `head_rows` reads
    layers: Sequence[object] = ()  # one per layer, in the target's own form: Block, Layer, C struct or module
    final_norm: Tensor | None = None  # [D] in front of the LM head, where it is a plain RMS norm
    rotations: Sequence[Rotations] = ()  # rotary tables, one per kind of rope; () = inside the layers
    config: DecoderConfig | None = None  # the target's shape; None where it is not one of our families
    partial: MakesPartial | None = None  # some of `layers` as a draft model; None where they cannot run apart

    @classmethod
    def of(cls, embedding: Tensor, head: Tensor) -> SharedWeights:
        """From whole tables [V, D]."""
        size, width = embedding.shape
        return cls(
            lambda ids: F.embedding(ids, embedding), lambda ids: head[ids], size, width, embedding.dtype, embedding
        )

    def must_fit(self, width: int, vocab_size: int, trained_for: str) -> None:
        """Raise unless a head of this width and vocabulary can use what is shared."""
        other = f"it was trained for another target ({trained_for or 'unnamed'})"
        if self.width != width:
            raise InvalidInput(f"the head is {width} wide and the target {self.width}: {other}")
        if self.vocab_size < vocab_size:
            raise VocabularyMismatch(
                f"the head knows a vocabulary of {vocab_size} and the target one of {self.vocab_size}: {other}"
            )


@dataclass(frozen=True, slots=True)
class LayerSubset:
    """Layers `first` to `end`, without the attention of some and without the MLP of some; counted from 0."""

    end: int
    first: int = 0
    without_attention: frozenset[int] = frozenset()
    without_mlp: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        inside = range(self.first, self.end)
        if self.first > self.end or any(i not in inside for i in (*self.without_attention, *self.without_mlp)):
            raise InvalidInput(f"a skipped layer is not one of layers {self.first} to {self.end}")

    @property
    def is_prefix(self) -> bool:
        """Does it run the first layers whole? Then their keys and values are those of the whole model."""
        return self.first == 0 and not self.skips

    @property
    def skips(self) -> bool:
        """Does it leave out a part of a layer that it runs?"""
        return bool(self.without_attention or self.without_mlp)

    def output_is_in(self, hidden: Container[int]) -> bool:
        """Does somebody read what leaves the last of them, of every row? Else rows without logits end with its keys."""
        return self.end in hidden or -1 in hidden

    @property
    def sublayers(self) -> int:
        """Attentions and MLPs that are run."""
        inside = range(self.first, self.end)
        left_out = sum(i in some for some in (self.without_attention, self.without_mlp) for i in inside)
        return 2 * len(inside) - left_out
