"""BlockConfig: which parts a block drafter has, from its config.json and back.

Public files say it in three ways: the authors' (`dflash_config`), that of speculators (`transformer_layer_config`), and
flat. What a file has that is not known here is refused by name, because a head that loads with a part left out drafts
tokens that are never accepted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from forerun.drafters.heads.base import HeadShape, shape_in, windows_in
from forerun.drafters.heads.formats import config_of, settings_in, size_in

BlockKind = Literal["dflash", "dspark", "peagle"]
KINDS: tuple[BlockKind, ...] = get_args(BlockKind)
Causal = Literal["none", "windowed", "all"]  # which layers' rows see only the rows before them in the block
Markov = Literal["none", "vanilla", "gated", "selector"]
NAMES: Mapping[str, str] = {"dflash": "DFlash", "dspark": "DSpark", "peagle": "P-EAGLE"}
_MODELS = {"dflash": "DFlashDraftModel", "dspark": "Qwen3DSparkModel", "peagle": "PEagleDraftModel"}
_BLOCKS = {"dflash": 16, "dspark": 8, "peagle": 8}  # rows of a block where a file does not say
CANDIDATES = 64  # tokens of a position that a tree is grown from


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockConfig(HeadShape):
    """A few layers that read the target's features as keys and values, or as EAGLE-3 does (P-EAGLE)."""

    kind: BlockKind
    depth: int  # layers of the drafter
    rows: int  # of a block: the root and the masks
    mask_token: int
    first: int  # the first row that predicts: 0 = the root's own, 1 = the first mask's
    causal: Causal = "none"
    taps: int = 0  # of the convolutions: a row and so many less one before it; 0 = no convolutions
    group: int = 1  # neighbouring columns that share what a row adds to their taps
    markov: Markov = "none"
    markov_rank: int = 0
    candidates: int = CANDIDATES
    confidence: bool = False  # has it a confidence head?
    confidence_with_markov: bool = True  # does that read the token before?
    norm_before_residual: bool = False  # P-EAGLE

    @property
    def levels(self) -> int:
        """Tokens that one pass drafts."""
        return self.rows - self.first

    @property
    def reads_rows(self) -> bool:
        """Do committed tokens pass through its layers?"""
        return self.kind == "peagle"

    def span(self, layer: int) -> tuple[int, bool]:
        """The window of a layer, 0 = all positions; and whether a row sees those after it."""
        slides = self.window_of(layer)
        return slides, self.causal == "all" or (self.causal == "windowed" and slides > 0)

    @classmethod
    def from_json(cls, values: Mapping[str, Any], kind: BlockKind) -> BlockConfig:
        """From a config.json in the authors' form, or in that of speculators."""
        with config_of(f"{NAMES[kind]}'s"):
            own = {**values, **settings_in(values, "transformer_layer_config"), **settings_in(values, "dflash_config")}
            _refuse_unknown(own)
            shape, depth = shape_in(values), size_in(own, "num_hidden_layers")
            rank = "selector_rank" if own.get("selector_rank") else "markov_rank"
            return cls(
                **shape,
                kind=kind,
                depth=depth,
                layers=_layers_in(own, kind),
                rows=_rows_in(values, own, kind),
                mask_token=_mask_in(own, shape["vocab_size"]),
                first=int(kind == "dflash") if (says := own.get("sample_from_anchor")) is None else int(not says),
                **_spans_in(own, depth, kind),
                taps=size_in(own, "conv_kernel_size") if own.get("conv_kernel_size") else 0,
                group=size_in(own, "conv_group_size", 1),
                markov=_markov_in(own),
                markov_rank=size_in(own, rank) if own.get(rank) else 0,
                candidates=size_in(own, "selector_top_k", CANDIDATES),
                confidence=bool(own.get("enable_confidence_head")),
                confidence_with_markov=own.get("confidence_head_with_markov") is not False,
                norm_before_residual=bool(own.get("norm_before_residual")),
            )

    def to_json(self) -> dict[str, Any]:
        """config.json in the authors' form, with what only we measure under a key of our own."""
        values: dict[str, Any] = {
            "architectures": ["DFlash2DraftModel" if self.taps else _MODELS[self.kind]],
            **self.layer_json("llama" if self.reads_rows else "qwen3", self.depth, attention_bias=False),
            "block_size": self.rows,
            **self.target_json(),
            "sample_from_anchor": not self.first,
            "forerun": {"format": self.kind, **self.measured_json()},
        }
        if self.reads_rows:
            residual = {"norm_before_residual": self.norm_before_residual}
            ids = {"eagle_aux_hidden_state_layer_ids": list(self.layers)}
            return values | ids | residual | {"mask_token_id": self.mask_token, "ptd_token_id": self.mask_token}
        own = {"mask_token_id": self.mask_token, "target_layer_ids": [layer - 1 for layer in self.layers]}
        if self.causal == "all" or (self.window and self.causal == "none"):
            own |= {"causal": self.causal == "all"}
        if self.taps:
            own |= {"block_size": self.rows, "conv_kernel_size": self.taps, "conv_group_size": self.group}
        if self.markov == "selector":
            return values | {
                "dflash_config": {**own, "selector_rank": self.markov_rank, "selector_top_k": self.candidates}
            }
        if self.kind == "dflash":
            return values | {"dflash_config": own}
        return values | {
            **own,
            "markov_rank": self.markov_rank,
            "markov_head_type": "gated" if self.markov == "gated" else "vanilla",
            "enable_confidence_head": self.confidence,
            "confidence_head_with_markov": self.confidence and self.confidence_with_markov,
        }


def spread_features(layers: int, count: int = 5) -> tuple[int, ...]:
    """Which hidden layers to read: from the second layer's input to that of the last but one, evenly."""
    low, high = min(2, layers), max(min(2, layers), layers - 1)
    return tuple(sorted({round(low + i * (high - low) / max(1, count - 1)) for i in range(count)}))


def _layers_in(own: Mapping[str, Any], kind: BlockKind) -> tuple[int, ...]:
    """Outputs of layers in the authors' files; speculators and P-EAGLE count inputs, as we do."""
    if ids := own.get("target_layer_ids"):
        found = tuple(int(layer) + 1 for layer in ids)
    elif kind == "peagle":
        nested = settings_in(own, "eagle_config").get("eagle_aux_hidden_state_layer_ids")
        found = tuple(int(layer) for layer in own.get("eagle_aux_hidden_state_layer_ids") or nested or ())
        if not found:
            return ()  # the usual ones, which depend on the target
    else:
        found = tuple(int(layer) for layer in own["aux_hidden_state_layer_ids"])
    if not found or min(found) < 0 or len(set(found)) != len(found):
        raise ValueError(f"target_layer_ids = {found!r:.60}")
    return found


def _rows_in(values: Mapping[str, Any], own: Mapping[str, Any], kind: BlockKind) -> int:
    methods = settings_in(values, "speculators_config").get("proposal_methods")
    if not own.get("block_size") and isinstance(methods, list) and methods and isinstance(methods[0], Mapping):
        own = {"block_size": methods[0].get("speculative_tokens")}  # P-EAGLE's name no block
    return size_in(own, "block_size", _BLOCKS[kind])


def _mask_in(own: Mapping[str, Any], vocab_size: int) -> int:
    named = (own.get(key) for key in ("mask_token_id", "ptd_token_id", "pard_token"))
    mask = next((one for one in named if one is not None), None)
    if type(mask) is not int or not 0 <= mask < vocab_size:
        raise ValueError(f"mask_token_id = {mask!r:.60}")
    return mask


def _spans_in(own: Mapping[str, Any], depth: int, kind: BlockKind) -> dict[str, Any]:
    """Windows and causality of the layers.

    vLLM, speculators and SpecForge agree: where a file says nothing, windowed layers are causal inside the block and
    others are not. DeepSpec's windows (`use_swa`) look both ways.
    """
    windows = windows_in(own, depth)
    given = (own.get(key) for key in ("causal", "causal_head", "is_causal"))
    says = True if kind == "peagle" else next((one for one in given if one is not None), None)
    both_ways = own.get("use_swa") or own.get("sliding_window_non_causal")
    causal = ("all" if says else "none") if says is not None else "none" if both_ways else "windowed"
    return windows | {"causal": causal if windows or causal == "all" else "none"}


def _markov_in(own: Mapping[str, Any]) -> Markov:
    if own.get("selector_rank"):
        return "selector"
    if not own.get("markov_rank"):
        return "none"
    return "gated" if own.get("markov_head_type") == "gated" else "vanilla"


def _refuse_unknown(own: Mapping[str, Any]) -> None:
    """Variants whose layers compute something else: they would load, and draft what is never accepted."""
    kind, mode, shape = own.get("markov_head_type"), own.get("attention_mode"), own.get("projector_type")
    for unknown, what in (
        (own.get("fc_layernorm") or own.get("fc_norm"), "norms on every feature"),
        (own.get("norm_before_fc"), "a norm in front of its fc"),
        (own.get("attention_bias"), "biases in its attention"),
        (own.get("attention_sink_bias"), "attention sinks"),
        (own.get("markov_rank") and own.get("selector_rank"), "a Markov head and a path selector"),
        (kind not in (None, "vanilla", "gated"), f"a Markov head of the type {kind!r:.40}"),
        (mode not in (None, "gqa"), f"attention of the type {mode!r:.40}"),
        (shape not in (None, "dflash", "dflash2", "dspark"), f"a head of the type {shape!r:.40}"),
        (own.get("input_embedding_scale") not in (None, 1.0), "scaled embeddings"),
        (own.get("output_multiplier") not in (None, 1.0), "scaled logits"),
        (own.get("final_logit_softcapping"), "capped logits"),
    ):
        if unknown:
            raise ValueError(f"what is known here: it has {what}")
