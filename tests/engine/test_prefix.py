"""Prompts that start alike are read once: no text, logit or draft can tell, whatever is shared, kept or lost."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch

from forerun.build.engine import make_engine
from forerun.core.params import EngineConfig, SamplingParams, SpeculativeConfig
from forerun.core.types import Needs, Request, TreeBatch, Verdict
from forerun.drafters.heads import base as heads_base
from forerun.drafters.heads.eagle import Eagle3Drafter
from forerun.drafters.heads.eagle_head import EagleHead
from forerun.engine.engine import Engine
from forerun.engine.scheduler import Scheduler
from forerun.engine.sequence import SequenceState
from forerun.models.config import DecoderConfig
from forerun.models.pages import PAGE
from forerun.models.slots import Piece
from forerun.testing import FakeSeq, TableLM
from tests.drafters.tiny_heads import eagle_config, eagle_weights
from tests.models.tiny_checkpoints import make_decoder, save
from tests.native.blocks import needs_native

GREEDY = SamplingParams(max_tokens=12, ignore_eos=True)
SEEDED = replace(GREEDY, temperature=0.9, seed=7)
VOCAB = 40


def llama(positions: int = 1024) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(3)
    config = AutoConfig.for_model(
        "llama", vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=positions, pad_token_id=None,
        bos_token_id=None, eos_token_id=None, initializer_range=0.4,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()


def make_target(kind: str, folder: Path, kv_slots: int | None = None, positions: int = 1024) -> Any:
    if kind == "cuda":
        from forerun.models.cuda.target import CudaDecoder
        from forerun.verify.greedy import device_walk

        model = llama(positions)
        config = DecoderConfig.from_hf({**model.config.to_dict(), "model_type": "llama"})
        return CudaDecoder(
            config, dict(model.state_dict()), dtype=torch.float32, device="cpu", kv_slots=kv_slots or 6000,
            greedy_walk=device_walk(torch.device("cpu")),
        )  # fmt: skip
    config, weights = save(llama(positions), folder)
    if kind == "torch":
        return make_decoder(config, weights, kv_slots)
    from forerun.models.native.target import NativeDecoder

    kept = "int8" if kind == "native-int8" else "auto"
    return NativeDecoder(DecoderConfig.from_hf(config), weights, mode="float32", kv_slots=kv_slots, kv_dtype=kept)


NATIVE = [pytest.param(kind, marks=needs_native) for kind in ("native", "native-int8")]
KINDS = [*NATIVE, "torch", "cuda"]


def text(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(VOCAB), k=length)


def scatter(target: Any, seed: int) -> None:
    """Have the next pages come in no order: some are held by others, far apart."""
    pool, rng = target.kv.pool, random.Random(seed)
    if not pool.size:
        target.prefill([seq := FakeSeq(900_000, [1] * 700)], Needs())
        target.release(seq)
    owners = [1_000_000 + i for i in range(pool.free)]
    for owner in owners:
        pool.take(owner, 1)
    rng.shuffle(owners)
    for owner in owners[: len(owners) * 2 // 3]:
        pool.release(owner)


def logits_of(target: Any, tokens: list[int], salt: str | None, rows: int | None, seq_id: int) -> tuple[Any, ...]:
    """Logits and hidden rows of three nodes after a prompt, the prompt's hidden rows, and what was found of it."""
    seq, needs = FakeSeq(seq_id, list(tokens), cache_salt=salt), Needs((1, -1))
    chains, hidden = list[int](), list[torch.Tensor]()
    while not hidden or target.cached_tokens(seq) < len(tokens) - 1:
        trees, scores = target.prefill([seq], needs, rows)
        chains += trees.tokens.tolist()
        hidden.append(torch.cat([scores.hidden[1], scores.hidden[-1]], -1))
    found = target.reused_tokens(seq)
    assert chains == tokens[:-1]
    tree = TreeBatch.trees([([tokens[-1], 3, 4], [-1, 0, 0])])
    scores = target.score([seq], tree, needs)
    out = scores.logits, scores.hidden[1], torch.cat(hidden)
    target.commit([seq], tree, Verdict(torch.tensor([[2]]), torch.tensor([1]), torch.tensor([5])))
    seq.tokens += [4, 5]
    target.release(seq)
    return (*out, found)


def same(kind: str, got: Sequence[Any], wanted: Sequence[Any]) -> bool:
    """Bit for bit; torch's products themselves depend on how many rows they have."""
    if kind.startswith("native"):
        return all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))
    return all(a.shape == b.shape and bool(((a - b).abs() < 2e-4).all()) for a, b in zip(got, wanted, strict=True))


@pytest.mark.slow(keep=4)
@pytest.mark.parametrize("rows", [1, 7, 64, None])
@pytest.mark.parametrize("kind", KINDS)
def test_logits_and_hidden_rows_are_those_of_reading_it_all(kind: str, rows: int | None, tmp_path: Path) -> None:
    target, whole = make_target(kind, tmp_path), text(1, 200)
    lengths = [1, 2, 63, 64, 65, 66, 128, 129, 150, 200]
    wanted = {n: logits_of(target, whole[:n], None, None, n) for n in lengths}
    assert all(found == 0 for *_, found in wanted.values())
    scatter(target, 1)
    logits_of(target, whole[:140], "", rows, 1000)  # what the others may find
    for n in random.Random(rows or 0).sample(lengths, len(lengths)):
        *got, found = logits_of(target, whole[:n], "", rows, 1001 + n)
        assert same(kind, got, wanted[n][:3]), n
        assert found == min(n - 1, 139) or (n > 140 and found > 139)
    *got, found = logits_of(target, [*whole[:100], 1, *whole[101:150]], "", rows, 2000)
    assert found in (100, 101)  # another token at 100, or by chance the same
    other = logits_of(target, [*whole[:100], 1, *whole[101:150]], None, None, 2001)
    assert same(kind, got, other[:3])
    assert target.used_slots == PAGE * sum(owner >= 1_000_000 for owner in target.kv.pool.held)


@pytest.mark.parametrize("kind", NATIVE)
def test_hashes_of_logits_do_not_depend_on_pages(kind: str, tmp_path: Path) -> None:
    """The negative control: one wrong slot, and the hash is another."""
    whole, hashes = text(2, 180), set()
    for seed in range(4):
        target = make_target(kind, tmp_path)
        if seed:
            scatter(target, seed)
        logits_of(target, whole[: 40 * seed + 20], "", None, 1)
        logits = logits_of(target, whole, "", [None, 5, 64, 33][seed], 2)[0]
        hashes.add(sha256(logits.numpy().tobytes()).hexdigest())
    assert len(hashes) == 1
    target._lengths[3] = len(whole)
    page = target.kv.pool.find(target._start_of(FakeSeq(3, whole, cache_salt="")), whole).pages[1]
    target.kv.data[0, 1, 0, page * PAGE + 3, 5] += 1
    logits = logits_of(target, whole, "", None, 4)[0]
    assert sha256(logits.numpy().tobytes()).hexdigest() not in hashes


def engine_on(target: Any, drafter: str = "ngram", **config: int) -> Engine:
    speculative = SpeculativeConfig(drafter=drafter, controller="fixed", budget=5)
    return make_engine(target, frozenset(), speculative, EngineConfig(**config))  # type: ignore[arg-type]


def play(engine: Engine, requests: Sequence[Request], apart: int = 1) -> list[SequenceState]:
    seqs = []
    for request in requests:
        seqs.append(engine.find(engine.submit(request)))
        for _ in range(apart):
            engine.step()
    while engine.busy:
        engine.step()
    assert engine.target.used_slots == 0
    return [seq for seq in seqs if seq is not None]


def written(seqs: Sequence[SequenceState]) -> list[list[int]]:
    return [seq.tokens[seq.prompt_length :] for seq in seqs]


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("kind", KINDS)
def test_texts_do_not_depend_on_what_is_shared(kind: str, params: SamplingParams, tmp_path: Path) -> None:
    start = text(3, 150)
    prompts = [start, start[:70], [*start, 1, 2], start[:128], [*start[:129], 7, 7], [9] * 5, start[:149]]
    requests = [Request(tuple(prompt), params) for prompt in prompts]
    alone = engine_on(make_target(kind, tmp_path))
    wanted = written([play(alone, [replace(request, cache_salt=None)])[0] for request in requests])
    engine = engine_on(make_target(kind, tmp_path))
    first = play(engine, requests, apart=2)  # they run beside each other, on the same pages
    assert written(first) == wanted
    assert first[0].cached_tokens == 0
    assert sum(seq.cached_tokens > 0 for seq in first) >= 4
    again = play(engine, requests, apart=0)
    assert written(again) == wanted
    assert [seq.cached_tokens for seq in again] == [seq.prompt_length - 1 for seq in again]
    assert engine.stats.reused == sum(seq.cached_tokens for seq in [*first, *again])
    assert engine.target.cached_slots > 0
    turns = [Request((*seq.tokens, 5, 6), params) for seq in again]  # the next turn of each conversation
    for seq in play(engine, turns):
        assert seq.cached_tokens >= seq.prompt_length - 3  # all that was said before


@pytest.mark.parametrize("kind", ["torch", "cuda"])
def test_salts_do_not_share(kind: str, tmp_path: Path) -> None:
    engine = engine_on(make_target(kind, tmp_path))
    request = Request(tuple(text(4, 100)), GREEDY)
    salts = ["", "a", "a", "b", None, None, "", "b"]
    seqs = [play(engine, [replace(request, cache_salt=salt)])[0] for salt in salts]
    assert [seq.cached_tokens for seq in seqs] == [0, 0, 99, 0, 0, 0, 99, 99]
    assert len({tuple(seq.tokens) for seq in seqs}) == 1


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_sequence_sent_back_at_any_point_continues_with_the_same_text(
    kind: str, params: SamplingParams, tmp_path: Path
) -> None:
    requests = [Request(tuple(text(5 + i, 60 + i)), params) for i in range(2)]
    engine = engine_on(make_target(kind, tmp_path))
    wanted = written(play(engine, requests))
    for salt, points in ((None, range(14)), ("", range(0, 14, 4))):
        for at in points:
            seqs = [engine.find(engine.submit(replace(request, cache_salt=salt))) for request in requests]
            for _ in range(at):
                engine.step()
            for seq in (*engine.running, *engine.reading)[:1]:
                engine._preempt(seq)
                engine.timeline.change = None
                assert engine.waiting[0] is seq
            while engine.busy:
                engine.step()
            assert written([seq for seq in seqs if seq is not None]) == wanted, at
            assert engine.target.used_slots == 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*KINDS, "table"])
def test_many_run_where_their_longest_would_not_fit_and_the_youngest_wait(kind: str, tmp_path: Path) -> None:
    """Eight of up to 162 tokens in 768 slots: reserved for life, four would fit."""
    folder = tmp_path if kind != "table" else None
    few = TableLM(VOCAB, slots=768) if folder is None else make_target(kind, folder, kv_slots=768)
    many = TableLM(VOCAB) if folder is None else make_target(kind, folder)
    params = replace(SEEDED, max_tokens=120)
    requests = [Request(tuple(text(20 + i, 42)), params) for i in range(8)]
    wanted = written(play(engine_on(many), requests))
    engine, most = engine_on(few), 0
    seqs = [engine.find(engine.submit(request)) for request in requests]
    while engine.busy:
        engine.step()
        most = max(most, len(engine.running))
        assert few.used_slots <= 768
    assert written([seq for seq in seqs if seq is not None]) == wanted
    assert all(seq is not None and seq.error is None for seq in seqs)
    assert most > 4
    assert engine.stats.preemptions > 0
    assert few.used_slots == 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("reach", [1024, 50])
def test_heads_draft_the_same_after_a_hit(
    kind: str, reach: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not only the text: what was drafted and accepted, as if the prompt had been read."""
    monkeypatch.setattr(heads_base, "SURPLUS", 20)  # rows that a head does not see are forgotten in these texts too
    monkeypatch.setattr(Scheduler, "starters", lambda *_: [])  # else who has a plain round depends on company

    def stats(salt: str | None) -> list[tuple[object, ...]]:
        target = make_target(kind, tmp_path)
        config = replace(
            eagle_config("eagle3", VOCAB, 32), heads=2, kv_heads=1, head_dim=16, max_length=reach, layers=(0, 1, 2)
        )
        head = EagleHead(config, eagle_weights(config, seed=5), target.shared(), dtype=torch.float32, device="cpu")
        engine = engine_on(target)
        engine.drafters.add("head", Eagle3Drafter(head))
        requests = [Request(tuple(text(30, n)), GREEDY, drafter="head", cache_salt=salt) for n in (90, 150, 170, 170)]
        seqs = [play(engine, [request])[0] for request in requests]
        seqs += play(engine, requests)
        assert all(seq.drafting == "head" for seq in seqs)
        assert (sum(seq.cached_tokens for seq in seqs) > 900) == (salt == "")
        return [(seq.tokens, seq.stats.rounds, seq.stats.drafted, seq.stats.accepted) for seq in seqs]

    wanted = stats(None)
    assert stats("") == wanted
    assert all(row[2] for row in wanted)


def test_pages_without_the_hidden_rows_that_a_drafter_needs_are_read_again(tmp_path: Path) -> None:
    target, tokens = make_target("torch", tmp_path), text(40, 130)
    for seq_id, needs, found in ((0, Needs(), 0), (1, Needs((1,)), 0), (2, Needs((1,)), 129), (3, Needs(), 129)):
        seq = FakeSeq(seq_id, tokens, cache_salt="")
        trees, scores = target.prefill([seq], needs)
        assert target.reused_tokens(seq) == found, seq_id
        assert trees.nodes == 129
        assert all(len(rows) == 129 for rows in scores.hidden.values())
        target.release(seq)


def test_a_draft_model_reuses_what_it_has_read(tmp_path: Path) -> None:
    target, draft = make_target("torch", tmp_path), make_target("torch", tmp_path)
    speculative = SpeculativeConfig(drafter="draft_model", controller="fixed", budget=4)
    engine = make_engine(target, frozenset(), speculative, EngineConfig(), draft_target=draft)
    request = Request(tuple(text(50, 140)), GREEDY)
    first, second = (play(engine, [request])[0] for _ in range(2))
    assert second.tokens == first.tokens
    assert (first.stats.drafted, first.stats.accepted) == (second.stats.drafted, second.stats.accepted)
    assert first.stats.accepted > 0
    assert draft.used_slots == 0
    assert draft.cached_slots > 0
    reads = 0
    prefill = draft.prefill

    def note(seqs: Sequence[Any], needs: Needs, rows: int | None = None) -> Any:
        nonlocal reads
        result = prefill(seqs, needs, rows)
        reads += sum(draft.reused_tokens(seq) for seq in seqs)
        return result

    draft.prefill = note
    play(engine, [request])
    assert reads == 139


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize("kind", KINDS)
def test_of_a_long_document_the_second_question_reads_its_own_end_alone(kind: str, tmp_path: Path) -> None:
    target, document = make_target(kind, tmp_path, 20_000, positions=16_384), text(1, 8000)
    first, second = document + text(2, 30), document + text(3, 50)
    read, keep = list[int](), target._keep_pieces

    def count(pieces: Sequence[Piece]) -> None:
        read.extend(len(piece.tokens) for piece in pieces)
        keep(pieces)

    target._keep_pieces = count

    def ask(tokens: list[int], salt: str | None, seq_id: int) -> tuple[tuple[Any, ...], int]:
        read.clear()
        found = logits_of(target, tokens, salt, 512, seq_id)
        return found, sum(read)

    _, rows = ask(first, "document", 0)
    assert rows == len(first) - 1
    (*again, found), rows = ask(second, "document", 1)
    assert found == len(document)  # whole pages: 8,000 is a multiple of 64
    assert rows == len(second) - 1 - found
    (*alone, found), rows = ask(second, None, 2)
    assert (found, rows) == (0, len(second) - 1)
    assert same(kind, again, alone)


def test_a_page_that_others_read_is_never_written(tmp_path: Path) -> None:
    """A sequence that is cut back into a shared page gets a page of its own."""
    target, tokens = make_target("torch", tmp_path), text(60, 129)
    seqs = [FakeSeq(i, list(tokens), cache_salt="") for i in range(3)]
    for seq in seqs:
        target.prefill([seq], Needs())
    pages = [target.kv.extent(i).pages for i in range(3)]
    assert pages[0][:2] == pages[1][:2] == pages[2][:2]
    before = target.kv.data[:, :, :, pages[0][1] * PAGE : (pages[0][1] + 1) * PAGE].clone()
    for seq in seqs[:2]:
        target.truncate(seq, 100)
        seq.tokens[100:] = [1, 2, 3]
        target.prefill([seq], Needs())
        target.score([seq], TreeBatch.chains([[3, 4, 5]]), Needs())
    assert target.kv.extent(0).pages[1] != target.kv.extent(1).pages[1] != pages[2][1]
    assert torch.equal(target.kv.data[:, :, :, pages[2][1] * PAGE : (pages[2][1] + 1) * PAGE], before)
    target.release(seqs[2])
    again = FakeSeq(9, list(tokens), cache_salt="")
    target.prefill([again], Needs())
    assert target.reused_tokens(again) == 128
