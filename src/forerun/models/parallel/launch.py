"""Loads a model over several processes: starts the other ranks, loads rank 0, connects them, and ends them.

A worker ends when its input is closed: by `close`, when the target is garbage, at the end of the program, and by the
system where the program was killed. Nothing is left behind in any of these cases. A worker is this module run with
`python -m`: it loads its part of the model, says that it is ready, connects, and computes passes.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from threading import Event, Thread
from typing import IO, Any

import torch

from forerun.core.checks import as_memory
from forerun.core.errors import InvalidInput, ModelError, UnsupportedModel, brief
from forerun.core.params import EngineConfig
from forerun.models.config import DecoderConfig, supports
from forerun.models.load.checkpoint import Checkpoint, open_checkpoint
from forerun.models.load.shapes import check_shapes
from forerun.models.parallel.decoder import DTYPES, Backend, Group, ParallelFollower, ParallelTarget, Part, check_split
from forerun.models.slots import allowed_bytes

log = logging.getLogger(__name__)
GRACE = 5.0  # seconds that a worker has to end by itself
NOTICE = 1.0  # seconds until the end of a process is known, after it has broken a pass


class Worker:
    def __init__(self, rank: int, size: int, job: dict[str, Any]) -> None:
        self._name = f"rank {rank} of {size}"
        ours = str(Path(__file__).parents[3])
        # it imports what this process would, and from there (-P: nothing from the folder it is started in)
        paths = [*([] if ours in sys.path else [ours]), *filter(None, sys.path)]
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "forerun.models.parallel.launch", json.dumps(job | {"rank": rank})],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
            start_new_session=True,  # Ctrl-C in a terminal is for rank 0
        )
        self.settled, self.ended = Event(), Event()  # settled: it is ready, or has ended
        self.problem: str | None = None
        Thread(target=self._listen, name=f"forerun-{rank}", daemon=True).start()

    def _listen(self) -> None:
        """What it says, until it ends."""
        assert self.process.stdout is not None
        reason = ""
        for line in self.process.stdout:
            said = json.loads(line)
            if said["what"] == "ready":
                self.settled.set()
            else:
                reason = f": {said['text']}"
        status = self.process.wait()
        self.problem = f"{self._name} has ended (status {status}{reason}); load the model again"
        self.ended.set()
        self.settled.set()

    def close(self) -> None:
        assert self.process.stdin is not None
        with suppress(OSError):
            self.process.stdin.close()

    def reap(self) -> None:
        """Wait for its end, and end it where that takes long."""
        try:
            self.process.wait(GRACE)
        except subprocess.TimeoutExpired:
            log.warning("%s does not end and is killed", self._name)
            self.process.kill()
            self.process.wait()


class Workers:
    """All ranks but 0, and the file through which they find each other."""

    def __init__(self, size: int, devices: Sequence[torch.device], job: dict[str, Any]) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="forerun-ranks-"))
        self.store = self._folder / "store"
        self._workers: list[Worker] = []
        self._is_closed = False
        try:
            for rank in range(1, size):
                own = job | {"size": size, "store": str(self.store), "device": str(devices[rank])}
                self._workers.append(Worker(rank, size, own))
        except BaseException:
            self.close()
            raise

    @property
    def pids(self) -> list[int]:
        return [worker.process.pid for worker in self._workers]

    def problem(self) -> str | None:
        """Which of them has ended, and why; None while all run."""
        return next((worker.problem for worker in self._workers if worker.problem is not None), None)

    def wait_until_ready(self) -> None:
        """Until all have loaded their parts; raises where one has ended instead."""
        for worker in self._workers:
            worker.settled.wait()
        problem = self.problem()
        if problem is not None:
            raise ModelError(problem)

    def forget_store(self) -> None:
        """All are connected: a program that is killed leaves no file behind. NCCL may look into it again."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def end_after_failure(self) -> str | None:
        """A pass has failed: end all, and say which of them was the first to go."""
        for worker in self._workers:
            worker.ended.wait(NOTICE)
        found = self.problem()
        self.close()
        return found

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        for worker in self._workers:
            worker.close()
        for worker in self._workers:
            worker.reap()
        self.forget_store()


def load_parallel(
    checkpoint: Checkpoint, settings: EngineConfig, device: torch.device, backend: Backend | None = None
) -> ParallelTarget:
    """Rank 0 of a model that is split over processes: on GPUs 0, 1, ..., or on this machine's CPU.

    `backend` gloo on a GPU lets ranks share one, for tests.
    """
    size, dtype = settings.tensor_parallel_size, _dtype(settings, device)
    if not supports(checkpoint.config):
        raise UnsupportedModel(
            f"tensor_parallel_size={size} splits models of our own families, and "
            f"{checkpoint.config.get('model_type')!r} is none; leave it out"
        )
    config = DecoderConfig.from_hf(checkpoint.config)
    check_shapes(config, checkpoint.weights)
    check_split(config, size)
    memory = allowed_bytes(as_memory("kv_memory", settings.kv_memory), device)
    if memory is not None and device.type != "cuda":
        memory //= size  # the ranks share this machine's
    backend = backend or ("nccl" if device.type == "cuda" else "gloo")
    devices = _devices(device, size, shares=backend == "gloo")
    job = {
        "model": str(checkpoint.path), "dtype": str(dtype).removeprefix("torch."), "backend": backend,
        "threads": torch.get_num_threads(),
    }  # fmt: skip
    workers = Workers(size, devices, job)
    try:
        target = ParallelTarget(
            config, checkpoint.weights, Part(0, size),
            dtype=dtype, device=devices[0], kv_slots=settings.kv_slots, kv_memory=memory,
        )  # fmt: skip
        workers.wait_until_ready()
        target.join(Group(workers.store, Part(0, size), backend, devices[0]), workers)
        if backend == "gloo":
            workers.forget_store()
    except BaseException:
        workers.close()
        raise
    weakref.finalize(target, workers.close)
    return target


def _dtype(settings: EngineConfig, device: torch.device) -> torch.dtype:
    """Neither the C kernels nor the CUDA graphs are split: no weights in fewer bits."""
    if settings.dtype == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    if settings.dtype not in DTYPES:
        raise InvalidInput(
            f"dtype={settings.dtype!r} cannot be split over processes; use {', '.join(DTYPES)} with "
            f"tensor_parallel_size={settings.tensor_parallel_size}"
        )
    return DTYPES[settings.dtype]


def _devices(device: torch.device, size: int, shares: bool) -> list[torch.device]:
    if device.type != "cuda":
        return [device] * size
    if str(device) != "cuda":
        raise InvalidInput(
            f"device={str(device)!r} names one GPU and tensor_parallel_size={size} needs {size}; use device='cuda'"
        )
    there = torch.cuda.device_count()
    if size > there and not shares:
        raise InvalidInput(f"tensor_parallel_size={size} needs {size} GPUs and torch sees {there}; use at most {there}")
    return [torch.device("cuda", rank % there) for rank in range(size)]


def load(job: dict[str, Any]) -> ParallelFollower:
    device = torch.device(job["device"])
    if device.type == "cuda":
        torch.cuda.set_device(device)
    torch.set_num_threads(job["threads"])
    checkpoint = open_checkpoint(job["model"])
    config = DecoderConfig.from_hf(checkpoint.config)
    dtype = DTYPES[job["dtype"]]
    part = Part(job["rank"], job["size"])
    return ParallelFollower(config, checkpoint.weights, part, dtype=dtype, device=device)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is rank 0's affair
    said = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print is no answer
    Thread(target=_end_with_parent, daemon=True).start()
    try:
        job = json.loads(sys.argv[1])
        follower = load(job)
        _say(said, "ready", "")
        follower.group = Group(Path(job["store"]), follower.part, job["backend"], follower.device)
        follower.serve()
    except BaseException as error:
        _say(said, "error", f"{type(error).__name__}: {brief(error)}")
    finally:
        os._exit(1)  # gloo's threads would abort an orderly end


def _end_with_parent() -> None:
    while os.read(0, 4096):
        pass
    os._exit(0)


def _say(to: IO[str], what: str, text: str) -> None:
    try:
        print(json.dumps({"what": what, "text": text}), file=to, flush=True)
    except OSError:
        os._exit(0)  # nobody listens any more


if __name__ == "__main__":
    main()
