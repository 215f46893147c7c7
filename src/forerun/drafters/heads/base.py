"""Shared parts of head drafters: observed hidden rows, calibration, timing, the shape of a head, last-row heads.

A head reads the target's hidden rows. They reach it through `observe`: the rows of the root and the accepted
path of every round, the prompt being a round too. Row t of a sequence belongs to token t, so a sequence of n tokens has
n - 1 rows when a round starts: the last token, the root, has not been through the target yet.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.core.clock import WALL, Clock
from forerun.core.errors import DamagedFile, InvalidInput, UnsupportedModel
from forerun.core.params import SamplingParams, SpeculativeConfig
from forerun.core.types import Budget, PlainSeq, Scores, Seq, TreeBatch, Verdict
from forerun.drafters.heads.formats import DraftVocabulary, check_weight, rates_in, readers, settings_in, size_in
from forerun.models.base import Abilities, SharedWeights, Target
from forerun.models.layers import pair_up
from forerun.models.native.pass_rows import HiddenRows, LayerRows
from forerun.models.rope import RopeConfig

if TYPE_CHECKING:
    from forerun.drafters.base import Drafter


UNMEASURED = 1e-3  # seconds per level, until the first draft was timed
REHEARSED = -1  # a sequence that no engine has
MOST_CAPTURED = 16  # sequences of the largest graph of heads whose trees the host builds
NOT_CAPTURED = "drafts are not captured, so they run operation by operation: %s: %s"  # a warning
TIMED = 3  # drafts of a rehearsal: the first is captured, the second counts little (see Meter)


def head_dtype(target: Target, shared: SharedWeights | None) -> torch.dtype:
    """The dtype a head computes in: the target's, where it is known."""
    if shared is not None:
        return shared.dtype
    return target.can.row_dtype


@dataclass(frozen=True, slots=True)
class Calibration:
    """From a head's probability q to how often such a token is accepted: scale * q^power, fitted on held-back text."""

    scale: float = 1.0
    power: float = 1.0

    def __post_init__(self) -> None:
        if not self.scale > 0:
            raise InvalidInput(f"a calibration's scale of {self.scale} is out of range: above 0; fit it again")

    def log_confidences(self, log_probs: list[float]) -> list[float]:
        if self.scale == 1.0 and self.power == 1.0:
            return log_probs
        shift, power = math.log(self.scale), self.power
        return [min(value * power + shift, 0.0) for value in log_probs]


class Meter:
    """Seconds per drafted level, a running mean.

    The first draft includes warm-up: it counts for a tenth, and the second replaces it, unless it took longer. Pauses
    of the machine count little too: a drafter that seems too slow is not used again, and so is not measured again.
    """

    def __init__(self, clock: Clock = WALL) -> None:
        self._clock, self.seconds = clock, 0.0
        self._started = 0.0
        self._drafts = 0

    def start(self) -> None:
        self._started = self._clock()

    def elapsed(self) -> float:
        return self._clock() - self._started

    def stop(self, levels: int) -> None:
        self.note(self.elapsed(), levels)

    def note(self, seconds: float, levels: int) -> None:
        if levels:
            spent, self._drafts = seconds / levels, self._drafts + 1
            if self._drafts <= 2:
                self.seconds = min(spent, 10.0 * self.seconds) if self._drafts == 2 else 0.1 * spent
            else:
                weight = 0.3 if spent < self.seconds else 0.1
                self.seconds += weight * (min(spent, 2.0 * self.seconds) - self.seconds)


Piece = tuple[Sequence[Tensor], Sequence[int]]  # layers of one pass, each [M, ..], and which of its rows


SURPLUS = 256  # rows that are worth forgetting


class ObservedRows:
    """Hidden rows of one sequence that were observed and that the head has not read yet."""

    __slots__ = ("_features", "_noted", "seen", "tokens")

    def __init__(self) -> None:
        self.tokens: list[int] = []  # the token *after* each row
        self.seen = 0  # rows observed in all
        self._features: list[Tensor] = []
        self._noted: list[tuple[Sequence[Tensor], slice | list[int]]] = []

    @property
    def features(self) -> list[Tensor]:
        """Each [r, F]; layers are concatenated when they are asked for, which many rounds never do."""
        for layers, rows in self._noted:
            parts = [layer[rows] for layer in layers]
            self._features.append(parts[0] if len(parts) == 1 else torch.cat(parts, -1))
        self._noted = []
        return self._features

    @features.setter
    def features(self, features: list[Tensor]) -> None:
        self._features, self._noted = features, []

    def take(self) -> list[Piece]:
        """All rows that were not read yet, layers not concatenated."""
        whole = [([rows], range(len(rows))) for rows in self._features]
        self.tokens, noted, self.features = [], self._noted, []
        return [*whole, *((layers, _counted(rows)) for layers, rows in noted)]

    def keep_last(self, count: int) -> None:
        """Forget rows that were not read yet, all but about so many, where no draft will depend on them."""
        surplus = len(self.tokens) - count
        if surplus < SURPLUS:
            return
        tokens, pieces = self.tokens[surplus:], self.take()
        for layers, rows in pieces:
            if surplus < len(rows):
                some = rows[surplus:]
                self._noted.append((layers, slice(some.start, some.stop) if isinstance(some, range) else list(some)))
            surplus = max(0, surplus - len(rows))
        self.tokens = tokens

    def note(self, layers: Sequence[Tensor], rows: slice | list[int]) -> None:
        """Add rows of a pass; rows on a device may be overwritten by the next pass and are copied at once."""
        self._noted.append((layers, rows))
        if not isinstance(layers, LayerRows) and layers[0].device.type != "cpu":
            self.features  # noqa: B018


def _counted(rows: slice | list[int]) -> Sequence[int]:
    return range(rows.start, rows.stop) if isinstance(rows, slice) else rows


def observe_rows(
    sequences: dict[int, ObservedRows],
    layers: Sequence[int],
    seqs: Sequence[Seq],
    trees: TreeBatch,
    scores: Scores,
    verdict: Verdict,
) -> None:
    """Add the rows of root and path of every tree, each with the token that follows it."""
    hidden = scores.hidden
    whole: Sequence[Tensor] = (
        hidden.some(layers) if isinstance(hidden, HiddenRows) else [hidden[layer] for layer in layers]
    )
    if trees.form is not None:  # rows in the target's own buffers, which its next pass overwrites
        whole = [rows.clone() for rows in whole]
    tokens, (every, bonus) = trees.to_host()[0], verdict.to_host()
    for b, seq in enumerate(seqs):
        first, end = trees.starts[b], trees.starts[b + 1]
        observed = sequences.setdefault(seq.id, ObservedRows())
        if first == end:
            continue  # a prompt of one token: nothing went through the target
        path = every[b]
        nodes = [first, *(first + node for node in path)]
        straight = nodes[-1] - first == len(path)  # a chain from its start: a slice, not a gather
        observed.note(whole, slice(first, nodes[-1] + 1) if straight else nodes)
        observed.tokens += [*(tokens[node] for node in nodes[1:]), bonus[b]]
        observed.seen += len(nodes)


def is_ready(observed: ObservedRows | None, seq: Seq, budget: Budget) -> bool:
    """Can the head draft for this sequence: is there a budget, and a row for each committed token?"""
    return budget.runs and observed is not None and observed.seen > 0 and observed.seen == len(seq.tokens) - 1


def is_drawn(seq: Seq) -> bool:
    """Are this sequence's drafts tested by p/q? Not where it is greedy or coupled by noise."""
    return not seq.params.is_greedy and not seq.shares_noise


def rehearse(
    drafter: Drafter,
    sequences: dict[int, ObservedRows],
    features: Tensor,
    context: int,
    budgets: Sequence[Budget],
    params: SamplingParams | None = None,
) -> None:
    """Draft for a made-up sequence of `context` rows, so that drafts are captured and timed before texts are written.

    `sequences`: the drafter's own, where it looks for rows that it has not read. Above T=0 noise is shared.
    """
    params = params or SamplingParams(temperature=0.0)
    seq = PlainSeq(REHEARSED, [0] * (context + 1), params=params, shares_noise=not params.is_greedy)
    observed = ObservedRows()
    observed.seen, observed.features, observed.tokens = context, [features], [0] * len(features)
    sequences[seq.id] = observed
    try:
        for budget in budgets:
            for _ in range(TIMED):
                drafter.propose([seq], [budget])
    finally:
        drafter.forget(seq)


def wants_sampling(speculative: SpeculativeConfig, can: Abilities) -> bool:
    """Should nodes be drawn from the head's law, where the verifier can test them? (vLLM's setting)

    On a GPU trees of chosen tokens are grown without the host, drawn ones are not: there it must be asked for.
    """
    if speculative.draft_sample_method == "auto":
        return not can.decides
    return speculative.draft_sample_method == "probabilistic"


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
    rope_scaling: Mapping[str, Any] = field(default_factory=dict)  # as the file has it; empty = none
    max_length: int = 2048  # positions that its file names
    trained: int = 0  # tokens of the longest texts that it learnt from; 0 = as many as its file names positions
    window: int = 0  # positions that a row of a windowed layer sees, its own included
    windowed: tuple[bool, ...] = ()  # of each layer; () = none
    target: str = ""  # what it was trained for
    calibration: Calibration = field(default_factory=Calibration)
    rates: tuple[tuple[float, ...], ...] = ()  # [levels][ranks] how often right, given that the path was

    @property
    def feature_width(self) -> int:
        return self.target_width * max(1, len(self.layers))

    @property
    def rope(self) -> RopeConfig:
        values = {"rope_theta": self.rope_theta, "max_position_embeddings": self.max_length}
        try:
            rope = RopeConfig.from_hf(self.rope_scaling, values, self.head_dim)
        except (KeyError, TypeError, ValueError) as error:
            raise UnsupportedModel(f"the head's rotary positions cannot be read: {error}") from None
        if rope.has_regimes or rope.dims < self.head_dim:
            raise UnsupportedModel(
                f"the head's rotary positions are {rope.kind} over {rope.dims} of {self.head_dim} dimensions: only "
                "whole ones that are the same at every length are run here; use another head"
            )
        return rope

    def window_of(self, layer: int) -> int:
        """Positions that a row of this layer sees, its own included; 0 = the file names no window."""
        return self.window if self.windowed and self.windowed[layer] else 0

    def reach(self, layer: int) -> int:
        """The same in any layer. Without a window it is the length that the head was trained for.

        Rotary positions are relative: in a longer text a row then sees no distance that is new to the head.
        """
        return self.window_of(layer) or min(self.max_length, self.trained or self.max_length)

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
        self.rope  # noqa: B018 - raises where it is none of ours
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
        types = [_SLIDING if slides else _WHOLE for slides in self.windowed]
        spans = {"layer_types": types, "sliding_window": self.window, "use_sliding_window": True}
        return {
            **(spans if self.window else {}),
            **({"rope_scaling": dict(self.rope_scaling)} if self.rope_scaling else {}),
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
        return {
            "draft_vocab_size": self.draft_vocab_size,
            "target_hidden_size": self.target_width,
            "target_model": self.target,
        }

    def measured_json(self) -> dict[str, Any]:
        found = {"calibration": asdict(self.calibration), "rates": self.rates}
        return found | ({"trained_length": self.trained} if self.trained else {})


def shape_in(values: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a HeadShape, but for its layers, in a config.json in the authors' form or in that of speculators.

    Raises KeyError, TypeError or ValueError where one is missing or cannot be what it says.
    """
    shape = {**values, **settings_in(values, "transformer_layer_config")}
    width, heads, vocab = (size_in(shape, n) for n in ("hidden_size", "num_attention_heads", "vocab_size"))
    rope = settings_in(shape, "rope_parameters") or settings_in(shape, "rope_scaling")
    plain = ("default", "mrope")  # the latter of pictures; of text alone it is a plain one
    is_scaled = (rope.get("rope_type") or rope.get("type") or "default") not in plain
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
        "rope_scaling": {key: value for key, value in rope.items() if key != "rope_theta"} if is_scaled else {},
        "max_length": size_in(shape, "max_position_embeddings", 2048),
        "trained": size_in(ours, "trained_length") if ours.get("trained_length") else 0,
        "target": str(values.get("target_model") or trained_for or ""),
        "calibration": Calibration(**settings_in(ours, "calibration")),
        "rates": rates_in(ours),
    }


_SLIDING, _WHOLE = "sliding_attention", "full_attention"


def windows_in(own: Mapping[str, Any], depth: int) -> dict[str, Any]:
    """`window` and `windowed` of a head of so many layers, as Hugging Face, speculators and vLLM name them."""
    types = own.get("layer_types")
    if types is None and own.get("use_sliding_window"):
        whole = own.get("max_window_layers", 0)
        types = [_WHOLE if i < whole else _SLIDING for i in range(depth)]
    if types is not None and (len(types) != depth or not set(types) <= {_SLIDING, _WHOLE}):
        raise ValueError(f"layer_types = {types!r:.60}")
    if _SLIDING not in (types or ()):
        return {}
    window = size_in(own, "swa_window_size" if own.get("use_swa") else "sliding_window")
    return {"window": window, "windowed": tuple(one == _SLIDING for one in types or ())}


def vocabulary_of(shape: HeadShape, weights: Mapping[str, Tensor]) -> DraftVocabulary:
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


Get = Callable[[str], Tensor]  # a weight that must be there, by its name
Maybe = Callable[[str], Tensor | None]


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer of a head, with rows of queries and keys paired up for rotation."""

    qkv: Tensor  # [(H + 2 Hkv) Dh, D]; 2D in the first layer of EAGLE-3 and P-EAGLE
    o: Tensor  # [D, H Dh]
    gate_up: Tensor  # [2I, D]
    down: Tensor  # [D, I]
    mlp_norm: Tensor  # [D]
    input_norm: Tensor | None  # [D] in front of attention; EAGLE-1's has none
    feature_norm: Tensor | None  # [D] of first layers that read features beside tokens
    qk_norm: Tensor | None  # [H + Hkv, Dh]

    @classmethod
    def read(cls, shape: HeadShape, get: Get, maybe: Maybe) -> LayerWeights:
        dims = shape.head_dim
        q, k, v = (get(f"self_attn.{name}_proj.weight") for name in "qkv")
        norms = zip("qk", (shape.heads, shape.kv_heads), strict=True)
        found = [(maybe(f"self_attn.{name}_norm.weight"), count) for name, count in norms]
        heads = [pair_up(norm, dims, dims).expand(count, -1) for norm, count in found if norm is not None]
        return cls(
            torch.cat((pair_up(q, dims, dims), pair_up(k, dims, dims), v)),
            get("self_attn.o_proj.weight"),
            torch.cat([get(f"mlp.{name}_proj.weight") for name in ("gate", "up")]),
            get("mlp.down_proj.weight"),
            get("post_attention_layernorm.weight"),
            maybe("input_layernorm.weight"),
            maybe("hidden_norm.weight"),
            torch.cat(heads).contiguous() if heads else None,
        )


class Tables:
    """Embedding and LM head of a head: its own, or those of its target."""

    def __init__(
        self, shape: HeadShape, weights: Mapping[str, Tensor], shared: SharedWeights | None, dtype: torch.dtype,
        device: torch.device,
    ) -> None:  # fmt: skip
        maybe, self._dtype = readers(weights, dtype, device)[1], dtype
        self.vocabulary = vocabulary_of(shape, weights).to(device)
        self._shared = checked_shared(shape, weights, shared)
        self._embedding, self._narrows = maybe("embed_tokens.weight"), maybe("embed_proj.weight")
        head = maybe("lm_head.weight")
        if head is None:
            assert self._shared is not None
            head = self._shared.head_rows(self.vocabulary.ids).to(device, dtype).contiguous()
        self.head = head  # [Vd, D]

    def embed(self, tokens: Tensor) -> Tensor:
        """[N, D]"""
        if self._embedding is not None:
            return F.embedding(tokens, self._embedding)
        assert self._shared is not None
        rows = self._shared.embed(tokens).to(self._dtype)
        return rows if self._narrows is None else F.linear(rows, self._narrows)
