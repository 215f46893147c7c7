"""Compiles Triton's kernels side by side before they are needed: the first launch of each would do it one by one.

`compile_together` is given work that launches kernels. It does that work with launches that launch nothing: each only
asks for its kernel, which is compiled in a thread. At the end all kernels are where launches look for them. Triton has
most of this (`AsyncCompileMode` of Triton 3.6), but waits for a kernel as soon as it is launched.

Work that is asked for by a name (`what`) is noted once all its kernels are on disk (`on_disk`): the next process does
not ask for them, and its launches read each kernel when they need it.

About a third of a compilation holds Python's global lock, so each thread has a process of its own (`compile_worker`),
which compiles what is not on disk yet. To do without them, set MOST_THREADS to 0: kernels are then compiled when they
are first launched.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from functools import lru_cache
from importlib import import_module
from queue import Empty, SimpleQueue
from time import perf_counter
from typing import Any

import torch

from forerun.models.cuda.compile.on_disk import KernelNote, triton_key
from forerun.models.cuda.compile.worker import Worker, job_of

log = logging.getLogger(__name__)
progress = logging.getLogger("forerun.progress")

MOST_THREADS = 16  # each has a process of about 300 MB while kernels are compiled; 0 = do not compile ahead

_ASYNC = "triton.runtime._async_compile"
_KNOWN = "3.6."  # versions of Triton; launches of 3.8 keep a kernel that failed, and never compile it again
_alone = threading.Lock()  # one at a time may exchange what a launch does


def compile_together(work: Callable[[], None], what: object = None) -> None:
    """Compile all kernels that `work` launches, and launch none of them. What else it does is done.

    `what` tells all that its kernels follow from: nothing is done where they are known to be on disk.

    Does nothing, not even `work`, where Triton is missing or cannot do this. A kernel that cannot be compiled is
    compiled again when it is launched, which then says why.
    """
    if begun := begin_compiling(work, what):
        begun.finish()


def begin_compiling(work: Callable[[], None], what: object = None) -> Compiling | None:
    """The same without waiting for the kernels; None = there is nothing to wait for."""
    threads = _thread_count()
    if not threads:
        return None
    triton_key()
    note = None if what is None else KernelNote(what)
    if note is not None and note.holds():
        log.info("all kernels are on disk")
        return None
    pool = _Pool(threads)
    begun = Compiling(import_module(_ASYNC).AsyncCompileMode(pool), note)
    try:
        with _alone, _launching_nothing(begun.mode):
            work()
    except Exception as error:  # of another Triton, or one that a launch raises too
        log.warning("kernels are compiled one by one: %s: %s", type(error).__name__, error)
        pool.drop()
        begun.finish()
        return None
    finally:
        pool.close()  # nobody may ever wait for these kernels
    return begun


class Compiling:
    """Kernels that are being compiled. A launch that needs one of them meanwhile compiles it again."""

    def __init__(self, mode: Any, note: KernelNote | None = None) -> None:
        self.mode, self._note, self._started = mode, note, perf_counter()

    @property
    def is_done(self) -> bool:
        return all(future.done() for future in self.mode.raw_futures)

    def finish(self) -> None:
        """Wait for all kernels, and put them where launches look for them."""
        kernels = list(self.mode.future_kernels.values())
        for i, kernel in enumerate(kernels):
            progress.info("compiling kernels: %d of %d", i + 1, len(kernels))
            kernel.result(ignore_errors=True)
        if self._note is not None:
            self._note.write(kernel.kernel for kernel in kernels)
        log.info("compiled %d kernels in %.1f s", len(kernels), perf_counter() - self._started)


class _Pool:
    """An executor for Triton: threads that wait for processes of their own. Neither keeps a program from ending."""

    def __init__(self, threads: int) -> None:
        self._most, self._threads = threads, list[threading.Thread]()
        self._jobs: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()

    def submit(self, compile_kernel: Callable[[], Any]) -> Future[Any]:
        found = Future[Any]()
        self._jobs.put((found, compile_kernel))
        if len(self._threads) < self._most:
            thread = threading.Thread(target=self._work, name=f"compile_{len(self._threads)}", daemon=True)
            self._threads.append(thread)
            thread.start()
        return found

    def _work(self) -> None:
        workers = list[Worker]()  # one, once there is something to compile
        while (job := self._jobs.get()) is not None:
            future, compile_kernel = job
            try:
                future.set_result(self._compile(compile_kernel, workers))
            except BaseException as error:
                future.set_exception(error)
        for worker in workers:
            worker.close()

    def _compile(self, compile_kernel: Callable[[], Any], workers: list[Worker]) -> Any:
        """By the thread's process, and then from disk; without it where it fails."""
        try:
            if job := job_of(compile_kernel):
                if not workers:
                    workers.append(Worker())
                workers[0].compile(job)
        except Exception as error:
            log.warning("a kernel is compiled in the main process: %s: %s", type(error).__name__, error)
        return compile_kernel()

    def drop(self) -> None:
        """Compile nothing that has not begun."""
        with suppress(Empty):
            while job := self._jobs.get_nowait():
                job[0].set_exception(RuntimeError("it is not wanted any more"))

    def close(self) -> None:
        """Let threads and processes end, once there is nothing left to compile."""
        for _ in self._threads:
            self._jobs.put(None)


def _thread_count() -> int:
    """As many as there are cores, with a limit; 0 where kernels cannot be compiled before they are launched."""
    try:
        known = str(import_module("triton").__version__).startswith(_KNOWN)
        interpreted = import_module("triton.knobs").runtime.interpret
        begun = import_module(_ASYNC).active_mode.get() is not None  # by a caller of ours
    except (ImportError, AttributeError):  # no Triton, or another
        return 0
    if interpreted or begun or not known:
        return 0
    return min(MOST_THREADS, os.cpu_count() or 1)


@contextmanager
def _launching_nothing(mode: Any) -> Iterator[None]:
    """Launches of this thread only hand their kernel to the mode; those of other threads go on as ever."""
    kernels, active = import_module("triton.runtime.jit").JITFunction, import_module(_ASYNC).active_mode
    run, compile_kernel, asked = kernels.run, kernels._do_compile, list[tuple[dict[Any, Any], Any, Any]]()

    def ask(kernel: Any, *args: Any, grid: Any, warmup: bool, **settings: Any) -> Any:
        asks = active.get() is mode  # of each thread its own
        return run(kernel, *args, grid=grid, warmup=warmup or asks, **settings)

    def ask_once(kernel: Any, key: Any, signature: Any, device: Any, *given: Any, **more: Any) -> Any:
        """Its place is taken: a launch of the same kernel, and there are forty of each, need not find its key."""
        found = compile_kernel(kernel, key, signature, device, *given, **more)
        if active.get() is mode and found is not None:
            known = kernel.device_caches[device][0]
            known[key] = found
            asked.append((known, key, found))
        return found

    token = active.set(mode)
    kernels.run, kernels._do_compile = ask, ask_once
    try:
        yield
    finally:
        kernels.run, kernels._do_compile = run, compile_kernel
        active.reset(token)
        for known, key, found in asked:
            if known.get(key) is found:  # the kernel itself comes at the end
                del known[key]


@lru_cache(maxsize=16)
def starts_early(device: torch.device) -> bool:
    """From compute capability 9.0 on; never where kernels are interpreted."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
