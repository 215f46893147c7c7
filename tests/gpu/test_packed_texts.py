"""Targets whose weights stay as their files have them: texts are the plain ones, and a row's bits are its own.

Everywhere the same checkpoints are dequantised to float32, and show that these tests see what they look for.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from forerun.build.engine import keeps_packed, make_engine
from forerun.core.params import EngineConfig, SamplingParams, SpeculativeConfig
from forerun.core.types import Budget, Needs, Prompts, Request, TreeBatch
from forerun.models.config import DecoderConfig
from forerun.models.cuda.cubin.products import Cut, Products
from forerun.models.cuda.target import CudaDecoder
from forerun.models.cuda.weights import Strips
from forerun.models.load.checkpoint import Checkpoint, open_checkpoint
from forerun.models.load.weights import GgufWeights
from forerun.testing import FakeSeq, path_to, random_tree
from forerun.verify.greedy import device_walk
from forerun.verify.sampled import SampledTokens
from tests.gpu.heads import both_drafters
from tests.gpu.test_file_weights import write
from tests.gpu.test_head_formats import accepts_all, quantise_by_torch
from tests.gpu.tiny import DEVICES, need_cuda

FORMATS = {  # what queries, keys and values are held as
    "fp8": "e4m3", "fp8-blocks": "e4m3", "awq": "int4_zeros", "gptq": "int4_zeros", "w4": "int4", "gguf": "bytes_k",
}  # fmt: skip
STORED = [name for name in FORMATS if name != "gguf"]
WORDS, LENGTH = 8, 1400  # tokens that texts have; positions
FORMS = {"none": None, "chain": Budget(3, 3), "tree": Budget(9, 3, 3), "ngram": Budget(6, 6)}
SIZES, CUTS = (1, 5, 17, 33), (299, 256, 130, 64, 33, 7)  # nodes of a tree; rows of a prompt in one pass


def few_words(name: str, folder: Path) -> Checkpoint:
    """A checkpoint of a format that says few different tokens, and much of what is drafted."""
    if name == "gguf":
        from tests.models.gguf_blocks import WIDTH, write_mixture  # needs gguf

        path = write_mixture(folder / "model.gguf", "Q4_K_M")
        weights = open_checkpoint(str(path)).weights
        assert isinstance(weights, GgufWeights)
        info = weights.file.tensors["output.weight"]
        content, row = bytearray(path.read_bytes()), WIDTH // 256 * 210
        start, end = (info.offset + rows * row for rows in (WORDS, weights.shape("lm_head.weight")[0]))
        content[start:end] = bytes(end - start)
        path.write_bytes(content)
        return open_checkpoint(str(path))
    made = write(name, folder)
    for file in made.glob("*.safetensors"):
        held = load_file(file)
        if (head := held.get("lm_head.weight")) is not None:
            head[WORDS:], head[:WORDS] = 0.0, head[:WORDS] * 4
            save_file(held, file, {"format": "pt"})
    settings = json.loads((made / "config.json").read_text()) | {"max_position_embeddings": LENGTH}
    (made / "config.json").write_text(json.dumps(settings))
    return open_checkpoint(str(made))


def target_of(name: str, device: str, folder: Path, walk: Callable[..., None] | None = None) -> CudaDecoder:
    """Packed on a Hopper GPU; elsewhere on a CPU, where the weights' numbers are dequantised."""
    need_cuda(device)
    folder.mkdir(parents=True, exist_ok=True)
    checkpoint, where = few_words(name, folder), torch.device(device)
    config = DecoderConfig.from_hf(checkpoint.config)
    if device == "cuda" and not keeps_packed(checkpoint, config, "gguf" if name == "gguf" else "auto", where):
        pytest.skip("needs a Hopper GPU")
    target = CudaDecoder(
        config, checkpoint.weights, dtype=torch.bfloat16 if device == "cuda" else torch.float32, device=where,
        kv_slots=20_000, weight_kind="file", greedy_walk=walk or device_walk(where), sampling=SampledTokens(),
    )  # fmt: skip
    if device == "cuda":
        assert type(target.passes.steps).__name__ == "CompiledSteps"
        held = target.model.layers[0].qkv
        assert isinstance(held, Strips)
        assert held.format == FORMATS[name]
    return target


def texts_of(target: CudaDecoder, form: str, batch: int, heat: float) -> list[list[int]]:
    """Texts of prompts of any length, alone or together, and drafts of each form are taken now and then."""
    speculative = SpeculativeConfig(drafter="none", controller="fixed")
    engine = make_engine(target, frozenset(), speculative, EngineConfig(max_batch=batch, max_length=LENGTH))
    if form in ("chain", "tree"):
        engine.drafters.add("head", both_drafters(target, borrows=True)[0])
    drafter, rng, found = {"none": "none", "ngram": "ngram"}.get(form, "head"), random.Random(5), dict[int, list[int]]()
    for i, length in enumerate((3, 1, 140, 20, 64, 33)):
        prompt = [rng.randrange(2, target.vocab_size) for _ in range(length)] * (2 if i % 2 else 1)
        params = SamplingParams(max_tokens=30 + i, temperature=heat, seed=i if heat else None, ignore_eos=True)
        found[engine.submit(Request(tuple(prompt), params, drafter=drafter, budget=FORMS[form]))] = []
    while engine.busy:
        for event in engine.step():
            assert event.error is None
            found[event.seq_id] += event.tokens
    assert (engine.stats.drafted > 0) == (engine.stats.accepted > 0) == (form != "none")
    return list(found.values())


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("heat", [0.0, 1.0])
@pytest.mark.parametrize("name", FORMATS)
def test_drafted_texts_are_the_plain_ones(name: str, heat: float, device: str, tmp_path: Path) -> None:
    target = target_of(name, device, tmp_path)
    wanted = texts_of(target, "none", 1, heat)
    assert texts_of(target, "none", 6, heat) == wanted
    for form in ("chain", "tree", "ngram"):
        for batch in (1, 6):
            assert texts_of(target, form, batch, heat) == wanted, f"{form}, {batch} at once"


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["fp8", "w4", "gguf"])
def test_texts_would_show_a_draft_that_is_taken_wrongly(name: str, device: str, tmp_path: Path) -> None:
    wanted = texts_of(target_of(name, device, tmp_path / "right"), "none", 1, 0.0)
    wrong = target_of(name, device, tmp_path / "wrong", accepts_all)
    assert texts_of(wrong, "chain", 1, 0.0) != wanted


def text_of(rng: random.Random, target: CudaDecoder, length: int) -> list[int]:
    return [rng.randrange(target.vocab_size) for _ in range(length)]


def score(target: CudaDecoder, seqs: list[FakeSeq], trees: TreeBatch) -> Tensor:
    return target.score(seqs, trees, Needs()).required_logits.clone()


def company_of(target: CudaDecoder) -> Iterator[tuple[int, int, Tensor, Tensor]]:
    """Nodes of a tree and of all its company, and the tree's logits alone and beside them."""
    rng = random.Random(11)
    seqs = [FakeSeq(i, text_of(rng, target, length), max_length=LENGTH) for i, length in enumerate((70, 2, 129, 300))]
    target.prefill(seqs, Needs())
    for size in SIZES:
        own = random_tree(rng, seqs[0].tokens[-1], target.vocab_size, 3 * size)
        own = own[0][:size], own[1][:size]
        single = score(target, seqs[:1], TreeBatch.trees([own]))
        for beside in (1, 5, 40, 200):
            others = [random_tree(rng, one.tokens[-1], target.vocab_size, beside) for one in seqs[1:]]
            trees = TreeBatch.trees([own, *others])
            yield size, trees.starts[-1], single, score(target, seqs, trees)[:size]


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", STORED)
def test_a_tree_has_the_same_bits_in_any_company(name: str, device: str, tmp_path: Path) -> None:
    """On a CPU products of torch are those of all rows, and other rows round as they like."""
    for size, rows, single, beside in company_of(target_of(name, device, tmp_path)):
        close = torch.allclose(single, beside, rtol=1e-4, atol=1e-4) if device == "cpu" else torch.equal(single, beside)
        assert close, f"a tree of {size} differs among {rows} rows"


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", STORED)
def test_a_node_has_the_bits_of_its_path_however_the_prompt_was_cut(name: str, device: str, tmp_path: Path) -> None:
    target, rng = target_of(name, device, tmp_path), random.Random(4)
    prompt = FakeSeq(0, text_of(rng, target, 300), max_length=LENGTH)
    other = FakeSeq(1, text_of(rng, target, 40), max_length=LENGTH)
    target.prefill([prompt, other], Needs())
    atol = 1e-3 if device == "cpu" else 0.0
    trees, wanted = [], list[Tensor]()
    for size in SIZES:
        tokens, parents = random_tree(rng, prompt.tokens[-1], target.vocab_size, 3 * size)
        trees.append((tokens[:size], parents[:size]))
        wanted.append(score(target, [prompt], TreeBatch.trees(trees[-1:])))
        for node in {0, size // 2, size - 1}:
            path = [tokens[i] for i in path_to(parents, node)]
            plain = FakeSeq(100, [*prompt.tokens, *path], max_length=LENGTH)
            target.prefill([plain], Needs())
            root = score(target, [plain], TreeBatch.chains([plain.tokens[-1:]]))
            target.release(plain)
            torch.testing.assert_close(root[0], wanted[-1][node], atol=atol, rtol=0.0)
    beside = TreeBatch.trees([random_tree(rng, other.tokens[-1], target.vocab_size, 20)])
    for rows in CUTS:
        target.release(prompt)
        while target.cached_tokens(prompt) < 299:
            target.score([other], beside, Needs(), Prompts([prompt], rows))
        for tree, logits in zip(trees, wanted, strict=True):
            torch.testing.assert_close(score(target, [prompt], TreeBatch.trees([tree])), logits, atol=atol, rtol=0.0)


def splits_by_rows(products: Products, weight: Strips, count: int) -> Cut:
    """A fault: more rows, other splits of the same weight."""
    cut = CHOOSE(products, weight, count)
    if count <= 16 or weight.blocks < 2:
        return cut
    splits = 2 if cut.splits == 1 else 1
    groups = max(1, min(products.processors // splits, weight.strips))
    return replace(cut, splits=splits, groups=groups, width=min(cut.width, 128), whole=False, four=False)


CHOOSE = Products.choose


def scales_of_all_rows(rows: Tensor, count: int, out: Tensor, scales: Tensor) -> None:
    """Rows in e4m3 by the largest number among them, as where there is one scale for a tensor of them."""
    quantise_by_torch(rows, count, out, scales)
    most = scales[:, :count].amax(1, keepdim=True)
    parts = rows[:count].float().view(count, -1, 128) / most[None]
    out[:count] = parts.flatten(1).to(torch.float8_e4m3fn).view(torch.uint8)
    scales[:, :count] = most.expand(-1, count)


def differing(target: CudaDecoder) -> int:
    return sum(not torch.equal(single, beside) for _, _, single, beside in company_of(target))


@pytest.mark.gpu
@pytest.mark.parametrize("name", STORED)
def test_splits_by_the_number_of_rows_are_seen(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert differing(target_of(name, "cuda", tmp_path / "right")) == 0
    monkeypatch.setattr(Products, "choose", splits_by_rows)
    assert differing(target_of(name, "cuda", tmp_path / "wrong")) > 0


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["fp8", "fp8-blocks"])
def test_rows_in_e4m3_by_a_scale_of_all_are_seen(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    need_cuda()
    monkeypatch.setattr("forerun.models.cuda.steps.compiled.quantise_rows", quantise_by_torch)
    assert differing(target_of(name, "cuda", tmp_path / "right")) == 0, "by torch, each row by itself"
    monkeypatch.setattr("forerun.models.cuda.steps.compiled.quantise_rows", scales_of_all_rows)
    assert differing(target_of(name, "cuda", tmp_path / "wrong")) > 0


def test_the_scale_of_all_rows_is_one_of_company() -> None:
    rows = torch.randn(9, 256) * torch.logspace(-1, 1, 9)[:, None]
    for quantise, same in ((quantise_by_torch, True), (scales_of_all_rows, False)):
        found = list[Tensor]()
        for count in (3, 9):
            out, scales = torch.zeros(9, 256, dtype=torch.uint8), torch.zeros(2, 9)
            quantise(rows, count, out, scales)
            wide = out.view(torch.float8_e4m3fn).float() * scales.t().repeat_interleave(128, 1)
            assert float((wide[:count] - rows[:count]).abs().max()) < 0.07 * float(rows[:count].abs().max())
            found.append(wide[:3])
        assert torch.equal(*found) == same
