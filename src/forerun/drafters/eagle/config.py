"""EagleConfig: an EAGLE head's shape, the features it reads, and its measured acceptance.

Three kinds. EAGLE-1 (`eagle`) reads the target's last hidden row and predicts the next one, so that the target's
own LM head turns it into a law. EAGLE-3 (`eagle3`) reads the inputs of three layers, keeps its own LM head, over
a reduced vocabulary, and predicts no feature. EAGLE-2 is EAGLE-1's head with a dynamic tree. A multi-token-prediction
layer (`mtp`, forerun.drafters.mtp) reads what EAGLE-1 does, behind norms.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from forerun.drafters.head_formats import settings_in, size_in
from forerun.drafters.head_shape import HeadShape, shape_in
from forerun.errors import DamagedFile, brief

Kind = Literal["eagle", "eagle3", "mtp"]
MOST_LAYERS = 64  # that a file may say it has
NAMES: Mapping[str, str] = {"eagle": "EAGLE-1", "eagle3": "EAGLE-3", "mtp": "MTP"}


@dataclass(frozen=True, slots=True, kw_only=True)
class EagleConfig(HeadShape):
    """Layers on the target's features: one, or several in an EAGLE-3 head."""

    kind: Kind
    depth: int = 1  # layers of its own
    fc_norm: bool = False  # EAGLE-3.1: a norm on each feature before they are fused
    norm_output: bool = False  # EAGLE-3.1: the normed output is the next step's feature
    norm_before_fc: bool = False  # one norm over all features, side by side
    norm_before_residual: bool = False

    @classmethod
    def from_json(cls, values: Mapping[str, Any], kind: Kind) -> EagleConfig:
        """From a config.json in the authors' form, or in that of speculators; layers stay empty if not named."""
        try:
            ids = values.get("eagle_aux_hidden_state_layer_ids") or _nested_ids(values) or ()
            return cls(
                **shape_in(values),
                kind=kind,
                depth=_depth_in(values) if kind == "eagle3" else 1,
                layers=tuple(int(layer) for layer in ids) if kind == "eagle3" else (-1,),
                fc_norm=bool(values.get("fc_norm")),
                norm_output=bool(values.get("norm_output")),
                norm_before_fc=bool(values.get("norm_before_fc")),
                norm_before_residual=bool(values.get("norm_before_residual")),
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
            **self.layer_json("llama", self.depth),
            **self.target_json(),
            "forerun": self.measured_json(),
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
            "transformer_layer_config": self.layer_json("llama", self.depth),
            "draft_vocab_size": self.draft_vocab_size,
            "target_hidden_size": self.target_width,
            "embed_requires_grad": False,
            "forerun": self.measured_json(),
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


def default_layers(layers: int) -> tuple[int, int, int]:
    """The inputs of layers 2, L/2 and L - 3: what EAGLE-3 heads read where their files do not say."""
    return (min(2, layers), layers // 2, max(0, layers - 3))


def _depth_in(values: Mapping[str, Any]) -> int:
    depth = size_in({**values, **settings_in(values, "transformer_layer_config")}, "num_hidden_layers", 1)
    if depth > MOST_LAYERS:
        raise ValueError(f"num_hidden_layers = {depth}")
    return depth


def _nested_ids(values: Mapping[str, Any]) -> Any:
    return settings_in(values, "eagle_config").get("eagle_aux_hidden_state_layer_ids")
