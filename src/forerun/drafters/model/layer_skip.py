"""LayerSkipDrafter: drafts with the target's own layers, some of them left out (self-speculation).

Either the first layers alone draft, with the LM head, or an exit adapter in front of it, behind the last of them (early
exit: LayerSkip, Elhoushi et al. 2024; Kangaroo, Liu et al. 2024), or some attentions and MLPs are skipped (Draft &
Verify, Zhang et al. 2023; SWIFT, Xia et al. 2024). A `LayerPlan` says which: a JSON file of `forerun layers search` or
of `forerun train early-exit`, which names the exit adapter's safetensors file where one was trained.

It has no KV cache of its own: it reads the keys and values that the target has of the committed tokens. After an early
exit a CPU's pass over the draft starts where the draft left off, so that the first layers compute each drafted token
once. On a GPU draft steps are captured when the drafter is built (forerun.models.cuda.target).

SparseKvDrafter: the target itself drafts, over a few pages of its own KV cache (self-speculation for long contexts).

A draft pass runs all layers and reads the start of the text, its end and some pages between them; the target's pass
then reads everything, and writes the keys and values of what was drafted anew (TriForce, Sun et al. 2024; MagicDec,
Chen et al. 2024). There is nothing to train and no second KV cache. It pays where reading the context takes most of
the time of a pass: long contexts, and large batches of them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.core.errors import DamagedFile, InvalidInput
from forerun.core.types import NEVER, Budget, Needs, Offer, PlainSeq, Seq, TreeBatch
from forerun.drafters.base import Drafter, Parts
from forerun.drafters.model.draft_model import ModelDrafter
from forerun.models.attention import SparseContext
from forerun.models.base import HoldsUnread, LayerSubset, Target
from forerun.models.layers import rms_norm


@dataclass(frozen=True, slots=True)
class ExitAdapter:
    """Rank R, width D."""

    norm: Tensor  # [D] in front of `down`
    down: Tensor  # [R, D]
    up: Tensor  # [D, R]
    final_norm: Tensor  # [D] in front of the LM head
    eps: float = 1e-5

    def __call__(self, rows: Tensor) -> Tensor:
        """[M, D] what leaves the exit layer -> [M, D] what the LM head reads."""
        inner = F.silu(F.linear(rms_norm(rows, self.norm, self.eps), self.down))
        return rms_norm(rows + F.linear(inner, self.up), self.final_norm, self.eps)

    @property
    def rank(self) -> int:
        return len(self.down)

    def must_fit(self, width: int) -> None:
        if self.down.shape[1] != width:
            raise InvalidInput(f"the exit adapter is {self.down.shape[1]} wide, and the target {width}: train another")

    def to(self, dtype: torch.dtype, device: torch.device) -> ExitAdapter:
        moved = {name: value.to(device, dtype) for name, value in self._tensors().items()}
        return ExitAdapter(**moved, eps=self.eps)

    def write(self, path: Path) -> None:
        """As safetensors, in 16 bits."""
        from forerun.models.load.weights import write_tensors

        halves = {name: value.detach().to(torch.float16).contiguous() for name, value in self._tensors().items()}
        write_tensors(path, halves, {"eps": repr(self.eps)})

    @classmethod
    def read(cls, path: Path) -> ExitAdapter:
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(path, "pt") as file:
                tensors = {name: file.get_tensor(name).float() for name in file.keys()}  # noqa: SIM118
                eps = float((file.metadata() or {}).get("eps", "1e-5"))
        except (OSError, SafetensorError, ValueError) as error:
            raise DamagedFile(f"the exit adapter {path} cannot be read: {error}") from error
        wanted = {f.name for f in fields(cls)} - {"eps"}
        shapes = {name: tuple(value.shape) for name, value in tensors.items()}
        rank, width = shapes.get("down", (0, 0))
        expected = {"norm": (width,), "down": (rank, width), "up": (width, rank), "final_norm": (width,)}
        if set(tensors) != wanted or shapes != expected:
            raise DamagedFile(f"the exit adapter {path} has tensors {shapes}, which do not fit together")
        return cls(**tensors, eps=eps)

    def _tensors(self) -> dict[str, Tensor]:
        return {"norm": self.norm, "down": self.down, "up": self.up, "final_norm": self.final_norm}


FORMAT = "forerun-layers-1"
PLAN = "plan.json"  # its name in a folder of `forerun train early-exit`
KEPT = 2 / 3  # of the layers: where an exit is tried when nobody has searched for one


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """Layers to run, and what stands between the last of them and the LM head; None = the target's final norm."""

    layers: LayerSubset
    adapter: ExitAdapter | None = None
    notes: Mapping[str, Any] = field(default_factory=dict)


def default_plan(layers: int) -> LayerPlan:
    """The first two thirds of a target's layers."""
    return LayerPlan(LayerSubset(max(1, round(layers * KEPT))))


def read_plan(given: str, layers: int) -> LayerPlan:
    """The plan of a file, or the first n layers where a number n is given; for a target of `layers` layers."""
    if re.fullmatch(r"\d+", given):
        return LayerPlan(_subset(given, layers, {"exit": int(given)}))
    path = Path(given).expanduser()
    path = path / PLAN if path.is_dir() else path
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidInput(
            f"draft_layers={given}: there is no such file ({error.strerror}); `forerun layers search` makes one, "
            "and a number stands for that many of the first layers"
        ) from error
    except ValueError as error:
        raise DamagedFile(f"{path} is not JSON: {error}") from error
    if not isinstance(values, dict) or values.get("format") != FORMAT:
        raise DamagedFile(f"{path} is not a plan of layers: its format is not {FORMAT!r}")
    if values.get("layers") != layers:
        raise InvalidInput(
            f"{path} was made for a model of {values.get('layers')} layers, and the target has {layers}: "
            "search again with `forerun layers search`"
        )
    adapter = values.get("adapter")
    if adapter is not None and (not isinstance(adapter, str) or Path(adapter).name != adapter):
        raise DamagedFile(f"{path}: adapter must be the name of a file beside it, not {adapter!r}")
    read = None if adapter is None else ExitAdapter.read(path.with_name(adapter))
    return LayerPlan(_subset(str(path), layers, values), read, values)


def write_plan(path: Path, plan: LayerPlan, layers: int) -> None:
    """Write a plan for a target of `layers` layers; its adapter goes beside it."""
    values: dict[str, Any] = {
        **plan.notes,
        "format": FORMAT,
        "layers": layers,
        "exit": plan.layers.end,
        "without_attention": sorted(plan.layers.without_attention),
        "without_mlp": sorted(plan.layers.without_mlp),
        "adapter": None if plan.adapter is None else path.with_suffix(".safetensors").name,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    if plan.adapter is not None:
        plan.adapter.write(path.with_suffix(".safetensors"))
    path.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")


def _subset(name: str, layers: int, values: Mapping[str, Any]) -> LayerSubset:
    end = values.get("exit")
    skipped = [values.get(key, []) for key in ("without_attention", "without_mlp")]
    whole = [type(end) is int, *(isinstance(some, list) and all(type(i) is int for i in some) for some in skipped)]
    if not all(whole) or not 1 <= (end or 0) <= layers:
        raise InvalidInput(f"draft_layers={name}: exit must be 1 to {layers}, and skipped layers whole numbers")
    attentions, mlps = (frozenset(some) for some in skipped)
    return LayerSubset(end or 0, without_attention=attentions, without_mlp=mlps)


class LayerSkipDrafter(ModelDrafter):
    adapts = True

    @classmethod
    def build(cls, parts: Parts) -> LayerSkipDrafter:
        given, shared = parts.speculative.draft_layers, parts.target.shared()
        layers = len(shared.layers) if shared is not None else 0
        plan = default_plan(layers) if given is None else read_plan(given, layers)
        part = draft_part(parts.target, plan)
        part.warm_up(cls.needs, parts.max_batch, parts.max_length or parts.target.max_length)
        return cls(part, parts.target.vocab_size)


def draft_part(target: Target, plan: LayerPlan) -> Target:
    shared = target.shared()
    if shared is None or shared.partial is None:
        raise InvalidInput(
            "the drafter 'layer_skip' needs a target whose layers can run apart: our own decoders; "
            f"{type(target).__name__} on {target.device.type} cannot"
        )
    adapter = plan.adapter
    if adapter is not None:
        adapter.must_fit(shared.width)
    return shared.partial(plan.layers, None if adapter is None else adapter.to(shared.dtype, target.device))


LEAST_LONGER = 2  # times as long as what drafts read: on shorter contexts a draft pass costs about a whole one
PROBE, REPEATS = -1, 3  # a sequence that no engine has, and passes over it


class SparseKvDrafter(ModelDrafter):
    adapts = True

    def __init__(self, draft: Target, vocab_size: int, context: SparseContext, level: float | None = None) -> None:
        """`level`: seconds of a draft pass, where one was timed."""
        super().__init__(draft, vocab_size)
        self._least = LEAST_LONGER * context.tokens
        for _ in range(0 if level is None else 2):
            self._meter.note(level or 0.0, 1)

    @classmethod
    def build(cls, parts: Parts) -> Drafter:
        """On the target's device where that is our own GPU decoder, else token by token from the host."""
        context, shared = SparseContext(parts.speculative.draft_context), parts.target.shared()
        if shared is None or shared.partial is None:
            raise InvalidInput(
                "the drafter 'sparse_kv' needs a target whose KV cache has pages: our own decoders; "
                f"{type(parts.target).__name__} on {parts.target.device.type} has none"
            )
        length = parts.max_length or parts.target.max_length
        draft = shared.partial(LayerSubset(len(shared.layers)), context=context)
        if parts.target.can.captures and not parts.by_host:
            from forerun.drafters.device.model import sparse_on_device

            def by_host() -> Drafter:
                return cls(draft, parts.target.vocab_size, context)

            least = LEAST_LONGER * context.tokens
            drafter = sparse_on_device(parts.target, context, least, by_host, parts.max_batch, length)
            if drafter is not None:
                return drafter
        draft.warm_up(cls.needs, parts.max_batch, length)
        return cls(draft, parts.target.vocab_size, context, level_seconds(parts.target, draft, context))

    def offer(self, seq: Seq) -> Offer:
        """Nothing until most of the context would be left out; then a level costs the same however long it is."""
        return NEVER if len(seq.tokens) < self._least else super().offer(seq)

    def _depth(self, seq: Seq, budget: Budget) -> int:
        return super()._depth(seq, budget) if budget.runs else 0


def level_seconds(target: Target, draft: Target, context: SparseContext) -> float | None:
    """What a draft pass takes behind as much as it reads of a long context; None where there is no room to try."""
    length, now = context.tokens, draft.can.clock
    if not isinstance(target, HoldsUnread) or length >= target.max_length or not target.has_room(length + 1):
        return None
    probe, times = PlainSeq(PROBE, [0] * length, max_length=length + 1), list[float]()
    try:
        target.occupy(probe)
        for _ in range(REPEATS):
            started = now()
            logits = draft.score([probe], TreeBatch.chains([probe.tokens[-1:]], draft.device), Needs()).required_logits
            float(logits[-1, -1])  # wait for the device
            times.append(now() - started)
    finally:
        draft.release(probe)
        target.release(probe)
    return min(times)
