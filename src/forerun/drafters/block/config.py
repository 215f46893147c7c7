"""BlockConfig: the shape of a block drafter (DFlash, DSpark), and its config.json as the authors write it.

Files count hidden layers by their outputs (`target_layer_ids`: 0 = what the first layer returns); here, as everywhere
in this package, i is the input of layer i. DFlash's first row carries the root and predicts nothing, the mask rows
behind it predict their own token; DSpark's root row predicts too, each row the token after it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from forerun.drafters.head_formats import settings_in, size_in
from forerun.drafters.head_shape import HeadShape, shape_in
from forerun.errors import DamagedFile, brief

BlockKind = Literal["dflash", "dspark"]
NAMES: Mapping[str, str] = {"dflash": "DFlash", "dspark": "DSpark"}
_MODELS = {"dflash": "DFlashDraftModel", "dspark": "Qwen3DSparkModel"}
_BLOCKS = {"dflash": 16, "dspark": 8}  # rows of a block where a file does not say


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockConfig(HeadShape):
    """A few layers that read the target's features as keys and values."""

    kind: BlockKind
    depth: int  # layers of the drafter
    rows: int  # of a block: the root and the masks
    mask_token: int
    markov_rank: int = 0  # 0 = no Markov head
    confidence: bool = False  # has it a confidence head?

    @property
    def levels(self) -> int:
        """Tokens that one pass drafts."""
        return self.rows - self.first

    @property
    def first(self) -> int:
        """The first row that predicts: the root's own (DSpark), or the first mask's (DFlash)."""
        return 1 if self.kind == "dflash" else 0

    @classmethod
    def from_json(cls, values: Mapping[str, Any], kind: BlockKind) -> BlockConfig:
        """From a config.json in the authors' form, or in that of speculators."""
        try:
            own = {**values, **settings_in(values, "dflash_config")}
            _refuse_unknown(own)
            shape = shape_in(values)
            return cls(
                **shape,
                kind=kind,
                depth=size_in(
                    {**values, **settings_in(values, "transformer_layer_config")}, "num_hidden_layers"
                ),
                layers=_layers_in(own),
                rows=size_in(own, "block_size", _BLOCKS[kind]),
                mask_token=_mask_in(own, shape["vocab_size"]),
                markov_rank=size_in(own, "markov_rank", 1) if own.get("markov_rank") else 0,
                confidence=bool(own.get("enable_confidence_head")),
            )
        except (KeyError, TypeError, ValueError, ArithmeticError) as error:
            raise DamagedFile(
                f"config.json of the head lacks or garbles {brief(error)}; is it {NAMES[kind]}'s?"
            ) from None

    def to_json(self) -> dict[str, Any]:
        """config.json in the authors' form, with what only we measure under a key of our own."""
        outputs = [layer - 1 for layer in self.layers]
        values: dict[str, Any] = {
            "architectures": [_MODELS[self.kind]],
            **self.layer_json("qwen3", self.depth, attention_bias=False),
            "block_size": self.rows,
            **self.target_json(),
            "forerun": {"format": self.kind, **self.measured_json()},
        }
        if self.kind == "dflash":
            return values | {"dflash_config": {"mask_token_id": self.mask_token, "target_layer_ids": outputs}}
        return values | {
            "mask_token_id": self.mask_token,
            "target_layer_ids": outputs,
            "markov_rank": self.markov_rank,
            "markov_head_type": "vanilla",
            "enable_confidence_head": self.confidence,
            "confidence_head_with_markov": self.confidence,
        }


def spread_features(layers: int, count: int = 5) -> tuple[int, ...]:
    """Which hidden layers to read: from the second layer's input to that of the last but one, evenly."""
    low, high = min(2, layers), max(min(2, layers), layers - 1)
    return tuple(sorted({round(low + i * (high - low) / max(1, count - 1)) for i in range(count)}))


def _layers_in(own: Mapping[str, Any]) -> tuple[int, ...]:
    """Outputs of layers in the authors' files; speculators counts inputs, as we do."""
    if ids := own.get("target_layer_ids"):
        found = tuple(int(layer) + 1 for layer in ids)
    else:
        found = tuple(int(layer) for layer in own["aux_hidden_state_layer_ids"])
    if not found or min(found) < 0 or len(set(found)) != len(found):
        raise ValueError(f"target_layer_ids = {found!r:.60}")
    return found


def _mask_in(own: Mapping[str, Any], vocab_size: int) -> int:
    mask = own["mask_token_id"]
    if type(mask) is not int or not 0 <= mask < vocab_size:
        raise ValueError(f"mask_token_id = {mask!r:.60}")
    return mask


def _refuse_unknown(own: Mapping[str, Any]) -> None:
    """Variants whose layers compute something else: they would load, and draft what is never accepted."""
    windows = own.get("use_swa") or "sliding_attention" in (own.get("layer_types") or ())
    causal = own.get("causal") or own.get("is_causal")
    kind = own.get("markov_head_type")
    for unknown, what in (
        (windows, "sliding windows"),
        (causal, "causal attention inside the block"),
        (own.get("fc_layernorm"), "norms on every feature"),
        (own.get("attention_bias"), "biases in its attention"),
        (kind not in (None, "vanilla"), f"a Markov head of the type {kind!r:.40}"),
    ):
        if unknown:
            raise ValueError(f"what is known here: it has {what}")
