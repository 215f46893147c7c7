"""The whole benchmark on a random model of two layers: the document it prints, and texts that are equal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from forerun.bench import cpu, run
from forerun.bench.contenders import load, load_peers, own_contenders
from forerun.bench.measure import Contender, Written
from forerun.bench.settings import Cell, Settings, ways_of
from tests.bench.conftest import Letters

pytestmark = pytest.mark.usefixtures("tiny_checkpoint")


def bench(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, Any], str]:
    code = cpu.main([*words, "--threads", "1"])
    printed = capsys.readouterr().out
    return code, json.loads(printed.splitlines()[-1]), printed


def test_the_last_line_is_the_document(
    capsys: pytest.CaptureFixture[str], suite: str, tmp_path: Path
) -> None:
    saved = tmp_path / "result.json"
    words = ("--suite", suite, "--max-tokens", "12", "--repeats", "2", "--json", str(saved))
    code, result, printed = bench(capsys, *words, "--pair", "tiny", "tiny")
    assert code == 0, result["differing"]
    assert json.loads(saved.read_text()) == result
    assert result["equal"] is True
    assert result["compared"] == 2 * 2 * 6  # prompts, repeats, contenders
    ours = ["plain", "ngram", "draft_model", "ngram_fixed"]
    assert list(result["contenders"]) == ["transformers", "transformers_lookup", *ours]
    assert set(result["by_task"]) == {"ngram", "draft_model", "ngram_fixed"}
    assert set(result["by_task"]["ngram"]) == {"multi_turn", "qa"}
    assert {"speedup", "low", "high", "tokens_per_round"} <= set(result["by_task"]["ngram"]["qa"])
    assert {"plain_vs_transformers", "worst_drafter_vs_plain", "ngram_vs_plain"} <= set(result["ratios"])
    assert {"1", "2", "64"} <= set(result["t"])
    assert {"cpu", "cores", "threads", "model", "max_tokens", "load_before", "busy"} <= set(
        result["conditions"]
    )
    assert "By task" in printed
    assert "24 of 24" in printed


def test_figures_count_passes_as_they_were(capsys: pytest.CaptureFixture[str], suite: str) -> None:
    _, result, _ = bench(capsys, "--suite", suite, "--max-tokens", "8", "--repeats", "1", "--ignore-eos")
    assert result["contenders"]["plain"]["tokens_per_round"] == 1.0
    assert result["contenders"]["transformers"]["tokens_per_round"] == 1.0
    assert result["contenders"]["ngram_fixed"]["tokens_per_round"] >= 1.0


def test_everybody_ends_on_the_same_token(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = Letters().encode("tell tell tell me")
    endless = Settings(ignore_eos=True, threads=1)
    llm, _ = load(endless)
    whole = list(own_contenders(llm, endless, Cell())[0].write([ids], 12).texts[0])
    wanted = whole[: whole.index(whole[-1]) + 1]
    assert 1 < len(wanted) < 12
    monkeypatch.setattr(Letters, "eos_ids", frozenset({wanted[-1]}))
    peers = ("transformers", "transformers_lookup", "transformers_assisted")
    ways = ways_of(["auto", "ngram", "hybrid", "draft_model:4"])
    settings = Settings(draft_model="tiny", ways=ways, peers=peers, threads=1)
    llm, _ = load(settings)
    contenders = [*load_peers(llm, settings), *own_contenders(llm, settings, Cell())]
    assert len(contenders) == 8
    found = {c.name: list(c.write([ids], 12).texts[0]) for c in contenders}
    assert found == dict.fromkeys(found, wanted)


def test_a_wrong_text_turns_the_exit_code(
    capsys: pytest.CaptureFixture[str], suite: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = run.own_contenders

    def with_a_liar(llm: Any, settings: Settings, cell: Cell) -> list[Contender]:
        return [
            *honest(llm, settings, cell),
            Contender("liar", lambda ids, most: Written([[0]], 1.0, 1, 1.0)),
        ]

    monkeypatch.setattr(run, "own_contenders", with_a_liar)
    code, result, _ = bench(
        capsys, "--suite", suite, "--max-tokens", "4", "--repeats", "1", "--skip-transformers"
    )
    assert code == 1
    assert result["equal"] is False
    assert {row["contender"] for row in result["differing"]} == {"liar"}


def test_later_turns_are_asked_when_wanted(suite: str) -> None:
    settings = Settings(suite=suite, max_tokens=4, all_turns=True, threads=1)
    llm, _ = load(settings)
    prompts = run.tokenise(llm, run.load_suite(suite), settings)
    assert [prompt.id for prompt in prompts] == ["1", "1/2", "2"]
    first, second = prompts[0].ids, prompts[1].ids
    assert second[: len(first)] == first
    assert len(second) > len(first) + len("tell me more")


def test_a_plot_is_drawn(capsys: pytest.CaptureFixture[str], suite: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "speed.png"
    words = ("--suite", suite, "--max-tokens", "4", "--repeats", "1", "--skip-transformers")
    bench(capsys, *words, "--plot", str(picture))
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--repeats", "0"], "repeats=0"),
        (["--max-tokens", "0"], "max_tokens=0"),
        (["--tasks", "poetry"], "unknown task 'poetry'"),
        (["--drafters", "ngran"], "did you mean 'ngram'"),
        (["--suite", "absent.jsonl"], "no prompts at 'absent.jsonl'"),
    ],
)
def test_mistakes_are_one_line_and_code_2(
    capsys: pytest.CaptureFixture[str], words: list[str], complaint: str
) -> None:
    assert cpu.main(words) == 2
    lines = capsys.readouterr().err.splitlines()
    assert complaint in lines[-1]


def test_a_busy_machine_can_be_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu, "load_average", lambda: 1000.0)
    assert cpu.main(["--require-idle"]) == 2
    assert "load average 1000.0" in capsys.readouterr().err
