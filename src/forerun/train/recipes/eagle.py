"""Recipes for EAGLE heads (EAGLE-1, HASS, EAGLE-3) and MTP layers, which differ in the head, the steps and the loss.

A head that drafts ahead reads its own outputs, so it must be trained on them. Step 0 is a causal pass over the
target's true features. Step j continues, from every row t at once, the draft that started there: it reads the
output of step j - 1 at t and the token at t + 1 + j, sits at position t + j, and attends to the true rows up to
t and to its own earlier steps, which are the diagonals of the steps before. Everything else is masked with -inf,
and so is what lies before a window. Scores of long texts are made part by part, and once more for the gradients.
That is EAGLE-3's training-time test, and HASS's context alignment as well, counted from the draft's start instead
of from its end; HASS stops gradients between the steps.

    eagle   one step; smooth-L1 on features + 0.1 law loss; noise on features
    hass    three steps, detached; the same, + the top-K loss
    eagle3  seven steps, gradients through them; law loss only, 0.8 per step
    mtp     four steps, the same

Parameters of modules are named as files name them, so a folded state_dict is a head's file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from forerun.drafters.heads.base import HeadShape
from forerun.drafters.heads.eagle import write_mtp
from forerun.drafters.heads.eagle_head import EagleConfig, write_head
from forerun.drafters.heads.formats import DraftVocabulary
from forerun.train.data.corpus import Batch
from forerun.train.options import WIDTHS, TrainOptions
from forerun.train.recipes.base import LawLoss, Measured, Output, Reading, Recipe, fused, shifted
from forerun.train.recipes.scaling import BEGINNING, QUICK, ScaledLinear, ScaledNorm, Sizes, main_directions
from forerun.train.teacher import Teacher

HEAD_DIM = 64  # of a head that is narrower than its target, where its width allows it
SIMULATED = 6  # levels of a simulation, however many steps were learnt


class EagleRecipe(Recipe):
    _module: EagleModule | MtpModule

    def __init__(
        self,
        options: TrainOptions,
        teacher: Teacher,
        config: EagleConfig,
        vocabulary: DraftVocabulary,
        sizes: Sizes | None = None,
    ) -> None:
        """Sizes, of EAGLE-1's features, are for training alone: the head that is written is the same."""
        super().__init__(options, teacher, vocabulary)
        self.config, self.layers, device = config, config.layers, teacher.head.device
        self._unit = None if sizes is None else sizes.feature.to(device)
        if config.kind == "mtp":
            self._module = MtpModule(config, sizes or Sizes.ones(config.width)).to(device)
            return
        own_head = config.kind == "eagle3" and options.train_head
        self._module = EagleModule(config, own_head=own_head, sizes=sizes).to(device)
        if config.kind == "eagle":
            self.law_loss = LawLoss(options.loss, top_weight=10.0 if options.method == "hass" else 0.0)
            self.feature_weight, self.law_weight = 1.0, 0.1  # HASS's top-K loss counts 1.0: ten tenths
        self._start(self._module)

    def lm_head(self) -> Tensor:
        own = getattr(self._module, "lm_head", None)
        return self._truth_head if own is None else own.weight

    def outputs(self, batch: Batch, reading: Reading, noise: torch.Generator | None) -> Iterator[Output]:
        features = torch.cat([reading.features[layer] for layer in self.config.layers], -1)
        embedded = F.embedding(batch.tokens, self.teacher.embedding)
        if not torch.is_autocast_enabled(features.device.type):
            features, embedded = features.float(), embedded.float()
        if noise is not None and self.config.kind == "eagle":
            spread = torch.rand(features.shape, generator=noise, device=features.device) - 0.5
            features = features + (spread * (0.2 * 512 / max(512, features.shape[1]))).to(features.dtype)
        steps, detach = self.options.depth, self.options.method == "hass"
        # a simulation goes as deep for a head that learnt one step as for one that learnt six
        if noise is None:
            steps = max(steps, SIMULATED)
        rolled = self._module(embedded, features, steps, detach)
        for step, (rows, out) in enumerate(rolled):
            predicted = out if self.config.kind == "eagle" else None
            weight = 1.0 if self.config.kind == "eagle" else self.options.decay**step
            yield Output(rows, step + 1, weight, predicted, self._unit)

    def export(self, folder: Path, measured: Measured) -> None:
        config = replace(self.config, calibration=measured.calibration, rates=measured.rates)
        if config.kind == "mtp":
            write_mtp(folder, config, self.tensors(self._module))
        else:
            write_head(folder, config, self.tensors(self._module), one_byte=bool(self.options.one_byte))

    @torch.no_grad()
    def _start(self, module: EagleModule) -> None:
        """Begin with the target's own rows in the LM head, where the head has one.

        Nothing of the target's layers: they are made for a residual stream of another size (in a SmolLM2 a
        hundred times that of a head's), and a head that began with one learnt more slowly than from noise.
        """
        head, rows = self.config.width, self._truth_head.float()
        if head != self.config.target_width:
            basis = main_directions(rows, head)  # [D, width]
            module.lm_head.weight.copy_(rows @ basis)
            module.embed_proj.weight.copy_(basis.t())
        elif hasattr(module, "lm_head"):
            module.lm_head.weight.copy_(rows)


def eagle_config(
    options: TrainOptions, checkpoint_config: dict[str, object], layers: tuple[int, ...], vocab: int
) -> EagleConfig:
    """A head whose layers are shaped like those of its target."""
    kind = options.method if options.method in ("eagle3", "mtp") else "eagle"
    ours = {"draft_vocab_size": vocab, "num_hidden_layers": options.own_layers if kind == "eagle3" else 1}
    plain = {"layer_types": None, "use_sliding_window": False}  # whatever the target has
    read = EagleConfig.from_json({**checkpoint_config, **ours, **plain}, "eagle3")
    if options.width:  # half as many heads of keys as of queries
        dims = HEAD_DIM if options.width % (2 * HEAD_DIM) == 0 else WIDTHS
        heads = options.width // dims
        sizes = {"width": options.width, "heads": heads, "kv_heads": max(1, heads // 2), "head_dim": dims}
        read = replace(read, inner=3 * options.width, **sizes)  # type: ignore[arg-type]
    return replace(
        read,
        kind=kind,
        inner=options.inner or read.inner,
        layers=layers if kind == "eagle3" else (-1,),
        rope_scaling={},  # its own positions are plain ones
        trained=options.max_length,
        window=options.window,
        windowed=(True,) * read.depth if options.window else (),
        fc_norm=options.fc_norm,
        norm_output=options.norm_output and kind == "eagle3",
        target=options.target,
    )


Past = list[tuple[Tensor, Tensor]]  # keys and values of each step so far, of one layer


class Norm(nn.RMSNorm):
    """In the weight's own precision: a fused kernel wants both alike."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.weight.dtype))


class HeadLayer(nn.Module):
    def __init__(self, config: HeadShape, into: int, linear: Callable[[int, int], nn.Linear]) -> None:
        super().__init__()
        width, inner = config.width, config.inner
        q, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
        shapes = {"q_proj": (into, q), "k_proj": (into, kv), "v_proj": (into, kv), "o_proj": (q, width)}
        self.self_attn = nn.ModuleDict({name: linear(*shape) for name, shape in shapes.items()})
        shapes = {"gate_proj": (width, inner), "up_proj": (width, inner), "down_proj": (inner, width)}
        self.mlp = nn.ModuleDict({name: linear(*shape) for name, shape in shapes.items()})
        self.post_attention_layernorm = Norm(width, config.norm_eps)

    def after_attention(self, x: Tensor, found: Tensor) -> Tensor:
        """The residual stream x with what attention found and what the MLP adds."""
        x = x + self.self_attn["o_proj"](found)
        rows = self.post_attention_layernorm(x)
        inner = F.silu(self.mlp["gate_proj"](rows)) * self.mlp["up_proj"](rows)
        out: Tensor = x + self.mlp["down_proj"](inner)
        return out


def turn(x: Tensor, rotations: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate halves of x [.., N, Dh], as checkpoints order them, by cosines and sines [.., N, Dh / 2]."""
    cos, sin = rotations
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def rates_of(config: HeadShape) -> Tensor:
    """[Dh / 2] angles of a rotation by one position."""
    return config.rope_theta ** -(torch.arange(0, config.head_dim, 2).float() / config.head_dim)


def softmax_over_both(far: Tensor, near: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """One softmax over two parts of a row of scores."""
    top = torch.maximum(far.amax(-1, keepdim=True), near.amax(-1, keepdim=True)).detach()
    far, near = (far - top).exp(), (near - top).exp()
    total = far.sum(-1, keepdim=True) + near.sum(-1, keepdim=True)
    return (far / total).to(dtype), (near / total).to(dtype)


class EagleLayer(HeadLayer):
    """One layer of a head: the first, or an ordinary one behind it."""

    rates: Tensor

    def __init__(self, config: EagleConfig, sizes: Sizes, index: int = 0) -> None:
        width, fused, is_first = config.width, config.kind == "eagle3", not index
        super().__init__(config, width * (2 if fused and is_first else 1), ScaledLinear)
        self.config, self.window = config, config.window_of(index)
        if fused:
            self.input_layernorm = Norm(width, config.norm_eps)
            if is_first:
                self.hidden_norm = Norm(width, config.norm_eps)
        else:
            self._scale(sizes)
        self.register_buffer("rates", rates_of(config), persistent=False)

    def _scale(self, sizes: Sizes) -> None:
        """An EAGLE-1 head's residual stream has the size of the features it predicts, dimension by dimension."""
        for name, layer in [*self.self_attn.items(), *self.mlp.items()]:
            assert isinstance(layer, ScaledLinear)
            if name in ("o_proj", "down_proj"):
                layer.scale(writes=sizes.feature)
            else:  # the MLP reads behind a norm over all dimensions
                layer.scale(reads=sizes.feature / (sizes.row if name in ("gate_proj", "up_proj") else 1.0))

    def forward(self, x: Tensor, into: Tensor, first: int, past: Past) -> Tensor:
        """Residual x and input [B, T, .] of step `len(past)`, rows at positions first + t; grows `past`."""
        heads, dim = self.config.heads, self.config.head_dim
        q, k, v = (self.self_attn[f"{name}_proj"](into).unflatten(-1, (-1, dim)).transpose(1, 2) for name in "qkv")
        positions = torch.arange(first, first + q.shape[2], device=q.device).float()
        angles = positions[:, None] * self.rates  # [T, Dh / 2]
        rotations = angles.cos().to(q.dtype), angles.sin().to(q.dtype)
        repeat = heads // self.config.kv_heads
        past.append((turn(k, rotations).repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)))
        found = attend_rollout(turn(q, rotations), past, self.window)
        return self.after_attention(x, found.transpose(1, 2).flatten(2))


PART = 1024  # rows whose scores are there at once, in texts that are longer than twice as many


def attend_rollout(q: Tensor, past: Past, window: int = 0) -> Tensor:
    """Queries [B, H, T, Dh] of the last step: causal over the first step's rows, own row only of the later ones."""
    keys, values = past[0]
    if len(past) == 1 and not window:
        return F.scaled_dot_product_attention(q, keys, values, is_causal=True)
    length = q.shape[2]
    if length <= 2 * PART:
        return _attend_part(q, keys, values, past[1:], 0, window)
    parts = list[Tensor]()
    for low in range(0, length, PART):
        high = min(low + PART, length)
        first = max(0, low - window + 1) if window else 0
        own = [(k[:, :, low:high], v[:, :, low:high]) for k, v in past[1:]]
        some = keys[:, :, first:high], values[:, :, first:high]
        parts.append(checkpoint(_attend_part, q[:, :, low:high], *some, own, low - first, window, use_reentrant=False))
    return torch.cat(parts, 2)


def _attend_part(q: Tensor, keys: Tensor, values: Tensor, own: Past, first: int, window: int) -> Tensor:
    """Queries that belong to the rows from `first` on of these keys; `own`: of the draft's later steps."""
    if not own:
        back = first + torch.arange(q.shape[2], device=q.device)[:, None] - torch.arange(keys.shape[2], device=q.device)
        return F.scaled_dot_product_attention(q, keys, values, (back >= 0) & (back < window))
    scores = torch.stack([(q * k).sum(-1) for k, _ in own], -1)  # [B, H, T, steps]
    weigh = fused(weigh_rollout, q.device.type)
    weights, shares = weigh(q @ keys.transpose(-1, -2), scores, q.shape[-1] ** -0.5, first, window)
    found: Tensor = weights @ values
    for i, (_, v) in enumerate(own):
        found = found + shares[..., i, None] * v
    return found


def weigh_rollout(scores: Tensor, own: Tensor, scale: float, first: int, window: int) -> tuple[Tensor, Tensor]:
    """One softmax over true rows up to the query's [B, H, T, S] and the draft's own earlier steps [B, H, T, n]."""
    rows, places = (torch.arange(scores.shape[i], device=scores.device) for i in (-2, -1))
    back, steps = first + rows[:, None] - places, torch.arange(own.shape[-1], device=scores.device)
    hidden, own = back < 0, own.float() * scale
    if window:  # a query of step n is n positions behind its row
        hidden = hidden | (back + own.shape[-1] >= window)
        own = own.masked_fill(own.shape[-1] - 1 - steps >= window, -torch.inf)
    return softmax_over_both((scores.float() * scale).masked_fill(hidden, -torch.inf), own, scores.dtype)


class EagleModule(nn.Module):
    """All trained parameters of a head; its state_dict, folded, is the head's file."""

    def __init__(self, config: EagleConfig, *, own_head: bool, sizes: Sizes | None = None) -> None:
        super().__init__()
        self.config, sizes = config, sizes or Sizes.ones(config.width)
        fused = 2 * config.width if config.kind == "eagle" else config.feature_width
        self.fc = ScaledLinear(fused, config.width)
        if config.kind == "eagle":
            self.fc.scale(torch.cat((sizes.token, sizes.feature)), sizes.feature)
        self.midlayer = EagleLayer(config, sizes)
        if config.depth > 1:
            later = {str(i): EagleLayer(config, sizes, i) for i in range(1, config.depth)}
            self.layers = nn.ModuleDict(later)
        if config.fc_norm:
            self.fc_norm = nn.ModuleList([Norm(config.target_width, config.norm_eps) for _ in config.layers])
        if config.kind == "eagle3":
            self.norm = Norm(config.width, config.norm_eps)
        if own_head:
            self.lm_head = nn.Linear(config.width, config.draft_vocab_size, bias=False)
        if config.width != config.target_width:
            self.embed_proj = nn.Linear(config.target_width, config.width, bias=False)

    def forward(self, embedded: Tensor, features: Tensor, steps: int, detach: bool) -> Iterator[tuple[Tensor, Tensor]]:
        """(rows for the LM head, raw outputs) of every step; embeddings [B, T, D] of token t at t."""
        carried, pasts = self.fuse(features), [Past() for _ in range(self.config.depth)]
        if self.config.width != self.config.target_width:
            embedded = self.embed_proj(embedded)
        for step in range(steps):
            token = shifted(embedded, step + 1)
            if self.config.kind == "eagle":
                x = into = self.fc(torch.cat((token, carried), -1))
            else:
                layer = self.midlayer
                x, into = carried, torch.cat((layer.input_layernorm(token), layer.hidden_norm(carried)), -1)
            out = self._through_layers(x, into, step, pasts)
            normed = self.norm(out) if self.config.kind == "eagle3" else out
            yield normed, out
            carried = normed if self.config.norm_output else out
            if detach:
                carried = carried.detach()
                for past in pasts:
                    past[1:] = [(k.detach(), v.detach()) for k, v in past[1:]]

    def _through_layers(self, x: Tensor, into: Tensor, step: int, pasts: Sequence[Past]) -> Tensor:
        """The first layer on its two inputs, each later one on the output before it, behind a norm."""
        out: Tensor = self.midlayer(x, into, step, pasts[0])
        for i, past in enumerate(pasts[1:], start=1):
            layer = self.layers[str(i)]
            assert isinstance(layer, EagleLayer)
            out = layer(out, layer.input_layernorm(out), step, past)
        return out

    def fuse(self, features: Tensor) -> Tensor:
        if self.config.kind == "eagle":
            return features
        if self.config.fc_norm:
            parts = zip(features.chunk(len(self.fc_norm), -1), self.fc_norm, strict=True)
            features = torch.cat([norm(part) for part, norm in parts], -1)
        fused: Tensor = self.fc(features)
        return fused


class MtpModule(nn.Module):
    """All trained parameters; its state_dict, folded, is the layer under our names."""

    def __init__(self, config: EagleConfig, sizes: Sizes) -> None:
        super().__init__()
        self.config, width = config, config.width
        self.enorm, self.hnorm = Norm(width, config.norm_eps), Norm(width, config.norm_eps)
        self.fc = ScaledLinear(2 * width, width)
        self.midlayer = EagleLayer(config, Sizes.ones(width))
        self.midlayer.input_layernorm = Norm(width, config.norm_eps)
        self.norm = ScaledNorm(width, config.norm_eps)
        self.norm.scale(QUICK * sizes.feature, BEGINNING / QUICK)
        with torch.no_grad():  # dimensions of the target's rows are very unequal: made equal when read
            self.hnorm.weight.copy_(sizes.row / sizes.feature)

    def forward(self, embedded: Tensor, features: Tensor, steps: int, detach: bool) -> Iterator[tuple[Tensor, Tensor]]:
        """(rows for the LM head, raw outputs) of every step; embeddings [B, T, D] of token t at t."""
        carried, past = features, list[tuple[Tensor, Tensor]]()
        for step in range(steps):
            token = self.enorm(shifted(embedded, step + 1))
            x = self.fc(torch.cat((token, self.hnorm(carried)), -1))
            out: Tensor = self.midlayer(x, self.midlayer.input_layernorm(x), step, past)
            yield self.norm(out), out
            carried = out.detach() if detach else out
