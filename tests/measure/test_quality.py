"""Number formats against float32 on a tiny model, and against transformers; memory on the real one."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from forerun.cli import app
from forerun.core.errors import InvalidInput
from forerun.measure.memory import resident
from forerun.measure.peers.transformers import load_transformers_model
from forerun.measure.quality import cut, laws_of, load_mode, measure_kv, measure_quality, read_text
from forerun.models.load import checkpoint as loading
from forerun.models.load.catalog import known_models
from forerun.models.native import library as native_library
from tests.measure.conftest import Letters

TEXT = "the quick brown fox jumps over the lazy dog, and then it goes home " * 3
PRESENT = any(model.name == "smollm2" and model.path for model in known_models())


@pytest.mark.usefixtures("tiny_checkpoint")
def test_float32_is_what_transformers_computes() -> None:
    found = measure_quality("tiny", ["float32"], TEXT, window=64)
    model = load_transformers_model(loading.open_checkpoint("tiny"), frozenset(), torch.float32)
    ids = Letters().encode(TEXT)
    lost, count = 0.0, 0
    for piece in cut(ids, 64):
        rows = torch.tensor([piece])
        with torch.no_grad():
            lost += float(model(rows, labels=rows).loss) * (len(piece) - 1)
        count += len(piece) - 1
    assert found["tokens"] == count
    figures = found["modes"]["float32"]
    assert figures["perplexity"] == pytest.approx(math.exp(lost / count), rel=1e-3)
    assert (figures["agreement"], figures["kl"]) == (1.0, 0.0)


@pytest.mark.usefixtures("tiny_checkpoint")
def test_other_formats_move_the_law_a_little_and_say_why_they_cannot() -> None:
    found = measure_quality("tiny", ["gguf", "q8", "bfloat16"], TEXT, window=50)["modes"]
    assert "gguf" in found["gguf"]["why_not"]
    names = ["bfloat16", *(["q8"] if native_library.available() else [])]
    for name in names:
        assert 0.0 < found[name]["kl"] < 0.05, name
        assert 0.5 < found[name]["agreement"] <= 1.0, name


@pytest.mark.skipif(not native_library.available(), reason="torch has no KV cache in 8 bits")
@pytest.mark.usefixtures("tiny_checkpoint")
def test_a_kv_cache_in_eight_bits_is_measured_against_the_usual_one() -> None:
    found = measure_kv("tiny", ["int8", "fp8"], TEXT, window=50)
    assert (found["auto"]["kl"], found["auto"]["agreement"]) == (0.0, 1.0)
    assert 0.0 < found["int8"]["kl"] < 0.01
    assert found["int8"]["bytes_per_token"] < 0.5 * found["auto"]["bytes_per_token"]
    assert "needs a GPU" in found["fp8"]["why_not"]
    assert measure_kv("tiny", [], TEXT) == {}


@pytest.mark.usefixtures("tiny_checkpoint")
def test_a_piece_is_scored_alike_again_and_again() -> None:
    target = load_mode(loading.open_checkpoint("tiny"), "float32")
    assert not isinstance(target, str)
    piece = Letters().encode("a few letters")
    laws = laws_of(target, piece)
    assert laws.shape == (len(piece) - 1, target.vocab_size)
    torch.testing.assert_close(laws.exp().sum(1), torch.ones(len(piece) - 1))
    torch.testing.assert_close(laws_of(target, piece), laws, rtol=0, atol=0)
    with pytest.raises(InvalidInput, match="beyond the model's 1024 tokens"):
        laws_of(target, [1] * 1025)


def test_windows_hold_everything_that_can_be_predicted() -> None:
    assert list(cut([1, 2, 3, 4, 5], 2)) == [[1, 2], [3, 4]]
    assert list(cut([1, 2, 3, 4, 5], 3)) == [[1, 2, 3], [4, 5]]
    with pytest.raises(InvalidInput, match="window=1"):
        list(cut([1, 2], 1))


def test_our_text_is_shipped_and_long_enough(tmp_path: Path) -> None:
    assert len(read_text().split()) > 1000
    with pytest.raises(InvalidInput, match="cannot read"):
        read_text(tmp_path / "absent.txt")


def command(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr("sys.argv", ["forerun", "quality", *words])
    with pytest.raises(SystemExit) as ended:
        app.main()
    return int(ended.value.code or 0)


@pytest.mark.usefixtures("tiny_checkpoint")
def test_the_command_prints_a_table_then_the_document(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    text, saved = tmp_path / "text.txt", tmp_path / "quality.json"
    text.write_text(TEXT)
    monkeypatch.setattr("forerun.measure.memory.resident", held)
    words = ["--dtypes", "gguf,bfloat16,float32", "--text", str(text), "--json", str(saved), "--threads", "1"]
    assert command(monkeypatch, *words) == 0
    printed = capsys.readouterr().out
    document = json.loads(printed.splitlines()[-1])
    assert json.loads(saved.read_text()) == document
    assert document["modes"]["bfloat16"]["memory"] == held("tiny", "bfloat16", 1)
    assert "why_not" in document["modes"]["gguf"]
    assert {"model", "date", "commit", "cores", "torch"} <= set(document["conditions"])
    assert "MB above torch" in printed
    assert "gguf left out" in printed


def held(model: str, dtype: str, threads: int | None) -> dict[str, Any]:
    return {"above_torch_mb": 3.0, "model_mb": 2.0}


@pytest.mark.usefixtures("tiny_checkpoint")
def test_mistakes_are_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for words, complaint in (
        (["--dtypes", "int3"], "unknown number format 'int3'"),
        (["--dtypes", "auto"], "unknown number format 'auto'"),
        (["--dtypes", ","], "--dtypes is empty"),
        (["--text", "absent.txt"], "cannot read 'absent.txt'"),
    ):
        assert command(monkeypatch, *words) == 2
        assert complaint in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.slow
def test_memory_of_what_is_absent_is_one_line() -> None:
    with pytest.raises(InvalidInput, match=r"memory of './absent.gguf' as q8 could not be measured: .*absent"):
        resident("./absent.gguf", "q8", 1)


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.skipif(not PRESENT, reason="the default model is absent; run: forerun models pull smollm2")
def test_the_default_model_takes_little_more_than_its_weights() -> None:
    found = resident("smollm2", "auto", 1)
    assert 97 < found["model_mb"] < 450  # 538 in float32
    assert found["model_mb"] < found["above_torch_mb"] < found["peak_mb"]
