"""LoRA adapters on the GPU decoder: the law of merged weights, in any company, drafted or not.

The same tests run on a CPU with the plain steps. The kernels also run there in Triton's interpreter:
TRITON_INTERPRET=1 python -m pytest tests/gpu/test_adapters.py -k kernels
"""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from forerun.build.engine import make_engine
from forerun.core.errors import DamagedFile
from forerun.core.params import EngineConfig, SamplingParams, SpeculativeConfig
from forerun.core.types import Budget, LoadedAdapter, Needs, PlainSeq, Request, TreeBatch
from forerun.engine.engine import Engine
from forerun.models.adapters import Adapter, AdapterPool
from forerun.models.cuda.adapters import PARTS, AdapterStacks, splits_of
from forerun.models.cuda.target import CudaDecoder
from forerun.models.layers import pair_up
from tests.gpu.heads import both_drafters
from tests.gpu.tiny import (
    DEVICES,
    VOCAB,
    fused_on_a_cpu,
    make_reference,
    make_target,
    need_cuda,
    weights_of,
    where_kernels_run,
)

COMPANY = (3, 9, 17, 70, 150)  # sequences of six rows
FORMS = {"chain": Budget(3, 3), "tree": Budget(7, 3, 3)}


def make_adapter(name: str, seed: int, rank: int = 4, only: str = "") -> Adapter:
    """Random changes of all projections of a shape, in numbers that 16 bits hold."""
    dice, pairs = torch.Generator().manual_seed(seed), {}
    for key, weight in weights_of(make_reference(name))[1].items():
        if re.fullmatch(r".*(self_attn|mlp)\.\w+_proj\.weight", key) and only in key:
            outputs, inputs = weight.shape
            down, up = torch.randn(rank, inputs, generator=dice), torch.randn(outputs, rank, generator=dice)
            pairs[key] = (down / inputs**0.5).bfloat16().float(), (0.3 * up).bfloat16().float()
    assert pairs
    return Adapter("base", rank, 0.5, pairs)


def merged_logits(name: str, adapter: Adapter | None, tokens: list[int]) -> Tensor:
    model = make_reference(name)
    with torch.no_grad():
        for key, (down, up) in ({} if adapter is None else adapter.changes).items():
            dict(model.named_parameters())[key].add_(adapter.scale * up @ down)  # type: ignore[union-attr]
        found: Tensor = model(torch.tensor([tokens])).logits[0]
    return found


def score(target: CudaDecoder, texts: list[list[int]], own: list[Any], read: int, first: int = 0) -> Tensor:
    """Logits of what follows the first `read` tokens of each text, all of them in one pass."""
    both = enumerate(zip(texts, own, strict=True))
    seqs = [PlainSeq(first + i, text[: read + 1], adapter=one) for i, (text, one) in both]
    target.prefill(seqs, Needs())
    logits = target.score(seqs, TreeBatch.chains([text[read:] for text in texts]), Needs()).required_logits.clone()
    for seq in seqs:
        target.release(seq)
    return logits


def text_of(draw: int, length: int) -> list[int]:
    rng = random.Random(draw)
    return [rng.randrange(VOCAB) for _ in range(length)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["llama", "smollm2", "mistral", "qwen2", "qwen3", "smollm3"])
def test_the_law_of_an_adapter_is_that_of_merged_weights(name: str, device: str) -> None:
    need_cuda(device)
    target, text = make_target(name, device, torch.bfloat16 if device == "cuda" else torch.float32), text_of(1, 12)
    most = 0.15 if device == "cuda" else 2e-4  # as far as the base is from its own law in 16 bits
    for seed, rank in ((1, 4), (2, 20)):
        adapter = make_adapter(name, seed, rank)
        found = score(target, [text], [target.load_adapter("a", seed, adapter)], 3)
        wanted = merged_logits(name, adapter, text)[3:]
        torch.testing.assert_close(found.cpu().float(), wanted, rtol=most, atol=most)
        plain = merged_logits(name, None, text)[3:]
        assert float((wanted - plain).abs().mean()) > 3 * most, "negative control: the adapter changes the law"
        torch.testing.assert_close(score(target, [text], [None], 3, 5).cpu().float(), plain, rtol=most, atol=most)


@pytest.mark.parametrize("only", ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"])
def test_each_projection_alone(only: str) -> None:
    target, adapter, text = make_target("qwen3", "cpu"), make_adapter("qwen3", 3, only=only), text_of(2, 9)
    found = score(target, [text], [target.load_adapter("a", 1, adapter)], 3)
    torch.testing.assert_close(found, merged_logits("qwen3", adapter, text)[3:], rtol=2e-4, atol=2e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["qwen3", "wide-qwen3"])
def test_the_base_has_the_same_bits_in_such_company(name: str) -> None:
    """What the next test asks of adapters, of a target without one: whose fault is it?"""
    need_cuda()
    target, texts = make_target(name, "cuda", torch.bfloat16, "triton"), [text_of(i, 40) for i in range(4)]
    alone = [score(target, [text], [None], 34) for text in texts]
    for count in COMPANY:
        found = score(target, [texts[i % 4] for i in range(count)], [None] * count, 34).view(count, 6, -1)
        off = [i for i in range(count) if not torch.equal(found[i], alone[i % 4])]
        assert not off, f"{count} sequences: {len(off)} differ, the first by {apart(found[off[0]], alone[off[0] % 4])}"


def apart(one: Tensor, other: Tensor) -> str:
    off = (one.float() - other.float()).abs()
    return f"{float(off.max()):.3g} at most, {int((off > 0).sum())} of {off.numel()} numbers"


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["smollm2", "qwen3", "llama", "large", "odd", "wide-split", "wide-qwen3"])
def test_a_row_has_the_same_bits_in_any_company(name: str) -> None:
    """Alone, among others of its adapter, of other adapters and of none, in narrow passes and in wide ones."""
    need_cuda()
    target = make_target(name, "cuda", torch.bfloat16, "triton")
    loaded = [target.load_adapter(str(i), i, make_adapter(name, i, rank)) for i, rank in ((1, 4), (2, 16), (3, 24))]
    own: list[LoadedAdapter | None] = [None, *loaded]
    texts = [text_of(i, 40) for i in range(4)]
    alone = [score(target, [text], [one], 34) for text, one in zip(texts, own, strict=True)]
    off = list[str]()
    for count in COMPANY:
        every = [i % 4 for i in range(count)]
        random.Random(count).shuffle(every)
        found = score(target, [texts[i] for i in every], [own[i] for i in every], 34).view(count, 6, -1)
        for place, i in enumerate(every):
            if not torch.equal(found[place], alone[i]):
                off.append(f"{count} sequences, place {place}, adapter {i}: {apart(found[place], alone[i])}")
    assert not off, f"{len(off)} texts differ: " + "; ".join(off[:3] + off[-3:])
    assert not any(torch.equal(alone[0], other) for other in alone[1:])


def engine_of(target: CudaDecoder, folders: dict[str, str], batch: int) -> Engine:
    speculative = SpeculativeConfig(drafter="none", controller="fixed", budget=4)
    config = EngineConfig(max_batch=batch, max_length=300, adapters=folders)
    engine = make_engine(target, frozenset(), speculative, config)
    engine.drafters.add("head", both_drafters(target, borrows=True)[0])
    return engine


Asked = tuple[list[int], str | None, int]  # a prompt, an adapter, a seed


def write(engine: Engine, asked: list[Asked], drafter: str, form: Budget | None) -> list[list[int]]:
    texts = dict[int, list[int]]()
    for prompt, adapter, seed in asked:
        params = SamplingParams(16 + seed % 5, temperature=0.8 * (seed % 2), seed=seed, ignore_eos=True)
        texts[engine.submit(Request(tuple(prompt), params, drafter=drafter, budget=form, adapter=adapter))] = []
    while engine.busy:
        for event in engine.step():
            assert event.error is None
            texts[event.seq_id] += event.tokens
    return list(texts.values())


def folders_of(name: str, folder: Path, count: int) -> dict[str, str]:
    for i in range(count):
        make_adapter(name, i + 1, 4 + 9 * (i % 3)).write(folder / str(i))
    return {f"a{i}": str(folder / str(i)) for i in range(count)}


@pytest.mark.parametrize("device", DEVICES)
def test_texts_of_a_mixed_batch_are_those_of_each_adapter_alone(device: str, tmp_path: Path) -> None:
    need_cuda(device)
    on_gpu = device == "cuda"
    target = make_target("llama", device, torch.bfloat16 if on_gpu else torch.float32)
    folders = folders_of("llama", tmp_path, 6 if on_gpu else 2)
    engine = engine_of(target, folders, 32 if on_gpu else 4)
    names = [None, *folders]
    asked = [(text_of(i, 5 + 17 * (i % 4)) * 2, names[i % len(names)], i) for i in range(24 if on_gpu else 6)]
    alone = [write(engine, [one], "none", None)[0] for one in asked]
    assert write(engine, asked, "none", None) == alone
    assert write(engine, asked, "ngram", None) == alone
    for name, form in FORMS.items():
        assert write(engine, asked, "head", form) == alone, name
    assert engine.stats.drafted > 0
    same = [write(engine, [(asked[0][0], name, 0)], "none", None)[0] for name in names]
    assert len({tuple(text) for text in same}) == len(names), "negative control: adapters write other texts"


@pytest.mark.parametrize("device", DEVICES)
def test_adapters_come_and_go_while_texts_are_written(device: str, tmp_path: Path) -> None:
    """Loaded, unloaded and evicted beside texts that go on: nobody's text changes."""
    need_cuda(device)
    target = make_target("llama", device, torch.bfloat16 if device == "cuda" else torch.float32)
    folders = folders_of("llama", tmp_path, 5)
    engine = engine_of(target, folders, 8)
    asked: list[Asked] = [(text_of(i, 9), name, i) for i, name in enumerate([None, *folders])]
    alone = [write(engine, [one], "none", None)[0] for one in asked]
    pool = AdapterPool(target, limit=1)  # one is kept, beside those that are held
    engine.adapters = pool
    texts, waiting, rounds = dict[int, list[int]](), [*asked], 0
    while engine.busy or waiting:
        if waiting and rounds % 3 == 0:  # the next one comes; the one before it is unloaded in mid-text
            prompt, adapter, seed = waiting.pop(0)
            for name in pool.names:
                pool.remove(name)
            if adapter is not None:
                pool.add(adapter, folders[adapter])
            params = SamplingParams(16 + seed % 5, temperature=0.8 * (seed % 2), seed=seed, ignore_eos=True)
            texts[engine.submit(Request(tuple(prompt), params, drafter="ngram", adapter=adapter))] = []
        rounds += 1
        for event in engine.step():
            assert event.error is None
            texts[event.seq_id] += event.tokens
    assert list(texts.values()) == alone
    with pytest.raises(ValueError, match="a0"):
        write(engine, [(text_of(0, 9), "a0", 0)], "none", None)


def test_an_adapter_that_is_not_finite_is_refused() -> None:
    """Rows of others are multiplied by zero where it lies beside them: that must not be NaN."""
    target, adapter = make_target("llama", "cpu"), make_adapter("llama", 1)
    next(iter(adapter.changes.values()))[1][3, 1] = float("inf")
    with pytest.raises(DamagedFile, match="not finite"):
        target.load_adapter("a", 1, adapter)


def keys_of(target: CudaDecoder) -> tuple[int, int]:
    """Graphs of passes without adapters and with them."""
    adapted = [key.adapted for key in target.passes._graphs]
    return adapted.count(False), adapted.count(True)


@pytest.mark.gpu
def test_graphs_are_captured_again_only_where_there_is_no_room() -> None:
    need_cuda()
    target, text = make_target("llama", "cuda", torch.bfloat16, "triton"), text_of(1, 9)
    score(target, [text], [None], 3)
    before = keys_of(target)
    assert before[1] == 0
    loaded = [target.load_adapter(str(i), i, make_adapter("llama", i, 16)) for i in range(1, 4)]
    stacks = target.buffers.adapters
    found = [score(target, [text], [one], 3) for one in loaded]
    assert (stacks.slots, stacks.rank) == (4, 16)
    first = keys_of(target)
    assert first[0] == before[0]
    assert first[1] > 0
    kept = loaded.pop(0)
    del loaded[:]  # their slots are free: others take them, and no graph changes
    others = [target.load_adapter(str(i), i, make_adapter("llama", i, 8)) for i in range(4, 7)]
    for one in others:
        score(target, [text], [one], 3)
    assert keys_of(target) == first
    assert stacks.slots == 4
    assert torch.equal(score(target, [text], [kept], 3), found[0])
    large = target.load_adapter("large", 9, make_adapter("llama", 9, 40))  # more slots, and a higher rank
    score(target, [text], [large], 3)
    assert (stacks.slots, stacks.rank) == (8, 48)
    assert torch.equal(score(target, [text], [kept], 3), found[0]), "bits do not depend on what else is loaded"
    assert keys_of(target)[0] == before[0]


def test_slots_are_used_again_and_stacks_grow() -> None:
    target, text = make_target("llama", "cpu"), text_of(1, 9)
    stacks = target.buffers.adapters
    score(target, [text], [None], 3)
    assert (stacks.slots, stacks.in_use) == (0, False)
    made = {i: make_adapter("llama", i, 3 + 6 * i) for i in range(1, 7)}
    loaded: dict[int, LoadedAdapter] = {i: target.load_adapter(str(i), i, made[i]) for i in (1, 2)}
    for i in (1, 2, 3, 4, 5, 6):
        if i > 2:
            loaded[i] = target.load_adapter(str(i), i, made[i])
            del loaded[i - 2]
        for j, one in loaded.items():
            found = score(target, [text], [one], 3)
            torch.testing.assert_close(found, merged_logits("llama", made[j], text)[3:], rtol=2e-4, atol=2e-4)
    assert stacks.slots == 4, "four were never there at once"
    assert stacks.rank == 48
    with pytest.raises(ValueError, match="another target"):
        score(make_target("llama", "cpu"), [text], [loaded[6]], 3)


def test_units_hold_every_row_once() -> None:
    """Rows of one adapter together, at most sixteen in a unit; there is room for any mix."""
    config = weights_of(make_reference("llama"))[0]
    stacks, rng = AdapterStacks(config, torch.float32, torch.device("cpu")), random.Random(1)
    loaded = [stacks.load(str(i), i, make_adapter("llama", i, only="q_proj")) for i in range(7)]
    for rows in (1, 2, 4, 16, 48, 96, 1024):
        own = [rng.choice([None, *loaded]) for _ in range(rows)]
        units = stacks.units_of(rows, [(one, i, i + 1) for i, one in enumerate(own)])
        stacks.sent.send(units)
        adapted = stacks.sent_with(rows)
        table, seen = adapted.table.view(-1, 17), dict[int, int]()
        for slot, *some in table.tolist():
            seen |= {row: slot for row in some if row >= 0}
        assert seen == {i: -1 if one is None else stacks.slot_of(one) for i, one in enumerate(own)}
        assert int((table[:, 1:] >= 0).sum()) == rows
        assert [max(slot, -1) for slot in adapted.owners.tolist()[:rows]] == [seen[i] for i in range(rows)]
        count = int(adapted.count[0])
        assert sorted(adapted.chosen.tolist()[:count]) == sorted({slot for slot in seen.values() if slot >= 0})
        assert max(adapted.chosen.tolist()[count:], default=-1) < 0


# the kernels, in the interpreter or on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize(("product", "tile"), [("qkv", 128), ("o", 128), ("gate", 128), ("down", 128), ("gate", 16)])
def test_kernels_add_what_torch_adds(product: str, tile: int, monkeypatch: pytest.MonkeyPatch) -> None:
    device = where_kernels_run()
    from forerun.models.cuda.steps import fused as steps

    monkeypatch.setattr(steps, "OUTPUTS", tile)
    monkeypatch.setattr(steps, "ENOUGH", 1024 if tile == 128 else 1)  # 1: programs take as many tiles as they may
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    name = "large" if product == "down" else "llama"  # the first: sums in several stretches
    config = weights_of(make_reference(name))[0]
    stacks = AdapterStacks(config, dtype, device)
    made = [make_adapter(name, 1, 4), make_adapter(name, 2, 20), make_adapter(name, 3, 16, only="q_proj")]
    loaded = [stacks.load(str(i), i, one) for i, one in enumerate(made)]
    own = [None, *loaded, *[loaded[0]] * 17, None, loaded[1]]
    units = stacks.units_of(32, [(one, i, i + 1) for i, one in enumerate(own)])
    stacks.sent.send(units)
    shape = stacks.shapes[product]
    width = sum(shape.outputs)
    assert (splits_of(shape.inputs) > 1) == (product == "down")
    given = torch.randn(32, shape.inputs, generator=torch.Generator().manual_seed(5)).to(device, dtype)
    stacks.delta.fill_(7.0)
    steps.Change(stacks, stacks.sent_with(32), 1, product, given, pdl=False).delta()
    assert not stacks.counters.any()
    found = stacks.delta[: 32 * width].view(32, width)
    for row, one in enumerate(own):
        wanted = torch.zeros(width)
        if one is not None:
            pairs = [made[loaded.index(one)].changes.get(key) for key in _names(product)]
            outputs = [
                torch.zeros(size)
                if pair is None
                else 0.5 * _laid_out(pair[1], part) @ (pair[0] @ given[row].cpu().float())
                for part, pair, size in zip(PARTS[product], pairs, shape.outputs, strict=True)
            ]
            wanted = torch.cat(outputs)
        torch.testing.assert_close(found[row].cpu(), wanted, atol=1e-4, rtol=1e-4 if dtype == torch.float32 else 1e-2)
    assert bool((found[len(own) :] == 7.0).all()), "padding is left alone"


def _names(product: str) -> list[str]:
    group = "mlp" if product in ("gate", "down") else "self_attn"
    return [f"model.layers.1.{group}.{part}_proj.weight" for part in PARTS[product]]


def _laid_out(up: Tensor, part: str) -> Tensor:
    """Queries and keys: numbers that are rotated together lie side by side."""
    return pair_up(up, 16, 16) if part in "qk" else up


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["llama", "qwen3", "qwen2", "with-gemma3"])
def test_kernels_of_a_pass_say_what_torch_says(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if where_kernels_run().type == "cuda":
        pytest.skip("the tests above do this on a GPU, in 16 bits")
    texts = [text_of(i, 6) for i in range(3)]
    adapters = [make_adapter(name, 1, 4), make_adapter(name, 2, 20)]
    target = fused_on_a_cpu(make_target(name, "cpu"), monkeypatch)
    own = [None, *[target.load_adapter(str(i), i, one) for i, one in enumerate(adapters)]]
    found = score(target, texts, own, 3).view(3, 3, -1)
    for text, adapter, logits in zip(texts, [None, *adapters], found, strict=True):
        torch.testing.assert_close(logits, merged_logits(name, adapter, text)[3:], rtol=1e-3, atol=1e-3)


def test_a_pool_serves_them(tmp_path: Path) -> None:
    target = make_target("llama", "cpu")
    pool = AdapterPool(target)
    for name, folder in folders_of("llama", tmp_path, 2).items():
        pool.add(name, folder)
    assert pool.loaded == ["a0", "a1"]
    assert pool.get("a0").nbytes > 0
