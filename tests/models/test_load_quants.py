"""Unpacking quantised blocks: bit-equal to the gguf package, on random bytes, for every size of tail."""

import sys

import numpy as np
import pytest
import torch

from forerun.core.errors import UnsupportedModel
from forerun.models.load import quants
from forerun.models.load.quants import LAYOUTS, Blocks, dequantize

gguf = pytest.importorskip("gguf")

OURS = ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "MXFP4"]
BORROWED = ["Q2_K", "Q3_K", "IQ4_XS", "TQ1_0"]
KIND = {layout.name: kind for kind, layout in LAYOUTS.items()}


def random_blocks(name: str, count: int, seed: int = 0) -> Blocks:
    layout = LAYOUTS[KIND[name]]
    data = np.random.default_rng(seed).integers(0, 256, count * layout.bytes, dtype=np.uint8)
    return Blocks(KIND[name], (count * layout.weights,), torch.from_numpy(data))


def reference(blocks: Blocks) -> np.ndarray:
    layout = LAYOUTS[blocks.kind]
    rows = blocks.data.numpy().reshape(-1, layout.bytes)
    with np.errstate(all="ignore"):  # random bytes make infinite scales too
        return gguf.quants.dequantize(rows, gguf.GGMLQuantizationType(blocks.kind)).reshape(-1)


@pytest.mark.parametrize("name", OURS + BORROWED)
@pytest.mark.parametrize("count", [1, 3, 16, 17])
def test_unpacks_as_the_gguf_package_does(name: str, count: int) -> None:
    blocks = random_blocks(name, count, seed=count)
    ours = dequantize(blocks)
    assert ours.dtype == torch.float32
    np.testing.assert_array_equal(ours.numpy(), reference(blocks))


@pytest.mark.parametrize("name", ["Q4_1", "Q8_0", "Q6_K"])
def test_a_tensor_larger_than_a_chunk_has_no_seam(name: str) -> None:
    blocks = random_blocks(name, (1 << 20) // LAYOUTS[KIND[name]].weights + 1)
    np.testing.assert_array_equal(dequantize(blocks).numpy(), reference(blocks))


@pytest.mark.parametrize("name", OURS)
def test_everything_happens_on_the_device_that_was_asked_for(name: str) -> None:
    """`meta` tensors have no data, and any step that stayed on the CPU would fail beside them."""
    found = dequantize(random_blocks(name, 3), "meta")
    assert found.device.type == "meta"
    assert found.shape == dequantize(random_blocks(name, 3)).shape
    assert found.dtype == torch.float32


@pytest.mark.parametrize("name", ["Q4_K", "Q6_K"])
def test_a_device_has_few_launches_of_much_work(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk that a CPU has in its caches was 36,000 launches for the weights of a 1.5B; no bit depends on it."""
    done, unpack = list[int](), quants._UNPACKERS[name]
    monkeypatch.setitem(quants._UNPACKERS, name, lambda packed, out: done.append(len(packed)) or unpack(packed, out))
    blocks = random_blocks(name, (1 << 24) // 256 + 1)
    dequantize(blocks, "meta")
    assert done == [(1 << 24) // 256, 1]
    small = random_blocks(name, 9)
    whole = dequantize(small)
    monkeypatch.setattr(quants, "_CHUNK", 4 * 256)
    assert torch.equal(dequantize(small).view(torch.int32), whole.view(torch.int32))


@pytest.mark.gpu
@pytest.mark.parametrize("name", OURS + BORROWED)
def test_a_gpu_unpacks_the_same_bits(name: str) -> None:
    if not torch.cuda.is_available():
        pytest.skip("there is no GPU")
    blocks = random_blocks(name, 4097)
    found = dequantize(blocks, "cuda")
    assert found.device.type == "cuda"
    np.testing.assert_array_equal(found.cpu().numpy(), dequantize(blocks).numpy())


def test_layouts_are_those_of_the_gguf_package() -> None:
    sizes = {int(kind): size for kind, size in gguf.constants.GGML_QUANT_SIZES.items()}
    for kind, layout in LAYOUTS.items():
        assert (layout.weights, layout.bytes) == sizes[kind], layout
        assert gguf.GGMLQuantizationType(kind).name == layout.name


def test_the_result_does_not_share_memory_with_the_file() -> None:
    blocks = random_blocks("F32", 8)
    dequantize(blocks).zero_()
    assert blocks.data.any()


def test_a_type_that_nobody_unpacks_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match="I32"):
        dequantize(random_blocks("I32", 4))


def test_without_the_gguf_package_rare_types_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(UnsupportedModel, match="install gguf"):
        dequantize(random_blocks("Q2_K", 1))
    assert dequantize(random_blocks("Q4_K", 1)).numel() == 256
