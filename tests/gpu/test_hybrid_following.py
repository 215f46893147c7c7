"""Look-ups beside a head on a device: they do not keep rounds from following, unless a match is worth that."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest
import torch

from forerun.build.engine import make_engine
from forerun.control.adaptive import AdaptiveController
from forerun.control.cost import CostModel
from forerun.control.overlap import Overlap
from forerun.core.params import EngineConfig, SamplingParams, SpeculativeConfig
from forerun.core.types import Budget, Request, Round, TreeBatch, Verdict
from forerun.drafters.compose import HybridDrafter
from forerun.drafters.lookup.ngram import NgramDrafter
from forerun.engine.engine import Engine
from forerun.engine.round import LaunchedRound
from forerun.engine.sequence import SequenceState
from forerun.models.cuda.target import CudaDecoder
from forerun.verify.greedy import device_walk
from tests.gpu.heads import both_drafters
from tests.gpu.test_following import Watched, plain_texts, willing_target
from tests.gpu.tiny import VOCAB, make_reference, weights_of

COST = CostModel({1: 1.6e-3, 16: 1.8e-3, 32: 1.9e-3, 64: 2.4e-3, 256: 4e-3})
GAP, LEVEL = 1e-3, 1.3e-4  # seconds of the host in a round that was read first, and of a level of a draft


class Timed(AdaptiveController):
    """Is told the seconds of a GPU instead of those of this machine."""

    sources: tuple[str, ...] = ()
    followed = 0

    def observe(self, outcome: Round) -> None:
        nodes, depth = outcome.drafted[0], outcome.depths[0]
        self.followed += outcome.followed
        by_head = bool(nodes) and self._planned.decisions[0].promise.form.nodes > 0
        self.sources += ("head" if by_head else "look-up" if nodes else "plain",)
        seconds = {"draft": LEVEL * depth if by_head else 0.0, "host": 0.0 if outcome.followed else GAP}
        seconds["pass"] = COST.pass_seconds(sum(outcome.drafted) + len(outcome.seqs))
        super().observe(replace(outcome, seconds=seconds, prompt_rows=0))


def make(target: CudaDecoder, *, lookup: bool, batch: int = 1) -> Engine:
    speculative = SpeculativeConfig(drafter="none", controller="fixed")
    engine = make_engine(target, frozenset({1}), speculative, EngineConfig(max_batch=batch))
    head = both_drafters(target, borrows=True)[0]
    for form in head.draft.menu.forms:
        head.draft.menu.note(1, form, LEVEL * form.depth)
    drafter = HybridDrafter(NgramDrafter(), head) if lookup else head
    engine.drafters.add("device", drafter)
    engine.controller = Timed(CostModel(COST.seconds), 60, 10, drafter.offer)
    engine.timeline.depth = 2
    return engine


def asked(prompts: list[list[int]], tokens: int) -> list[Request]:
    return [Request(one, SamplingParams(max_tokens=tokens), drafter="device") for one in prompts]


def write(engine: Engine, some: list[Request]) -> list[list[int]]:
    """One after the other."""
    texts = []
    for one in some:
        seq = engine.find(engine.submit(one))
        assert seq is not None
        while engine.busy:
            engine.step()
        texts.append(seq.tokens[seq.prompt_length :])
    assert engine.target.used_slots == 0
    return texts


def counting_target() -> CudaDecoder:
    """Behind every token it says the next one: no text of it repeats anything of itself."""
    model = make_reference("llama")
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.model.norm.weight.fill_(1.0)
        rows = torch.nn.functional.normalize(model.model.embed_tokens.weight)
        model.lm_head.weight.copy_(rows.roll(1, 0))
    config, weights = weights_of(model)
    return CudaDecoder(
        config, weights, dtype=torch.float32, device="cpu", kv_slots=20_000, kernels="torch",
        greedy_walk=device_walk(torch.device("cpu")),
    )  # fmt: skip


class Praised(Timed):
    """Is told that two tokens of every tree of the head's were accepted."""

    def observe(self, outcome: Round) -> None:
        if outcome.drafted[0] and self._planned.decisions[0].promise.form.nodes:
            outcome = replace(outcome, accepted=(2,))
        super().observe(outcome)


def followed_rounds(
    target: CudaDecoder, some: list[Request], monkeypatch: pytest.MonkeyPatch, *, lookup: bool
) -> tuple[int, int, list[list[int]]]:
    """Rounds that followed, rounds, and the texts."""
    with monkeypatch.context() as patch:
        watched, engine = Watched(patch), make(target, lookup=lookup)
        engine.controller = Praised(CostModel(COST.seconds), 60, 10, engine.controller.planner.offer)
        texts = write(engine, some)
        return watched.followed, len(engine.controller.sources), texts


def misleading(seed: int) -> list[list[int]]:
    """Prompts with all tokens that will be written, two by two: behind every other one comes another than here."""
    rng, prompts = random.Random(seed), []
    for _ in range(3):
        pairs = [[first, first + 1] for first in range(2, VOCAB - 1, 2)]
        rng.shuffle(pairs)
        prompts.append([*(token for pair in pairs for token in pair), rng.randrange(2, VOCAB - 60)])
    return prompts


@pytest.mark.slow
def test_matches_that_prove_nothing_do_not_keep_rounds_from_following(monkeypatch: pytest.MonkeyPatch) -> None:
    target, some = counting_target(), asked(misleading(1), 30)
    head, rounds, wanted = followed_rounds(target, some, monkeypatch, lookup=False)
    both, _, texts = followed_rounds(target, some, monkeypatch, lookup=True)
    assert texts == wanted == plain_texts(target, some)
    assert all(text == [*range(text[0], text[0] + 30)] for text in texts)
    assert head > 0.7 * rounds
    assert abs(both - head) <= 3


@pytest.mark.slow
def test_a_controller_that_always_waits_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: as every match once did."""
    target, some = counting_target(), asked(misleading(1), 20)
    monkeypatch.setattr(Overlap, "waits", lambda self, chooser, head, offers: any(one.free for one in offers))
    head, _, wanted = followed_rounds(target, some, monkeypatch, lookup=False)
    both, _, texts = followed_rounds(target, some, monkeypatch, lookup=True)
    assert texts == wanted
    assert both < 0.7 * head


@pytest.mark.slow
def test_text_that_repeats_itself_is_looked_up_all_the_same() -> None:
    target = willing_target()
    target.model.head[1] = 0.0  # texts go on
    rng = random.Random(3)
    some = asked([[rng.randrange(2, VOCAB) for _ in range(20)] for _ in range(3)], 60)
    engine, alone = make(target, lookup=True), make(target, lookup=False)
    assert write(engine, some) == write(alone, some) == plain_texts(target, some)
    assert engine.controller.sources.count("look-up") > 3
    assert len(engine.controller.sources) < 0.6 * len(alone.controller.sources)


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("tokens", [1, 2, 3, 7])
def test_nothing_follows_a_text_that_ends_surely(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """And where it ends likely, little does: a round in vain keeps the next prompt waiting."""
    target, some = willing_target(words=60), asked([[5, 7, 9]] * 12, tokens)
    target.model.head[1] = 0.0
    watched, engine = Watched(monkeypatch), make(target, lookup=True)
    write(engine, some)
    followed = engine.controller.followed
    assert watched.followed - followed <= 3, "rounds that were dropped"
    assert tokens < 7 or followed > 0


@pytest.mark.slow
@pytest.mark.parametrize("lookup", [False, True])
def test_requests_with_budgets_of_their_own_are_followed_too(lookup: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """And where nobody plans, look-ups are drafted from all the same."""
    target, rng = willing_target(), random.Random(3)
    target.model.head[1] = 0.0
    prompts = [[rng.randrange(2, VOCAB) for _ in range(20)] for _ in range(4)]
    params = SamplingParams(max_tokens=40)
    some = [Request(one, params, drafter="device", budget=Budget(8, 3, 3)) for one in prompts]
    wanted = plain_texts(target, asked(prompts, 40))
    watched, engine = Watched(monkeypatch), make(target, lookup=lookup)
    proposed = list[int]()
    drafter = engine.drafters.get("device")
    if isinstance(drafter, HybridDrafter):
        first = drafter.first.propose
        monkeypatch.setattr(
            drafter.first, "propose",
            lambda seqs, budgets: proposed.extend(one.nodes for one in budgets) or first(seqs, budgets),
        )  # fmt: skip
    assert write(engine, some) == wanted
    assert watched.followed > 4
    assert (sum(map(bool, proposed)) > 3) is lookup


def test_whoever_ends_in_a_batch_leaves_one_tree_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    target, rng, dropped = willing_target(), random.Random(5), Counter[int]()
    prompts = [[rng.randrange(2, VOCAB) for _ in range(rng.choice((2, 20)))] for _ in range(12)]
    some = [Request(one, SamplingParams(max_tokens=rng.randint(2, 30)), drafter="device") for one in prompts]
    wanted, engine = plain_texts(target, some), make(target, lookup=True, batch=6)
    without_ended = LaunchedRound.without_ended

    def counted(self: LaunchedRound, verdict: Verdict) -> tuple[list[SequenceState], TreeBatch, Verdict]:
        dropped.update([seq.id for seq in self.seqs if seq.finished is not None])
        return without_ended(self, verdict)

    monkeypatch.setattr(LaunchedRound, "without_ended", counted)
    seqs = [engine.find(engine.submit(one)) for one in some]
    while engine.busy:
        engine.step()
    assert [seq.tokens[seq.prompt_length :] for seq in seqs if seq is not None] == wanted
    assert dropped
    assert max(dropped.values()) == 1
    assert engine.target.used_slots == 0
