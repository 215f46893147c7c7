"""LoRA on a causal network in training: low-rank changes of every layer's matrices, learnt while the base is frozen."""

from __future__ import annotations

from collections.abc import Container, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.func import functional_call

from forerun.core.errors import InvalidInput
from forerun.models.load.adapter import Adapter
from forerun.train.network import MATRICES, CausalNet, split_rows


def require_separate_matrices(names: Container[str]) -> None:
    """Raise where a checkpoint fuses what an adapter names one by one, as Phi 3 does."""
    if "model.layers.0.self_attn.q_proj.weight" not in names:
        raise InvalidInput(
            "a LoRA needs a target whose files name q_proj, k_proj and v_proj; train without --joint"
        )


class LoraNet(nn.Module):
    """A network whose layers' matrices are the base's plus `up @ down`; it begins as the base."""

    def __init__(self, base: CausalNet, rank: int) -> None:
        super().__init__()
        self.rank, self.base = rank, base.requires_grad_(False)
        self.down, self.up = nn.ParameterDict(), nn.ParameterDict()
        for key, weight in self._matrices().items():
            outputs, inputs = weight.shape
            down = torch.randn(rank, inputs) * inputs**-0.5
            self.down[key] = nn.Parameter(down.to(weight.device))
            self.up[key] = nn.Parameter(torch.zeros(outputs, rank, device=weight.device))

    def forward(self, tokens: Tensor, keep: Sequence[int] = ()) -> tuple[dict[int, Tensor], Tensor]:
        """As the base's."""
        changed = {
            key.replace("-", "."): weight.float() + self.up[key] @ self.down[key]
            for key, weight in self._matrices().items()
        }
        if not torch.is_autocast_enabled(tokens.device.type):
            changed = {name: weight.to(self.base.embedding.dtype) for name, weight in changed.items()}
        found: tuple[dict[int, Tensor], Tensor] = functional_call(self.base, changed, (tokens, tuple(keep)))
        return found

    def write(self, folder: Path, base: str) -> None:
        """An adapter in PEFT's form, of the base with this name."""
        changes: dict[str, tuple[Tensor, Tensor]] = {}
        for i in range(len(self.base.layers)):
            for name in MATRICES:
                key = f"layers-{i}-{name}"
                for part, up in split_rows(self.base.config, name, self.up[key].detach()).items():
                    down = self.down[key].detach().clone()  # parts of one matrix share it; files do not
                    changes[f"model.layers.{i}.{part}.weight"] = down, up
        Adapter(base, self.rank, 1.0, changes).write(folder)

    def _matrices(self) -> dict[str, Tensor]:
        """By a key that a parameter may have."""
        return {
            f"layers-{i}-{name}": layer.get_parameter(name)
            for i, layer in enumerate(self.base.layers)
            for name in MATRICES
        }
