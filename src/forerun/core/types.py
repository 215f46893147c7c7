"""The nouns of a round: sequences, scores, laws, what drafters offer, and what is planned (`RoundPlan`).

Trees and verdicts are in tree.py, requests, budgets and events in request.py.

Shapes: B sequences, M nodes of all trees laid end to end, V vocabulary, D width. Parents precede children;
node 0 of a tree is its root, the last committed token, whose keys and values the target has not seen yet.
So a sequence of n tokens has n - 1 of them in the KV cache, plain decoding is a tree of one node, and a
prompt is a chain whose every node is accepted: there is one kind of round.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

from torch import Tensor

from forerun.core.errors import CannotSample
from forerun.core.params import SamplingParams
from forerun.core.request import Branch as Branch
from forerun.core.request import Budget as Budget
from forerun.core.request import Event as Event
from forerun.core.request import FinishReason as FinishReason
from forerun.core.request import LawRules
from forerun.core.request import Request as Request
from forerun.core.request import Source as Source
from forerun.core.request import TokenLogprob as TokenLogprob
from forerun.core.tree import CUT as CUT
from forerun.core.tree import ONE_NODE
from forerun.core.tree import DeviceOutcome as DeviceOutcome
from forerun.core.tree import DeviceSampling as DeviceSampling
from forerun.core.tree import Draws as Draws
from forerun.core.tree import NextRoots as NextRoots
from forerun.core.tree import TreeBatch as TreeBatch
from forerun.core.tree import TreeForm as TreeForm
from forerun.core.tree import Verdict as Verdict
from forerun.core.tree import offsets as offsets


class LoadedAdapter(Protocol):
    """A LoRA adapter that a target has in memory; a sequence keeps its own to the end."""

    @property
    def name(self) -> str: ...
    @property
    def key(self) -> int: ...  # another one for every time that an adapter is loaded
    @property
    def nbytes(self) -> int: ...


class Adapters(Protocol):
    """Adapters by name; any thread may call."""

    @property
    def names(self) -> list[str]: ...
    def __contains__(self, name: str) -> bool: ...
    def get(self, name: str) -> LoadedAdapter:
        """Raises UnknownName where none has this name."""

    def add(self, name: str, folder: str) -> None: ...
    def remove(self, name: str) -> None: ...


class Seq(Protocol):
    """A sequence as targets, drafters and controllers see it: read only."""

    @property
    def id(self) -> int: ...
    @property
    def tokens(self) -> list[int]: ...  # prompt and output, all committed
    @property
    def prompt_length(self) -> int: ...
    @property
    def params(self) -> SamplingParams: ...
    @property
    def seed(self) -> int: ...
    @property
    def max_length(self) -> int: ...  # tokens it can ever hold
    @property
    def stop_ids(self) -> frozenset[int]: ...  # tokens that end it
    @property
    def shares_noise(self) -> bool: ...  # its verifier couples by noise: draft with the same noise
    @property
    def cache_salt(self) -> str | None: ...  # cached prompts are shared within a salt; None = not at all
    @property
    def source(self) -> Sequence[int]: ...  # what an encoder reads; () where the model is a decoder alone
    @property
    def rules(self) -> LawRules | None: ...  # of its laws, beside its parameters
    @property
    def prediction(self) -> Sequence[int]: ...  # what the caller expects the output to be; () = nothing
    @property
    def adapter(self) -> LoadedAdapter | None: ...  # changes of the target's weights that hold for it alone


@dataclass(slots=True, eq=False)
class PlainSeq:
    """A sequence that no engine schedules; its maker may change it. For probes, replays and tests."""

    id: int
    tokens: list[int]
    prompt_length: int = -1  # -1 = all of the tokens given
    params: SamplingParams = field(default_factory=SamplingParams)
    seed: int = 0
    max_length: int = 1 << 20
    stop_ids: frozenset[int] = frozenset()
    shares_noise: bool = False
    cache_salt: str | None = None
    source: Sequence[int] = ()
    rules: LawRules | None = None
    prediction: Sequence[int] = ()
    adapter: LoadedAdapter | None = None

    def __post_init__(self) -> None:
        if self.prompt_length < 0:
            self.prompt_length = len(self.tokens)


class Traits(NamedTuple):
    """The constants of a sequence that rounds compare between sequences; equal ones are one object."""

    verifier: str
    is_plain_greedy: bool  # its law is the argmax of the logits as they are
    wants_logprobs: bool
    has_budget: bool  # of its own


class DecidedSeq(Seq, Protocol):
    """A sequence with a verifier."""

    @property
    def verifier(self) -> str: ...
    @property
    def traits(self) -> Traits: ...


def traits_of(seqs: Sequence[DecidedSeq]) -> Sequence[Traits]:
    """The different traits among these sequences; mostly one."""
    first = seqs[0].traits
    # the usual cases, and quicker than a generator
    if len(seqs) == 1 or all([seq.traits is first for seq in seqs]):  # noqa: C419
        return (first,)
    return tuple({seq.traits for seq in seqs})


@dataclass(frozen=True, slots=True)
class Needs:
    """What a drafter reads from the target; nothing else is computed."""

    hidden_layers: tuple[int, ...] = ()  # () n-gram | (-1,) Medusa, EAGLE-1/2 | several layers EAGLE-3
    # Of a row of logits only the largest entry is read, or the largest that `bad_words` leave.
    largest_only: bool = False
    encoded: bool = False  # what an encoder made of the sources, with their prefill
    # It drafts only where the last `match_length` tokens of the text occurred before in it; 0 = it never drafts, None =
    # it may draft at any time. Where it does not, a target may run several plain passes of one greedy text in a call.
    match_length: int | None = None
    # It is a head: it also drafts without a match, unless its budget is empty for some rounds (`Budget.repeats`).
    may_run: bool = False
    rests: int | None = None  # `match_length` holds for so many further rounds; None = always
    last_row: bool = False  # hidden rows are read of the round before a draft alone

    def __or__(self, other: Needs) -> Needs:
        layers = tuple(sorted({*self.hidden_layers, *other.hidden_layers}))
        last_row = all([one.last_row or not one.hidden_layers for one in (self, other)])  # noqa: C419 - quicker
        one, two = self.match_length, other.match_length
        shorter = None if one is None or two is None else min(one, two) or max(one, two)
        both = self.largest_only and other.largest_only, self.encoded or other.encoded
        return Needs(layers, *both, shorter, self.may_run or other.may_run, last_row=last_row and bool(layers))


@dataclass(frozen=True, slots=True)
class Prompts:
    """Prompts whose next tokens are read in the pass that scores the trees of other sequences, in this order."""

    seqs: Sequence[Seq]  # not wholly cached, but for those of one token
    rows: int  # tokens of all of them that the pass reads: at most so many, or a few more that fill a GPU's pass


def first_rows(prompts: Sequence[list[int]], rows: int) -> list[list[int]]:
    """The first `rows` tokens of several prompts, in order."""
    taken: list[list[int]] = []
    for tokens in prompts:
        taken.append(tokens[:rows])
        rows -= len(taken[-1])
    return taken


@dataclass(frozen=True, slots=True)
class Greedy:
    """What a pass has found out for greedy sequences whose laws are the unchanged logits: `argmax` or `verdict`."""

    argmax: list[int] | None = None  # [M] where each row of logits is largest, the first on a tie
    verdict: Callable[[], Verdict] | None = None  # decided on the device; the call waits for it and reads it
    sampled: bool = False  # the verdict holds above temperature 0 too: `forerun.core.tree.DeviceSampling`
    next_roots: NextRoots | None = None  # makes a plain round behind this one before it is read
    hand_on: Callable[[], None] | None = None  # of a plain pass: its tokens to what grows trees behind it
    # [M] on the device, before the next pass: the target's token after the root and the accepted nodes of every tree
    tokens: Callable[[], Tensor] | None = None


class KnownLogprobs(Protocol):
    """Log-probabilities that were computed behind a pass (forerun.verify.decide)."""

    def of(self, seq_id: int, nodes: Sequence[int], tokens: Sequence[int]) -> tuple[TokenLogprob, ...]:
        """Of the tokens after these nodes of its tree, and of the likeliest there."""


class GreedyWalk(Protocol):
    """The greedy rule for B trees on a device (forerun.verify.greedy), which `build` gives to targets there."""

    def __call__(
        self,
        trees: Tensor,  # [2, B, N] int64: tokens, and parents within their tree
        ancestors: Tensor,  # [B, N, depth + 1] int32: the node above at every depth; past its own depth, itself
        argmax: Tensor,  # [B, N] int64
        paths: Tensor,  # [B, depth] int64, written: accepted nodes below the root, -1 past the end
        accepted: Tensor,  # [B] int64, written
        bonus: Tensor,  # [B] int64, written
    ) -> None: ...


@dataclass(frozen=True, slots=True)
class Scores:
    """What the target computed for every node: logits and hidden rows.

    With `Needs.largest_only`, entries of a row other than the largest may be estimates, which are below it too.
    Logits on a device, and all rows of trees that it has grown (`TreeBatch.form`), lie in the target's own buffers
    until the next call of `score`.
    """

    logits: Tensor | None  # [M, V] fp32, raw; None when a prompt is prefilled
    hidden: Mapping[int, Tensor] = field(default_factory=dict)  # layer -> [M, D]; -1 = after the last norm
    greedy: Greedy | None = None
    # Of the prompts in the same pass, as `Target.prefill` returns them.
    read: tuple[TreeBatch, Scores] | None = None
    seconds: Callable[[], float | None] | None = None  # of the pass on a device; called after its verdict is read
    encoded: Sequence[Tensor] | None = None  # of a prefill with `Needs.encoded`: [S, D] of each sequence
    # Passes of later rounds that the same call has run; -1 = this pass was run by an earlier call.
    ahead: int = 0
    own: float = 1.0  # the share of the call's time that this pass took
    logprobs: KnownLogprobs | None = None  # where the logits may be overwritten before the round is read
    # of every node, what the drafter has kept of its logits (`drafters.base.KeepsRows`); read behind the verdict
    kept: Callable[[], Sequence[Any]] | None = None

    @property
    def required_logits(self) -> Tensor:
        assert self.logits is not None, "a pass over trees returns logits"
        return self.logits


@dataclass(frozen=True, slots=True)
class Laws:
    """The sampling distribution after every node, as log-weights: law = softmax(log_weights), -inf = impossible.

    Where `greedy` holds, the law is the point mass on the argmax (the first one on a tie).
    """

    log_weights: Tensor  # [M, V] fp32
    greedy: tuple[bool, ...]  # [B]
    plain_greedy: bool = False  # all are greedy, and the log-weights are the target's unchanged logits
    impossible: Mapping[int, CannotSample] = field(default_factory=dict)  # node -> why no token can follow it
    known: KnownLogprobs | None = None  # what the log-weights would give, where another pass may have written there

    def probs(self, node: int) -> Tensor:
        return self.log_weights[node].softmax(-1)  # [V]

    def select(self, nodes: Tensor, which: Sequence[int]) -> Laws:
        if list(which) == list(range(len(self.greedy))):
            return self
        return Laws(self.log_weights[nodes], tuple(self.greedy[b] for b in which))


@dataclass(frozen=True, slots=True)
class Round:
    """What one round did, for controllers and metrics: never for drafters or verifiers."""

    seqs: tuple[Seq, ...]
    drafted: tuple[int, ...]  # [B] nodes below the root
    depths: tuple[int, ...]  # [B] depth of the deepest node
    accepted: tuple[int, ...]  # [B]
    seconds: Mapping[str, float]  # prompt, draft, pass, verdict, host: of the whole round
    prompt_rows: int = 0  # rows of prompts that were in the same pass
    followed: bool = False  # it was launched before the round before it was read
    tree_rows: int = 0  # rows of trees in the pass, padding included; 0 = one for every node
    ahead: int = 0  # passes of coming plain rounds that were run with its own: see Needs.match_length
    undrafted: int = 0  # of the last sequences: nobody drafted for these, who start with this pass

    @property
    def tells_times(self) -> bool:
        """Are its seconds those of its own trees?"""
        return not self.prompt_rows


def lone_roots(seqs: Sequence[Seq]) -> TreeBatch:
    """One root per sequence and nothing drafted: a plain round."""
    count = len(seqs)
    if count == 1:
        return TreeBatch([seqs[0].tokens[-1]], [-1], ONE_NODE)
    return TreeBatch([seq.tokens[-1] for seq in seqs], [-1] * count, tuple(range(count + 1)))


# plain: nothing is drafted | trees: one form for all, grown on the device | lookup: trees of any size, from the host |
# searched: look-ups were made for all sequences and none was worth drafting
Kind = Literal["plain", "trees", "lookup", "searched"]


class Form(NamedTuple):
    """The drafts of a round: nodes below the root, levels, and children per node at most of every tree; their kind."""

    nodes: int
    depth: int
    width: int
    kind: Kind = "trees"  # other kinds have no size of their own

    @property
    def sizes(self) -> tuple[int, int, int]:
        return self[:3]


PLAIN, LOOKUP, SEARCHED = Form(0, 0, 1, "plain"), Form(0, 0, 1, "lookup"), Form(0, 0, 1, "searched")


class RoundPlan(NamedTuple):
    """What a round is, planned before anything is drafted for it."""

    kind: Kind
    repeats: int = 0  # further rounds under this plan that may be launched before this one is read
    # of its trees; None = trees of any size, or, where it follows an unread round, the form of that round
    form: Form | None = None

    def again(self) -> RoundPlan:
        """The next round under the same plan."""
        return self._replace(repeats=self.repeats - 1, form=None)


class Menu(Protocol):
    """The forms that a drafter has ready for a whole batch, such as captured graphs; all sequences get the same one.

    Sequences whose offers hold the same menu draft together.
    """

    @property
    def forms(self) -> tuple[Form, ...]: ...

    def seconds(self, form: Form, batch: int) -> float:
        """What drafting this form for so many sequences takes, measured where it was."""

    def rows(self, form: Form, batch: int) -> int:
        """Of the target's pass over trees of this form for so many sequences, padding included."""

    def expected(self, form: Form) -> float:
        """Tokens of one draft that are accepted on average, as far as the drafter's files say."""


@dataclass(frozen=True, slots=True)
class Offer:
    """What drafting for one sequence would cost in the coming round, and what it can draft at no cost.

    `seconds[d - 1]` is what drafting depth d adds to drafting depth d - 1; the last entry holds for every further
    depth. So `()` costs nothing, `(s,)` costs s per level, and a drafter that makes all levels in one pass says
    `(s, 0.0)`.
    """

    seconds: tuple[float, ...] = ()
    start: float = 0.0  # seconds before the first level: tokens that it must read first
    free: tuple[float, ...] = ()  # acceptance probability of each depth of a chain that costs nothing
    chosen: bool = True  # tokens are chosen, never sampled: the drafter cuts its tree by the price list
    stops: bool = False  # it knows its confidence level by level, and stops where the next would not pay
    # tokens of its last draft that it expected to be accepted; None = not known
    expected: float | None = None
    menu: Menu | None = None  # it drafts in these forms only, for all its sequences together
    key: int = 0  # the same for all sequences of one drafter: what their texts came to is kept by it
    otherwise: float = 0.0  # tokens that its next draft brings where the next token is none of `free`

    @property
    def costs(self) -> bool:
        """Must the drafter run, and take time, to draft?"""
        return self.menu is not None or any(self.seconds)

    @property
    def level(self) -> float:
        """Seconds that each further level takes."""
        return self.seconds[-1] if self.seconds else 0.0

    def until(self, depth: int) -> float:
        """Seconds of drafting so deep, without the start."""
        return total(self.seconds, depth)


FREE = Offer()
NEVER = Offer(chosen=False)  # of a drafter that never drafts: there is nothing to choose


def at_depth(levels: Sequence[float], depth: int) -> float:
    """What depth 1, 2, ... adds: the last entry holds for all further depths."""
    return levels[min(depth, len(levels)) - 1] if levels else 0.0


def total(levels: Sequence[float], depth: int) -> float:
    """What depths 1 to `depth` add up to."""
    if not levels:
        return 0.0
    known = len(levels) - 1
    return sum(levels[: min(known, depth)]) + max(0, depth - known) * levels[-1]
