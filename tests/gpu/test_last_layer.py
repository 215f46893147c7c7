"""Rows that nobody scores leave out the last layer but for keys and values: nothing that is asked for changes."""

import random

import pytest
import torch

from forerun.core.types import Needs, Prompts, TreeBatch
from forerun.models.cuda.network import Run, last_with_keys, run_pass
from forerun.models.cuda.plan import Size
from forerun.models.cuda.target import CudaDecoder
from forerun.testing import FakeSeq, random_tree
from tests.gpu.tiny import DEVICES, VOCAB, WIDE, make_target, need_cuda

LAYERS = 3  # of tiny models


def _read(target: CudaDecoder, all_rows: bool) -> list[torch.Tensor]:
    """Read a prompt beside a tree and alone, then score a tree behind it: all that comes out, and keys and values.

    With `all_rows`, what leaves the last layer is wanted too, so that every row passes it.
    """
    inner, rng = tuple(range(1, last_with_keys(target.model) + 1)), random.Random(7)
    needs = Needs(hidden_layers=(*inner, target.config.layers) if all_rows else inner)
    texts = [[rng.randrange(VOCAB) for _ in range(length)] for length in (20, 150)]
    short, long = (FakeSeq(i, text, max_length=300) for i, text in enumerate(texts))
    trees = TreeBatch.trees([random_tree(rng, seq.tokens[-1], VOCAB, 12) for seq in (short, long)])
    found = list[torch.Tensor]()
    target.kv.data.zero_()  # slots of layers of different sizes are not filled by all
    target.prefill([short], needs)
    beside = target.score([short], trees.select([0]), needs, Prompts([long], 90))
    assert beside.read is not None
    found += [beside.required_logits.clone(), *(beside.hidden[layer].clone() for layer in inner)]
    found += [beside.read[1].hidden[layer].clone() for layer in inner]
    target.prefill([long], needs)
    behind = target.score([short, long], trees, needs)
    found += [behind.required_logits.clone(), *(behind.hidden[layer].clone() for layer in inner)]
    slots = [page * 64 + i for page in target.kv.pool.held[long.id] for i in range(64)][:149]
    found.append(target.kv.data[:, :, :, slots].clone())
    for seq in (short, long):
        target.release(seq)
    return found


def _made(device: str, name: str = "llama") -> CudaDecoder:
    need_cuda(device)
    return make_target(name, device, torch.float32 if device == "cpu" else torch.bfloat16)


@pytest.mark.parametrize("name", ["llama", "mistral", "zz-gemma4", "large", "wide-split"])
@pytest.mark.parametrize("device", DEVICES)
def test_what_is_asked_for_is_the_same(device: str, name: str) -> None:
    """The last two have products of many rows that are cut otherwise for few of them, on a GPU."""
    if device == "cpu" and name in WIDE:
        pytest.skip("tiles are chosen on a GPU")
    wanted, found = (_read(_made(device, name), all_rows) for all_rows in (True, False))
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5 if device == "cpu" else 0.0, rtol=0.0)


def test_it_would_show_if_keys_and_values_were_left_out_too(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted, target = _read(_made("cpu"), True), _made("cpu")
    qkv, steps = target.passes.steps.qkv, target.passes.steps

    def without(run: Run, layer: int) -> None:
        qkv(run, layer)
        if layer == LAYERS - 1:
            target.kv.data[layer, :, :, run.slots[16:][run.slots[16:] >= 0].long()] = 0.0

    monkeypatch.setattr(steps, "qkv", without)
    found = _read(target, False)
    assert not all(torch.allclose(one, other, atol=1e-5) for one, other in zip(found, wanted, strict=True))


@pytest.mark.parametrize(("scored", "hidden", "rows"), [(0, (1,), []), (5, (1,), [5]), (5, (LAYERS,), [40])])
def test_rows_of_the_last_layer(
    scored: int, hidden: tuple[int, ...], rows: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    target, seen = _made("cpu"), list[int]()
    steps = target.passes.steps
    for name in ("embed", "qkv", "attend", "leave_attention", "leave_mlp", "head"):
        monkeypatch.setattr(steps, name, lambda *given: None)
    monkeypatch.setattr(steps, "gate", lambda run, layer: seen.append(run.size.rows) if layer == LAYERS - 1 else None)
    run_pass(steps, target.model, target.buffers, Run.of(Size(40, 4, 8), target.buffers.ints), hidden, scored)
    assert seen == rows


def test_rows_without_logits_end_with_the_last_layer_that_has_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of six layers of Gemma 4, three read earlier ones' keys and values."""
    target, seen = _made("cpu", "zz-gemma4"), list[tuple[int, int]]()
    steps = target.passes.steps
    for name in ("embed", "attend", "leave_attention", "gate", "leave_mlp", "head"):
        monkeypatch.setattr(steps, name, lambda *given: None)
    monkeypatch.setattr(steps, "qkv", lambda run, layer: seen.append((layer, run.size.rows)))
    run = Run.of(Size(40, 4, 8), target.buffers.ints)
    for scored, hidden in ((0, ()), (5, (2,)), (5, (3,))):
        run_pass(steps, target.model, target.buffers, run, hidden, scored)
    whole = [(layer, 40) for layer in range(3)]
    assert seen == [*whole, *whole, *((layer, 5) for layer in (3, 4, 5)), *((layer, 40) for layer in range(6))]
