"""Time by part: the parts add up to the round, and what a device did is booked where it belongs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from forerun.build.engine import make_engine
from forerun.core.params import EngineConfig, SamplingParams, SpeculativeConfig
from forerun.core.types import Request, Scores, TreeBatch
from forerun.engine.stats import PARTS, RoundClock
from forerun.models.base import Abilities
from forerun.testing import TableLM


def clock_of(
    *times: float, launched: list[Callable[[], float | None]] | None = None, awaited: bool = False
) -> RoundClock:
    """A clock whose laps of draft, pass and verdict end at these times."""
    now = iter([0.0, *times])
    clock = RoundClock(launched if launched is not None else [], lambda: next(now), awaited=awaited)
    for part in ("draft", "pass", "verdict"):
        clock.lap(part)
    return clock


@dataclass
class FakeTrees:
    nodes: int = 8
    seconds: float = 0.0
    follows: tuple[int, ...] | None = None

    @property
    def draft_seconds(self) -> float:
        return self.seconds


def settled(clock: RoundClock, scores: Scores, trees: Any) -> dict[str, float]:
    total = sum(clock.seconds.values())
    clock.settle(trees, scores)
    assert sum(clock.seconds.values()) == pytest.approx(total), "time is moved, never made"
    assert all(spent >= 0.0 for spent in clock.seconds.values())
    return {part: spent for part, spent in clock.seconds.items() if spent > 1e-9}


def test_on_a_cpu_laps_are_the_parts() -> None:
    found = settled(clock_of(1.0, 5.0, 5.5), Scores(torch.zeros(1, 2)), FakeTrees())
    assert found == pytest.approx({"draft": 1.0, "pass": 4.0, "verdict": 0.5})


def test_what_the_host_waited_for_on_a_device_is_booked_where_it_belongs() -> None:
    """0.2 s to launch the pass, 6 s in the verdict: of these 4 were the pass and 1.5 a draft."""
    scores = Scores(None, seconds=lambda: 4.0)
    found = settled(clock_of(0.1, 0.3, 6.3), scores, FakeTrees(seconds=1.5))
    assert found == pytest.approx({"draft": 1.6, "pass": 4.0, "verdict": 0.5, "host": 0.2})


def test_a_draft_that_followed_an_unread_round_is_no_time_of_the_host() -> None:
    """The host waited 4 of 6 s, for a pass that takes 4.5; the draft before it took 1.2."""
    scores = Scores(None, seconds=lambda: 4.5)
    clock, followed = clock_of(0.0, 2.0, 6.0), FakeTrees(seconds=1.2, follows=(0,))
    assert settled(clock, scores, followed) == pytest.approx({"draft": 1.2, "pass": 4.5, "host": 0.3})
    first = settled(clock_of(0.0, 2.0, 6.0), scores, FakeTrees(seconds=1.2))
    # it may have been drafted in the last round's time
    assert first == pytest.approx({"pass": 4.5, "host": 1.5})


def ended(follows: tuple[int, ...] | None, read: tuple[TreeBatch, Scores] | None = None) -> RoundClock:
    """The host launches for 1 s, waits 2, and writes for 3.5 more; the pass takes 5, and 1 the draft before it."""
    clock = clock_of(0.0, 1.0, 3.0, 6.5)
    clock.settle(FakeTrees(2, 1.0, follows), Scores(None, seconds=lambda: 5.0, read=read))  # type: ignore[arg-type]
    clock.end()
    assert sum(clock.seconds.values()) == pytest.approx(6.5)
    return clock


def test_what_the_host_writes_beside_the_next_pass_is_no_time_of_a_round_that_followed() -> None:
    """In a row of such rounds the device is never idle: each takes what its draft and its pass take."""
    seconds = ended((0,)).seconds
    assert seconds == pytest.approx({"prompt": 0, "draft": 1.0, "pass": 5.0, "verdict": 0, "host": 0.5})
    alone = ended(None).seconds
    assert alone == pytest.approx({"prompt": 0, "draft": 0, "pass": 3.0, "verdict": 0, "host": 3.5})


def test_prompts_have_their_share_of_that_too() -> None:
    read = TreeBatch.chains([[1, 2, 3], [4, 5, 6]]), Scores(None)
    seconds = ended((0,), read).seconds
    assert seconds == pytest.approx({"prompt": 3.75, "draft": 1.0, "pass": 1.25, "verdict": 0, "host": 0.5})


def test_a_round_that_follows_begins_where_the_last_one_ended() -> None:
    clock = ended((0,))
    assert RoundClock([], lambda: 9.0, behind=clock).started == 6.5


def test_prompts_that_were_launched_before_are_prompts_and_not_a_verdict() -> None:
    launched: list[Callable[[], float | None]] = [lambda: 2.0, lambda: 1.0]
    clock = clock_of(0.1, 0.2, 8.2, launched=launched)
    found = settled(clock, Scores(None, seconds=lambda: 4.0), FakeTrees())
    assert found == pytest.approx({"prompt": 3.0, "draft": 0.1, "pass": 4.0, "verdict": 1.0, "host": 0.1})
    assert not launched, "each is booked once"


def test_a_pass_that_began_before_the_host_waited_is_whole() -> None:
    found = settled(clock_of(0.5, 3.5, 4.5), Scores(None, seconds=lambda: 2.5), FakeTrees())
    assert found == pytest.approx({"draft": 0.5, "pass": 2.5, "host": 1.5})


def test_prompts_in_the_same_pass_have_their_rows_share() -> None:
    read = TreeBatch.chains([[1, 2, 3], [4, 5, 6]]), Scores(None)
    found = settled(clock_of(0.0, 4.0, 4.5), Scores(torch.zeros(1, 2), read=read), FakeTrees(nodes=2))
    assert found == pytest.approx({"prompt": 3.0, "pass": 1.0, "verdict": 0.5})


def test_a_device_that_is_not_timed_gives_its_wait_to_the_pass() -> None:
    """The target says that it is one: where the logits lie is not asked."""
    found = settled(clock_of(0.0, 0.5, 4.5, awaited=True), Scores(torch.zeros(1, 2)), FakeTrees())
    assert found == pytest.approx({"pass": 4.5})
    found = settled(clock_of(0.0, 0.5, 4.5), Scores(torch.zeros(1, 2, device="meta")), FakeTrees())
    assert found == pytest.approx({"pass": 0.5, "verdict": 4.0})
    for device in ("cpu", "cuda"):
        assert Abilities.of(torch.device(device)).awaited is (device == "cuda")


class Slow(TableLM):
    """Prompts take a while, as they do on a CPU."""

    def prefill(self, *args: Any) -> Any:
        spin = torch.ones(300, 300)
        for _ in range(30):
            spin = (spin @ spin).clamp(max=1.0)
        return TableLM.prefill(self, *args)


def test_an_engine_books_prompts_apart_and_everything_somewhere() -> None:
    engine = make_engine(Slow(16), frozenset(), SpeculativeConfig("ngram"), EngineConfig())
    rounds: list[dict[str, float]] = []
    observe = engine.controller.observe

    def listen(outcome: Any) -> None:
        rounds.append(dict(outcome.seconds))
        observe(outcome)

    engine.controller.observe = listen  # type: ignore[method-assign]
    engine.submit(Request((1, 2, 3) * 4, SamplingParams(max_tokens=12, ignore_eos=True)))
    while engine.busy:
        engine.step()
    assert set(engine.stats.seconds) == set(PARTS)
    assert engine.stats.seconds["prompt"] > 0.0
    assert all(one["prompt"] == 0.0 and one["pass"] > 0.0 for one in rounds), "read before, not in a round"
    for part in ("draft", "pass", "verdict", "host"):
        assert engine.stats.seconds[part] == pytest.approx(sum(one[part] for one in rounds))


def test_passes_that_were_run_ahead_are_booked_round_by_round() -> None:
    """A call of 8 s runs four passes; of the three others one is asked for, and two are dropped."""
    ahead: list[float] = []

    def round_of(known: int, *times: float) -> tuple[RoundClock, dict[str, float]]:
        now = iter(times)
        clock = RoundClock([], lambda: next(now), ahead)
        for part in ("draft", "pass", "verdict"):
            clock.lap(part)
        clock.settle(FakeTrees(1), Scores(torch.zeros(1, 2), ahead=known, own=0.25))  # type: ignore[arg-type]
        return clock, {part: spent for part, spent in clock.seconds.items() if spent}

    clock, first = round_of(3, 10.0, 11.0, 19.0, 20.0)
    assert first == {"draft": 1.0, "pass": 2.0, "verdict": 1.0}
    assert clock.started == 16.0, "as if the round had taken the 4 s that are its own"
    clock, second = round_of(-1, 20.0, 21.0, 21.5, 22.0)
    assert second == {"draft": 1.0, "pass": 2.5, "verdict": 0.5}
    assert clock.started == 18.0
    clock, third = round_of(0, 22.0, 23.0, 25.0, 26.0)
    assert third == {"draft": 1.0, "pass": 2.0, "verdict": 1.0, "host": 4.0}
    assert clock.started == 18.0
    assert not ahead
    assert sum(first.values()) + sum(second.values()) + sum(third.values()) == 26.0 - 10.0
