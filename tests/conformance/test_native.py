"""The native decoder under the contract that every target is held to."""

from pathlib import Path

import pytest

from forerun.core.types import Needs
from forerun.models.config import DecoderConfig
from forerun.models.native.target import Mode, NativeDecoder
from forerun.testing import check_target
from tests.models.tiny_checkpoints import VOCAB, make_reference, save
from tests.native.blocks import needs_native


@needs_native
@pytest.mark.parametrize("mode", ["float32", "bfloat16", "q8"])
@pytest.mark.parametrize("name", ["smollm2", "mistral", "qwen3", "smollm3"])
def test_native_decoder_is_a_target(name: str, mode: Mode, tmp_path: Path) -> None:
    config, weights = save(make_reference(name), tmp_path)

    def make_target() -> NativeDecoder:
        return NativeDecoder(DecoderConfig.from_hf(config), weights, mode=mode, kv_slots=None)

    check_target(make_target, vocab_size=VOCAB, needs=Needs((-1, 1)), seed=len(name), atol=0.0)
