"""A tiny model, a shape to inflate it to, and random heads of every kind for it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from forerun.drafters.heads import eagle as mtp
from forerun.drafters.heads.block_head import write_block
from forerun.drafters.heads.eagle_head import write_head
from forerun.drafters.heads.medusa import write_heads
from lab.inflate.model import PRESETS, Shape
from tests.drafters.tiny_heads import (
    block_config,
    block_weights,
    eagle_config,
    eagle_weights,
    heads_config,
    heads_weights,
    mtp_weights,
)
from tests.measure.conftest import CONFIG, VOCAB

WIDTH = int(str(CONFIG["hidden_size"]))
TINY = Shape(width=64, layers=3, heads=8, kv_heads=4, head_dim=16, inner=96)


@pytest.fixture
def tiny_shape(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setitem(PRESETS, "tiny", TINY)
    return "tiny"


@pytest.fixture(scope="session")
def every_head(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Folders of an EAGLE-3, EAGLE-1, MTP, Medusa, Hydra, DFlash and DSpark head."""
    box = tmp_path_factory.mktemp("heads")
    for kind in ("eagle3", "eagle"):
        config = replace(
            eagle_config(kind, VOCAB, WIDTH), layers=(0, 1, -1) if kind == "eagle3" else (-1,), max_length=1024
        )  # type: ignore[arg-type]
        write_head(box / kind, config, eagle_weights(config))
    layer = replace(eagle_config("mtp", VOCAB, WIDTH), max_length=1024)
    plain = {name: weight for name, weight in mtp_weights(layer).items() if "self_attn" not in name or "proj" in name}
    mtp.write_mtp(box / "mtp", layer, plain)
    for family in ("medusa", "hydra"):
        heads = heads_config(family, VOCAB, WIDTH)  # type: ignore[arg-type]
        write_heads(box / family, heads, heads_weights(heads))
    for name in ("dflash", "dspark"):
        block = replace(block_config(name, VOCAB, WIDTH), layers=(0, 1), max_length=1024)  # type: ignore[arg-type]
        write_block(box / name, block, block_weights(block))
    return [str(folder) for folder in sorted(box.iterdir())]
