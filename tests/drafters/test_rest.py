"""Drafters that read rows of passes: plain rounds overlap all the same, rows are kept in time, and not at rest."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from forerun.build.engine import make_engine
from forerun.control.adaptive import AdaptiveController
from forerun.control.cost import CostModel
from forerun.core.params import EngineConfig, SamplingParams, SpeculativeConfig
from forerun.core.types import NEVER, Needs, Offer, Prompts, Request, Scores, Seq, TreeBatch, Verdict
from forerun.drafters.lookup.lookahead import LookaheadDrafter, Pool
from forerun.drafters.lookup.recycling import LONGEST, SHORTEST, RecyclingDrafter, Rest, Table
from forerun.engine.engine import Engine
from forerun.engine.round import LaunchedRound
from forerun.engine.sequence import SequenceState
from forerun.testing import FakeSeq
from lab.simulate.device import KnownAnswers, SimulatedDevice
from lab.simulate.speeds import h200
from tests.simulate.device import SimulatedClock

VOCAB, PROMPT, ANSWER, TEXTS = 4000, 24, 96, 12
KEEPING = 8e-5  # seconds of a pass of 4.1 ms


class Counted(Tensor):
    """Counts how often something of it is brought to the host."""

    reads = 0

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        Counted.reads += getattr(func, "__name__", "") in ("tolist", "item", "cpu", "numpy")
        return super().__torch_function__(func, types, args, kwargs or {})


def engine_of(device: SimulatedDevice, drafter: str) -> Engine:
    speculative = SpeculativeConfig(drafter=drafter, controller="fixed")
    engine = make_engine(device, frozenset(), speculative, EngineConfig(max_batch=1))

    def offer(seq: Seq) -> Offer:
        assert isinstance(seq, SequenceState)
        return engine.drafters.offer(seq)

    if drafter != "none":
        curve = CostModel(h200().curve())
        engine.controller = AdaptiveController(curve, 60, 10, offer, engine.drafters.looks_up, follows=True)
    return engine


def write(drafter: str) -> tuple[list[float], int, int]:
    """Simulated seconds for each of the texts, in which nothing recurs, reads of rows, and rounds that overlap."""
    each, rng, clock = list[float](), random.Random(1), SimulatedClock()
    texts = {}
    for _ in range(TEXTS):
        prompt = tuple(rng.randrange(VOCAB) for _ in range(PROMPT))
        texts[prompt] = [rng.randrange(VOCAB) for _ in range(ANSWER)]
    device = SimulatedDevice(clock, h200(), KnownAnswers(texts, VOCAB))
    device._logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(0)).as_subclass(Counted)
    engine = engine_of(device, drafter)
    followed, next_round = 0, engine._next_round

    def counted(last: Any) -> Any:
        nonlocal followed
        found = next_round(last)
        followed += found is not None
        return found

    engine._next_round = counted  # type: ignore[method-assign]
    Counted.reads = 0
    for prompt in texts:
        started = clock.seconds
        engine.submit(Request(prompt, SamplingParams(max_tokens=ANSWER, ignore_eos=True)))
        while engine.busy:
            engine.step()
        device.finish()
        each.append(clock.seconds - started)
    return each, Counted.reads, followed


@pytest.mark.parametrize("drafter", ["recycling", "lookahead"])
def test_where_nothing_can_be_drafted_rounds_overlap_and_few_rows_are_kept(
    drafter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every single text, the first one too, is as fast as plain, though keeping a row takes the device 2% of a pass."""
    rounds, keep, run = TEXTS * ANSWER, RecyclingDrafter.keep, SimulatedDevice._run
    kept: list[bool] = []

    def noted(*given: Any) -> Any:
        kept.append(True)
        return keep(*given)

    def slower(self: SimulatedDevice, *given: Any) -> tuple[float, float]:
        self.busy_for(KEEPING * len(kept))
        kept.clear()
        return run(self, *given)

    plain, none, ahead = write("none")
    assert none == 0
    monkeypatch.setattr(RecyclingDrafter, "keep", noted)
    monkeypatch.setattr(SimulatedDevice, "_run", slower)
    seconds, reads, followed = write(drafter)
    assert reads < 0.3 * rounds
    assert followed > 0.98 * ahead
    assert min(once / drafted for once, drafted in zip(plain, seconds, strict=True)) > 0.98


def test_negative_control_who_never_rests_keeps_rows_of_every_round(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Rest, "holds", lambda self, seq: False)
    assert write("recycling")[1] > 0.9 * TEXTS * ANSWER


def test_negative_control_who_is_not_planned_as_a_look_up_reads_every_round_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(RecyclingDrafter, "looks_up", False)
    monkeypatch.setattr(Rest, "holds", lambda self, seq: False)
    plain, (seconds, _, followed) = write("none")[0], write("recycling")
    assert followed == 0
    assert sum(plain) / sum(seconds) < 0.95


class Overwritten(SimulatedDevice):
    """Every pass writes over the row of the last one: likeliest is the number of tokens that the text then has."""

    def score(self, seqs: Sequence[Seq], trees: TreeBatch, needs: Needs, prompts: Prompts | None = None) -> Scores:
        self._logits.fill_(-9.0)[0, len(seqs[0].tokens) + (trees.follows is not None)] = 9.0
        return SimulatedDevice.score(self, seqs, trees, needs, prompts)


@pytest.mark.parametrize("in_time", [True, False], ids=["kept in time", "negative control: too late"])
def test_what_is_read_a_round_late_is_of_the_right_pass(in_time: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    found, keep, observe = list[bool](), RecyclingDrafter.keep, RecyclingDrafter.observe

    def late(*given: Any) -> Any:
        return lambda: keep(*given)()  # type: ignore[misc]

    def noted(self: RecyclingDrafter, seqs: Sequence[Seq], trees: TreeBatch, scores: Scores, verdict: Verdict) -> None:
        if scores.kept is not None and trees.follows is not None:
            found.append(scores.kept()[0][0][0] == len(seqs[0].tokens))
        observe(self, seqs, trees, scores, verdict)

    monkeypatch.setattr(RecyclingDrafter, "observe", noted)
    if not in_time:
        monkeypatch.setattr(RecyclingDrafter, "keep", late)
    device = Overwritten(SimulatedClock(), h200(), KnownAnswers({(1, 2, 3): [*range(100, 140)]}, VOCAB))
    engine = engine_of(device, "recycling")
    engine.submit(Request((1, 2, 3), SamplingParams(max_tokens=40, ignore_eos=True)))
    while engine.busy:
        engine.step()
    assert len(found) > 15
    assert all(found) if in_time else not any(found[:-1])


def rounds_of(rest: Rest, seq: FakeSeq, known: Callable[[int], int], count: int) -> list[bool]:
    """Whether it rested, round by round."""
    found = []
    for i in range(count):
        found.append(rest.holds(seq))
        rest.note(seq, known(i), True)
    return found


def test_whoever_gains_does_not_rest_and_sampled_texts_do_not_speak_for_greedy_ones() -> None:
    rest, greedy = Rest(), FakeSeq(0, [1])
    warm = FakeSeq(1, [1], params=SamplingParams(temperature=1.0))
    assert not any(rounds_of(rest, greedy, lambda i: i % 2, 500))
    assert sum(rounds_of(rest, warm, lambda i: i % 16 == 0, 2000)) > 1700
    assert not rest.holds(greedy)


def test_rests_double_while_nothing_is_gained_and_are_short_again_after_a_gain() -> None:
    rest, seq = Rest(), FakeSeq(0, [1])
    idle = "".join("z" if one else "." for one in rounds_of(rest, seq, lambda i: 0, 4000))
    lengths = [len(part) for part in idle.split(".") if part]
    assert lengths[:3] == [SHORTEST, 2 * SHORTEST, 4 * SHORTEST]
    assert max(lengths) == LONGEST
    while rest.holds(seq):
        rest.note(seq, 0, True)
    assert not any(rounds_of(rest, seq, lambda i: 2, 20))
    again = "".join("z" if one else "." for one in rounds_of(rest, seq, lambda i: 0, 200))
    assert len(next(part for part in again.split(".") if part)) == SHORTEST


def test_a_round_whose_rows_were_overwritten_teaches_what_was_committed() -> None:
    drafter, seq = RecyclingDrafter(), FakeSeq(0, [1, 2, 3], prompt_length=2)
    drafter.observe([seq], TreeBatch.chains([[3]]), Scores(None), Verdict.of([[]], [4], "cpu"))
    assert [token for token, _ in drafter._table(seq).after(2, 3)] == [4]
    for _ in range(100):
        drafter._rest.note(seq, 0, True)
        if drafter._rest.holds(seq):
            break
    assert drafter.offer(seq) is NEVER


@pytest.mark.parametrize("made", [RecyclingDrafter, LookaheadDrafter])
def test_a_long_prompt_is_learnt_once_whether_it_is_read_in_parts_or_read_again(
    made: type[RecyclingDrafter | LookaheadDrafter], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also a text that was preempted: its parts are not taken for rounds in which all that was drafted was right."""
    learnt, noted, text = list[int](), list[int](), [*range(100, 164)]
    learn_copied, collect = Table.learn_copied, LookaheadDrafter._collect

    def copied(self: Table, tokens: Sequence[int]) -> None:
        learnt.append(len(tokens))
        learn_copied(self, tokens)

    def collected(self: LookaheadDrafter, pool: Pool, tokens: Sequence[int], fresh: int) -> None:
        learnt.append(fresh)
        collect(self, pool, tokens, fresh)

    monkeypatch.setattr(Table, "learn_copied", copied)
    monkeypatch.setattr(LookaheadDrafter, "_collect", collected)
    monkeypatch.setattr(Rest, "note", lambda *given: noted.append(1))
    for prompt_length in (64, 40):  # the second was preempted when 24 tokens were written
        drafter, seq = made(), FakeSeq(0, text, prompt_length=prompt_length)
        for at in (0, 16, 32, 48):
            part, end = TreeBatch.chains([text[at : min(at + 16, 63)]]), min(at + 16, 63)
            drafter.observe([seq], part, Scores(None), Verdict.whole_chain(part, [text[end]]))
        assert sum(learnt) <= 64
        learnt.clear()
        assert not noted
        drafter.observe([seq], TreeBatch.chains([[]]), Scores(None), Verdict.of([[]], [text[-1]], "cpu"))
        drafter.observe([seq], TreeBatch.chains([[text[-1]]]), Scores(None), Verdict.of([[]], [7], "cpu"))
        assert sum(learnt) == (3 if prompt_length == 40 and made is RecyclingDrafter else prompt_length == 40)
        learnt.clear()
        noted.clear()


class Ending(FakeSeq):
    finished: str | None = None


def test_rows_of_those_that_ended_are_not_read_for_others() -> None:
    """A round behind one in which a sequence ended has its logits where those of all of its sequences were."""
    seqs = [Ending(0, [1, 2]), Ending(1, [3, 4])]
    seqs[0].finished = "stop"
    trees, logits = TreeBatch.chains([[2], [4]]), torch.full((2, 9), -9.0)
    logits[0, 7] = logits[1, 8] = 9.0
    given: Any = (None, seqs, [], trees, Scores(logits), None, None)
    left, few, scores, verdict = LaunchedRound(*given).without_ended(Verdict.of([[], []], [5, 6], "cpu"))
    drafter = RecyclingDrafter()
    drafter.observe(left, few, scores, verdict)
    assert [seq.id for seq in left] == [1]
    assert 7 not in [token for token, _ in drafter._table(seqs[1]).after(3, 4)]
