"""Prompts are read in chunks beside the trees of running sequences: no text and no logit depends on how."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch

from forerun.core.params import SamplingParams
from forerun.core.types import Request
from forerun.engine.engine import Engine
from forerun.engine.scheduler import PrefillRows
from forerun.engine.sequence import SequenceState
from forerun.models import decoder as decoder_module
from forerun.models import hf as hf_module
from forerun.models.base import ON_CPU, ON_GPU, Target
from forerun.models.config import DecoderConfig
from forerun.models.cuda import target as cuda_module
from forerun.testing import TableLM
from tests.engine.test_faults import engine_on, tiny_llama
from tests.exactness.harness import engine_for
from tests.models.tiny_checkpoints import make_decoder, save
from tests.native.blocks import needs_native

GREEDY = SamplingParams(max_tokens=10, ignore_eos=True)
SEEDED = replace(GREEDY, temperature=0.9, seed=7)
PROMPTS = [(5, 6, 7, 8, 5, 6), tuple(range(1, 38)), (9,), (1, 2, 3) * 5, (30, 31)]
ALL = 10_000


def torch_target(folder: Path) -> Target:
    return make_decoder(*save(tiny_llama(2), folder))


def native_target(folder: Path) -> Target:
    from forerun.models.native.target import NativeDecoder

    config, weights = save(tiny_llama(2), folder)
    return NativeDecoder(DecoderConfig.from_hf(config), weights, mode="float32", kv_slots=None)


def hf_target(folder: Path) -> Target:
    return hf_module.HFTarget(tiny_llama(2))


def cuda_target(folder: Path) -> Target:
    from forerun.verify.greedy import device_walk

    model = tiny_llama(2)
    config = DecoderConfig.from_hf({**model.config.to_dict(), "model_type": "llama"})
    return cuda_module.CudaDecoder(
        config, dict(model.state_dict()), dtype=torch.float32, device="cpu", kv_slots=3000,
        greedy_walk=device_walk(torch.device("cpu")),
    )  # fmt: skip


TARGETS: dict[str, Callable[[Path], Target]] = {
    "torch": torch_target, "native": native_target, "hf": hf_target, "cuda": cuda_target,
}  # fmt: skip
KINDS = ["torch", pytest.param("native", marks=needs_native), "hf", "cuda"]


def in_chunks(engine: Engine, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """So many rows of prompts per pass, whether somebody runs or not."""
    engine.prefill_rows = PrefillRows(ON_CPU.prefill, rows, fixed=rows)
    for module in (decoder_module, cuda_module, hf_module):
        monkeypatch.setattr(module, "CHUNK", rows)


def play(engine: Engine, requests: Sequence[Request], apart: int = 1) -> list[SequenceState]:
    """The first runs; another joins every `apart` steps."""
    seqs = []
    for request in requests:
        seqs.append(engine.find(engine.submit(replace(request, cache_salt=None))))  # each is really read
        for _ in range(apart):
            engine.step()
    steps = 0
    while engine.busy:
        engine.step()
        steps += 1
        assert steps < 500
    assert engine.target.used_slots == 0
    return [seq for seq in seqs if seq is not None]


def texts(seqs: Sequence[SequenceState]) -> list[list[int]]:
    return [seq.tokens[seq.prompt_length :] for seq in seqs]


def alone(engine: Engine, requests: Sequence[Request]) -> list[list[int]]:
    return [texts(play(engine, [request]))[0] for request in requests]


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("kind", KINDS)
def test_texts_do_not_depend_on_chunks_or_company(
    kind: str, params: SamplingParams, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_on(TARGETS[kind](tmp_path))
    requests = [Request(prompt, params) for prompt in PROMPTS]
    wanted = alone(engine, requests)
    for rows in (1, 2, 7, 16, ALL):
        in_chunks(engine, rows, monkeypatch)
        for apart in (0, 2):
            assert texts(play(engine, requests, apart)) == wanted, f"{rows} rows, {apart} steps apart"


def test_texts_are_those_of_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_llama(2)
    wanted = []
    for prompt in PROMPTS:
        out = model.generate(torch.tensor([prompt]), max_new_tokens=10, do_sample=False, use_cache=True)
        wanted.append(out[0, len(prompt) :].tolist())
    engine = engine_on(torch_target(tmp_path))
    in_chunks(engine, 5, monkeypatch)
    assert texts(play(engine, [Request(prompt, GREEDY) for prompt in PROMPTS])) == wanted


def logits_of(engine: Engine, monkeypatch: pytest.MonkeyPatch, apart: int) -> dict[tuple[int, ...], str]:
    """The logits after every committed text that was ever the root of a tree, by that text, as a hash."""
    score, seen = engine.target.score, dict[tuple[int, ...], str]()

    def noted(seqs: Sequence[Any], trees: Any, *rest: Any) -> Any:
        scores = score(seqs, trees, *rest)
        for seq, first in zip(seqs, trees.starts, strict=False):
            digest = sha256(scores.required_logits[first].numpy().tobytes()).hexdigest()
            assert seen.setdefault(tuple(seq.tokens), digest) == digest
        return scores

    with monkeypatch.context() as patch:
        patch.setattr(engine.target, "score", noted)
        play(engine, [Request(prompt, GREEDY, drafter="none") for prompt in PROMPTS], apart)
    return seen


@needs_native
def test_full_logits_have_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_on(native_target(tmp_path))
    in_chunks(engine, ALL, monkeypatch)
    wanted = logits_of(engine, monkeypatch, apart=50)
    assert len(wanted) == 10 * len(PROMPTS)
    for rows in (1, 3, 16):
        in_chunks(engine, rows, monkeypatch)
        assert logits_of(engine, monkeypatch, apart=2) == wanted, f"chunks of {rows}"


def test_a_chunk_in_the_wrong_place_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: a second chunk that forgets that there was a first."""
    engine = engine_on(torch_target(tmp_path))
    requests = [Request(prompt, GREEDY) for prompt in PROMPTS]
    wanted = alone(engine, requests)
    in_chunks(engine, 5, monkeypatch)
    real = decoder_module._chain_spans

    def misplaced(first: int, pieces: Any) -> Any:
        return [replace(span, length=0) for span in real(first, pieces)]

    monkeypatch.setattr(decoder_module, "_chain_spans", misplaced)
    assert texts(play(engine, requests)) != wanted


@pytest.mark.parametrize("drafter", ["draft_model", "eagle", "eagle3", "medusa", "hydra", "mtp", "dflash", "dspark"])
def test_drafters_learn_the_same(drafter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not only the text, which no drafter can change: what was drafted and what was accepted."""

    def stats(rows: int, apart: int) -> list[tuple[object, ...]]:
        engine = engine_for(drafter, "exact", "tree", 40, frozenset())
        in_chunks(engine, rows, monkeypatch)
        assert isinstance(engine.target, TableLM)
        engine.target.pass_rows = rows
        seqs = play(engine, [Request(prompt, GREEDY) for prompt in PROMPTS], apart)
        return [(s.tokens, s.stats.rounds, s.stats.drafted, s.stats.accepted) for s in seqs]

    wanted = stats(ALL, 0)
    assert any(drafted for *_, drafted, _ in wanted)
    for rows in (1, 4):
        assert stats(rows, 2) == wanted


def test_whoever_runs_writes_while_a_long_prompt_is_read(tmp_path: Path) -> None:
    engine = engine_on(torch_target(tmp_path))
    engine.prefill_rows = PrefillRows(ON_CPU.prefill, 8, fixed=8)
    running = engine.find(engine.submit(Request((1, 2, 3), replace(GREEDY, max_tokens=40), drafter="none")))
    assert running is not None
    engine.step()
    long = engine.find(engine.submit(Request(tuple(range(1, 38)), GREEDY)))
    assert long is not None
    read = []
    while long not in engine.running:
        before = len(running.tokens)
        engine.step()
        assert len(running.tokens) == before + 1, "a step without a token"
        read.append(engine.target.cached_tokens(long))
        engine.scheduler.start_those_read()
    assert read == [8, 16, 24, 32, 36]
    assert long.prompt_seconds > 0.0


def test_the_first_comes_first_and_short_prompts_share_a_chunk() -> None:
    engine = engine_on(TableLM(vocab_size=40))
    engine.prefill_rows = PrefillRows(ON_CPU.prefill, 10, fixed=10)
    engine.submit(Request((1, 2), replace(GREEDY, max_tokens=60), drafter="none"))
    engine.step()
    lengths = [5, 4, 16, 1, 9]
    seqs = [engine.find(engine.submit(Request(tuple(range(1, n + 1)), GREEDY))) for n in lengths]
    held = []
    for _ in range(5):
        engine.step()
        held.append([engine.target.cached_tokens(seq) if seq is not None else -1 for seq in seqs])
    first = [row[:5] for row in held]
    assert first[0] == [4, 3, 3, 0, 0]
    assert first[1][2:] == [13, 1, 0], "the prompt of one token needs no row"
    assert first[2][2:] == [15, 2, 8]
    assert not engine.reading or seqs[4] in engine.reading


@pytest.mark.parametrize("kind", KINDS)
def test_an_abort_in_the_middle_of_a_prompt_frees_it(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_on(TARGETS[kind](tmp_path))
    first = Request(PROMPTS[0], GREEDY)
    wanted = alone(engine, [first])
    in_chunks(engine, 6, monkeypatch)
    seq = engine.find(engine.submit(first))
    assert seq is not None
    engine.step()
    held = engine.target.used_slots
    half = engine.submit(Request(tuple(range(1, 38)), GREEDY))
    engine.step()
    assert [one.id for one in engine.reading] == [half]
    engine.abort(half)
    assert not engine.reading
    assert engine.find(half) is None
    assert engine.target.used_slots <= held + 3
    while engine.busy:
        engine.step()
    assert texts([seq]) == wanted
    assert engine.target.used_slots == 0


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
@pytest.mark.parametrize("at", range(6))
def test_a_round_that_stops_in_the_middle_of_a_prompt(
    at: int, error: type[BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Right after a pass over trees and a chunk: everything it held is freed, and read again."""
    engine = engine_on(torch_target(tmp_path))
    requests = [Request(prompt, SEEDED) for prompt in PROMPTS[:3]]
    wanted = alone(engine, requests)
    in_chunks(engine, 9, monkeypatch)
    seqs = [engine.find(engine.submit(request)) for request in requests]
    run_pass, calls = engine.target._run, iter(range(1000))  # type: ignore[attr-defined]

    def failing(*given: Any) -> Any:
        found = run_pass(*given)
        if next(calls) == at:
            raise error("stopped")
        return found

    monkeypatch.setattr(engine.target, "_run", failing)
    stopped = 0
    while engine.busy:
        try:
            engine.step()
        except KeyboardInterrupt:
            stopped += 1
            assert not engine.reading
            assert engine.target.used_slots == 0
            assert len(engine.waiting) == 3
    assert stopped == (error is KeyboardInterrupt)
    assert texts([seq for seq in seqs if seq is not None]) == wanted
    assert engine.target.used_slots == 0


def test_the_rows_of_a_chunk_follow_what_rounds_take() -> None:
    assert PrefillRows(ON_GPU.prefill, 1024).rows() == ON_GPU.prefill.start
    rows = PrefillRows(ON_CPU.prefill, 512)
    assert rows.rows() == ON_CPU.prefill.start
    rows.observe(0.1, 20)
    assert rows.rows() == ON_CPU.prefill.start, "nothing to compare with"
    for _ in range(3):
        rows.observe(0.010, 0)
    rows.observe(0.013, 32)  # three milliseconds for 32 rows
    assert rows.rows() == 64, "twice as many at most"
    rows.observe(0.016, 64)
    assert rows.rows() == 64 * 10 // 6 // 16 * 16
    for _ in range(9):
        rows.observe(1.0, rows.rows())
    assert rows.rows() == ON_CPU.prefill.least
    rows.observe(0.0105, 4)
    assert rows.rows() == ON_CPU.prefill.least, "the rest of a prompt"
    for _ in range(9):
        rows.observe(0.0105, rows.rows())
    assert rows.rows() == 512
    assert PrefillRows(ON_CPU.prefill, 512, fixed=3).rows() == 3


def test_the_rows_of_a_chunk_grow_where_many_wait() -> None:
    rows = PrefillRows(ON_GPU.prefill, 1024)
    assert [rows.rows(32, waiting) for waiting in (0, 2, 3, 5, 6, 32)] == [256, 256, 512, 512, 1024, 1024]
    assert rows.rows(1, 1) == 256, "one long prompt does not stall the one that writes"
    assert [rows.rows(64, waiting) for waiting in (5, 6, 10, 11)] == [256, 512, 512, 1024]
    on_cpu = PrefillRows(ON_CPU.prefill, 1024)
    assert [on_cpu.rows(32, waiting) for waiting in (3, 4, 15, 16)] == [32, 64, 64, 128]
    for _ in range(20):
        rows.observe(0.004, 0)
        rows.observe(1.0, 256)
    assert rows.rows() == 256, "a GPU never reads less at a time: a batch that fills slowly costs more"
    assert PrefillRows(ON_CPU.prefill, 48).rows(1, 9) == 48
    assert PrefillRows(ON_CPU.prefill, 512, fixed=3).rows(1, 9) == 3
