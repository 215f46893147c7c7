"""The whole benchmark on a random model of two layers: the document it prints, and texts that are equal."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from forerun.core.errors import InvalidInput
from forerun.drafters.heads.medusa import write_heads
from forerun.measure.bench import run
from forerun.measure.bench.alternate import Contender, Written
from forerun.measure.bench.contenders import Engines, load, own_contenders
from forerun.measure.bench.settings import Cell, Settings, parse_setups
from forerun.measure.peers import transformers
from forerun.measure.peers.process import PeerProcess, Peers
from lab import cpu
from lab.runner import main, parse
from tests.drafters.tiny_heads import heads_config, heads_weights
from tests.measure.conftest import VOCAB, Letters
from tests.measure.peers.dying import FATAL

in_this_process = pytest.mark.usefixtures("tiny_checkpoint", "same_process")
HELD = {"torch_mb": 1.0, "above_torch_mb": 3.0, "model_mb": 2.0, "loaded_mb": 1.5, "peak_mb": 9.0}


@pytest.fixture
def same_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fresh process would not know the tiny model."""
    monkeypatch.setattr(cpu, "resident", lambda model, dtype, threads: HELD)


def bench(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, Any], str]:
    code = main(["cpu", *words, "--threads", "1", *(() if "--batches" in words else ("--batches", ""))])
    printed = capsys.readouterr().out
    return code, json.loads(printed.splitlines()[-1]), printed


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Costs are kept in a folder of the test's; the number of threads is put back."""
    monkeypatch.setenv("FORERUN_CACHE", str(tmp_path / "cache"))
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.mark.slow
@pytest.mark.usefixtures("cache")
def test_the_last_line_is_the_document(
    capsys: pytest.CaptureFixture[str], suite: str, tmp_path: Path, tiny_folder: str
) -> None:
    """Everything real: our loop here, transformers in a process of its own."""
    saved = tmp_path / "result.json"
    words = ("--suite", suite, "--max-tokens", "12", "--repeats", "2", "--json", str(saved), "--ignore-eos")
    code, result, printed = bench(
        capsys, *words, "--pair", tiny_folder, tiny_folder, "--dtype", "float32", "--skip-modes"
    )
    assert code == 0, result["differing"]
    assert json.loads(saved.read_text()) == result
    assert result["equal"] is True
    assert result["compared"] == 2 * 2 * 8  # prompts, repeats, contenders
    drafters = ["auto", "ngram", "draft_model", "ngram+draft_model", "ngram_fixed"]
    peers = ["transformers", "transformers_lookup"]
    assert list(result["contenders"]) == [*peers, "plain", *drafters]
    assert set(result["by_task"]) == set(drafters)
    assert set(result["by_task"]["ngram"]) == {"multi_turn", "qa"}
    assert {"speedup", "low", "high", "tokens_per_round"} <= set(result["by_task"]["ngram"]["qa"])
    assert set(result["by_task_vs_peers"]) == set(peers)
    assert set(result["by_task_vs_peers"]["transformers"]) == {"plain", *drafters}
    assert {"plain_vs_transformers", "worst_drafter_vs_plain", "ngram_vs_plain"} <= set(result["ratios"])
    same = {"plain": "transformers", "equal": 4, "texts": 4}
    assert result["equal_to_own_plain"] == {"transformers_lookup": same}
    assert {"1", "2", "4", "8", "64"} <= set(result["t"])
    assert {"cpu", "cores", "threads", "model", "max_tokens", "load_before", "busy", "commit", "date"} <= set(
        result["conditions"]
    )
    assert result["contenders"]["plain"]["tokens_per_round"] == 1.0
    assert result["contenders"]["transformers"]["tokens_per_round"] == 1.0
    blind = result["contenders"]["ngram_fixed"]
    accepted = sum(kept for kept, _ in blind["accepted_counts"])
    assert accepted > 0, "a model that goes round in circles is guessed now and then"
    tokens = 2 * 2 * 12  # prompts, repeats; every round commits what was accepted and one token more
    assert blind["tokens_per_round"] == pytest.approx(tokens / (tokens - accepted), abs=1e-3)
    assert result["conditions"]["left_out"].keys() == {"llama_cpp"}  # a folder is no GGUF file
    assert result["conditions"]["isa"]["transformers"].startswith("torch ")
    assert result["conditions"]["isa"]["forerun"]
    assert f"Instruction sets: forerun {result['conditions']['isa']['forerun']}; transformers torch" in printed
    assert "By task" in printed
    assert "32 of 32" in printed


@pytest.mark.slow
@in_this_process
def test_formats_are_measured_and_what_is_absent_is_null(capsys: pytest.CaptureFixture[str], suite: str) -> None:
    words = ["--suite", suite, "--max-tokens", "4", "--repeats", "1", "--skip-transformers", "--threads", "1"]
    assert main(["cpu", *words, "--batches", "1,3"]) == 0
    printed = capsys.readouterr()
    result = json.loads(printed.out.splitlines()[-1])
    rows = result["batches"]["rows"]
    assert [(row["batch"], row["texts"]) for row in rows if row["setup"] == "plain"] == [(1, 8), (3, 8)]
    assert {row["setup"] for row in rows} == {"plain", "auto", "ngram"}
    assert not any(row["differing"] for row in rows)
    assert "left out: llama.cpp reads .gguf files only" in printed.err
    for name in ("plain_vs_transformers", "plain_vs_llama_cpp", "best_vs_llama_cpp"):
        assert result["ratios"][name] is None
    assert result["ratios"]["worst_drafter_vs_plain"] > 0
    assert set(result["modes"]) == {"gguf", "q8", "bfloat16", "float32"}
    assert result["modes"]["gguf"]["t"] is None
    assert "gguf" in result["modes"]["gguf"]["why_not"]
    float32 = result["modes"]["float32"]
    assert set(float32["t"]) == set(result["t"])
    assert float32["weight_bytes"] > 0
    assert result["bandwidth"]["gb_per_s"]["best"] > 0
    assert result["memory"] == {"dtype": "auto", **HELD}
    assert "gguf left out" in printed.out


def test_the_headline_names_the_best_on_both_sides() -> None:
    rates = {"transformers": 10.0, "llama_cpp": 80.0, "llama_cpp_lookup_3": 50.0, "plain": 90.0}
    rates |= {"auto": 100.0, "ngram": 95.0}
    figures = {name: {"tokens_per_second": r, "decode_tokens_per_second": 2 * r} for name, r in rates.items()}
    pairs = {f"{a}_vs_{b}": ra / rb for a, ra in rates.items() for b, rb in rates.items()}
    result: dict[str, Any] = {"contenders": figures, "speedup": {"auto": {}, "ngram": {}}, "ratios": pairs}
    result["intervals"] = {name: [ratio - 0.1, ratio + 0.1] for name, ratio in pairs.items()}
    cpu.add_headline(result)
    assert result["best"] == {"drafter": "auto", "llama_cpp": "llama_cpp"}
    assert result["ratios"]["best_vs_llama_cpp"] == 1.25
    assert result["intervals"]["best_vs_llama_cpp"] == [1.15, 1.35]
    assert result["decode_ratios"] == {"plain_vs_transformers": 9.0, "plain_vs_llama_cpp": 1.125}


@in_this_process
def test_full_measures_more_and_the_default_tasks_are_spec_benchs() -> None:
    flags, full = parse("cpu", []), parse("cpu", ["--full", "--repeats", "5"])
    assert (flags.limit, flags.repeats, flags.max_tokens, flags.batches) == (1, 2, 48, "1,8")
    assert (full.limit, full.repeats, full.max_tokens, full.batches) == (2, 5, 64, "1,2,4,8,16,32,64,128")
    assert len(flags.tasks) == 6
    assert "code_edit" not in flags.tasks
    assert parse("cpu", ["--tasks", "all"]).tasks == ()


@in_this_process
def test_a_head_in_a_folder_is_measured_beside_the_others(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    config = heads_config("medusa", VOCAB, width=32)
    write_heads(folder, config, heads_weights(config))
    assert cpu.drafters_of(["auto"], "tiny", str(folder)) == ["auto", "medusa", "ngram+medusa"]
    assert cpu.drafters_of(["auto"], "tiny", "tiny") == ["auto", "draft_model", "ngram+draft_model"]
    assert cpu.drafters_of(["auto"], "tiny", None) == ["auto"]
    settings = Settings(setups=parse_setups(["ngram", f"medusa:3={folder}"]), threads=1)
    assert [setup.name for setup in settings.setups] == ["ngram", "medusa:3=mine"]
    llm, _ = load(settings)
    plain, ngram, head = own_contenders(Engines(llm), settings, Cell())
    ids = Letters().encode("tell tell tell me")
    texts = [list(each.write([ids], 12).texts[0]) for each in (plain, ngram)]
    written = head.write([ids], 12)
    assert [*texts, list(written.texts[0])] == [texts[0]] * 3
    assert max(nodes for nodes, _, _ in written.drafts[0]) == 3
    with pytest.raises(InvalidInput, match="names no head"):
        parse_setups(["auto=x"])
    with pytest.raises(InvalidInput, match="'none' has no head"):
        load(Settings(setups=parse_setups([f"none={folder}"]), threads=1))


@in_this_process
def test_everybody_ends_on_the_same_token(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = Letters().encode("tell tell tell me")
    endless = Settings(ignore_eos=True, threads=1)
    llm, _ = load(endless)
    whole = list(own_contenders(Engines(llm), endless, Cell())[0].write([ids], 12).texts[0])
    wanted = whole[: whole.index(whole[-1]) + 1]
    assert 1 < len(wanted) < 12
    monkeypatch.setattr(Letters, "eos_ids", frozenset({wanted[-1]}))
    peers = ("transformers", "transformers_lookup", "transformers_assisted")
    setups = parse_setups(["auto", "ngram", "hybrid", "draft_model:4"])
    settings = Settings(draft_model="tiny", setups=setups, threads=1)
    llm, _ = load(settings)
    ends = sorted(Letters.eos_ids)
    theirs = transformers.load(peers, "tiny", "tiny", ends, "cpu", alike=True, threads=1)
    contenders = [*theirs, *own_contenders(Engines(llm), settings, Cell())]
    assert len(contenders) == 8
    found = {c.name: list(c.write([ids], 12).texts[0]) for c in contenders}
    assert found == dict.fromkeys(found, wanted)


@pytest.mark.slow
@in_this_process
def test_a_wrong_text_turns_the_exit_code(
    capsys: pytest.CaptureFixture[str], suite: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = run.own_contenders

    def with_a_liar(engines: Any, settings: Settings, cell: Cell) -> list[Contender]:
        return [*honest(engines, settings, cell), Contender("liar", lambda ids, most: Written([[0]], 1.0, 1, 1.0))]

    monkeypatch.setattr(run, "own_contenders", with_a_liar)
    code, result, _ = bench(
        capsys, "--suite", suite, "--max-tokens", "4", "--repeats", "1", "--skip-transformers", "--skip-modes"
    )
    assert code == 1
    assert result["equal"] is False
    assert {row["contender"] for row in result["differing"]} == {"liar"}


@in_this_process
def test_later_turns_are_asked_when_wanted(suite: str) -> None:
    settings = Settings(suite=suite, max_tokens=4, all_turns=True, threads=1)
    llm, _ = load(settings)
    prompts = run.tokenise(llm, run.load_suite(suite), settings)
    assert [prompt.id for prompt in prompts] == ["1", "1/2", "2"]
    first, second = prompts[0].ids, prompts[1].ids
    assert second[: len(first)] == first
    assert len(second) > len(first) + len("tell me more")


@pytest.mark.slow
@in_this_process
def test_a_plot_is_drawn(capsys: pytest.CaptureFixture[str], suite: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "speed.png"
    words = ("--suite", suite, "--max-tokens", "4", "--repeats", "1", "--skip-transformers", "--skip-modes")
    bench(capsys, *words, "--plot", str(picture))
    assert picture.stat().st_size > 10_000
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow(keep=1)
@in_this_process
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
def test_mistakes_are_one_line_and_code_2(capsys: pytest.CaptureFixture[str], words: list[str], complaint: str) -> None:
    assert main(["cpu", *words]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert complaint in lines[-1]


def test_a_busy_machine_can_be_refused(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "load_average", lambda: 1000.0)
    assert main(["cpu", "--require-idle"]) == 2
    assert "load average 1000.0" in capsys.readouterr().err


class Dies:
    """A process whose every call ends it."""

    def __enter__(self) -> Dies:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing is left to end."""

    def call(self, function: str, **arguments: Any) -> Any:
        with PeerProcess() as process:
            return process.call("tests.measure.peers.dying:load", names=["x"], how="SIGILL")


@pytest.mark.slow
@in_this_process
def test_a_llama_cpp_that_dies_is_left_out_and_the_benchmark_goes_on(
    capsys: pytest.CaptureFixture[str], suite: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu, "PeerProcess", Dies)
    words = ("--suite", suite, "--max-tokens", "4", "--repeats", "1", "--skip-transformers", "--skip-modes")
    code, result, printed = bench(capsys, *words)
    assert code == 0
    assert "died of SIGILL" in result["conditions"]["left_out"]["llama_cpp"]
    assert "llama_cpp left out: llama.cpp: its process died of SIGILL" in printed
    assert result["ratios"]["plain_vs_llama_cpp"] is None
    assert cpu.llama_cpp_curve(Path("x.gguf"), 1)["t"] is None
    assert "SIGILL" in cpu.llama_cpp_curve(Path("x.gguf"), 1)["why_not"]


@pytest.mark.slow
@in_this_process
def test_a_peer_that_dies_in_mid_run_is_left_out_of_all_figures(
    capsys: pytest.CaptureFixture[str], suite: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def with_a_dying_peer(llm: Any, settings: Settings) -> Peers:
        peers = Peers()
        peers.host("dying", ["dying", "dying_lookup"], "tests.measure.peers.dying")
        honest = peers.contenders[0].write
        asked: list[int] = []

        def write(prompts: Any, max_tokens: int) -> Written:
            asked.append(1)
            return honest([[FATAL]] if len(asked) == 3 else prompts, max_tokens)

        peers.contenders[0] = replace(peers.contenders[0], write=write)
        return peers

    monkeypatch.setattr(run, "load_peers", with_a_dying_peer)
    words = ("--suite", suite, "--max-tokens", "4", "--repeats", "2", "--skip-transformers", "--skip-modes")
    code, result, printed = bench(capsys, *words, "--skip-llama-cpp")
    assert code == 0
    assert set(result["conditions"]["left_out"]) == {"dying", "dying_lookup"}
    assert next(iter(result["contenders"])) == "plain"
    assert result["equal_to_own_plain"] == {}
    assert "dying left out: its process died of SIGILL" in printed
    assert result["conditions"]["isa"]["dying"] == "abacus"
