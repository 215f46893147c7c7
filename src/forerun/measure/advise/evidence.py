"""Evidence for `forerun advise`: texts, costs of rounds, and what every drafter would have done on those texts.

The plain loop writes the prompts once, which gives the texts, the cost of a real round and that of the prompts. Every
drafter writes them once more, prompt by prompt right beside it, because machines drift: look-ups, heads and hybrids as
the controller has them, the others drafting as much as they may. Drafters that are only replayed write the first few
prompts, and so do those that would lose clearly on these at any length. For one sequence at a time that is the answer.
For more at once, look-ups are replayed on the texts under the price list of the batch size, others are cut, and t(n)
says what it costs.

Both prompts and the machine's noise move a figure. So the evidence is also kept without each prompt, costs included,
and intervals come from how much a figure changes then (`jackknife`).

The speed-up of a drafter is predicted from its rounds, for any batch size (`estimate`). A round of B sequences costs
t(nodes) for the target, a level of drafting times the depth, and the host's share. How many nodes and how many tokens
it has comes from recorded or replayed rounds; t(n) from this machine. Verification is exact, so a text does not depend
on its drafter: once the plain loop has written it, any drafter that costs nothing and needs nothing from the target can
be replayed on it, under any price list.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from time import perf_counter
from typing import TypeVar

from forerun.api.llm import LLM
from forerun.build.engine import build_drafter
from forerun.control.adaptive import MOST_WIDTH
from forerun.control.cost import CostModel
from forerun.control.prices import deepest
from forerun.core import registry
from forerun.core.errors import ForerunError, InvalidInput
from forerun.core.params import SpeculativeConfig
from forerun.core.types import Budget, PlainSeq, Scores, TreeBatch, Verdict
from forerun.drafters.base import Drafter, LookupDrafter, Parts
from forerun.drafters.lookup.suffix import SuffixDrafter
from forerun.drafters.lookup.suffix_table import Successors
from forerun.measure.bench.alternate import Contender, Drafts, Group, Prompt, Run, alternate, in_turn, warm_up
from forerun.measure.bench.contenders import own_contender
from forerun.measure.bench.figures import Accepted, Pair, Spread, acceptance_by_depth, jackknife, ratio_of
from forerun.measure.bench.settings import PLAIN, Cell, DrafterSetup, Settings
from forerun.verify.greedy import follow

DRAWS = 200  # rounds of a batch that are put together at random


@dataclass(frozen=True, slots=True)
class Costs:
    target: CostModel  # scaled to real rounds
    host: float  # per sequence of a plain round: planning, sampling, bookkeeping

    def plain_round(self, batch: int) -> float:
        return self.target.pass_seconds(batch) + self.host * batch


@dataclass(frozen=True, slots=True)
class Drafting:
    """What a drafter did on every sequence, and what that cost beyond the target's passes."""

    rounds: tuple[Drafts, ...]  # per sequence: of all texts, or of the first few
    level: float = 0.0  # seconds per drafted level
    host: float = 0.0  # seconds per sequence and round beyond a plain round's
    passes: float = 1.0  # what its own passes took, over t(n): they also hand hidden rows to a head

    def cut(self, depth: int) -> Drafting:
        """The same with drafts cut at a depth, trees with their share of nodes: no token depends on later ones."""
        rounds = tuple(
            tuple((_share(n, deep, depth), min(deep, depth), min(kept, depth)) for n, deep, kept in text)
            for text in self.rounds
        )
        return replace(self, rounds=rounds)

    def without(self, text: int) -> Drafting:
        """The same rounds but for those of one text, at the same costs."""
        return replace(self, rounds=(*self.rounds[:text], *self.rounds[text + 1 :]))

    def tokens_per_round(self) -> float:
        kept = [accepted for text in self.rounds for _, _, accepted in text]
        return 1.0 + sum(kept) / max(1, len(kept))

    def accepted(self) -> list[Accepted]:
        return acceptance_by_depth(self.rounds)


def _share(nodes: int, deep: int, depth: int) -> int:
    return nodes if deep <= depth else round(nodes * depth / deep)


def worst_prompt(drafting: Drafting, texts: Sequence[Text], costs: Costs, batch: int) -> float:
    """The speed-up on the prompt that gains least, or loses most."""
    return min(ratio_of([pair]) for pair in _pairs(drafting, texts, costs, batch))


def estimate(drafting: Drafting, texts: Sequence[Text], costs: Costs, batch: int) -> float:
    """Speed-up over plain decoding of whole calls, prompts included, with so many sequences at once."""
    return ratio_of(_pairs(drafting, texts, costs, batch))


def _pairs(drafting: Drafting, texts: Sequence[Text], costs: Costs, batch: int) -> list[Pair]:
    round_seconds = _round_seconds(drafting, costs, batch)
    pairs = []
    assert len(drafting.rounds) <= len(texts), "texts that were not written"
    for text, rounds in zip(texts, drafting.rounds, strict=False):  # it may have written the first few only
        tokens = len(text.tokens)
        plain = text.prompt_seconds + tokens * costs.plain_round(batch) / batch
        drafted = text.prompt_seconds + _text_seconds(rounds, tokens, drafting, costs, batch, round_seconds)
        pairs.append(Pair(tokens, drafted, tokens, plain))
    return pairs


def _text_seconds(rounds: Drafts, tokens: int, drafting: Drafting, costs: Costs, batch: int, shared: float) -> float:
    """A sequence's share of the time of its rounds."""
    needed = tokens / (1.0 + sum(kept for _, _, kept in rounds) / max(1, len(rounds)))
    if batch > 1:  # its rounds are shared with random others, so all take the mean time
        return needed * shared / batch
    own = sum(
        drafting.passes * costs.target.pass_seconds(1 + nodes) + depth * drafting.level + costs.host + drafting.host
        for nodes, depth, _ in rounds
    )
    return own * needed / max(1, len(rounds))


def _round_seconds(drafting: Drafting, costs: Costs, batch: int) -> float:
    """The mean time of a round of several sequences, each at some round of its own."""
    flat = [one for text in drafting.rounds for one in text]
    if batch == 1 or not flat:
        return costs.plain_round(batch)
    rng, spent = random.Random(0), 0.0
    level = drafting.level * costs.target.pass_seconds(batch) / costs.target.pass_seconds(1)
    for _ in range(DRAWS):
        drawn = rng.choices(flat, k=batch)
        nodes, depth = sum(one[0] for one in drawn), max(one[1] for one in drawn)
        spent += drafting.passes * costs.target.pass_seconds(batch + nodes) + depth * level
    return spent / DRAWS + batch * (costs.host + drafting.host)


def at_acceptance(acceptance: float, level: float, costs: Costs, batch: int, most: int) -> tuple[float, int]:
    """The best speed-up of a chain whose every node is accepted with this probability, and its length.

    `level` is what drafting one level costs, as a share of a plain pass: for drafters that do not exist yet.
    """
    plain = costs.plain_round(batch)
    best, length, tokens, survival = 1.0, 0, 1.0, 1.0
    for depth in range(1, most + 1):
        survival *= acceptance
        tokens += survival
        drafting = depth * level * costs.target.pass_seconds(batch)
        whole = costs.target.pass_seconds(batch * (1 + depth)) + drafting + costs.host * batch
        if tokens * plain / whole > best:
            best, length = tokens * plain / whole, depth
    return best, length


@dataclass(frozen=True, slots=True)
class Text:
    """A prompt, what was written on it, and what the pass over the prompt took."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    prompt_seconds: float = 0.0
    most: int | None = None  # tokens that were allowed; None = as many as were written
    stop_ids: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Replay:
    rounds: tuple[Drafts, ...]
    seconds_per_round: float


def can_replay(drafter: Drafter) -> bool:
    """Does it know its own confidence, cost nothing, and read nothing of the target?"""
    return isinstance(drafter, LookupDrafter) and not drafter.needs.hidden_layers


def replay(drafter: Drafter, texts: Sequence[Text], budget: Budget) -> Replay:
    """Write the texts again, one after the other, with the drafter learning as it would."""
    found, spent, count = [], 0.0, 0
    for number, text in enumerate(texts):
        whole = [*text.prompt, *text.tokens]
        end = len(text.prompt) + (text.most or len(text.tokens))
        seq = PlainSeq(-1 - number, list(text.prompt), max_length=end, stop_ids=text.stop_ids)
        rounds: list[tuple[int, int, int]] = []
        while len(seq.tokens) < len(whole):
            depth = min(budget.depth, end - len(seq.tokens) - 1)
            nodes = budget.nodes if depth > 0 else 0
            allowed = replace(budget, nodes=nodes, depth=max(0, depth))
            started = perf_counter()
            trees = drafter.propose([seq], [allowed])
            path = _walk(trees, whole[len(seq.tokens) :])
            ahead = whole[len(seq.tokens) + len(path) :]
            bonus = ahead[0] if ahead else 0  # a drafted token that ends the text has none after it
            drafter.observe([seq], trees, Scores(None), Verdict.of([path], [bonus], trees.tokens.device))
            spent += perf_counter() - started
            rounds.append((len(trees.tokens) - 1, int(trees.depths().max()), len(path)))
            seq.tokens = whole[: len(seq.tokens) + len(path) + 1]
        drafter.forget(seq)
        found.append(tuple(rounds))
        count += len(rounds)
    return Replay(tuple(found), spent / max(1, count))


def _walk(trees: TreeBatch, ahead: Sequence[int]) -> list[int]:
    """The nodes below the root that agree with the text."""
    (tokens, _), (shape,) = trees.to_host(), trees.topology()
    return follow(tokens, shape.children, lambda node, depth: ahead[depth] if depth < len(ahead) else -1)[0]


BATCHES = (1, 2, 4, 8, 16, 32)
HOPELESS = 0.85  # a drafter that would write no faster than this on the first prompts writes no others
_LENGTHS = (1, 2, 3, 4, 5, 6, 8)
LONGEST = 24  # nodes of a chain that a controller would have drafted
_One = TypeVar("_One")
_SHORTEST = (1, 2, 3, 4)  # matches that n-gram may use, where its budget is fixed


@dataclass(frozen=True, slots=True)
class Prospect:
    drafter: str
    budget: int | None  # None = the controller decides; 0 = nothing pays
    speedup: Spread
    tokens_per_round: float
    worst: float = 1.0  # the speed-up on the prompt that gains least
    left_out: tuple[float, ...] = ()  # the speed-up without each prompt

    @property
    def rests(self) -> bool:
        """Would nothing be drafted? Then it is plain decoding."""
        return self.budget == 0

    def over(self, other: Prospect) -> Spread:
        """How many times as fast as another drafter, prompt by prompt: much surer than the two intervals."""
        ratios = [one / same for one, same in zip(self.left_out, other.left_out, strict=True)]
        return jackknife(self.speedup.value / other.speedup.value, ratios)


@dataclass(frozen=True, slots=True)
class Fixed:
    """The best fixed number of drafted tokens by batch size, and what it would gain."""

    lengths: Mapping[int, int]
    gains: Mapping[int, float]
    shortest: int = 1  # match that an n-gram lookup may use

    @property
    def budgets(self) -> dict[int, int]:
        """The same with 0 where not even the best gains."""
        return {batch: length if self.gains[batch] > 1.0 else 0 for batch, length in self.lengths.items()}


@dataclass(frozen=True, slots=True)
class Evidence:
    texts: list[Text]
    costs: Costs
    prompt_rate: float  # tokens per second of passes over prompts
    draftings: Mapping[str, Drafting]  # of every drafter
    free: tuple[str, ...]  # the drafters that can be replayed
    nodes: int
    speculative: SpeculativeConfig
    successors: Successors | None = None  # what suffix fills trees with, on a GPU: there look-ups draft trees
    left_out: tuple[Evidence, ...] = ()  # the same without each prompt; empty = there was one


def gather(llm: LLM, cost: CostModel, prompts: Sequence[Prompt], settings: Settings) -> Evidence:
    """Write the prompts: plainly, and with every drafter that is there."""
    cell = Cell(temperature=settings.temperatures[0])
    groups = [Group.of([prompt]) for prompt in prompts]
    plain = own_contender(llm, settings, cell, DrafterSetup(PLAIN, "none"))
    drafters = _available(llm, [one.drafter for one in settings.setups if one.drafter is not None])
    contenders = []
    free = tuple(name for name, drafter in drafters.items() if can_replay(drafter))
    for name in drafters:
        budget = None if name in free or knows_its_confidence(name) else settings.nodes
        contenders.append(own_contender(llm, settings, cell, DrafterSetup(name, name, budget)))
    stops = frozenset() if settings.ignore_eos else llm.engine.stop_ids

    def goes_on(name: str, runs: Runs) -> bool:
        texts = _texts(prompts, runs[PLAIN], settings.max_tokens, stops)
        return has_hope(cost, texts, runs[PLAIN], runs[name], settings.nodes)

    runs = write_in_turn(plain, contenders, groups, settings.max_tokens, goes_on)
    texts = _texts(prompts, runs[PLAIN], settings.max_tokens, stops)
    suffix = drafters.get("suffix")
    table = suffix.successors if isinstance(suffix, SuffixDrafter) else None
    return conclude_from(texts, runs, cost, free, settings.nodes, table)


def _texts(prompts: Sequence[Prompt], runs: Sequence[Run], most: int, stops: frozenset[int]) -> list[Text]:
    return [
        Text(prompt.ids, run.texts[0], run.seconds - (run.decode_seconds or 0.0), most, stops)
        for prompt, run in zip(prompts, runs, strict=False)
    ]


def conclude_from(
    texts: list[Text],
    runs: Runs,
    cost: CostModel,
    free: tuple[str, ...],
    nodes: int,
    successors: Successors | None = None,
) -> Evidence:
    """What runs over these texts show, and what they show without each of them."""

    def of(some: list[Text], kept: Runs) -> Evidence:
        drafted = {name: mine for name, mine in kept.items() if name != PLAIN}
        costs = calibrate(cost, kept[PLAIN], [run for mine in drafted.values() for run in mine])
        draftings = {name: _drafting(mine, costs) for name, mine in drafted.items()}
        spent = sum(text.prompt_seconds for text in some)
        rate = sum(len(text.prompt) for text in some) / spent if spent else 0.0
        return Evidence(some, costs, rate, draftings, free, nodes, SpeculativeConfig(budget=nodes), successors)

    whole = of(texts, runs)
    if sum([bool(run.passes) for run in runs[PLAIN]]) < 2:
        return whole
    places = range(len(texts))
    without = [of(_without(texts, i), {name: _without(mine, i) for name, mine in runs.items()}) for i in places]
    return replace(whole, left_out=tuple(without))


def _without(items: Sequence[_One], place: int) -> list[_One]:
    return [*items[:place], *items[place + 1 :]]


def has_hope(cost: CostModel, texts: Sequence[Text], plain: Sequence[Run], runs: Sequence[Run], nodes: int) -> bool:
    """Could a drafter pay on other prompts, by the first few? At the length that is best for it."""
    costs = calibrate(cost, plain, runs)
    drafting = _drafting(runs, costs)
    options = [drafting, *(drafting.cut(length) for length in _LENGTHS if length <= nodes)]
    return max(estimate(option, texts, costs, 1) for option in options) >= HOPELESS


def _available(llm: LLM, wanted: Sequence[str]) -> dict[str, Drafter]:
    """The drafters asked for; else all that can be built around this engine with the files that were given."""
    if wanted:
        return {name: llm.engine.drafters.get(name) for name in wanted}
    found: dict[str, Drafter] = {}
    specs = sorted((spec for spec in registry.drafters.specs() if not spec.by_request), key=lambda spec: spec.name)
    for name in dict.fromkeys(name for spec in specs for name in (spec.name, spec.best)):
        if name == "none":
            continue
        with suppress(ForerunError):
            found[name] = llm.engine.drafters.get(name)
    return found


def knows_its_confidence(name: str) -> bool:
    """Does this drafter cost something and still cut its own trees? Then only the controller sets its budget."""
    spec = registry.drafters.spec(name)
    return spec.needs == "head" or bool(spec.members)


def calibrate(cost: CostModel, plain: Sequence[Run], drafted: Sequence[Run]) -> Costs:
    """t(n) scaled to real rounds, and the host's share of a plain one.

    A curve measured in a quiet moment is too low for both kinds of rounds, and not by the same factor: t(1) is what
    plain rounds took, and passes over more nodes are scaled by what those of the drafters took. `cost` may be the
    controller's, which has been learning from these very rounds: what counts is the curve as it was measured.
    """
    curve = CostModel(cost.seconds)
    passes = [one for run in plain for one in run.passes]
    if not passes:
        raise InvalidInput("the prompts gave no text to measure; give prompts that are answered")
    target = sum(one.get("pass", 0.0) for one in passes) / len(passes)
    host = sum(sum(one.values()) - one.get("prompt", 0.0) for one in passes) / len(passes) - target
    took = expected = 0.0
    for run in drafted:
        for one, (nodes, _, _) in zip(run.passes, run.drafts[0], strict=True):
            if nodes:
                took += one.get("pass", 0.0)
                expected += curve.pass_seconds(1 + nodes)
    one_node = target / curve.pass_seconds(1)
    several = took / expected if expected else one_node
    scaled = {size: seconds * (several if size > 1 else one_node) for size, seconds in curve.seconds.items()}
    return Costs(CostModel(scaled), host)


def _drafting(runs: Sequence[Run], costs: Costs) -> Drafting:
    passes = [one for run in runs for one in run.passes]
    rounds = tuple(run.drafts[0] for run in runs)
    levels = sum(depth for text in rounds for _, depth, _ in text)
    drafting = sum(one.get("draft", 0.0) for one in passes)
    host = sum(one.get("verdict", 0.0) + one.get("host", 0.0) for one in passes) / max(1, len(passes))
    took = sum(one.get("pass", 0.0) for one in passes)
    known = sum(costs.target.pass_seconds(1 + nodes) for text in rounds for nodes, _, _ in text)
    return Drafting(rounds, drafting / max(1, levels), max(0.0, host - costs.host), took / known if took else 1.0)


# of evidence that lacks a prompt, and which one: what a drafter does there
Making = Callable[[Evidence, int | None], Drafting]


def prospects(evidence: Evidence, batch: int) -> list[Prospect]:
    found = [_prospect(evidence, name, batch) for name in evidence.draftings]
    return sorted(found, key=lambda prospect: -prospect.speedup.value)


def _prospect(evidence: Evidence, name: str, batch: int) -> Prospect:
    """The budget that gains most; one at a time, what the controller did is what it does."""
    controlled = name in evidence.free or knows_its_confidence(name)
    options: list[tuple[int | None, Making]]
    if name in evidence.free and batch > 1:
        options = [(None, priced(evidence, name, batch))]
    else:
        options = [(None if controlled else evidence.nodes, lambda some, _: some.draftings[name])]
    if name not in evidence.free and not (controlled and batch == 1):
        lengths = [length for length in _LENGTHS if length <= evidence.nodes]
        options += [(None if controlled else length, _cut(name, length)) for length in lengths]
    values = [_estimate(evidence, None, make, batch) for _, make in options]
    value = max(values)
    budget, make = options[values.index(value)]
    if batch > 1 and value <= 1.0:  # then the controller drafts nothing, which is plain decoding
        return Prospect(name, 0, Spread(1.0), 1.0, 1.0, (1.0,) * len(evidence.left_out))
    left_out = tuple(_estimate(some, i, make, batch) for i, some in enumerate(evidence.left_out))
    drafting = make(evidence, None)
    worst = worst_prompt(drafting, evidence.texts, evidence.costs, batch)
    return Prospect(name, budget, jackknife(value, left_out), drafting.tokens_per_round(), worst, left_out)


def _cut(name: str, length: int) -> Making:
    return lambda some, _: some.draftings[name].cut(length)


def _estimate(evidence: Evidence, without: int | None, make: Making, batch: int) -> float:
    return estimate(make(evidence, without), evidence.texts, evidence.costs, batch)


def fixed_chain(evidence: Evidence, name: str) -> Fixed:
    """The best fixed chain of a drafter by batch size: for engines that do not weigh costs."""
    drafting = evidence.draftings[name]
    tried = {length: drafting.cut(length) for length in _LENGTHS if length <= evidence.nodes}
    return _best_fixed(evidence, tried)


def accepted(evidence: Evidence, name: str) -> list[Accepted]:
    """Acceptance by depth, with counts, drafting whatever there is to draft."""
    if name in evidence.free:
        return _replayed(evidence, name, Budget(evidence.nodes, evidence.nodes)).accepted()
    return evidence.draftings[name].accepted()


def priced(evidence: Evidence, name: str, batch: int) -> Making:
    """A drafter that cuts its own trees by the price list of this batch size, and of how fast it then writes."""
    rate, drafting = 1.0, Drafting(())
    for _ in range(2):
        price = evidence.costs.target.price(LONGEST, batch - 1, rate)
        depth = max(1, deepest(price))
        width = 1 if evidence.successors is None else MOST_WIDTH
        drafting = _replayed(evidence, name, Budget(depth, depth, width, price[: depth + 1]))
        rate = max(1.0, estimate(drafting, evidence.texts, evidence.costs, batch))
    return lambda some, without: drafting if without is None else drafting.without(without)


def _replayed(evidence: Evidence, name: str, budget: Budget, shortest: int = 1) -> Drafting:
    speculative = SpeculativeConfig(
        budget=evidence.nodes, prompt_lookup_max=evidence.speculative.prompt_lookup_max, prompt_lookup_min=shortest
    )
    parts = Parts(None, None, speculative)  # type: ignore[arg-type]  # it reads nothing of the target
    drafter = build_drafter(registry.drafters.spec(name), parts)
    if isinstance(drafter, SuffixDrafter):
        drafter = SuffixDrafter(drafter.longest, drafter.shortest, successors=evidence.successors)
    done = replay(drafter, evidence.texts, budget)
    return Drafting(done.rounds, 0.0, done.seconds_per_round)


def fixed_lookup(evidence: Evidence, name: str) -> Fixed:
    """The best fixed budget by batch size, and the shortest match: for engines that do not weigh costs."""
    lengths = [length for length in _LENGTHS if length <= evidence.nodes]
    found = [
        replace(
            _best_fixed(
                evidence, {length: _replayed(evidence, name, Budget(length, length), shortest) for length in lengths}
            ),
            shortest=shortest,
        )
        for shortest in _SHORTEST
    ]
    return max(found, key=lambda fixed: fixed.gains[1])


def _best_fixed(evidence: Evidence, tried: Mapping[int, Drafting]) -> Fixed:
    """Of what was tried by length, the best at every batch size."""
    lengths, gains = {}, {}
    for batch in BATCHES:
        found = {
            length: estimate(drafting, evidence.texts, evidence.costs, batch) for length, drafting in tried.items()
        }
        lengths[batch] = max(found, key=found.__getitem__)
        gains[batch] = found[lengths[batch]]
    return Fixed(lengths, gains)


FEW = 3  # prompts that every drafter writes
progress = logging.getLogger("forerun.progress")  # what the command line shows

Runs = dict[str, list[Run]]  # by contender


def write_in_turn(
    plain: Contender,
    contenders: Sequence[Contender],
    groups: Sequence[Group],
    max_tokens: int,
    goes_on: Callable[[str, Runs], bool],
) -> Runs:
    """The runs of each; after a few prompts, only those go on of whom `goes_on` says so."""
    for number, one in enumerate((plain, *contenders), start=1):
        progress.info("warming up %s, %d of %d", one.name, number, len(contenders) + 1)
        warm_up([one], groups[0], min(8, max_tokens))
    going, runs = list(contenders), Runs({one.name: [] for one in (plain, *contenders)})
    for index, group in enumerate(groups):
        if index == FEW:
            going = [one for one in going if goes_on(one.name, runs)]
        for run in alternate(in_turn((plain, *going), index), [group], max_tokens, 1):
            runs[run.contender].append(run)
            progress.info("prompt %d of %d, written with %s", index + 1, len(groups), run.contender)
    return runs
