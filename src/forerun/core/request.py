"""What goes into an engine and what comes out of it: requests with their budgets and seeds, and events.

No torch here: a process that only asks an engine in another one needs none.

What an encoder-decoder asks of its requests: where decoding starts, how long a source may be, its laws' rules.

The prompt of an encoder-decoder is its source: the encoder reads it once, and the decoder starts from a token of its
own. The tokens of such a sequence are the decoder's alone, so penalties, limits and positions count these.

Every random number is hashed from the seed of its request and where it is used (`hashed`); noise.py makes numbers.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import pairwise
from typing import Literal, get_args

from forerun.core.checks import as_token_ids, as_whole, refuse
from forerun.core.params import SamplingParams

FinishReason = Literal["stop", "length", "aborted", "error"]
Source = Literal["free", "costly", "any"]
Pooling = Literal["mean", "last"]  # of the rows that leave the last norm, one per token
Bytes = bytes  # under a name that a field called `bytes` does not hide
ALWAYS = 1 << 30  # rounds under one plan
MOST_URGENT = 1 << 53  # of priorities, either way: what JSON's numbers hold exactly


@dataclass(frozen=True, slots=True)
class Budget:
    """How much one sequence may draft this round, fixed before anything is drawn.

    `price` and `level` are in tokens: what would have been written in the time that they take. A drafter whose
    nodes are chosen leaves out those whose estimated gain is below their price. `source` is the controller's
    decision which drafter may draft; `any` leaves it to the drafter.
    """

    nodes: int  # below the root; 0 = do not draft
    depth: int
    width: int = 1
    # of a pass over the root and 0, 1, ... more nodes; None = all alike
    price: tuple[float, ...] | None = None
    level: float = 0.0  # of drafting one more level
    source: Source = "any"  # free = only what costs nothing | costly = the drafter that must run | any
    repeats: int = 0  # further rounds that may start under this plan before the one before them is known

    @property
    def runs(self) -> bool:
        """May a drafter that costs something draft?"""
        return self.nodes > 0 and self.depth > 0 and self.source != "free"

    def cut(self, depth: int) -> Budget:
        """The same, at most so deep."""
        return self if self.depth <= depth else replace(self, depth=depth)

    def __post_init__(self) -> None:
        for name, least in (("nodes", 0), ("depth", 0), ("width", 1)):
            value = getattr(self, name)
            if type(value) is not int or value < least:  # checked every round: the usual case comes first
                object.__setattr__(self, name, as_whole(f"Budget.{name}", value, low=least))
        if self.price is not None and not isinstance(self.price, tuple):
            raise refuse("Budget.price", self.price, "a tuple of numbers, or None")


def budget_of(nodes: int, width: int) -> Budget:
    """A budget of so many nodes: one chain, or `width` of them side by side."""
    return Budget(nodes, depth=max(1, nodes // width) if nodes else 0, width=width, repeats=ALWAYS)


def best_count(survivals: Sequence[float], price: Sequence[float] | None) -> int:
    """How many nodes, taken in this order, gain most beyond their price.

    price[n] is what a pass over the root and n more nodes costs, in tokens; None = they all cost the same.
    """
    if price is None:
        return len(survivals)
    best, best_gain, gain = 0, 0.0, price[0]
    for count, survival in enumerate(survivals[: len(price) - 1], start=1):
        gain += survival
        if gain - price[count] > best_gain:
            best, best_gain = count, gain - price[count]
    return best


@lru_cache(maxsize=16)  # a list holds for many rounds
def least_step(price: tuple[float, ...]) -> float:
    """What one more node costs at least, however many there are: one that survives less often never pays."""
    return max(0.0, min([after - before for before, after in pairwise(price)], default=0.0))


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt to continue, with its settings."""

    prompt: tuple[int, ...]
    params: SamplingParams = field(default_factory=SamplingParams)
    drafter: str | None = None  # None = the engine's
    verifier: str | None = None
    budget: Budget | None = None  # None = the controller decides
    shows_rejected: bool = False  # do its events tell what was drafted in vain?
    cache_salt: str | None = ""  # cached prompts are shared with requests of the same salt; None = with none
    request_id: str | None = None  # a name for `abort`
    prediction: tuple[int, ...] = ()  # what the output is expected to be: it is drafted
    adapter: str | None = None  # the name of a LoRA adapter; None = the base model
    pooling: Pooling | None = None  # how the rows of the prompt become its embedding; None = they do not
    priority: int = 0  # smaller = admitted sooner, where requests wait

    def __post_init__(self) -> None:
        object.__setattr__(self, "prompt", as_token_ids("Request.prompt", self.prompt))
        object.__setattr__(self, "prediction", as_token_ids("Request.prediction", self.prediction))
        object.__setattr__(self, "priority", as_whole("priority", self.priority, -MOST_URGENT, MOST_URGENT))
        if self.pooling not in (None, *get_args(Pooling)):
            raise refuse("Request.pooling", self.pooling, "'mean', 'last' or None")
        for name, kind in _KINDS.items():
            value, may_lack = getattr(self, name), name not in ("params", "shows_rejected")
            if not (isinstance(value, kind) or (may_lack and value is None)):
                raise refuse(f"Request.{name}", value, kind.__name__ + " or None" * may_lack)


_KINDS = {
    "params": SamplingParams, "drafter": str, "verifier": str, "budget": Budget, "shows_rejected": bool,
    "cache_salt": str, "request_id": str, "adapter": str,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probability of a token under the law it was sampled from, and of the likeliest tokens there.

    Text and bytes are filled in by `forerun.api.completion.spelt`, for whoever reads them: an engine knows ids alone.
    """

    token: int  # its id
    logprob: float
    top: tuple[TokenLogprob, ...] = ()
    text: str = ""  # U+FFFD stands for bytes that are only a part of a character
    bytes: Bytes = b""  # of several tokens they join to whole characters


@dataclass(frozen=True, slots=True)
class Branch:
    """Drafted tokens that were not accepted."""

    after: int  # how many of the round's own tokens come before it
    tokens: tuple[int, ...]


@dataclass(slots=True, unsafe_hash=True)  # not frozen, which takes six times as long: there is one per token
class Event:
    """What one round added to one sequence. To be read only."""

    seq_id: int
    tokens: tuple[int, ...]
    accepted: int  # how many of them, from the front, were drafted; the rest the target sampled
    text: str
    logprobs: tuple[TokenLogprob, ...] = ()
    finished: FinishReason | None = None
    error: Exception | None = None  # why it ended, where finished is "error"
    rejected: tuple[Branch, ...] = ()  # only where the request has shows_rejected


@dataclass(frozen=True, slots=True)
class LawRules:
    """What a model's own generation settings add to every law of its sequences, as transformers does."""

    bad_words: tuple[tuple[int, ...], ...] = ()  # transformers' bad_words_ids
    first: int | None = None  # forced_bos_token_id: the first token written
    last: int | None = None  # forced_eos_token_id: the token at the last place; not where eos is ignored


@dataclass(frozen=True, slots=True)
class SourceRules:
    """How the sequences of an encoder-decoder begin, and what holds for all of them."""

    start: int  # the token that its decoder starts from
    longest: int  # tokens of a source at most
    laws: LawRules | None = None


MASK = (1 << 64) - 1
DRAW, ACCEPT, BLOCK, DRAFT, COUPLE, DERIVE = range(6)  # purposes: two of them never share a number


def fresh_seed() -> int:
    """A seed for a request that gave none."""
    return secrets.randbits(63)


def derived_seed(seed: int, index: int) -> int:
    """The seed of the index-th of several completions of one prompt: the first has the seed itself."""
    return hashed(seed, index, DERIVE) >> 1 if index else seed


def mixed(x: int) -> int:
    """The finaliser of splitmix64."""
    x = (x + 0x9E3779B97F4A7C15) & MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def hashed(seed: int, *parts: int) -> int:
    """64 bits of a seed and where they are used."""
    key = mixed(seed & MASK)
    for part in parts:
        key = mixed(key ^ (part & MASK))
    return key
