"""Training data made by many workers on Ray: the shards are those that one machine makes from the same seed.

A text is a function of its order: seed, number, prompt and temperature. Workers take the orders in lots, one after the
other, in whatever order they are done; `make_data` sorts what comes back. A lot whose worker dies is written
again by another one. A run that was interrupted goes on behind the last shard, as on one machine.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from itertools import islice
from typing import Any

from forerun.core.errors import InvalidInput, MissingDependency
from forerun.train.data.make import Write, writer_for
from forerun.train.data.writer import Order, Written
from forerun.train.options import DataOptions

AHEAD = 2  # lots that a worker has at hand, so that it never waits
TRIES = 4  # times that a lot is written anew where its worker died


class Worker:
    def __init__(self, options: dict[str, Any], threads: int) -> None:
        import torch

        from forerun.models.load.checkpoint import open_checkpoint

        torch.set_num_threads(threads)
        self._options = DataOptions(**options)
        self._write = writer_for(open_checkpoint(self._options.target), self._options, by_order=True)

    def write(self, orders: Sequence[Order]) -> list[Written]:
        return list(self._write(orders))


@contextmanager
def ray_writer(options: DataOptions, workers: int, gpus: float = 0.0) -> Iterator[Write]:
    """A `Write` over so many workers; joins the cluster of RAY_ADDRESS, else starts one on this machine."""
    if workers < 1:
        raise InvalidInput(f"workers={workers} is out of range: 1 or more")
    try:
        import ray
    except ImportError:
        raise MissingDependency("--ray needs ray; pip install 'forerun[ray]'") from None
    started = not ray.is_initialized()
    if started:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        alone = {} if "RAY_ADDRESS" in os.environ else {"num_cpus": max(workers, os.cpu_count() or 1)}
        ray.init(log_to_driver=False, include_dashboard=False, **alone)
    threads = max(1, (os.cpu_count() or 1) // workers)
    actor: Any = ray.remote(num_cpus=1, num_gpus=gpus, max_restarts=-1, max_task_retries=TRIES)(Worker)
    crew = [actor.remote(asdict(options), threads) for _ in range(workers)]
    try:
        yield lambda orders: write_with_workers(ray, crew, orders, options.batch)
    finally:
        for worker in crew:
            ray.kill(worker)
        if started:
            ray.shutdown()


def write_with_workers(ray: Any, crew: Sequence[Any], orders: Iterable[Order], lot: int) -> Iterator[Written]:
    """Every order, written by whichever worker is free."""
    left = iter(orders)
    running: dict[Any, Any] = {}

    def start(worker: Any) -> None:
        if some := list(islice(left, lot)):
            running[worker.write.remote(some)] = worker

    for worker in [each for _ in range(AHEAD) for each in crew]:
        start(worker)
    while running:
        done, _ = ray.wait(list(running), num_returns=1)
        for ref in done:
            start(running.pop(ref))
            yield from ray.get(ref)
