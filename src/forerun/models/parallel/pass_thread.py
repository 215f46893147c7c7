"""A thread that passes run on, so that an interrupt of the caller (Ctrl-C) never splits one.

Ranks must all make the same calls. An interrupt is raised in the main thread between any two of them, so passes run on
another thread: the caller waits until the pass has ended, and only then is interrupted.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from concurrent.futures import Future, wait
from queue import SimpleQueue
from threading import Thread

Job = tuple["Future[None]", Callable[[], None]]


class PassThread:
    """Runs one piece of work after another."""

    def __init__(self) -> None:
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        Thread(target=_serve, args=(self._jobs,), name="forerun-passes", daemon=True).start()
        weakref.finalize(self, self._jobs.put, None)

    def run(self, work: Callable[[], None]) -> None:
        """Do it on the thread: an interrupt comes before it has begun, and then it is dropped, or after it."""
        job: Future[None] = Future()
        interrupt: BaseException | None = None
        try:
            self._jobs.put((job, work))
            wait([job])
        except BaseException as error:
            interrupt = error
        while not job.done() and not (interrupt is not None and job.cancel()):
            try:
                wait([job])
            except BaseException as error:
                interrupt = error
        if not job.cancelled():
            job.result()
        if interrupt is not None:
            raise interrupt

    def close(self) -> None:
        """End the thread when what it does now is done."""
        self._jobs.put(None)


def _serve(jobs: SimpleQueue[Job | None]) -> None:
    """Not a method: the thread must not keep its owner alive."""
    while (job := jobs.get()) is not None:
        future, work = job
        if future.set_running_or_notify_cancel():
            try:
                work()
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(None)
        del job, future, work
