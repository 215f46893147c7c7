"""EagleConfig: an EAGLE head's shape, the features it reads, and its measured acceptance.

Three kinds. EAGLE-1 (`eagle`) reads the target's last hidden row and predicts the next one, so that the target's
own LM head turns it into a law. EAGLE-3 (`eagle3`) reads the inputs of three layers, keeps its own LM head, over
a reduced vocabulary, and predicts no feature. EAGLE-2 is EAGLE-1's head with a dynamic tree. A multi-token-prediction
layer (`mtp`, forerun.drafters.mtp) reads what EAGLE-1 does, behind norms.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from forerun.drafters.head_drafter import Calibration
from forerun.drafters.head_formats import rates_in, settings_in, size_in
from forerun.errors import DamagedFile, brief

Kind = Literal["eagle", "eagle3", "mtp"]
NAMES: Mapping[str, str] = {"eagle": "EAGLE-1", "eagle3": "EAGLE-3", "mtp": "MTP"}


@dataclass(frozen=True, slots=True)
class EagleConfig:
    """One layer on the target's features."""

    kind: Kind
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
    fc_norm: bool = False  # EAGLE-3.1: a norm on each feature before they are fused
    norm_output: bool = False  # EAGLE-3.1: the normed output is the next step's feature
    norm_before_fc: bool = False  # one norm over all features, side by side
    norm_before_residual: bool = False
    target: str = ""  # what it was trained for
    calibration: Calibration = field(default_factory=Calibration)
    rates: tuple[tuple[float, ...], ...] = ()  # [levels][ranks] how often right, given that the path was

    @property
    def feature_width(self) -> int:
        return self.target_width * max(1, len(self.layers))

    @classmethod
    def from_json(cls, values: Mapping[str, Any], kind: Kind) -> EagleConfig:
        """From a config.json in the authors' form, or in that of speculators; layers stay empty if not named."""
        try:
            shape = {**values, **settings_in(values, "transformer_layer_config")}
            ours = settings_in(values, "forerun")
            width, heads = size_in(shape, "hidden_size"), size_in(shape, "num_attention_heads")
            rope = settings_in(shape, "rope_parameters") or settings_in(shape, "rope_scaling")
            ids = values.get("eagle_aux_hidden_state_layer_ids") or _nested_ids(values) or ()
            return cls(
                kind=kind,
                width=width,
                inner=size_in(shape, "intermediate_size"),
                heads=heads,
                kv_heads=size_in(shape, "num_key_value_heads", heads),
                head_dim=size_in(shape, "head_dim", max(1, width // heads)),
                vocab_size=size_in(shape, "vocab_size"),
                draft_vocab_size=size_in(values, "draft_vocab_size", size_in(shape, "vocab_size")),
                layers=tuple(int(layer) for layer in ids) if kind == "eagle3" else (-1,),
                target_width=size_in(values, "target_hidden_size", width),
                norm_eps=float(shape.get("rms_norm_eps") or 1e-5),
                rope_theta=float(shape.get("rope_theta") or rope.get("rope_theta") or 10_000.0),
                max_length=size_in(shape, "max_position_embeddings", 2048),
                fc_norm=bool(values.get("fc_norm")),
                norm_output=bool(values.get("norm_output")),
                norm_before_fc=bool(values.get("norm_before_fc")),
                norm_before_residual=bool(values.get("norm_before_residual")),
                target=_target_name(values),
                calibration=Calibration(**settings_in(ours, "calibration")),
                rates=rates_in(ours),
            )
        except (KeyError, TypeError, ValueError, ArithmeticError) as error:
            raise DamagedFile(
                f"config.json of the head lacks or garbles {brief(error)}; is it an EAGLE head's config?"
            ) from None

    def to_json(self) -> dict[str, Any]:
        """config.json in the authors' form, with what only we measure under a key of our own."""
        name = "LlamaForCausalLMEagle3" if self.kind == "eagle3" else "LlamaForCausalLMEagle"
        values = {
            "architectures": [name],
            **self._shape(),
            "draft_vocab_size": self.draft_vocab_size,
            "target_hidden_size": self.target_width,
            "target_model": self.target,
            "forerun": {"calibration": asdict(self.calibration), "rates": self.rates},
        }
        return {**values, **self._eagle3_settings()}

    def to_speculators_json(self, speculative_tokens: int = 5) -> dict[str, Any]:
        """config.json in the form of speculators, which vLLM loads."""
        return {
            "architectures": ["Eagle3Speculator"],
            "speculators_model_type": "eagle3",
            "speculators_version": "0.7.0",
            "speculators_config": {
                "algorithm": "eagle3",
                "default_proposal_method": "greedy",
                "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": speculative_tokens}],
                "verifier": {"name_or_path": self.target, "architectures": ["LlamaForCausalLM"]},
            },
            "transformer_layer_config": self._shape(),
            "draft_vocab_size": self.draft_vocab_size,
            "target_hidden_size": self.target_width,
            "embed_requires_grad": False,
            "forerun": {"calibration": asdict(self.calibration), "rates": self.rates},
            **self._eagle3_settings(),
        }

    def _eagle3_settings(self) -> dict[str, Any]:
        if self.kind != "eagle3":
            return {}
        return {
            "eagle_aux_hidden_state_layer_ids": list(self.layers),
            "fc_norm": self.fc_norm,
            "norm_output": self.norm_output,
            "norm_before_fc": self.norm_before_fc,
            "norm_before_residual": self.norm_before_residual,
        }

    def _shape(self) -> dict[str, Any]:
        return {
            "model_type": "llama",
            "hidden_size": self.width,
            "intermediate_size": self.inner,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "num_hidden_layers": 1,
            "vocab_size": self.vocab_size,
            "rms_norm_eps": self.norm_eps,
            "rope_theta": self.rope_theta,
            "max_position_embeddings": self.max_length,
            "hidden_act": "silu",
            "tie_word_embeddings": False,
        }


def default_layers(layers: int) -> tuple[int, int, int]:
    """The inputs of layers 2, L/2 and L - 3: what EAGLE-3 heads read where their files do not say."""
    return (min(2, layers), layers // 2, max(0, layers - 3))


def _target_name(values: Mapping[str, Any]) -> str:
    nested = settings_in(settings_in(values, "speculators_config"), "verifier")
    return str(values.get("target_model") or nested.get("name_or_path") or "")


def _nested_ids(values: Mapping[str, Any]) -> Any:
    return settings_in(values, "eagle_config").get("eagle_aux_hidden_state_layer_ids")
