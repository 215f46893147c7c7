"""The teacher: the frozen target during training, which computes features and laws for whole batches when needed.

Nothing is kept on disk: for a small target a pass costs less than reading its features back. Plain families run
in our own network; any other that transformers knows runs there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from forerun.core.errors import InvalidInput
from forerun.core.types import Needs, PlainSeq
from forerun.models.base import Target
from forerun.models.config import DecoderConfig, supports
from forerun.models.load.checkpoint import Checkpoint
from forerun.models.load.shapes import check_shapes
from forerun.train.network import CausalNet, is_plain


class Teacher(Protocol):
    """What recipes need of a target."""

    @property
    def embedding(self) -> Tensor: ...  # [V, D]
    @property
    def head(self) -> Tensor: ...  # [V, D]
    @property
    def layer_count(self) -> int: ...

    def features(self, tokens: Tensor, keep: Sequence[int]) -> tuple[dict[int, Tensor], Tensor]:
        """Inputs of the layers named (-1 = after the last norm) and the last rows [B, T, D], no gradients."""
        ...


class NetTeacher:
    """Our own network as the teacher."""

    def __init__(self, net: CausalNet, *, compiled: bool = False) -> None:
        self.net = net
        if compiled:  # all layers share one compiled program, for all shapes
            for layer in net.layers:
                layer.compile(dynamic=True)

    @property
    def embedding(self) -> Tensor:
        return self.net.embedding.detach()

    @property
    def head(self) -> Tensor:
        return self.net.head.detach()

    @property
    def layer_count(self) -> int:
        return self.net.config.layers

    @torch.no_grad()
    def features(self, tokens: Tensor, keep: Sequence[int]) -> tuple[dict[int, Tensor], Tensor]:
        found: tuple[dict[int, Tensor], Tensor] = self.net(tokens, tuple(keep))
        return found


class TransformersTeacher:
    """A transformers model as the teacher, run without a cache."""

    def __init__(self, model: Any) -> None:
        self.model = model.eval().requires_grad_(False)

    @property
    def embedding(self) -> Tensor:
        weight: Tensor = self.model.get_input_embeddings().weight
        return weight.detach()

    @property
    def head(self) -> Tensor:
        weight: Tensor = self.model.get_output_embeddings().weight
        return weight.detach()

    @property
    def layer_count(self) -> int:
        return int(self.model.config.get_text_config(decoder=True).num_hidden_layers)

    @torch.no_grad()
    def features(self, tokens: Tensor, keep: Sequence[int]) -> tuple[dict[int, Tensor], Tensor]:
        out = self.model.base_model(input_ids=tokens, use_cache=False, output_hidden_states=True)
        last = out.last_hidden_state
        return {i: last if i == -1 else out.hidden_states[i] for i in keep}, last


class ServedTeacher:
    """A target as a CPU serves it: features come from our kernels, several times sooner, and are what drafters see."""

    def __init__(self, weights: Teacher, target: Target) -> None:
        """Tables are read from another teacher of the same model."""
        self.weights, self.target = weights, target

    @property
    def embedding(self) -> Tensor:
        return self.weights.embedding

    @property
    def head(self) -> Tensor:
        return self.weights.head

    @property
    def layer_count(self) -> int:
        return self.weights.layer_count

    @torch.no_grad()
    def features(self, tokens: Tensor, keep: Sequence[int]) -> tuple[dict[int, Tensor], Tensor]:
        """Rows of a batch are prompts that are read and forgotten; the last token of a prompt is never read."""
        needs = Needs(tuple(sorted({*keep, -1})))
        seqs = [PlainSeq(i, [*row.tolist(), 0], cache_salt=None) for i, row in enumerate(tokens)]
        try:
            hidden = self.target.prefill(seqs, needs)[1].hidden
        finally:
            for seq in seqs:
                self.target.release(seq)
        found = {layer: rows.view(*tokens.shape, -1).clone() for layer, rows in hidden.items()}
        return {layer: found[layer] for layer in keep}, found[-1]


def device_of(name: str) -> torch.device:
    """The device of that name; auto is the GPU where there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise InvalidInput(f"device={name!r} is not available: torch sees no GPU; use device='cpu'")
    return torch.device(name)


def load_net(checkpoint: Checkpoint, device: torch.device) -> CausalNet:
    """A plain family's weights in our own network: bfloat16 on a GPU, float32 elsewhere."""
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    config = DecoderConfig.from_hf(checkpoint.config)
    check_shapes(config, checkpoint.weights)
    return CausalNet(config, checkpoint.weights, dtype=dtype, device=device)


def load_teacher(checkpoint: Checkpoint, device: torch.device, *, compiled: bool = False) -> Teacher:
    """The teacher for a checkpoint."""
    if supports(checkpoint.config) and is_plain(DecoderConfig.from_hf(checkpoint.config)):
        return NetTeacher(load_net(checkpoint, device), compiled=compiled)
    from transformers import AutoModelForCausalLM

    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    model = AutoModelForCausalLM.from_pretrained(str(checkpoint.path), dtype=dtype, use_safetensors=True)
    return TransformersTeacher(model.to(device))
