"""The next round waits for requests while the device is busy, and never so long that the device waits for it."""

from __future__ import annotations

import threading
from statistics import fmean
from types import SimpleNamespace
from typing import Any

import pytest

from forerun.core.params import SamplingParams
from forerun.engine import round as rounds
from forerun.engine.round import LATE, LAUNCHES, LONGER, QUIET, SPARE, SURE, LaunchDeadline
from forerun.engine.scheduler import NOTHING_READ
from lab.simulate.device import SimulatedDevice
from tests.engine.test_driver import make
from tests.simulate.load import Answered, SimulatedServer, asks

A, B = object(), object()  # sequences
ROUND = 8e-3


def launched(
    seqs: list[Any], seconds: float | None = ROUND, read: object = None, form: object = "form", reading: float = 0.0
) -> Any:
    trees, scores = SimpleNamespace(form=form, draft_seconds=0.0), SimpleNamespace(seconds=lambda: seconds, read=read)
    return SimpleNamespace(seqs=seqs, trees=trees, scores=scores, chunk=NOTHING_READ._replace(begun=reading))


def after_a_round(waited: float = 1.0, **other: Any) -> LaunchDeadline:
    """A round of one sequence was read at 1.0, and another of two is under way."""
    late = LaunchDeadline()
    late.note_launch(5e-4)
    late.note_read(launched([A], **other), launched([A, B]), waited, 1.0)
    return late


def test_it_waits_until_shortly_before_the_round_under_way_ends() -> None:
    late = after_a_round()
    whole = ROUND - SPARE - LAUNCHES * 5e-4
    assert late.left(1.0) == pytest.approx(whole)
    assert late.left(1.0 + whole + 1e-6) < 0.0


def test_it_does_not_wait_where_it_does_not_know_when_that_is() -> None:
    assert after_a_round(waited=LATE / 2).left(1.0) == 0.0, "the host was late"
    assert after_a_round(seconds=None).left(1.0) == 0.0, "nothing was timed"
    assert after_a_round(read=object()).left(1.0) == 0.0, "prompts made it longer"
    assert after_a_round(form="another").left(1.0) == 0.0, "another kind of round"
    late = after_a_round()
    late.note_read(launched([A, B]), None, 1.0, 1.1)
    assert late.left(1.1) == 0.0, "nothing is under way"


def test_it_does_not_wait_where_no_request_can_join(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make().engine
    monkeypatch.setattr(engine.deadline, "left", lambda now: 1.0)
    assert engine.spare_seconds() == 0.0, "rounds do not overlap on a CPU"
    engine.timeline.depth = 2
    assert engine.spare_seconds() == 1.0
    engine.max_batch = 0
    assert engine.spare_seconds() == 0.0, "no place is free"


def test_it_does_not_wait_where_no_sequence_has_joined_or_left_for_long() -> None:
    late = after_a_round()
    for _ in range(QUIET - 1):
        late.note_read(launched([A, B]), launched([A, B]), 1.0, 1.0)
    assert late.left(1.0) > 0.0
    late.note_read(launched([A, B]), launched([A, B]), 1.0, 1.0)
    assert late.left(1.0) == 0.0


def test_the_shortest_of_late_counts() -> None:
    late = after_a_round()
    before = late.left(1.0)
    late.note_read(launched([A, B], 2 * ROUND), launched([A]), 1.0, 1.0)
    assert late.left(1.0) == pytest.approx(before + (LONGER - 1.0) * ROUND)
    late.note_read(launched([A], ROUND / 2), launched([A, B]), 1.0, 1.0)
    assert late.left(1.0) == pytest.approx(before - ROUND / 2)


def test_prompts_that_are_read_leave_more_time() -> None:
    late, whole = after_a_round(), ROUND - SPARE - LAUNCHES * 5e-4
    for _ in range(2 * QUIET):
        late.note_read(launched([A, B]), launched([A, B], reading=5e-3), 1.0, 2.0)
    assert late.left(2.0) == pytest.approx(whole + SURE * 5e-3), "also where nobody has come for long"
    late.note_read(launched([A, B], read=object()), launched([A], form="new", reading=5e-3), 1.0, 3.0)
    assert late.left(3.0) == pytest.approx(SURE * 5e-3 - ROUND + whole), "all that is known of a new kind of round"
    late.note_prompts(7e-3, 4.0)
    assert late.left(4.0) == pytest.approx(SURE * 7e-3 - ROUND + whole)
    late.note_prompts(0.0, 5.0)
    assert late.left(5.0) == 0.0


def test_a_round_behind_nothing_begins_when_it_is_launched() -> None:
    late = after_a_round()
    late.note_start(launched([B]), 3.0)
    assert late.left(3.0) == pytest.approx(ROUND - SPARE - LAUNCHES * 5e-4)


class Idle:
    """Counts how long a simulated device has nothing to do."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seconds = 0.0
        real = SimulatedDevice.busy_for

        def busy_for(gpu: SimulatedDevice, seconds: float) -> None:
            self.seconds += max(0.0, gpu.clock.seconds - gpu._free_at)
            real(gpu, seconds)

        monkeypatch.setattr(SimulatedDevice, "busy_for", busy_for)


def served(drafts: bool, clients: int, seed: int) -> Answered:
    """The second load, on a server that has learnt from the first."""
    server = SimulatedServer(drafts, rate=0.6)
    for _ in range(2):
        found = server.serve(asks(5 * clients, seed=seed, prompt=142), clients)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("drafts", [False, True])
def test_clients_that_ask_again_are_read_a_round_earlier(drafts: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    idle, seeds = Idle(monkeypatch), range(32, 36)  # forms differ by chance: a single load says little of speed
    late = [served(drafts, 32, seed) for seed in seeds]
    idle_late, idle.seconds = idle.seconds, 0.0
    monkeypatch.setattr(rounds, "QUIET", 0)  # nobody is waited for
    early = [served(drafts, 32, seed) for seed in seeds]
    for one, other in zip(late, early, strict=True):
        assert one.first_at(0.5) < 0.9 * other.first_at(0.5)
        assert one.first_at(0.99) <= 1.01 * other.first_at(0.99)
    assert fmean(one.rate for one in late) > 0.99 * fmean(one.rate for one in early)
    assert idle_late <= idle.seconds + 0.005 * sum(one.seconds for one in late)


def test_who_leads_is_woken_by_a_request_while_it_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = make()
    asked = threading.Event()
    engine = llm.engine
    real = engine.enqueue

    def enqueue(seq: Any) -> None:
        real(seq)
        if len(engine.waiting) + len(engine.running) > 1:
            asked.set()

    monkeypatch.setattr(engine, "enqueue", enqueue)
    monkeypatch.setattr(engine, "spare_seconds", lambda: 0.0 if asked.is_set() else 3600.0)
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    threads = [threading.Thread(target=llm.generate, args=("ab", params), daemon=True) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
