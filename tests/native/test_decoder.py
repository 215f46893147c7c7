"""The native decoder: torch's logits in float32, and in every mode the same bits in a tree, a chain or alone."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from forerun.core.errors import DamagedFile, InvalidInput, ModelError
from forerun.core.types import Needs, TreeBatch, Verdict
from forerun.models import decoder as decoder_module
from forerun.models.config import DecoderConfig
from forerun.models.decoder import Decoder
from forerun.models.load.checkpoint import open_checkpoint
from forerun.models.native import library as native_library
from forerun.models.native.packing import table_of
from forerun.models.native.pass_rows import HiddenRows
from forerun.models.native.target import Mode, NativeDecoder, choose_mode
from forerun.testing import FakeSeq, path_to, random_tree, tree_of
from tests.models.tiny_checkpoints import (
    FAMILIES,
    LATENT,
    SIZED,
    VOCAB,
    in_tiers,
    make_decoder,
    make_reference,
    save,
    score_chain,
)
from tests.models.tiny_gguf import FAMILIES as GGUF_FAMILIES
from tests.models.tiny_gguf import write_tiny
from tests.native.blocks import needs_native

pytestmark = needs_native

LENGTH = 22
APART = (
    "llama-linear",
    "llama-yarn",
    "qwen3-yarn",
    "deepseek_v3-odd",
    "ernie4_5_moe",
)  # the last two are not for the kernels
FAMILIES_HERE = [name for name in (*FAMILIES, *SIZED, *LATENT) if name not in APART]
Checkpoint = tuple[dict[str, Any], dict[str, Tensor]]


def _text(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB) for _ in range(length)]


def _native(checkpoint: Checkpoint, mode: Mode = "float32", kv_slots: int | None = None) -> NativeDecoder:
    config, weights = checkpoint
    return NativeDecoder(DecoderConfig.from_hf(config), weights, mode=mode, kv_slots=kv_slots)


def _cached(target: NativeDecoder, slots: Any) -> list[Tensor]:
    """Keys and values that lie in some slots, by layer; where layers differ in size, those of small ones end early."""
    data, varied = target.kv.data[:, :, :, slots], target.config.varied
    sizes = [data.shape[-1]] * len(data) if varied is None else [heads * dim for heads, dim in varied.sizes]
    return [layer[..., :size] for layer, size in zip(data, sizes, strict=False)]


@pytest.fixture(scope="module", params=in_tiers(FAMILIES_HERE))
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return save(make_reference(request.param), tmp_path_factory.mktemp("checkpoint"))


@pytest.mark.parametrize("cached", [0, 13])
def test_chains_equal_torch(checkpoint: Checkpoint, cached: int) -> None:
    text = _text(1, LENGTH)
    got = score_chain(_native(checkpoint), text, cached, LENGTH)
    wanted = score_chain(make_decoder(*checkpoint, native=False), text, cached, LENGTH)
    torch.testing.assert_close(got, wanted, atol=1e-4, rtol=0)


@pytest.mark.parametrize("layers", [(-1, 0, 2, 3), (0, 2)])  # (0, 2): all enter a layer, and kernels keep them
def test_trees_and_hidden_rows_equal_torch(checkpoint: Checkpoint, layers: tuple[int, ...]) -> None:
    rng, needs = random.Random(2), Needs(layers)
    seqs = [FakeSeq(b, _text(b, n), max_length=LENGTH) for b, n in enumerate((11, 1, 17))]
    trees = TreeBatch.trees([random_tree(rng, seq.tokens[-1], VOCAB, 6) for seq in seqs])
    ours, theirs = _native(checkpoint), make_decoder(*checkpoint, native=False)
    ours.prefill(seqs, needs)
    theirs.prefill(seqs, needs)
    got, wanted = ours.score(seqs, trees, needs), theirs.score(seqs, trees, needs)
    torch.testing.assert_close(got.logits, wanted.logits, atol=1e-4, rtol=0)
    assert got.logits is not None
    assert got.greedy is not None
    assert got.greedy.argmax == got.logits.argmax(-1).tolist()
    for layer in needs.hidden_layers:
        torch.testing.assert_close(got.hidden[layer], wanted.hidden[layer], atol=1e-4, rtol=0)
        # and those that are kept for sequences that start alike are the same rows
        for b, seq in enumerate(seqs):
            extent, (first, end) = ours.kv.extent(seq.id), trees.starts[b : b + 2]
            kept = ours.kv.hidden[layer][extent.slots(extent.length, extent.length + end - first)]
            assert torch.equal(kept, got.hidden[layer][first:end])


@pytest.mark.parametrize("mode", ["float32", "q8"])
def test_the_short_way_of_one_tree_is_the_long_way(checkpoint: Checkpoint, mode: Mode) -> None:
    """One text in turn with another: trees that grow and shrink, over the end of a page, with and without layers."""
    shapes = (-1,), (-1,), (-1, 0, 1), (-1, 0, 0), (-1,), (-1, 0, 1, 2, 3), (-1, 0, 0, 1, 1, 2, 5)
    target, longer, rng = _native(checkpoint, mode), _native(checkpoint, mode), random.Random(5)
    seqs = [FakeSeq(b, _text(b, 58 + b), max_length=120) for b in range(2)]
    for one in (target, longer):
        one.prefill(seqs, Needs((0, 2, 3)))
    for turn in range(28):
        seq, parents = seqs[turn // 4 % 2], shapes[turn % 7]
        tokens = [seq.tokens[-1], *_text(turn, len(parents) - 1)]
        trees, needs = TreeBatch.trees([(tokens, parents)]), Needs(((), (0, 2), (0, 2, 3))[turn % 3])
        got, wanted = target.score([seq], trees, needs), Decoder.score(longer, [seq], trees, needs)
        assert got.logits is not None
        assert wanted.logits is not None
        assert torch.equal(got.logits, wanted.logits)
        assert got.greedy == wanted.greedy
        assert {layer: got.hidden[layer].tolist() for layer in got.hidden} == {
            layer: wanted.hidden[layer].tolist() for layer in wanted.hidden
        }
        path = trees.topology()[0].paths[rng.randrange(len(parents))][1:]
        verdict = Verdict.of([path], [7], "cpu")
        for one in (target, longer):
            one.commit([seq], trees, verdict)
            assert one.kv.extent(seq.id).layers == target.kv.extent(seq.id).layers
        seq.tokens += [*(tokens[node] for node in path), 7]
    assert all(map(torch.equal, _cached(target, slice(2 * 58)), _cached(longer, slice(2 * 58))))


def test_logits_that_were_returned_are_never_written_again(checkpoint: Checkpoint) -> None:
    """Those of single nodes are made several at once."""
    target, seq = _native(checkpoint), FakeSeq(0, _text(1, 5), max_length=LENGTH)
    target.prefill([seq], Needs())
    returned, copies = list[torch.Tensor](), list[torch.Tensor]()
    for token in range(20):
        logits = target.score([seq], TreeBatch.chains([[token]]), Needs()).required_logits
        returned.append(logits)
        copies.append(logits.clone())
    assert len({tuple(row.flatten().tolist()) for row in copies}) == 20
    assert all(map(torch.equal, returned, copies))


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("mode", ["float32", "q8"])
def test_the_first_of_equal_logits_is_found_whoever_computes_it(tmp_path: Path, mode: Mode, threads: int) -> None:
    """The LM head's rows repeat, so that every logit is there hundreds of times, in every worker's part."""
    config, weights = save(make_reference("llama2"), tmp_path)
    torch.manual_seed(4)
    width, words = weights["model.embed_tokens.weight"].shape[1], 30_001
    weights["model.embed_tokens.weight"] = torch.randn(words, width)
    weights["lm_head.weight"] = torch.randn(7, width).repeat(words // 7 + 1, 1)[:words]
    checkpoint = {**config, "vocab_size": words}, weights
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        target, seq = _native(checkpoint, mode), FakeSeq(0, _text(1, 5), max_length=LENGTH)
        target.prefill([seq], Needs())
        for turn in range(8):  # a worker may come late, and find nothing left to do
            scores = target.score([seq], TreeBatch.chains([_text(turn, 9)]), Needs())
            assert scores.greedy is not None
            assert scores.greedy.argmax == scores.required_logits.numpy().argmax(-1).tolist()
            assert 1 < len({*scores.greedy.argmax}) <= 7 > max(scores.greedy.argmax)
        weights["lm_head.weight"][29_500] = torch.nan
        damaged = _native(checkpoint)
        damaged.prefill([seq], Needs())
        with pytest.raises(ModelError, match="NaN"):
            damaged.score([seq], TreeBatch.chains([_text(2, 9)]), Needs())
    finally:
        torch.set_num_threads(before)


def test_hidden_rows_are_tensors_over_one_block() -> None:
    rows = HiddenRows((3, 1), 2, 5)
    for layer in rows:
        rows[layer].copy_(torch.arange(10.0).view(2, 5) + 100 * layer)
        assert rows[layer].data_ptr() == rows.addresses[layer]
    assert rows.addresses[1] - rows.addresses[3] == 2 * rows.row_bytes == 40
    assert {layer: tensor.tolist()[1][4] for layer, tensor in rows.items()} == {3: 309.0, 1: 109.0}
    assert [tuple(tensor.shape) for tensor in HiddenRows((3, 1), 0, 5).values()] == [(0, 5)] * 2
    with pytest.raises(KeyError):
        rows[2]


def test_a_token_outside_the_vocabulary_is_refused(checkpoint: Checkpoint) -> None:
    target, seq = _native(checkpoint), FakeSeq(0, _text(1, 5))
    target.prefill([seq], Needs())
    with pytest.raises(IndexError, match="vocabulary"):
        target.score([seq], TreeBatch.chains([[seq.tokens[-1], VOCAB]]), Needs())


def test_kept_rows_follow_a_cache_that_grows(checkpoint: Checkpoint) -> None:
    target, needs = _native(checkpoint), Needs((1, 2))
    for seq in [FakeSeq(b, _text(b, 40), max_length=4000) for b in range(30)]:  # more than one CHUNK of slots
        target.prefill([seq], needs)
        got = target.score([seq], TreeBatch.chains([seq.tokens[-1:]]), needs)
        slot = target.kv.extent(seq.id).slots(39, 40)[0]
        for layer in needs.hidden_layers:
            assert torch.equal(target.kv.hidden[layer][slot], got.hidden[layer][0])


@pytest.mark.parametrize("mode", ["float32", "bfloat16", "q8"])
def test_bits_do_not_depend_on_neighbours(checkpoint: Checkpoint, mode: Mode) -> None:
    """A node's logits: in a tree of a batch, in a chain of its own path, and as a root after prefill."""
    target, rng = _native(checkpoint, mode), random.Random(3)
    seqs = [FakeSeq(b, _text(b, n), max_length=LENGTH + 8) for b, n in enumerate((12, 5))]
    target.prefill(seqs, Needs())
    trees = TreeBatch.trees([random_tree(rng, seq.tokens[-1], VOCAB, 7) for seq in seqs])
    together = _logits(target, seqs, trees)
    for b, seq in enumerate(seqs):
        tokens, parents = tree_of(trees, b)
        for i in range(len(tokens)):
            node = together[trees.starts[b] + i]
            path = [tokens[j] for j in path_to(parents, i)]  # without the root
            chain = _logits(target, [seq], TreeBatch.chains([[seq.tokens[-1], *path]]))
            assert torch.equal(chain[-1], node)
            alone = FakeSeq(99, seq.tokens + path, max_length=LENGTH + 8)
            target.prefill([alone], Needs())
            assert torch.equal(_logits(target, [alone], TreeBatch.chains([alone.tokens[-1:]]))[0], node)
            target.release(alone)


def _logits(target: NativeDecoder, seqs: Sequence[FakeSeq], trees: TreeBatch) -> Tensor:
    logits = target.score(seqs, trees, Needs()).logits
    assert logits is not None
    return logits


@pytest.mark.parametrize("mode", ["float32", "bfloat16", "q8"])
def test_it_lends_its_tables(mode: Mode, tmp_path: Path) -> None:
    for name, head in (("smollm2", "model.embed_tokens.weight"), ("qwen3", "lm_head.weight")):
        checkpoint = save(make_reference(name), tmp_path / name)
        target, ids = _native(checkpoint, mode), torch.tensor([5, 0, 60])
        shared = target.shared()
        for rows, weight in ((shared.embed(ids), "model.embed_tokens.weight"), (shared.head_rows(ids), head)):
            assert rows.dtype == torch.float32
            torch.testing.assert_close(rows, checkpoint[1][weight][ids], atol=0, rtol=0.01)
        assert 0 < target.weight_bytes <= 4 * sum(weight.numel() for weight in checkpoint[1].values())


@pytest.mark.parametrize("name", ["gemma2", "gemma4"])
@pytest.mark.parametrize("mode", ["bfloat16", "float32"])
def test_rows_that_torch_looks_up_are_those_of_the_kernels(name: str, mode: Mode, tmp_path: Path) -> None:
    """Also where the file has its tables in bfloat16; Gemma 4's inputs of layers come from the kernels either way."""
    config, weights = save(make_reference(name), tmp_path)
    narrow = {key: weight.bfloat16() if "embed" in key else weight for key, weight in weights.items()}
    targets = [_native((config, narrow), mode) for _ in range(2)]
    targets[1]._looks_up, targets[1]._model.embedding = False, table_of(None)
    assert targets[0]._looks_up
    assert torch.equal(*(score_chain(target, _text(1, LENGTH), 9, LENGTH) for target in targets))


@pytest.mark.slow(keep=10)
@pytest.mark.parametrize("mode", ["float32", "q8"])
def test_rows_that_threads_share_have_the_same_bits(checkpoint: Checkpoint, mode: Mode) -> None:
    """Norms, rotations and cache writes of 492 rows, enough to be shared out, and of chains behind them."""
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            target, needs = _native(checkpoint, mode), Needs((1, 2, -1))
            seqs = [FakeSeq(b, _text(b, 42), max_length=60) for b in range(12)]
            read = target.prefill(seqs, needs)[1]
            scores = target.score(seqs, TreeBatch.chains([_text(seq.id, 15) for seq in seqs]), needs)
            slots = [slot for seq in seqs for slot in target.kv.extent(seq.id).slots(0, 41 + 15)]
            rows = [one.hidden[layer] for one in (read, scores) for layer in needs.hidden_layers]
            results.append([scores.required_logits, *_cached(target, slots), *rows])
    finally:
        torch.set_num_threads(before)
    for found in results[1:]:
        assert all(map(torch.equal, found, results[0]))


@pytest.mark.parametrize("chunk", [1, 3, 7])
def test_prompts_in_pieces_have_the_same_bits(chunk: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    checkpoint = save(make_reference("mistral"), tmp_path)
    seq = FakeSeq(0, _text(4, 30), max_length=40)
    results = []
    for size in (512, chunk):
        monkeypatch.setattr(decoder_module, "CHUNK", size)
        target = _native(checkpoint, "q8")
        _, scores = target.prefill([seq], Needs((-1,)))
        results.append((_logits(target, [seq], TreeBatch.chains([seq.tokens[-1:]])), scores.hidden[-1]))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


@pytest.mark.parametrize("family", GGUF_FAMILIES)
def test_gguf_files_keep_their_own_types(family: str, tmp_path: Path) -> None:
    """Against torch with the dequantised weights: only the rows' rounding to int8 differs, where it is used."""
    opened = open_checkpoint(str(write_tiny(tmp_path / "tiny.gguf", family)))
    config = DecoderConfig.from_hf(opened.config)
    text = [random.Random(5).randrange(24) for _ in range(12)]
    results = []
    for mode in ("gguf", "float32"):
        target = NativeDecoder(config, opened.weights, mode=mode, kv_slots=None)  # type: ignore[arg-type]
        results.append(score_chain(target, text, 4, 20))
    wanted = score_chain(make_decoder(opened.config, dict(opened.weights)), text, 4, 20)
    assert float((results[0] - wanted).norm() / wanted.norm()) < 0.05
    assert float((results[1] - wanted).norm() / wanted.norm()) < 1e-4


def test_modes_follow_the_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = open_checkpoint(str(write_tiny(tmp_path / "tiny.gguf")))
    config = DecoderConfig.from_hf(opened.config)
    assert choose_mode(config, opened.weights, "auto") == "gguf"
    assert choose_mode(config, opened.weights, "q8") == "q8"
    assert choose_mode(config, opened.weights, "float16") is None
    floats = dict(opened.weights)
    assert choose_mode(config, floats, "auto") == "float32"
    with pytest.raises(InvalidInput, match=r"needs a \.gguf file"):
        choose_mode(config, floats, "gguf")
    monkeypatch.setattr(native_library, "available", lambda: False)
    monkeypatch.setattr(native_library, "why_not", lambda: "it was not built")
    assert choose_mode(config, opened.weights, "auto") is None
    with pytest.raises(InvalidInput, match="it was not built"):
        choose_mode(config, opened.weights, "gguf")


def test_damaged_checkpoints_are_named(tmp_path: Path) -> None:
    config, weights = save(make_reference("llama2"), tmp_path)
    name = "model.layers.1.mlp.down_proj.weight"
    with pytest.raises(DamagedFile, match=name):
        _native((config, {key: weight for key, weight in weights.items() if key != name}))
    with pytest.raises(DamagedFile, match=name):
        _native((config, {**weights, name: weights[name][:-1]}))


def test_limits_are_said(tmp_path: Path) -> None:
    target = _native(save(make_reference("llama2"), tmp_path), kv_slots=128)
    seqs = [FakeSeq(b, [1, 2, 3], max_length=30) for b in range(3)]
    target.prefill(seqs[:1], Needs())
    with pytest.raises(InvalidInput, match="kv_slots"):
        target.prefill(seqs[1:], Needs())
    assert target.used_slots == 64
    with pytest.raises(InvalidInput, match="286 nodes"):
        target.score(seqs[:1], TreeBatch.chains([[3] * 286]), Needs())
