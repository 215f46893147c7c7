"""llama.cpp as a contender: with a model that pretends, and with the real one where it is installed."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from forerun.core.errors import InvalidInput, MissingDependency
from forerun.measure.bench.alternate import ContenderLost
from forerun.measure.peers import llama_cpp
from forerun.measure.peers.llama_cpp import enabled, llama_cpp_contender, load, why_not
from forerun.measure.peers.process import PeerProcess, Peers
from forerun.models.load.catalog import known_models
from lab.cpu import llama_cpp_curve, why_not_llama_cpp
from tests.measure.peers.llama_cpp_package import write_package

DEFAULT = next((model.path for model in known_models() if model.name == "smollm2"), None)
MODULE = "forerun.measure.peers.llama_cpp"
PEERS = ("llama_cpp", "llama_cpp_lookup_3", "llama_cpp_lookup_10")


class Counting:
    """Counts upwards from the last token of the prompt; keeps what it has read unless it is reset."""

    draft_model: Any = None

    def __init__(self) -> None:
        self.read: list[int] = []

    def n_ctx(self) -> int:
        return 32

    def reset(self) -> None:
        self.read = []

    def eval(self, tokens: Sequence[int]) -> None:
        self.read += tokens

    def generate(self, tokens: Sequence[int], temp: float, repeat_penalty: float) -> Iterator[int]:
        assert (temp, repeat_penalty) == (0.0, 1.0)
        assert not self.read, "a prompt must not be found in the cache"
        while True:
            self.eval(tokens)
            tokens = [self.read[-1] + 1]
            yield tokens[0]


def test_texts_end_where_ours_would_and_passes_are_counted() -> None:
    model = Counting()
    contender = llama_cpp_contender("x", model, frozenset({9}))
    assert not contender.exact
    for _ in range(2):
        written = contender.write([(4, 5)], 3)
        assert written.texts == [[6, 7, 8]]
        assert written.rounds == 3
        assert 0 <= (written.decode_seconds or 0.0) <= written.seconds
    assert contender.write([(4, 5)], 20).texts == [[6, 7, 8, 9]]
    assert model.eval == Counting.eval.__get__(model), "counting must end with the call"


def test_a_prompt_beyond_its_context_is_refused() -> None:
    with pytest.raises(InvalidInput, match="30 tokens and 3 more exceed"):
        llama_cpp_contender("x", Counting(), frozenset()).write([[1] * 30], 3)


def test_what_cannot_run_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> None:
        raise ImportError(name)

    def broken(name: str) -> None:
        raise OSError("libllama.so: wrong machine")

    assert "'a/folder' is none" in (why_not("a/folder") or "")
    monkeypatch.setattr(llama_cpp, "import_module", absent)
    assert "pip install 'forerun[llama]'" in (why_not("x.gguf") or "")
    with pytest.raises(MissingDependency, match="the peer 'llama_cpp' cannot run: llama-cpp-python is not"):
        load(PEERS, Path("x.gguf"), [], 64, 1)
    monkeypatch.setattr(llama_cpp, "import_module", broken)
    assert "does not load (libllama.so: wrong machine)" in (why_not("x.gguf") or "")


def test_what_it_was_built_with_is_read_from_its_own_words() -> None:
    said = "CPU : SSE3 = 1 | AVX2 = 1 | AVX512 = 0 | LLAMAFILE = 1 | OPENMP = 1 | REPACK = 1 |"
    assert enabled(said) == "SSE3 AVX2 LLAMAFILE OPENMP REPACK"
    assert enabled("NEON = 1 | ARM_FMA = 1 | SVE = 0") == "NEON ARM_FMA"
    assert enabled("") == ""


def on_the_path(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), *filter(None, sys.path)]))


@pytest.mark.slow
def test_our_side_of_it_works_through_a_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on_the_path(write_package(tmp_path), monkeypatch)
    arguments = {"file": "x.gguf", "ends": [9], "context": 10_000, "threads": 2}
    peers = Peers()
    try:
        peers.host("llama_cpp", PEERS, MODULE, **arguments)
        assert peers.left_out == {}
        assert peers.isa == {"llama_cpp": "AVX2 OPENMP"}
        plain, three, ten = peers.contenders
        assert [one.like for one in (plain, three, ten)] == [None, "llama_cpp", "llama_cpp"]
        assert not any(one.exact for one in peers.contenders)
        for contender in (plain, three, ten, plain):
            written = contender.write([(1, 4)], 3)
            assert [list(text) for text in written.texts] == [[5, 6, 7]]
            assert 0 <= (written.decode_seconds or 0.0) <= written.seconds
            assert written.rounds == (3 if contender is plain else 2)
        assert [list(text) for text in plain.write([(1, 4)], 30).texts] == [[5, 6, 7, 8, 9]], "it ends as ours does"
        with pytest.raises(InvalidInput, match=r"exceed llama.cpp's context of 4096"):
            plain.write([[1] * 4090], 9)
        assert [list(text) for text in plain.write([(1, 4)], 1).texts] == [[5]], "and goes on after a refusal"
        curve = peers.processes[0].call("lab.cpu:llama_cpp_seconds", file="x.gguf", threads=2, sizes=[1, 4])
        assert curve.keys() == {"1", "4"}
    finally:
        peers.close()


@pytest.mark.slow
def test_a_build_for_another_processor_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on_the_path(write_package(tmp_path, deadly=True), monkeypatch)
    peers = Peers()
    try:
        peers.host("llama_cpp", PEERS, MODULE, file="x.gguf", ends=[], context=64, threads=1)
    finally:
        peers.close()
    assert peers.contenders == []
    assert set(peers.left_out) == set(PEERS)
    assert all("SIGILL (an illegal instruction" in why for why in peers.left_out.values())
    curve = llama_cpp_curve(Path("x.gguf"), 1)
    assert curve["t"] is None
    assert "SIGILL" in curve["why_not"]
    assert why_not_llama_cpp(Path("x.gguf")) is None, "importing it works: it is its models that die"
    assert "'x.bin' is none" in (why_not_llama_cpp(Path("x.bin")) or "")


@pytest.mark.model
@pytest.mark.skipif(DEFAULT is None, reason="the default model is absent; run: forerun models pull smollm2")
@pytest.mark.skipif(find_spec("llama_cpp") is None, reason="llama-cpp-python is not installed")
def test_the_real_one_writes_the_same_text_again() -> None:
    """In a process of its own, as in the benchmark: a build for another processor must not end the tests."""
    from forerun.models.load.checkpoint import open_checkpoint

    assert DEFAULT is not None
    tokenizer = open_checkpoint("smollm2").tokenizer()
    ids = tokenizer.encode("The mill on the river was built in 1874. The mill on the river was")
    with PeerProcess() as process:
        try:
            plain, *lookups = process.load(
                f"{MODULE}:load", names=PEERS, file=str(DEFAULT), ends=[], context=128, threads=1
            )
            first, second = plain.write([ids], 24), plain.write([ids], 24)
        except ContenderLost as lost:
            pytest.skip(f"llama.cpp does not run here: {lost}")
        assert first.texts == second.texts
        assert first.rounds == len(first.texts[0]) == 24
        assert [lookup.like for lookup in lookups] == ["llama_cpp", "llama_cpp"]
        drafted = lookups[0].write([ids], 24)
        assert len(drafted.texts[0]) == 24
        assert (drafted.rounds or 0) < 24
        assert process.call(f"{MODULE}:isa")
        curve = process.call("lab.cpu:llama_cpp_seconds", file=str(DEFAULT), threads=1, sizes=[1, 4], repeats=1)
    assert curve.keys() == {"1", "4"}
    assert all(0 < seconds < 1e6 for seconds in curve.values())
