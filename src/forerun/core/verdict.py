"""Verdicts: the accepted paths through the trees of a round, on the host or on the device that decided them."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from forerun.core.tree import TreeBatch, ints_of


class DeviceOutcome(Protocol):
    """A verdict in the memory of the device that decided it, until that target's next pass over trees."""

    @property
    def is_latest(self) -> bool:
        """Is it still there? Else a pass that follows it was launched."""
        ...

    @property
    def is_moved(self) -> bool:
        """Are the accepted paths at their places in the KV cache?"""
        ...

    @property
    def trees(self) -> Sequence[int]:
        """[B] which trees of the pass the verdict is on."""
        ...

    def kept(self, which: Sequence[int]) -> DeviceOutcome:
        """On some of these trees."""
        ...


class DeviceSampling(Protocol):
    """The target's own tokens above temperature 0, on a device (forerun.verify.sampled), for targets there."""

    @property
    def fields(self) -> int:
        """Numbers per sequence that are sent to the device."""
        ...

    def kinds(self, seqs: Sequence[Any]) -> Hashable | None:
        """What these sequences (`forerun.core.types.Seq`) need; None = all are greedy, or the host must decide.

        What is captured for some kinds serves all batches of these.
        """
        ...

    def usual(self) -> Sequence[Hashable]:
        """Kinds that are to be captured beforehand."""
        ...

    def settings(self, seqs: Sequence[Any], kinds: Any) -> np.ndarray[Any, np.dtype[np.int64]]:
        """[fields, B] of every sequence."""
        ...

    def tokens(self, logits: Tensor, positions: Tensor, table: Tensor, kinds: Any, depth: int) -> Tensor:
        """[B, N] after every node: of logits [B, N, V], positions [B, N] and settings [fields, B] on the device."""
        ...


class Verdict:
    """The verifier's decision: per tree, the accepted nodes below the root and the bonus token."""

    __slots__ = ("_device", "_lists", "_tensors", "outcome")

    def __init__(
        self,
        paths: Tensor,  # [B, P] node index within its tree, by depth; -1 past the end
        accepted: Tensor,  # [B] how many nodes each path has
        bonus: Tensor,  # [B] the target's token after the path
        outcome: DeviceOutcome | None = None,  # the same on the target's device, where that decided
    ) -> None:
        self.outcome = outcome
        self._tensors: tuple[Tensor, Tensor, Tensor] | None = (paths, accepted, bonus)
        self._lists: tuple[list[list[int]], list[int]] | None = None
        self._device: torch.device | str = paths.device

    @classmethod
    def of(
        cls,
        paths: Sequence[Sequence[int]],
        bonus: Sequence[int],
        device: torch.device | str,
        outcome: DeviceOutcome | None = None,
    ) -> Verdict:
        verdict = cls.__new__(cls)
        verdict._lists, verdict._tensors = ([*map(list, paths)], list(bonus)), None
        verdict._device, verdict.outcome = device, outcome
        return verdict

    @classmethod
    def whole_chain(cls, trees: TreeBatch, bonus: Sequence[int]) -> Verdict:
        """Every node accepted: the verdict of a prompt on itself."""
        return cls.of([range(1, size) for size in trees.sizes()], bonus, trees.device)

    @property
    def paths(self) -> Tensor:
        return self._as_tensors()[0]

    @property
    def accepted(self) -> Tensor:
        return self._as_tensors()[1]

    @property
    def bonus(self) -> Tensor:
        return self._as_tensors()[2]

    def _as_tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        if self._tensors is None:
            assert self._lists is not None, "a verdict is made of one or the other"
            paths, bonus = self._lists
            longest = max((len(path) for path in paths), default=0)
            padded = [[*path, *[-1] * (longest - len(path))] for path in paths]
            lengths = ints_of([len(path) for path in paths], self._device)
            rows = ints_of(padded, self._device).view(len(paths), longest)
            self._tensors = rows, lengths, ints_of(bonus, self._device)
        return self._tensors

    def kept(self, which: Sequence[int]) -> Verdict:
        """On some of the trees."""
        paths, bonus = self.to_host()
        outcome = None if self.outcome is None else self.outcome.kept(which)
        return Verdict.of([paths[b] for b in which], [bonus[b] for b in which], self._device, outcome)

    def path(self, b: int) -> list[int]:
        return self.to_host()[0][b]

    def to_host(self) -> tuple[list[list[int]], list[int]]:
        """All paths, cut to their lengths, and all bonus tokens, to be read only: the one read of a round."""
        if self._lists is None:
            rows = zip(self.paths.tolist(), self.accepted.tolist(), strict=True)
            self._lists = [path[:length] for path, length in rows], self.bonus.tolist()
        return self._lists
