"""CPU seconds of each engine in its own process: what is counted, and who is left out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from forerun.bench.cpu import seconds
from forerun.models.native import library as native
from tests.models.tiny_gguf import write_tiny


def test_every_token_and_every_prompt_is_counted_once() -> None:
    texts: list[list[list[int]]] = []

    def start(ids: list[int]) -> seconds.Reads:
        calls = [ids[:1]]
        texts.append(calls)

        def read(fresh: list[int]) -> int:
            calls.append(fresh)
            return len(calls)

        return read

    found = seconds.measure(start, 1000, tokens=3, prompt=5, repeats=2)
    assert set(found) == {"token_s", "prompt_token_s"}
    assert len(texts) == 3  # one of them to warm up
    for calls in texts:
        assert [len(fresh) for fresh in calls] == [1, 4, 1, 1, 1]
        assert calls[2:] == [[2], [3], [4]]  # each token that was written is read next
    assert len({tuple(calls[1]) for calls in texts}) == 3


@pytest.mark.skipif(not native.available(), reason="the argmax of a pass is the native kernels'")
def test_ours_runs_and_an_engine_that_cannot_is_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "llama_cpp.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGILL)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    file = write_tiny(tmp_path / "tiny.gguf")
    assert seconds.main([str(file), "--tokens", "2", "--prompt", "4", "--repeats", "1"]) == 0
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert 0.0 < document["seconds"]["forerun"]["token_s"] < 1.0
    assert "SIGILL" in document["left_out"]["llama_cpp"]
