"""Number formats of one checkpoint: which load, what a pass costs in each, and its share of the memory bandwidth."""

from __future__ import annotations

import pytest

from forerun.control.cost import CostModel
from forerun.measure.quality import load_mode
from forerun.models.decoder import Decoder
from forerun.models.load import checkpoint as loading
from forerun.models.native import library
from lab.cpu import measure_modes

pytestmark = pytest.mark.usefixtures("tiny_checkpoint")


def test_a_format_that_cannot_be_had_says_why() -> None:
    found = {name: load_mode(loading.open_checkpoint("tiny"), name) for name in ("gguf", "float32")}  # type: ignore[arg-type]
    assert isinstance(found["gguf"], str)
    assert "gguf" in found["gguf"]
    assert isinstance(found["float32"], Decoder)


def test_the_share_is_bytes_by_seconds_by_what_memory_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CostModel, "measure", classmethod(lambda cls, target: CostModel({1: 0.001, 8: 0.002})))
    found = measure_modes("tiny", gb_per_second=2.0, names=("float32", "gguf"))
    assert found["float32"]["t"] == {"1": 0.001, "8": 0.002}
    read = found["float32"]["weight_bytes"]
    assert found["float32"]["bandwidth_share"] == pytest.approx(read / 0.001 / 2e9, abs=5e-4)
    assert found["gguf"]["t"] is None
    assert found["gguf"]["why_not"]


@pytest.mark.skipif(not library.available(), reason="no native kernels here")
def test_a_byte_for_a_weight_is_a_quarter_of_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CostModel, "measure", classmethod(lambda cls, target: CostModel({1: 0.001})))
    found = measure_modes("tiny", 1.0, ("q8", "float32"))
    ratio = found["float32"]["weight_bytes"] / found["q8"]["weight_bytes"]
    # scales of blocks and what stays float32 come on top, much of it in a model this small
    assert 2.0 < ratio < 4.1
