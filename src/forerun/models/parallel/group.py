"""What ranks say to each other: the plan from rank 0, sums in the order of the ranks, and logits put together.

A sum that goes round a ring adds in an order of its own; here every rank gets all parts and adds them in the order of
the ranks, so that the same numbers come out every time and on every rank. Plans travel as integers through gloo, which
may wait for ever; tensors go through gloo on CPUs and through NCCL on GPUs. Groups are objects of their own: the
process may use torch.distributed for something else.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, distributed

from forerun.models.parallel.split import Part

dist: Any = distributed  # process groups are not typed
Backend = Literal["gloo", "nccl"]
PLAN = 1024  # numbers of a plan that are sent at once; a longer one comes in two messages
FOR_EVER = timedelta(days=3650)  # a rank waits for the next plan as long as nobody asks for a text
PATIENCE = timedelta(minutes=5)  # for the others of a pass, and for all to connect


class Group:
    """One rank's connection with the others. All ranks must make the same calls in the same order."""

    def __init__(self, store: Path, part: Part, backend: Backend, device: torch.device) -> None:
        self.part, self.backend, self.device = part, backend, device
        shared = dist.FileStore(str(store), part.size)
        self._plans = _gloo(dist.PrefixStore("plans", shared), part, FOR_EVER)
        self._tensors: Any
        if backend == "nccl":
            self._tensors = _nccl(dist.PrefixStore("tensors", shared), part)
        else:
            self._tensors = _gloo(dist.PrefixStore("tensors", shared), part, PATIENCE)
        self._plan = torch.zeros(PLAN, dtype=torch.int64)
        self.sum_in_order(torch.zeros(1, 1, device=device))  # behind it all ranks are connected

    def send_plan(self, numbers: Sequence[int]) -> None:
        """Rank 0: to all others."""
        plan = torch.tensor([len(numbers), *numbers], dtype=torch.int64)
        self._plan[: min(PLAN, len(plan))] = plan[:PLAN]
        self._broadcast(self._plan)
        if len(plan) > PLAN:
            self._broadcast(plan[PLAN:].contiguous())

    def receive_plan(self) -> list[int]:
        """Another rank: what rank 0 sends next, whenever that is."""
        self._broadcast(self._plan)
        total = int(self._plan[0])
        numbers: list[int] = self._plan[1 : 1 + total].tolist()
        if total >= PLAN:
            rest = torch.empty(1 + total - PLAN, dtype=torch.int64)
            self._broadcast(rest)
            numbers += rest.tolist()
        return numbers

    def sum_in_order(self, mine: Tensor) -> Tensor:
        """The sum over ranks: first rank 0's part, then rank 1's, and so on; the same on every rank."""
        sent = self._sent(mine)
        parts = sent.new_empty(self.part.size, *sent.shape)
        self._tensors.allgather([list(parts.unbind())], [sent]).wait()
        total = parts[0].to(self.device, torch.float32 if mine.dtype != torch.float64 else mine.dtype)
        for part in parts[1:]:
            total = total.add_(part.to(self.device))
        return total.to(mine.dtype)

    def join_columns(self, mine: Tensor, widths: Sequence[int]) -> Tensor | None:
        """Rank 0: the columns of all ranks [M, sum(widths)], side by side; None elsewhere."""
        sent = self._sent(mine)
        wide = max(widths)
        if sent.shape[1] < wide:  # ranks must send alike
            sent = torch.nn.functional.pad(sent, (0, wide - sent.shape[1]))
        options = dist.GatherOptions()
        options.rootRank = 0
        is_root = self.part.rank == 0
        parts = [torch.empty_like(sent) for _ in widths] if is_root else []
        self._tensors.gather([parts] if is_root else [], [sent], options).wait()
        if not is_root:
            return None
        return torch.cat([part[:, :width] for part, width in zip(parts, widths, strict=True)], 1).to(self.device)

    def _sent(self, mine: Tensor) -> Tensor:
        """As the backend takes it: gloo reads memory of the CPU."""
        return (mine.cpu() if self.backend == "gloo" else mine).contiguous()

    def _broadcast(self, numbers: Tensor) -> None:
        options = dist.BroadcastOptions()
        options.rootRank = 0
        self._plans.broadcast([numbers], options).wait()


def _gloo(store: Any, part: Part, patience: timedelta) -> Any:
    """Ranks on this machine: nothing listens on an address that others reach."""
    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    options._timeout = patience
    return dist.ProcessGroupGloo(store, part.rank, part.size, options)


def _nccl(store: Any, part: Part) -> Any:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = PATIENCE
    return dist.ProcessGroupNCCL(store, part.rank, part.size, options)
