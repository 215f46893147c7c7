"""HeadShape: the layer shape of a head, and what every head made of transformer layers says in its config.json.

EAGLE's heads, multi-token-prediction layers and block drafters are layers of the same kind on the target's features:
their configs add what is their own. What a file leaves out, embedding or LM head, the target shares.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from forerun.drafters.head_drafter import Calibration
from forerun.drafters.head_formats import check_weight, rates_in, settings_in, size_in
from forerun.drafters.vocab import DraftVocabulary
from forerun.errors import DamagedFile, InvalidInput
from forerun.models.shared import SharedWeights

Sizes = dict[str, tuple[int, ...]]  # of weights, by name


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadShape:
    """Layers on the target's features."""

    width: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int  # the target's
    draft_vocab_size: int
    layers: tuple[int, ...]  # hidden layers it reads: i = the input of layer i, -1 = after the last norm
    target_width: int
    norm_eps: float = 1e-5
    rope_theta: float = 10_000.0
    max_length: int = 2048
    target: str = ""  # what it was trained for
    calibration: Calibration = field(default_factory=Calibration)
    rates: tuple[tuple[float, ...], ...] = ()  # [levels][ranks] how often right, given that the path was

    @property
    def feature_width(self) -> int:
        return self.target_width * max(1, len(self.layers))

    def layer_weights(self, into: int) -> Sizes:
        """Of one layer whose attention reads rows of width `into`."""
        width, q, kv = self.width, self.heads * self.head_dim, self.kv_heads * self.head_dim
        return {
            "self_attn.q_proj.weight": (q, into),
            "self_attn.k_proj.weight": (kv, into),
            "self_attn.v_proj.weight": (kv, into),
            "self_attn.o_proj.weight": (width, q),
            "mlp.gate_proj.weight": (self.inner, width),
            "mlp.up_proj.weight": (self.inner, width),
            "mlp.down_proj.weight": (width, self.inner),
            "post_attention_layernorm.weight": (width,),
        }

    def check(self, folder: Path, weights: Mapping[str, Tensor], needed: Sizes, optional: Sizes) -> None:
        """Every weight against the config, so that a wrong file is named here and not deep in a matrix product."""
        if self.heads % self.kv_heads or self.head_dim % 2:
            raise DamagedFile(
                f"config.json of {folder} says {self.heads} heads on {self.kv_heads} of keys, "
                f"each {self.head_dim} wide; fetch it again"
            )
        rows = self.draft_vocab_size
        optional = {
            "embed_tokens.weight": (self.vocab_size, self.width),
            "lm_head.weight": (rows, self.width),
            "d2t": (rows,),
            **optional,
        }
        for name, shape in ({n: s for n, s in optional.items() if n in weights} | needed).items():
            check_weight(folder, weights, name, shape)

    def layer_json(self, family: str, depth: int, **more: bool) -> dict[str, Any]:
        """The layers, as transformers names their settings."""
        return {
            "model_type": family,
            "hidden_size": self.width,
            "intermediate_size": self.inner,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "num_hidden_layers": depth,
            "vocab_size": self.vocab_size,
            "rms_norm_eps": self.norm_eps,
            "rope_theta": self.rope_theta,
            "max_position_embeddings": self.max_length,
            "hidden_act": "silu",
            **more,
            "tie_word_embeddings": False,
        }

    def target_json(self) -> dict[str, Any]:
        """What it drafts, and for whom."""
        return {
            "draft_vocab_size": self.draft_vocab_size,
            "target_hidden_size": self.target_width,
            "target_model": self.target,
        }

    def measured_json(self) -> dict[str, Any]:
        """What only we measure."""
        return {"calibration": asdict(self.calibration), "rates": self.rates}


def shape_in(values: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a HeadShape, but for its layers, in a config.json in the authors' form or in that of speculators.

    Raises KeyError, TypeError or ValueError where one is missing or cannot be what it says.
    """
    shape = {**values, **settings_in(values, "transformer_layer_config")}
    width, heads, vocab = (size_in(shape, n) for n in ("hidden_size", "num_attention_heads", "vocab_size"))
    rope = settings_in(shape, "rope_parameters") or settings_in(shape, "rope_scaling")
    ours = settings_in(values, "forerun")
    trained_for = settings_in(settings_in(values, "speculators_config"), "verifier").get("name_or_path")
    return {
        "width": width,
        "inner": size_in(shape, "intermediate_size"),
        "heads": heads,
        "kv_heads": size_in(shape, "num_key_value_heads", heads),
        "head_dim": size_in(shape, "head_dim", max(1, width // heads)),
        "vocab_size": vocab,
        "draft_vocab_size": size_in(values, "draft_vocab_size", vocab),
        "target_width": size_in(values, "target_hidden_size", width),
        "norm_eps": float(shape.get("rms_norm_eps") or 1e-5),
        "rope_theta": float(shape.get("rope_theta") or rope.get("rope_theta") or 10_000.0),
        "max_length": size_in(shape, "max_position_embeddings", 2048),
        "target": str(values.get("target_model") or trained_for or ""),
        "calibration": Calibration(**settings_in(ours, "calibration")),
        "rates": rates_in(ours),
    }


def vocabulary_of(shape: HeadShape, weights: Mapping[str, Tensor]) -> DraftVocabulary:
    """The tokens that the head can draft."""
    rows = len(weights["lm_head.weight"]) if "lm_head.weight" in weights else shape.draft_vocab_size
    return DraftVocabulary.from_file(weights, rows, shape.vocab_size)


def checked_shared(
    shape: HeadShape, weights: Mapping[str, Tensor], shared: SharedWeights | None
) -> SharedWeights | None:
    """What the target shares, if it fits; what the file leaves out must be shared."""
    if shared is not None:
        shared.must_fit(shape.target_width, shape.vocab_size, shape.target)
    elif "embed_tokens.weight" not in weights or "lm_head.weight" not in weights:
        raise InvalidInput(
            "the head shares embedding or LM head with its target and this target shares none; "
            "use a head that stores its own"
        )
    return shared
