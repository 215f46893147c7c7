"""Chunks of prompts by the time that they take: fewer rows deep in a prompt, and short requests first."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from forerun.engine import scheduler as scheduler_module
from forerun.engine.scheduler import DEEPER, NOTHING_READ, PrefillRows, Scheduler
from forerun.models.base import ON_CPU, ON_GPU
from forerun.testing import TableLM
from tests.simulate.company import Company, first_tokens, h200_small
from tests.simulate.load import SimulatedServer

PLAIN, ROW, CONTEXT = 4e-3, 1e-5, 1e-9  # seconds of a plain round, of a row, and more for every token before it
LONG = 30_000


def taught(depths: Sequence[int] = range(0, LONG, 1000), fixed: int | None = None) -> PrefillRows:
    """It has seen rounds that read a long prompt."""
    rows = PrefillRows(ON_GPU.prefill, 1024, fixed)
    rows.observe(PLAIN, 0)
    for _ in range(3):
        for depth in depths:
            _, count = rows.within([(LONG, depth)], rows.rows())
            rows.observe(PLAIN + count * (ROW + CONTEXT * depth), count, depth)
    return rows


def test_fewer_rows_deep_in_a_prompt_take_the_same_time() -> None:
    rows = taught()
    assert rows.rows() in (320, 384), "as many as take a plain round"
    found = {before: rows.within([(LONG, before)], 384)[1] for before in (0, 10_000, 20_000, LONG, 4 * LONG)}
    assert found[0] == found[10_000] == 384
    for before in (20_000, LONG):
        seconds = found[before] * (ROW + CONTEXT * before)
        assert seconds == pytest.approx(DEEPER * 384 * ROW, rel=0.1)
    assert found[4 * LONG] == 64 == ON_GPU.prefill.start // 4, "fewer would hardly take less"
    assert rows.within([(LONG, LONG)], 2 * 384)[1] == pytest.approx(2 * found[LONG], rel=0.02), "many wait"


def test_what_is_fixed_or_unknown_is_not_cut() -> None:
    assert taught(fixed=200).within([(LONG, LONG)], 200) == (1, 200)
    new = PrefillRows(ON_GPU.prefill, 1024)
    assert new.within([(LONG, LONG)], 256) == (1, 256)
    assert new.within([], 256) == (0, 256)
    assert new.planned is NOTHING_READ
    assert PrefillRows(ON_CPU.prefill, 512).within([(LONG, LONG)], 8) == (1, 8)


def test_short_prompts_at_their_start_know_nothing_of_depth() -> None:
    rows = taught()
    assert rows.within([(100, 0), (100, 0), (60, 0)], 384) == (3, 384), "all of them fit"
    assert rows.within([(120, 0)] * 5, 384) == (5, 384), "prompts of one scale share the pass"


def test_a_long_prompt_waits_for_one_pass_in_which_a_short_one_starts() -> None:
    rows, parts = taught(), [(90, 0), (12_000, 18_000)]
    assert rows.within(parts, 384) == (1, 90)
    count, some = rows.within(parts, 384)
    assert count == 2, "and not for two"
    assert 90 < some < 384
    assert rows.within(parts, 384) == (1, 90)
    assert rows.within([(12_000, 18_000)], 384)[0] == 1
    assert rows.within([(0, 0), (12_000, 18_000)], 384) == (1, 1), "a prompt of one token"


def test_what_a_chunk_takes_is_said_of_what_is_surely_read() -> None:
    rows = taught()
    assert rows.within([(LONG, 20_000)], 384)[0] == 1
    assert rows.planned.begun == pytest.approx(rows.planned.rows * (ROW + CONTEXT * 20_000), rel=0.1)
    assert (rows.planned.new, rows.planned.before) == (0.0, 20_000)
    rows.within([(100, 0)], 384)
    assert rows.planned.begun == 0.0
    assert rows.planned.new == pytest.approx(100 * ROW, rel=0.1)


@pytest.mark.parametrize("reused", [0, 64])
def test_a_prompt_that_begins_may_be_in_the_prefix_cache(reused: int) -> None:
    """The next round is not launched late for rows that nobody computes."""
    rows, target = taught(), TableLM(30)
    target.reused_tokens = lambda seq: reused  # type: ignore[method-assign]
    rows.within([(100, 0)], 384)
    known = Scheduler(target, 4).known_chunk(rows, [None])  # type: ignore[list-item]
    assert (known.seconds > 0.0) == (reused == 0)
    assert Scheduler(target, 4).known_chunk(rows, []) is NOTHING_READ, "it was launched"


def served(long: int, drafts: bool = False, requests: int = 60) -> Company:
    server = SimulatedServer(drafts, places=32, speeds=h200_small())
    first_tokens(server, long, 20, seed=9)
    return first_tokens(server, long, requests)


@pytest.mark.slow
def test_first_tokens_of_short_requests_come_soon_beside_a_long_prompt() -> None:
    """Twice as late as alone at most, in simulated seconds; the long prompt is read in the time that it took before."""
    alone, beside = served(0), served(LONG)
    assert beside.first_at(0.99) <= 2.0 * alone.first_at(0.99)
    assert beside.first_at(0.5) <= 2.0 * alone.first_at(0.5)
    assert beside.reading <= 1.03 * 0.745


@pytest.mark.slow
def test_negative_control_chunks_of_rows_make_them_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PrefillRows, "within", lambda self, parts, rows: (len(parts), rows))
    monkeypatch.setattr(scheduler_module, "COMPANY", 0)
    assert served(LONG).first_at(0.99) > 2.0 * served(0).first_at(0.99)
