"""Tensor parallel with the other ranks as threads of this process: real groups, no processes to start."""

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from forerun.models.config import DecoderConfig
from forerun.models.parallel.decoder import Group, ParallelFollower, ParallelTarget, Part, PassPlan

CPU = torch.device("cpu")


def connect(folder: Path, size: int) -> list[Group]:
    """A group of ranks, each as a thread of this process would hold it."""
    groups: dict[int, Group] = {}

    def join(part: Part) -> None:
        groups[part.rank] = Group(folder / "store", part, "gloo", CPU)

    threads = [threading.Thread(target=join, args=(part,)) for part in Part(0, size).all]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return [groups[rank] for rank in range(size)]


def _replay(follower: ParallelFollower) -> None:
    while numbers := follower.group.receive_plan():  # an empty plan ends the thread
        follower.replay(PassPlan.from_numbers(numbers))


@contextmanager
def parallel_target(
    config: Mapping[str, Any], weights: Mapping[str, Tensor], folder: Path, size: int = 2
) -> Iterator[ParallelTarget]:
    """Rank 0 of a decoder in fp32, with the others beside it until the block ends."""
    parsed, (own, *others) = DecoderConfig.from_hf(config), connect(folder, size)
    target = ParallelTarget(
        parsed, weights, Part(0, size), dtype=torch.float32, device=CPU, kv_slots=None, kv_memory=None
    )
    target.join(own, None)
    threads = []
    for group in others:
        follower = ParallelFollower(parsed, weights, group.part, dtype=torch.float32, device=CPU)
        follower.group = group
        threads.append(threading.Thread(target=_replay, args=(follower,)))
        threads[-1].start()
    try:
        yield target
    finally:
        target.close()
        own.send_plan([])
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive(), "a rank did not reach the end of the last pass"
