"""Driver: runs one engine for any number of threads; requests in, results and events by handle.

An engine is used by one thread at a time. It has no thread of its own: one of the waiting threads is the leader and
makes rounds for all. The others sleep until the leader wakes them, because what they wait for has come or because the
leader has left. What threads ask of the engine (queue a request, drop one) goes through an inbox that the leader
empties between rounds.

The engine stores events with their sequence, and a handle continues to read where it was. So nothing is lost when a
leader is interrupted: the engine undoes the round, the caller drops its own request, and another thread leads.
Leadership is taken and given up by identity, in steps that an interrupt cannot split.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import count, islice
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Event as ThreadEvent
from typing import Protocol

from forerun.core.types import Event, LoadedAdapter, Request
from forerun.engine.engine import Engine
from forerun.engine.round import WORTH_CAPTURES
from forerun.engine.sequence import SequenceState, compiled, find_adapter

LONGEST_SLEEP = 1.0  # seconds after which a thread that was not woken checks by itself
IDLE_SLEEP = 0.05  # the same where captures wait for kernels that are being compiled
_LEADER = "leader"


class Handle:
    """A request that was submitted: its sequence, and the events that were not read yet."""

    def __init__(self, request: Request, adapter: LoadedAdapter | None = None) -> None:
        self.request = request
        self._adapter = adapter  # held until the sequence holds it: no round waits until it is read
        self.refused: Exception | None = None  # why it was not queued
        self.is_dropped = False  # the caller no longer wants it
        self._seq: SequenceState | None = None
        self._read = 0

    @property
    def seq(self) -> SequenceState:
        assert self._seq is not None, "the request was not queued"
        return self._seq

    @property
    def is_decided(self) -> bool:
        return self._seq is not None or self.refused is not None

    @property
    def is_finished(self) -> bool:
        return self._seq is not None and self._seq.finished is not None

    @property
    def has_news(self) -> bool:
        """Is there an event to take, or has it finished?"""
        seq = self._seq
        return seq is not None and (seq.finished is not None or len(seq.events) > self._read)

    def take(self) -> list[Event]:
        fresh = self.seq.events[self._read :]
        self._read += len(fresh)
        return fresh

    def queue_in(self, engine: Engine) -> None:
        """Queue it, or say why not; repeated where it was interrupted, it is queued once."""
        if self.is_dropped or self.refused is not None:
            return
        try:
            if self._seq is None:
                self._seq = engine.prepare(self.request)
            self._adapter = None
            engine.enqueue(self._seq)
        except Exception as error:
            self.refused = error

    def drop_from(self, engine: Engine) -> None:
        if self._seq is not None:
            engine.abort(self._seq.id)


class Waits(Protocol):
    """Something that waits for the engine: a thread, or a task of an event loop."""

    def is_ready(self) -> bool:
        """Has it come? Asked by any thread."""

    def wake(self) -> None:
        """It may have come, or there is no leader. Called by any thread."""


class Waiter:
    def __init__(self, is_ready: Callable[[], bool]) -> None:
        self._is_ready = is_ready
        self._woken: SimpleQueue[None] = SimpleQueue()

    def is_ready(self) -> bool:
        return self._is_ready()

    def wake(self) -> None:
        if self._woken.empty():
            self._woken.put(None)

    def sleep(self, seconds: float) -> None:
        try:
            self._woken.get(timeout=seconds)
        except Empty:
            return


class Driver:
    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._inbox: deque[Callable[[Engine], None]] = deque()  # called again where they were interrupted
        self._leading: dict[str, Waits] = {}  # one at most
        self._waiting: dict[Waits, None] = {}

    def prepared(self, request: Request) -> Handle:
        """A request with its grammar compiled and its adapter read, by the caller's thread: no round waits for it."""
        adapter = None if request.adapter is None else find_adapter(self.engine.adapters, request.adapter)
        return Handle(compiled(self.engine.grammars, request), adapter)

    def submit(self, request: Request) -> Handle:
        """Queue a request, between two rounds; raises the engine's error if it is refused."""
        handle = self.prepared(request)
        try:
            self.post(handle.queue_in)
            self.wait(Waiter(lambda: handle.is_decided), makes_rounds=False)
        except BaseException:
            self.abort(handle)
            raise
        if handle.refused is not None:
            raise handle.refused
        return handle

    def abort(self, handle: Handle, at_once: bool = True) -> None:
        """Drop a request, before the next round at the latest; finished ones are ignored. Never waits for a round."""
        handle.is_dropped = True
        if not handle.is_finished:
            self.post(handle.drop_from, at_once)

    def result(self, handle: Handle) -> SequenceState:
        """Wait until it has finished, however that may be: see `finished` and `error`."""
        self.wait(Waiter(lambda: handle.is_finished))
        return handle.seq

    def events(self, handles: Mapping[int, Handle]) -> Iterator[tuple[int, Event]]:
        """The events of several requests as they come, under their keys, until all have ended."""
        left = dict(handles)
        waiter = Waiter(lambda: any(handle.has_news for handle in left.values()))
        while left:
            self.wait(waiter)
            for key, handle in list(left.items()):
                if handle.is_finished:  # asked first: what is there now is all
                    del left[key]
                for event in handle.take():
                    yield key, event

    def write(self, requests: Iterable[Request]) -> list[SequenceState]:
        """Serve several requests and wait for all. Whatever happens, none of them stays behind."""
        requests, handles = list(requests), list[Handle]()
        self.expect(requests)
        try:
            for request in requests:
                handles.append(self.submit(request))  # if one is refused, the others are dropped
            return [self.result(handle) for handle in handles]
        finally:
            for handle in handles:
                self.abort(handle)

    def expect(self, requests: Sequence[Request], rounds: int = WORTH_CAPTURES) -> None:
        """A caller waits for all of these: capture what they replay first, if they may take that many rounds.

        Captures take seconds, once. Shorter work, and what comes while others write, goes on without the drafts that
        need them, which are captured beside it.
        """

        def capture(engine: Engine) -> None:
            tokens = max((request.params.max_tokens for request in requests), default=0)
            if not engine.busy and tokens * -(-len(requests) // engine.max_batch) >= rounds:
                engine.captures.before(min(len(requests), engine.max_batch))

        self.post(capture)

    def stream(self, requests: Iterable[Request], at_once: int | None = None) -> Iterator[tuple[int, Event]]:
        """Events of many requests as they come, each with the index of its request; `at_once` are served at a time."""
        coming, places, active = iter(requests), count(), dict[int, Handle]()
        try:
            while True:
                for request in islice(coming, None if at_once is None else at_once - len(active)):
                    active[next(places)] = self.submit(request)
                if not active:
                    return
                for place, event in self.events(active):
                    if event.finished is not None:
                        del active[place]
                    yield place, event
                    if event.finished is not None and at_once is not None:
                        break  # another may come
        finally:
            for handle in active.values():
                self.abort(handle)

    def post(self, order: Callable[[Engine], None], at_once: bool = True) -> None:
        """Have something done to the engine between two rounds: by the leader, or here and now if there is none."""
        self._inbox.append(order)
        leader = self._leading.get(_LEADER)
        if leader is not None:
            leader.wake()
        if at_once:
            self._empty_inbox()

    def order(self, order: Callable[[Engine], None]) -> None:
        """Post it, return when it is done, and raise what it raised."""
        done, failed = ThreadEvent(), list[Exception]()

        def run(engine: Engine) -> None:
            try:
                order(engine)
            except Exception as error:
                failed.append(error)
            done.set()

        self.post(run)
        done.wait()
        if failed:
            raise failed[0]

    def wait(self, waiter: Waiter, makes_rounds: bool = True) -> None:
        """Return once it is ready; lead meanwhile, whenever there is no other leader."""
        if waiter.is_ready():
            return
        try:
            self._waiting[waiter] = None
            while not waiter.is_ready():
                if self._leading.setdefault(_LEADER, waiter) is waiter:
                    self._lead(waiter, makes_rounds)
                else:
                    waiter.sleep(LONGEST_SLEEP)
        finally:
            try:
                self._leave(waiter)
            finally:  # an interrupt in the first call does not spoil the second
                self._leave(waiter)

    def watch(self, waiter: Waits) -> None:
        """Have it woken when it is ready, without waiting here; ends with `ignore`."""
        self._waiting[waiter] = None

    def ignore(self, waiter: Waits) -> None:
        self._waiting.pop(waiter, None)

    def wake_all(self) -> None:
        """Have all waiters check again."""
        for other in list(self._waiting):
            other.wake()

    def _lead(self, waiter: Waiter, makes_rounds: bool) -> None:
        """Make rounds until it is ready; after each, wake the other waiters that are ready."""
        while True:
            if self._inbox:
                self._do_posted()
            if waiter.is_ready() or not makes_rounds:
                return
            if (left := self.engine.spare_seconds()) > 0.0:
                waiter.sleep(left)  # whoever posts something wakes it
            elif self.engine.busy:
                self.engine.step()
                self._wake_ready()
            elif not self.engine.captures.when_idle():
                waiter.sleep(IDLE_SLEEP if self.engine.captures.waiting else LONGEST_SLEEP)

    def _do_posted(self) -> None:
        while self._inbox:
            self._inbox[0](self.engine)
            self._inbox.popleft()
        self._wake_ready()

    def _wake_ready(self) -> None:
        if len(self._waiting) > 1:
            for other in list(self._waiting):
                if other.is_ready():
                    other.wake()

    def _leave(self, waiter: Waits) -> None:
        """Stop waiting. A leader also does what was posted meanwhile, and wakes the others: one of them will lead."""
        if self._leading.get(_LEADER) is waiter:
            del self._leading[_LEADER]
        self._waiting.pop(waiter, None)
        if _LEADER not in self._leading:
            self._empty_inbox()
            self.wake_all()

    def _empty_inbox(self) -> None:
        """Do what was posted, unless there is a leader: a leader checks again when it has left."""
        while self._inbox and _LEADER not in self._leading:
            self.wait(Waiter(lambda: not self._inbox), makes_rounds=False)


class HeadSwap:
    """An order to draft with another head from now on, done between two rounds; texts under way keep theirs.

    To be posted to a Driver; `done` is set when it has been carried out, or has failed and changed nothing.
    The head is loaded on the engine's thread, because on a GPU its graphs cannot be captured beside a pass.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.done = ThreadEvent()
        self.error: Exception | None = None

    def __call__(self, engine: Engine) -> None:
        try:
            engine.settle()  # the new head's graphs are captured by passes in the same buffers
            engine.drafters.swap_head(str(self.folder), [*engine.running, *engine.reading])
        except Exception as error:
            self.error = error
        finally:
            self.done.set()

    def raise_error(self) -> None:
        if self.error is not None:
            raise self.error
