"""The batch sweep on a small model: rows, equality, intervals; the table, the plot and another engine's file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from forerun.core.errors import InvalidInput
from forerun.core.types import Budget, Request
from forerun.engine.engine import Engine
from forerun.measure.bench.batches import Call, Setup, Sweep
from lab.batch_report import RivalRow, draw, read_rival, say_row, table
from tests.measure.conftest import table_llm

PROMPTS = [(5, 6, 7), (8, 9, 8, 9, 8), (11, 12, 13, 14)]
SETUPS = {"plain": Setup("none"), "copies": Setup("ngram", Budget(3, 3)), "adaptive": Setup("ngram")}


def make_sweep() -> Sweep:
    return Sweep(table_llm().engine, PROMPTS, 40, ignore_eos=True)


def test_every_batch_size_and_setup_has_a_row_and_all_texts_are_equal() -> None:
    said: list[dict[str, Any]] = []
    rows = make_sweep().measure(SETUPS, [1, 2, 4], lambda batch: 2 * batch, said.append)
    assert said == rows
    assert [(row["batch"], row["setup"]) for row in rows] == [(batch, setup) for batch in (1, 2, 4) for setup in SETUPS]
    assert all(row["differing"] == 0 and row["tokens"] == 40 * row["texts"] for row in rows)
    assert [row["texts"] for row in rows[::3]] == [2, 4, 8]
    assert all(row["x_plain"] == 1.0 for row in rows[::3])
    assert rows[1]["tokens_per_round"] > 1.5 > rows[0]["tokens_per_round"] == 1.0
    low, high = rows[0]["interval"]
    assert low < rows[0]["tokens_per_s"] < high
    assert rows[3]["ms_per_token"] == pytest.approx(2e3 / rows[3]["tokens_per_s"], rel=1e-3)


def test_a_third_of_the_requests_asks_the_same_engine_for_other_drafters(monkeypatch: pytest.MonkeyPatch) -> None:
    sweep, asked = make_sweep(), list[tuple[int, str | None]]()
    submit = Engine.submit

    def listen(engine: Engine, request: Request) -> int:
        asked.append((id(engine), request.drafter))
        return submit(engine, request)

    sweep.write_plainly()
    monkeypatch.setattr(Engine, "submit", listen)
    setup = Setup("ngram", others=("suffix", "none"))
    call = sweep.write(setup, 2, sweep.prompts_for(9), sweep.params)
    assert len({engine for engine, _ in asked}) == 1
    own = ["ngram"] * 2
    assert [drafter for _, drafter in asked] == [*own, "suffix", *own, "none", *own, "suffix"]
    assert call.own[0] == 6 * 40 < call.tokens
    assert call.own[1] < call.rounds
    assert call.texts == [sweep.plain[prompt] for prompt in sweep.prompts_for(9)]
    sweep.write(Setup("ngram"), 2, sweep.prompts_for(3), sweep.params)
    assert {engine for engine, _ in asked[9:]}.isdisjoint({asked[0][0]})


def test_repeats_alternate_and_count_as_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    sweep, order = make_sweep(), list[str]()
    write = sweep.write

    def listen(setup: Setup, batch: int, prompts: Any, params: Any) -> Any:
        order.append(setup.drafter if params is sweep.params else "warm-up")
        return write(setup, batch, prompts, params)

    monkeypatch.setattr(sweep, "write", listen)
    two = dict([*SETUPS.items()][:2])
    first, second = (setup.drafter for setup in two.values())
    rows = sweep.measure(two, [2], lambda batch: 3, repeats=2)
    assert order == ["none", "warm-up", first, "warm-up", second, second, first]
    assert [(row["texts"], row["tokens"], row["differing"]) for row in rows] == [(6, 240, 0)] * 2
    assert rows[0]["x_plain"] == 1.0


def test_prompts_are_read_every_time(monkeypatch: pytest.MonkeyPatch) -> None:
    sweep, salts = make_sweep(), list[str | None]()
    submit = Engine.submit

    def listen(engine: Engine, request: Request) -> int:
        salts.append(request.cache_salt)
        return submit(engine, request)

    monkeypatch.setattr(Engine, "submit", listen)
    sweep.write_plainly()
    assert salts == [None] * len(PROMPTS)


def test_a_text_that_differs_is_counted() -> None:
    sweep = make_sweep()
    sweep.write_plainly()
    sweep.plain[PROMPTS[1]] = [*sweep.plain[PROMPTS[1]][:7], 0]
    rows = sweep.measure({"plain": Setup("none")}, [2], lambda batch: 6)
    assert rows[0]["differing"] == 2
    assert rows[0]["first_differences"] == [7, 7]
    assert [prompt for prompt, _ in sweep.differing] == [PROMPTS[1]] * 2


def test_the_interval_comes_from_how_stretches_differ() -> None:
    even = Call([[1] * 40], 0.0, [(0.1 * (i + 1), 1) for i in range(40)])
    assert even.error() == pytest.approx(0.0, abs=1e-9)
    uneven = Call([[1] * 40], 0.0, [(0.1 * (i + 1), 2 if i % 8 < 4 else 0) for i in range(40)])
    error = uneven.error()
    assert error is not None
    assert 0.3 < error < 2.0
    assert Call([[1]], 0.0, [(0.1, 1)]).error() is None
    assert even.rate == pytest.approx(10.0)


ROWS: list[dict[str, Any]] = [
    {
        "batch": batch,
        "setup": setup,
        "texts": 8 * batch,
        "tokens_per_s": rate * batch,
        "interval": [0.9 * rate * batch, 1.2 * rate * batch],
        "ms_per_token": 1e3 / rate,
        "x_plain": x,
        "x_interval": [0.9 * x, 1.1 * x],
        "tokens_per_round": x,
        "own_tokens_per_round": x,
        "differing": 0,
    }
    for batch in (1, 8)
    for setup, rate, x in (("plain", 100.0, 1.0), ("default", 250.0, 2.5))
]


def test_the_table_puts_another_engine_beside_ours(capsys: pytest.CaptureFixture[str]) -> None:
    alone = table(ROWS)
    assert "2000 = 2.50x (2.25-2.75)" in alone
    beside = table(ROWS, [RivalRow(8, 400.0, 1000.0, 66, 29)]).splitlines()
    assert beside[1].split()[-1] == "-"
    assert beside[2].split()[-4:] == ["400", "1000", "2.00x", "2.00x"]
    say_row(ROWS[1])
    assert "2.50x plain" in capsys.readouterr().err


@pytest.mark.slow
def test_the_plot_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for rival in ([], [RivalRow(8, 400.0, None)]):
        draw(ROWS, tmp_path / "p.png", "title", rival)
        assert (tmp_path / "p.png").stat().st_size > 5000


def test_another_engines_file_is_read(tmp_path: Path) -> None:
    file = tmp_path / "other.json"
    file.write_text(
        json.dumps([{"batch": 32, "plain": 3108, "head": 4736.5, "texts": [[1], [2]], "equal": 1}, {"batch": 1}])
    )
    assert read_rival(file) == [RivalRow(1, None, None), RivalRow(32, 3108.0, 4736.5, 2, 1)]
    for wrong in ("{}x", '{"batch": 1}', '[{"plain": 3}]', '[{"batch": 1, "plain": -1}]', "[3]"):
        file.write_text(wrong)
        with pytest.raises(InvalidInput, match="another engine"):
            read_rival(file)
    with pytest.raises(InvalidInput):
        read_rival(tmp_path / "none.json")
