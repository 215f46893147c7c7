"""`forerun layers search`: which layers of a model draft best for it on a user's prompts.

Early exits are tried first, up to fifteen. Then each attention and each MLP is left out alone, which ranks them; the
least missed are left out together, more and more of them; and from the best of these, single ones are exchanged at
random until the time is up. Candidates are compared by the speed that they would have here: what would be accepted and
what passes cost. (Draft & Verify searches skip sets by Bayesian optimisation, SWIFT online.)

Acceptance is measured in windows, without decoding. A window is a place in a greedy text and the tokens that follow it.
A chain that is drafted there is accepted while each of its tokens is the text's own, so the part is fed the text: as
long as it is right it sees what it would see in a real round, and where it is wrong the round would have ended. The
windows are prefilled once, by the whole target.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from time import perf_counter
from typing import Any

from forerun.api.llm import LLM
from forerun.control.cost import CostModel
from forerun.core.errors import InvalidInput
from forerun.core.params import SamplingParams
from forerun.core.types import Needs, PlainSeq, TreeBatch
from forerun.drafters.model.layer_skip import LayerPlan, draft_part, read_plan
from forerun.measure.bench.contenders import load
from forerun.measure.bench.run import tokenise
from forerun.measure.bench.settings import Settings
from forerun.measure.bench.suites import load_suite
from forerun.measure.machine import machine_facts
from forerun.models.base import LayerSubset, Target
from forerun.models.config import DecoderConfig

FEW = 24  # windows that rank single sublayers
MOST = 96  # windows that candidates are compared on
STEPS = 15  # sizes of skip sets, and early exits, that are tried

Sublayer = tuple[str, int]  # "attention" or "mlp", and the layer


@dataclass(frozen=True, slots=True)
class Candidate:
    """A subset and what it would do."""

    layers: LayerSubset
    survivals: tuple[float, ...]
    gains: tuple[float, ...]

    @property
    def gain(self) -> float:
        return max(self.gains)

    @property
    def depth(self) -> int:
        return 1 + self.gains.index(self.gain)

    def as_document(self) -> dict[str, Any]:
        return {
            "accepted": [round(share, 4) for share in self.survivals],
            "depth": self.depth,
            "tokens_per_round": round(1.0 + sum(self.survivals[: self.depth]), 3),
            "predicted_speedup": round(self.gain, 3),
        }


class Judge:
    def __init__(self, target: Target, windows: Sequence[Window], cost: CostModel) -> None:
        shared = target.shared()
        if shared is None or shared.config is None or shared.partial is None:
            raise InvalidInput("the layers of this target cannot run apart; `layer_skip` cannot draft for it")
        self.target, self.windows, self.cost = target, windows, cost
        self.shares, self.layers = Shares.of(shared.config), shared.config.layers
        self.tried: dict[LayerSubset, Candidate] = {}

    def measure(self, plan: LayerPlan, windows: Sequence[Window] | None = None) -> Candidate:
        reached = survivals(draft_part(self.target, plan), self.windows if windows is None else windows)
        return Candidate(plan.layers, reached, gains(plan.layers, reached, self.shares, self.cost))

    def judge(self, layers: LayerSubset) -> Candidate:
        if layers not in self.tried:
            self.tried[layers] = self.measure(LayerPlan(layers))
        return self.tried[layers]

    def best(self) -> Candidate:
        """Of those that leave something out: the whole target drafts all right, and at the target's own cost."""
        parts = [one for one in self.tried.values() if one.layers.sublayers < 2 * self.layers]
        return max(parts, key=lambda candidate: candidate.gain)


def search(judge: Judge, seconds: float, seed: int = 0) -> Candidate:
    """The best candidate that was found in about so many seconds; early exits are tried in any case."""
    started, rng = perf_counter(), random.Random(seed)

    def has_time() -> bool:
        return perf_counter() - started < seconds

    for end in sizes(judge.layers):
        judge.judge(LayerSubset(end))
    ranked = rank(judge, has_time)
    for size in sizes(len(ranked)):
        if not has_time():
            break
        judge.judge(without(judge.layers, ranked[:size]))
    while has_time():
        judge.judge(neighbour(judge.best().layers, judge.layers, rng))
    return judge.best()


def rank(judge: Judge, has_time: Callable[[], bool]) -> list[Sublayer]:
    """Sublayers, those that are missed least first; those that there was no time for come last."""
    missed: dict[Sublayer, float] = {}
    for sublayer in sublayers(judge.layers):
        if not has_time():
            break
        alone = without(judge.layers, [sublayer])
        few = judge.measure(LayerPlan(alone), judge.windows[:: max(1, len(judge.windows) // FEW)])
        missed[sublayer] = -sum(few.survivals)
    return sorted(sublayers(judge.layers), key=lambda one: missed.get(one, 1.0))


def sublayers(layers: int) -> Iterator[Sublayer]:
    for layer in range(layers):
        yield "attention", layer
        yield "mlp", layer


def sizes(count: int) -> list[int]:
    """How many of these to try: from few to nearly all, evenly."""
    return sorted({min(count - 1, max(1, round(count * i / (STEPS + 1)))) for i in range(1, STEPS + 1)})


def without(layers: int, some: Sequence[Sublayer]) -> LayerSubset:
    """All layers but for some sublayers."""
    kinds = ("attention", "mlp")
    attentions, mlps = (frozenset(layer for kind, layer in some if kind == name) for name in kinds)
    return LayerSubset(layers, without_attention=attentions, without_mlp=mlps)


def neighbour(layers: LayerSubset, count: int, rng: random.Random) -> LayerSubset:
    """The same with one sublayer more, one less, or one exchanged for another; an early exit becomes a skip set."""
    skipped = {("attention", i) for i in layers.without_attention} | {("mlp", i) for i in layers.without_mlp}
    skipped |= {one for one in sublayers(count) if one[1] >= layers.end}
    run = sorted(set(sublayers(count)) - skipped)
    move = rng.choice(("more", "less", "other"))
    if move != "less" and len(run) > 1:
        skipped.add(rng.choice(run))
    if move != "more" and skipped:
        skipped.discard(rng.choice(sorted(skipped)))
    return without(count, sorted(skipped))


def run_search(settings: Settings, seconds: float) -> tuple[LayerPlan, int]:
    """Search on a model and prompts; what was measured goes with the plan. And how many layers the model has."""
    judge, facts = _prepare(settings)
    found = search(judge, seconds, settings.seed)
    release(judge.target, judge.windows)
    notes = {**facts, "candidates": len(judge.tried), **found.as_document()}
    return LayerPlan(found.layers, notes=notes), judge.layers


def run_measure(settings: Settings, given: str) -> dict[str, Any]:
    """What a plan, or the first so many layers, would do on a model and prompts."""
    judge, facts = _prepare(settings)
    found = judge.measure(read_plan(given, judge.layers))
    release(judge.target, judge.windows)
    return {**facts, "draft_layers": given, **found.as_document()}


def _prepare(settings: Settings) -> tuple[Judge, dict[str, Any]]:
    """Load, write the prompts greedily, and cut windows from the texts."""
    items = load_suite(settings.suite, settings.tasks, settings.limit, settings.model)
    llm, cost = load(settings)
    texts = _write(llm, settings, [prompt.ids for prompt in tokenise(llm, items, settings)])
    windows = cut_windows(llm.engine.target, texts, MOST)
    if not windows:
        raise InvalidInput("the texts are too short to look at; give other prompts, or raise --max-tokens")
    machine = machine_facts()
    facts = {
        "model": settings.model, "prompts": len(items), "windows": len(windows),
        **{key: machine[key] for key in ("date", "commit", "cpu")},
    }  # fmt: skip
    return Judge(llm.engine.target, windows, cost), facts


def _write(llm: LLM, settings: Settings, prompts: Sequence[Sequence[int]]) -> list[tuple[Sequence[int], Sequence[int]]]:
    params = SamplingParams(max_tokens=settings.max_tokens)
    done = llm.generate([list(ids) for ids in prompts], params, drafter="none")
    return [(ids, one.token_ids) for ids, one in zip(prompts, done, strict=True)]


DEPTH = 6  # tokens that a window shows behind its first
ROWS = 240  # nodes of one pass
_FIRST_ID = 1 << 50  # of sequences; an engine on the same target counts from 0


@dataclass(frozen=True, slots=True)
class Window:
    """A sequence that the target has cached, but for its last token, and the text from that token on."""

    seq: PlainSeq
    chain: list[int]


def cut_windows(target: Target, texts: Sequence[tuple[Sequence[int], Sequence[int]]], most: int) -> list[Window]:
    """Places in texts (prompt, answer), evenly taken, prefilled; `most` of them at most."""
    places = [(text, at) for text in texts for at in range(0, len(text[1]) - DEPTH, DEPTH)]
    stride = max(1, -(-len(places) // most))
    ids, found = count(_FIRST_ID), []
    for (prompt, answer), at in places[::stride]:
        seq = PlainSeq(next(ids), [*prompt, *answer[: at + 1]], cache_salt="layer windows")
        target.prefill([seq], Needs())
        found.append(Window(seq, list(answer[at : at + DEPTH + 1])))
    return found


def release(target: Target, windows: Sequence[Window]) -> None:
    for window in windows:
        target.release(window.seq)


def survivals(part: Target, windows: Sequence[Window]) -> tuple[float, ...]:
    """How often the first 1, 2, ... DEPTH tokens drafted in a window are all accepted, by a greedy target."""
    reached, at_once = [0] * DEPTH, ROWS // DEPTH
    for low in range(0, len(windows), at_once):
        some = windows[low : low + at_once]
        trees = TreeBatch.chains([window.chain[:-1] for window in some], part.device)
        tops = part.score([window.seq for window in some], trees, Needs()).required_logits.argmax(-1).tolist()
        for b, window in enumerate(some):
            said = tops[trees.starts[b] : trees.starts[b + 1]]
            right = [token == own for token, own in zip(said, window.chain[1:], strict=True)]
            for depth in range(right.index(False) if False in right else DEPTH):
                reached[depth] += 1
        for window in some:
            part.release(window.seq)
    return tuple(count / max(1, len(windows)) for count in reached)


@dataclass(frozen=True, slots=True)
class Shares:
    """What parts of a pass over one node cost, as shares of it, by the weights that they read."""

    attention: float  # of one layer
    mlp: float
    head: float

    @classmethod
    def of(cls, config: DecoderConfig) -> Shares:
        heads = 2 * config.heads + 2 * config.kv_heads
        attention, mlp = config.width * config.head_dim * heads, 3 * config.width * config.inner
        if config.moe is not None:
            mlp = 3 * config.width * config.moe.inner * config.moe.per_token
        head = config.width * config.vocab_size
        whole = config.layers * (attention + mlp) + head
        return cls(attention / whole, mlp / whole, head / whole)

    def layers(self, some: LayerSubset) -> float:
        """Of some layers, without the LM head."""
        inside = range(some.first, some.end)
        attentions = sum(i not in some.without_attention for i in inside)
        mlps = sum(i not in some.without_mlp for i in inside)
        return attentions * self.attention + mlps * self.mlp


def gains(layers: LayerSubset, reached: Sequence[float], shares: Shares, cost: CostModel) -> tuple[float, ...]:
    """How many times faster than plain decoding chains of 1, 2, ... tokens would be, by what passes cost here."""
    plain, run = cost.pass_seconds(1), shares.layers(layers)
    begun = run if layers.is_prefix else 0.0  # of the target's pass: only one row goes through these layers
    found, expected, ratio = [], 1.0, 1.0
    for depth, share in enumerate(reached, start=1):
        expected += share
        # on a busy machine t(2) may seem less than t(1)
        ratio = max(ratio, cost.pass_seconds(depth + 1) / plain)
        passed = begun + (1.0 - begun) * ratio
        found.append(expected / (passed + depth * (run + shares.head)))
    return tuple(found)
