"""Our decoder under the contract that every target is held to."""

from pathlib import Path
from typing import Any

import pytest

from forerun.core.types import Needs
from forerun.models.decoder import Decoder
from forerun.testing import check_target
from tests.models.tiny_checkpoints import VOCAB, make_decoder, make_reference, save


@pytest.mark.slow(keep=3)
@pytest.mark.parametrize("kv_slots", [None, 6000])
@pytest.mark.parametrize("name", ["smollm2", "gemma3", "mistral", "qwen2_moe", "smollm3"])
def test_decoder_is_a_target(name: str, kv_slots: int | None, tmp_path: Path) -> None:
    config, weights = save(make_reference(name), tmp_path)

    def make_target() -> Decoder:
        return make_decoder(config, weights, kv_slots)

    check_target(make_target, vocab_size=VOCAB, needs=Needs((-1, 1)), seed=len(name))


def test_forgetting_to_move_the_path_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, weights = save(make_reference("smollm2"), tmp_path)

    def stay(self: Any, moves: list[tuple[int, int]]) -> None:
        pass

    monkeypatch.setattr("forerun.models.pages.PagedKV.move", stay)
    with pytest.raises(AssertionError, match="differ from a plain pass"):
        check_target(lambda: make_decoder(config, weights), vocab_size=VOCAB)
