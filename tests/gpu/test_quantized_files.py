"""Quantised safetensors are dequantised on the GPU to the bits that a CPU computes."""

from pathlib import Path

import pytest
import torch

pytest.importorskip("compressed_tensors")

from forerun.models.load.checkpoint import open_checkpoint
from tests.gpu.tiny import need_cuda
from tests.models.quantized_folders import write
from tests.models.test_quantized import FORMATS

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", FORMATS)
def test_weights_are_dequantised_on_the_device(name: str, tmp_path: Path) -> None:
    need_cuda()
    model = write(tmp_path, FORMATS[name])
    weights = open_checkpoint(str(tmp_path)).weights.on("cuda")
    for key, weight in model.state_dict().items():
        assert torch.equal(weights[key].cpu(), weight), key
