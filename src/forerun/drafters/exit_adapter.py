"""ExitAdapter: what stands between an early exit and the LM head: a gated low-rank correction and a norm.

A row x that leaves the exit layer becomes norm(x + B silu(A norm(x))). With B = 0 and the target's final norm it is the
target's own early exit, which is where `forerun train early-exit` starts.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.errors import DamagedFile, InvalidInput
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
        """Raise unless it reads rows of this width."""
        if self.down.shape[1] != width:
            raise InvalidInput(
                f"the exit adapter is {self.down.shape[1]} wide, and the target {width}: train another"
            )

    def to(self, dtype: torch.dtype, device: torch.device) -> ExitAdapter:
        moved = {name: value.to(device, dtype) for name, value in self._tensors().items()}
        return ExitAdapter(**moved, eps=self.eps)

    def write(self, path: Path) -> None:
        """As safetensors, in 16 bits."""
        from forerun.models.load.tensor_file import write_tensors

        halves = {
            name: value.detach().to(torch.float16).contiguous() for name, value in self._tensors().items()
        }
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
