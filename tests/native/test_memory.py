"""Memory for packed weights: aligned, in pieces that do not overlap, there as long as one is used."""

import gc
from pathlib import Path

import pytest

from forerun.models.config import DecoderConfig
from forerun.models.load.checkpoint import open_checkpoint
from forerun.models.load.gguf import GgufFile
from forerun.models.native import packing as memory
from forerun.models.native.target import NativeDecoder
from tests.native.blocks import needs_native

pytestmark = needs_native


def test_pieces_are_aligned_and_do_not_overlap() -> None:
    sizes = [1, 64, 65, 100_000, (2 << 20) - 1, 2 << 20, (8 << 20) + 5, 7, 1_500_000, 1_500_000, 0, 3]
    pieces = [memory.take_memory(size) for size in sizes]
    assert [piece.numel() for piece in pieces] == sizes
    for i, piece in enumerate(pieces):
        assert piece.numel() == 0 or piece.data_ptr() % 64 == 0
        piece.fill_(i)
    for i, piece in enumerate(pieces):
        assert bool((piece == i).all())


def test_large_pieces_start_at_a_huge_page() -> None:
    assert memory.take_memory(2 << 20).data_ptr() % (2 << 20) == 0


def test_a_piece_outlives_its_neighbours() -> None:
    pieces = [memory.take_memory(1_500_000) for _ in range(12)]
    assert 2 <= len({piece.untyped_storage().data_ptr() for piece in pieces}) < 12  # several share a slab
    kept = pieces[-1].fill_(9)
    del pieces
    gc.collect()
    memory.take_memory(8 << 20).fill_(1)
    assert bool((kept == 9).all())


def test_file_and_copy_are_not_in_memory_side_by_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file's pages are let go of after every layer, not only when all are packed."""
    from tests.models.tiny_gguf import write_tiny

    checkpoint = open_checkpoint(str(write_tiny(tmp_path / "tiny.gguf")))
    config = DecoderConfig.from_hf(checkpoint.config)
    dropped: list[int] = []
    monkeypatch.setattr(GgufFile, "drop_pages", lambda self: dropped.append(1))
    NativeDecoder(config, checkpoint.weights, mode="gguf", kv_slots=64)
    assert len(dropped) == config.layers + 1
