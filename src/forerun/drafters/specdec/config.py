"""SpecDecConfig: the shape of a SpecDec drafter, its config.json, and the shapes of its weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from forerun.drafters.head_drafter import Calibration
from forerun.drafters.head_formats import rates_in, settings_in, size_in
from forerun.errors import DamagedFile, brief

KIND = "specdec"


@dataclass(frozen=True, slots=True)
class SpecDecConfig:
    """A few decoder layers as wide as the target's, for blocks of `levels` tokens."""

    width: int
    inner: int
    heads: int
    depth: int  # layers
    levels: int  # tokens that one pass drafts
    vocab_size: int  # the target's
    draft_vocab_size: int
    embedding_scale: float = 1.0
    norm_eps: float = 1e-5
    target: str = ""  # what it was trained for
    calibration: Calibration = field(default_factory=Calibration)
    rates: tuple[tuple[float, ...], ...] = ()  # [levels][ranks] how often right, given that the path was

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> SpecDecConfig:
        try:
            ours = settings_in(values, "forerun")
            config = cls(
                width=size_in(values, "hidden_size"),
                inner=size_in(values, "intermediate_size"),
                heads=size_in(values, "num_attention_heads"),
                depth=size_in(values, "num_hidden_layers"),
                levels=size_in(values, "block_size"),
                vocab_size=size_in(values, "vocab_size"),
                draft_vocab_size=size_in(values, "draft_vocab_size"),
                embedding_scale=float(values["embedding_scale"]),
                norm_eps=float(values["layer_norm_eps"]),
                target=str(values.get("target_model") or ""),
                calibration=Calibration(**settings_in(ours, "calibration")),
                rates=rates_in(ours),
            )
            if config.width % config.heads:
                raise ValueError(f"num_attention_heads = {config.heads} of a width of {config.width}")
        except (KeyError, TypeError, ValueError, ArithmeticError) as error:
            raise DamagedFile(
                f"config.json of the head lacks or garbles {brief(error)}; is it SpecDec's?"
            ) from None
        return config

    def to_json(self) -> dict[str, Any]:
        return {
            "architectures": ["SpecDecDraftModel"],
            "hidden_size": self.width,
            "intermediate_size": self.inner,
            "num_attention_heads": self.heads,
            "num_hidden_layers": self.depth,
            "block_size": self.levels,
            "vocab_size": self.vocab_size,
            "draft_vocab_size": self.draft_vocab_size,
            "embedding_scale": self.embedding_scale,
            "layer_norm_eps": self.norm_eps,
            "target_model": self.target,
            "forerun": {"format": KIND, "calibration": asdict(self.calibration), "rates": self.rates},
        }

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of all weights that a file must have."""
        width, inner = self.width, self.inner
        found: dict[str, tuple[int, ...]] = {
            "places": (self.levels, width),
            "fc.weight": (width, 2 * width),
            "fc.bias": (width,),
            "source.weight": (2 * width * self.depth, width),
            "source.bias": (2 * width * self.depth,),
            "lm_head.weight": (self.draft_vocab_size, width),
            "lm_head.bias": (self.draft_vocab_size,),
        }
        matrices = {
            "self_attn.in": (3 * width, width), "self_attn.out": (width, width), "cross_attn.in": (width, width),
            "cross_attn.out": (width, width), "mlp.up": (inner, width), "mlp.down": (width, inner),
        }  # fmt: skip
        for i in range(self.depth):
            for name, shape in matrices.items():
                found[f"layers.{i}.{name}.weight"] = shape
                found[f"layers.{i}.{name}.bias"] = shape[:1]
            for part in ("self_attn", "cross_attn", "mlp"):
                found[f"layers.{i}.{part}.norm.weight"] = found[f"layers.{i}.{part}.norm.bias"] = (width,)
        return found
