"""The timeline of an engine's rounds, step by step: what stays and what goes when a round fails, ends or is dropped."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from forerun.core.params import SamplingParams
from forerun.core.types import Budget, Form, Greedy, Request, RoundPlan, Scores, TreeBatch, TreeForm, Verdict
from forerun.drafters.device.protocol import Unread
from forerun.engine.engine import Engine
from forerun.engine.round import Change, LaunchedRound, Timeline, rows_of, seats_behind, with_starters
from forerun.engine.scheduler import PrefillRows
from forerun.engine.sequence import SequenceState
from forerun.engine.stats import EngineStats, RoundClock
from forerun.models.base import ON_GPU
from lab.host import make

TEXTS = [((10 + i, 20 + i, 30 + i), [40 + i, *range(100, 119)]) for i in range(6)]


def engine_of(batch: int = 4) -> Engine:
    """Over the simulated device, whose passes take no time: plain rounds, each launched behind an unread one."""
    return make("none", TEXTS, batch)


def submit(engine: Engine, count: int, **params: Any) -> list[SequenceState]:
    found = list[SequenceState]()
    for prompt, answer in TEXTS[:count]:
        engine.enqueue(seq := engine.prepare(Request(prompt, SamplingParams(**{"max_tokens": len(answer), **params}))))
        found.append(seq)
    return found


def finish(engine: Engine, most: int = 200) -> None:
    for _ in range(most):
        if not engine.busy:
            return
        engine.step()
    raise AssertionError("it does not end")


def launched(engine: Engine, seqs: list[SequenceState], readers: list[SequenceState] | None = None) -> LaunchedRound:
    """A round of these, without a pass."""
    trees = TreeBatch.chains([seq.tokens[-1:] for seq in seqs])
    held = [*seqs, *(readers or [])]
    return LaunchedRound(
        Change(held), seqs, readers or [], trees, Scores(None), engine.stats.clock(), RoundPlan("plain")
    )


def open_line(count: int) -> tuple[Engine, Timeline, list[SequenceState], list[int]]:
    """A timeline with two rounds under way, and the ids of what it has forgotten."""
    engine, forgotten = engine_of(), list[int]()
    seqs = submit(engine, count)
    engine.waiting.clear()
    engine.scheduler.running = list(seqs)
    line = Timeline(engine.scheduler, lambda seq: forgotten.append(seq.id), 2)
    line.open(seqs)
    line.launched(launched(engine, seqs))
    line.second = launched(engine, seqs)
    return engine, line, seqs, forgotten


def test_an_interrupt_forgets_the_round_behind_even_where_nothing_is_undone() -> None:
    _, line, _, forgotten = open_line(2)
    line.interrupt()
    assert line.second is None
    assert line.first is not None, "it was launched, and can be read"
    assert forgotten == []


def test_a_round_that_is_undone_leaves_no_round_under_way_and_who_failed_most_comes_first() -> None:
    engine, line, seqs, forgotten = open_line(3)
    seqs[2].note_failure()
    line.open([*seqs, seqs[0]])
    line.repair()
    assert line.is_idle
    assert forgotten == [seq.id for seq in seqs], "each of them once"
    assert [*engine.waiting] == [seqs[2], seqs[0], seqs[1]]
    assert engine.running == []


def test_a_round_that_fails_is_repeated_with_half_as_many_and_one_alone_fails_twice_before_it_ends() -> None:
    engine, line, seqs, _ = open_line(4)
    line.open(seqs)
    line.fail(RuntimeError("once"))
    assert engine.scheduler.limit == 2
    assert [seq.finished for seq in seqs] == [None] * 4
    _, line, (seq,), _ = open_line(1)
    for end in (None, "error"):
        line.open([seq])
        line.fail(RuntimeError("again"))
        assert seq.finished == end
    line.change = None
    with pytest.raises(RuntimeError, match="no round"):
        line.fail(RuntimeError("no round"))


def test_the_limit_after_a_failure_grows_by_one_with_every_text_that_ends() -> None:
    engine = engine_of()
    submit(engine, 3)
    engine.scheduler.limit = 2
    found = list[int | None]()
    for seq in [*engine.waiting]:
        engine.timeline.end(seq.ended("aborted"))
        found.append(engine.scheduler.limit)
    assert found == [3, 4, None]


def test_a_round_behind_one_in_which_sequences_ended_keeps_the_others_and_is_dropped_without_any() -> None:
    engine, line, seqs, _ = open_line(3)
    behind = line.second
    assert behind is not None
    seqs[0].take(seqs[0].ended("aborted"))
    line.first = None
    clock = engine.stats.clock()
    assert line.close(clock) is None
    assert line.first is not None
    assert line.first.change.seqs == seqs[1:], "a fault does not queue again what has ended"
    assert line.first.clock is clock
    line.first, line.second = None, behind
    for seq in seqs[1:]:
        seq.take(seq.ended("aborted"))
    assert line.close(clock) is behind
    assert line.is_idle


def test_sequences_that_start_with_a_round_are_counted() -> None:
    engine = engine_of()
    seqs = submit(engine, 4)
    one = launched(engine, seqs, seqs[2:])
    assert [one.starters(some) for some in (seqs, seqs[:2], seqs[1:3])] == [2, 0, 1]


def test_trees_of_starters_have_their_roots_and_follow_no_tree() -> None:
    form = TreeForm(4, 3, 2, 1)
    tokens, parents = torch.arange(6), torch.tensor([-1, 0, 1] * 2)
    for follows, wanted in ((None, None), ((1, 0), (1, 0, -1, -1))):
        trees = with_starters(TreeBatch(tokens, parents, form.starts(2), form=form, follows=follows), form, [70, 80])
        assert trees.tokens.tolist() == [*range(6), 70, 1, 2, 80, 1, 2]
        assert trees.parents.tolist() == [-1, 0, 1] * 4
        assert (trees.follows, trees.starts) == (wanted, form.starts(4))


def test_rows_that_do_not_lie_together() -> None:
    rows = torch.arange(20).view(10, 2)
    for which in ([0], [0, 1, 2], [1, 4, 5, 9], [3, 5, 7]):
        assert rows_of(rows, which).tolist() == rows[which].tolist()


# ---- the engine's side of it


def test_a_failure_of_the_round_behind_is_one_of_the_last_round_too_and_ends_the_overlap() -> None:
    engine = engine_of()
    seqs, score, failed = submit(engine, 2), engine._score, list[bool]()

    def fails(some: Any, trees: TreeBatch, *rest: Any) -> Scores:
        if trees.follows is not None and not failed:
            failed.append(True)
            raise RuntimeError("no memory")
        return score(some, trees, *rest)

    engine._score = fails  # type: ignore[method-assign]
    while not failed:
        engine.step()
    assert [seq.failures for seq in seqs] == [1, 1]
    assert [*engine.waiting] == seqs
    assert engine.timeline.depth == 1
    finish(engine)
    assert [seq.tokens[3:] for seq in seqs] == [answer for _, answer in TEXTS[:2]]


def test_the_clock_of_the_round_behind_starts_where_the_round_before_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    gaps, real = list[float](), EngineStats.clock

    def noted(stats: EngineStats, behind: RoundClock | None = None) -> RoundClock:
        clock = real(stats, behind=behind)
        if behind is not None:
            gaps.append(clock.started - behind.started - sum(behind.seconds.values()))
        return clock

    monkeypatch.setattr(EngineStats, "clock", noted)
    engine = engine_of()
    submit(engine, 1)
    finish(engine)
    assert len(gaps) > 10
    assert gaps == pytest.approx([0.0] * len(gaps), abs=1e-9), "no time between two rounds is left out"


def test_an_abort_waits_for_the_rounds_that_the_sequence_is_in() -> None:
    engine = engine_of()
    seqs = submit(engine, 2)
    for _ in range(4):
        engine.step()
    assert engine.timeline.first is not None
    engine.abort(seqs[0].id)
    assert engine.timeline.is_idle, "its rounds were read, and none is under way"
    assert seqs[0].finished == "aborted"
    engine.step()
    other = engine.timeline.first
    engine.abort(submit(engine, 3)[2].id)
    assert engine.timeline.first is other, "nothing was waited for where it only queues"
    finish(engine)
    assert seqs[1].tokens[3:] == TEXTS[1][1]


def test_a_drafter_is_built_while_no_pass_is_under_way() -> None:
    engine = engine_of()
    submit(engine, 1)
    for _ in range(4):
        engine.step()
    assert engine.timeline.first is not None
    get, seen = engine.drafters.get, list[bool]()

    def noted(name: str) -> Any:
        seen.append(engine.timeline.is_idle)
        return get(name)

    engine.drafters.get = noted  # type: ignore[method-assign]
    engine.prepare(Request((10, 20, 30), drafter="ngram"))
    assert seen[0]


def test_a_round_follows_only_where_the_device_decides_about_all() -> None:
    engine = engine_of()
    seqs = submit(engine, 2)
    assert engine._device_decides(seqs, sampled=False)
    others = {
        "another drafter": {"drafter": "ngram"},
        "a penalty": {"params": SamplingParams(presence_penalty=0.1)},
        "a verifier that is not exact": {"verifier": "typical"},
        "a temperature": {"params": SamplingParams(temperature=1.0)},
    }
    for why, options in others.items():
        other = engine.prepare(Request((10, 20, 30), **options))  # type: ignore[arg-type]
        assert not engine._device_decides([*seqs, other], sampled=False), why


def test_room_is_made_behind_all_that_an_unread_round_may_add(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, asked = engine_of(), list[Sequence[int]]()
    seqs = submit(engine, 2)
    monkeypatch.setattr(type(engine.target), "make_room", lambda target, some, rows: asked.append(rows) or True)
    plain, form = launched(engine, seqs), TreeForm(2, 4, 3, 1)
    trees = TreeBatch(torch.zeros(8), torch.zeros(8), form.starts(2), form=form)
    for last in (plain, plain._replace(trees=trees)):
        assert engine._has_room(last, [(seqs[0], 0), (seqs[1], -1)], 5)
    assert asked == [[6, 5], [9, 5]], "one token behind a root, root and path behind a tree, nothing before the first"


class Answers:
    """A controller whose word on the next round is given."""

    same = True
    switch: RoundPlan | None = None

    def plan(self, seqs: Sequence[Any]) -> list[Budget]:
        return [Budget(0, 0) for _ in seqs]

    def observe(self, outcome: Any) -> None: ...
    def forget(self, seq: Any) -> None: ...
    def follow(self, seqs: Sequence[Any], last: RoundPlan, switches: Callable[[], bool]) -> RoundPlan | None:
        return last.again() if self.same else self.switch if switches() else None


def test_the_next_plan_is_the_last_one_where_that_holds_and_else_another_if_the_menu_switches() -> None:
    engine = engine_of()
    seqs, engine.controller = submit(engine, 2), (says := Answers())
    form = TreeForm(2, 4, 3, 1)
    trees = TreeBatch(torch.zeros(8), torch.zeros(8), form.starts(2), form=form)
    plain = launched(engine, seqs)
    engine.drafters.never_draft = lambda seqs: False  # type: ignore[method-assign]
    grown = plain._replace(trees=trees, plan=RoundPlan("trees", 3))
    assert engine._next_plan(grown, seqs) == RoundPlan("trees", 2)
    assert engine._next_plan(plain, seqs) == RoundPlan("plain", -1)
    says.same = False
    says.switch = other = RoundPlan("trees", 7, Form(5, 2, 1))
    assert [engine._next_plan(last, seqs) for last in (grown, plain)] == [None, None], "no drafter on a device"
    device = SimpleNamespace(menu=SimpleNamespace(switches=False))
    engine.drafters.device = lambda seqs: device  # type: ignore[method-assign,assignment,return-value]
    assert engine._next_plan(grown, seqs) is None, "forms of this menu are not switched"
    device.menu.switches = True
    assert [engine._next_plan(last, seqs) for last in (grown, plain)] == [other] * 2
    own = engine.prepare(Request((10, 20, 30), budget=Budget(4, 3)))
    assert engine._next_plan(plain, [*seqs, own]) is None, "a request's own budget is not the controller's"


def test_prompts_that_a_dropped_round_has_read_are_noted() -> None:
    """The text ends by a stop token, which nobody knew when the round behind was launched."""
    long = tuple(range(200, 500))
    for steps in range(1, 8):
        engine = make("none", [TEXTS[0], (long, [1, 2, 3])], 4)
        engine.prefill_rows = PrefillRows(ON_GPU.prefill, 16, fixed=16)
        submit(engine, 1, stop_token_ids=[103])
        for _ in range(steps):
            engine.step()
        noted, real = list[int](), engine._note_prefill

        def note(seqs: Any, chains: TreeBatch, started: float, noted: Any = noted, real: Any = real) -> int:
            noted.append(chains.nodes)
            rows: int = real(seqs, chains, started)
            return rows

        engine._note_prefill = note  # type: ignore[method-assign]
        engine.submit(Request(long, SamplingParams(max_tokens=3)))
        finish(engine)
        assert sum(noted) == len(long) - 1


def test_a_drafter_is_handed_what_it_goes_on_from_when_rounds_switch_between_trees_and_roots() -> None:
    engine, done = engine_of(), list[Any]()
    seqs = submit(engine, 2)
    seats, roots = [(seqs[0], 0), (seqs[1], -1)], TreeBatch.chains([[1], [2]])
    greedy = Greedy(
        verdict=lambda: Verdict.of([], [], torch.device("cpu")),
        next_roots=lambda going: done.append("roots") or roots,  # type: ignore[func-returns-value]
        hand_on=lambda: done.append("hand on"),
    )
    form = TreeForm(2, 4, 3, 1)
    trees = TreeBatch(torch.zeros(8), torch.zeros(8), form.starts(2), form=form)
    plain = launched(engine, seqs)._replace(scores=Scores(None, {}, greedy))
    grown = plain._replace(trees=trees)

    def launch(places: Any, wanted: Form | None, behind: Unread) -> TreeBatch:
        done.append((wanted, behind.trees.form))
        return trees

    device = SimpleNamespace(launch=launch, rest=lambda places, behind: done.append(("rest", behind.trees.form)))
    engine.drafters.device = lambda seqs: device  # type: ignore[method-assign,assignment,return-value]
    engine._has_room = lambda last, places, nodes: not done.append(nodes)  # type: ignore[method-assign,func-returns-value]
    other = RoundPlan("trees", 7, Form(5, 2, 1))
    for last, plan, wanted in (
        (plain, other, [6, "hand on", (Form(5, 2, 1), None)]),
        (grown, other, [6, (Form(5, 2, 1), form)]),
        (grown, RoundPlan("trees", 1), [4, (None, form)]),
    ):
        done.clear()
        assert engine._grown(last, seats, plan) is trees
        assert done == wanted, "nodes to make room for, and what was launched"
    for last, wanted in ((plain, ["roots"]), (grown, [("rest", form), "roots"])):
        done.clear()
        assert engine._roots(last, seats) is roots
        assert done == wanted
    engine._has_room = lambda last, places, nodes: False  # type: ignore[method-assign]
    assert engine._grown(grown, seats, other) is None


def test_whoever_one_more_token_ends_has_no_seat_in_the_round_behind_unless_that_round_is_its_first() -> None:
    engine = engine_of()
    seqs = submit(engine, 3)
    last = launched(engine, seqs)
    assert seats_behind(last, seqs) == [(seq, b) for b, seq in enumerate(seqs)]
    (ends,) = submit(engine, 1, max_tokens=1)
    assert seats_behind(last._replace(seqs=[*seqs, ends]), [*seqs, ends]) == [(seq, b) for b, seq in enumerate(seqs)]
    assert seats_behind(last, [seqs[2], ends]) == [(seqs[2], 2), (ends, -1)]
    assert seats_behind(last._replace(seqs=[ends, seqs[1]]), [seqs[1], ends, seqs[0]]) == [(seqs[1], 1), (seqs[0], -1)]


def test_a_round_is_read_without_the_sequences_that_have_ended() -> None:
    engine = engine_of()
    seqs = submit(engine, 3)
    scores = Scores(torch.zeros(3, 5), {1: torch.arange(3.0)[:, None]})
    one, verdict = launched(engine, seqs)._replace(scores=scores), Verdict.of([[]] * 3, [7, 8, 9], torch.device("cpu"))
    assert one.without_ended(verdict) == (seqs, one.trees, scores, verdict)
    seqs[1].take(seqs[1].ended("aborted"))
    left, trees, some, kept = one.without_ended(verdict)
    assert (left, trees.to_host()[0]) == ([seqs[0], seqs[2]], [30, 32])
    assert kept.to_host()[1] == [7, 9]
    assert (some.logits, some.hidden[1].tolist()) == (None, [[0.0], [2.0]])
