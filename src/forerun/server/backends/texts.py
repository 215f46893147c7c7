"""The texts that an engine writes for a front in another process: orders in, what each round added out."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import main_thread
from time import process_time

from forerun.api.completion import ended_of, raised_by
from forerun.api.llm import LLM
from forerun.engine.driver import Handle, HeadSwap, Waiter
from forerun.engine.engine import Engine
from forerun.engine.sequence import SequenceState
from forerun.engine.stats import seconds_of
from forerun.server.backends.thread import change_adapter, load_of, lost_process_of, progress_of
from forerun.server.backends.wire import (
    Channel,
    Facts,
    Packed,
    Report,
    pack_ended,
    pack_error,
    pack_event,
    takes_preparing,
    unpack_request,
)

log = logging.getLogger(__name__)


class _Text:
    """A text that the front waits for."""

    __slots__ = ("every_round", "handle", "read", "seq")

    def __init__(self, handle: Handle, every_round: bool) -> None:
        self.handle, self.every_round = handle, every_round
        self.seq: SequenceState | None = None  # once it is queued
        self.read = 0  # events that the front has


class Texts:
    """Implements forerun.engine.driver.Waits: after every round one message goes to the front."""

    def __init__(self, llm: LLM, channel: Channel) -> None:
        self._llm, self._channel = llm, channel
        self._texts: dict[int, _Text] = {}
        self._preparing: set[int] = set()  # texts whose grammar is made, or whose adapter is read
        self._waits_for_prepared = 0  # reports that were made meanwhile
        self._preparer = ThreadPoolExecutor(1, "forerun-prepare")
        self._is_closed = False
        self._owner = Waiter(lambda: self._is_closed)
        self._orders: dict[str, Callable[..., None]] = {
            "write": self._write, "abort": self._abort, "report": self._report, "swap": self._swap,
            "adapter": self._adapter,
        }  # fmt: skip

    def make_rounds(self) -> None:
        """Until it is closed. This thread is the engine's."""
        # what all grammars need takes half a second, in which the interpreter does nothing else: not beside streams
        self._preparer.submit(self._llm.engine.grammars.warm_up)
        self._llm.engine.captures.leave_to_thread()
        self._llm.driver.watch(self)
        self._llm.driver.wait(self._owner)

    def close(self) -> None:
        """Have `make_rounds` return after the round that is under way."""
        self._is_closed = True
        self._owner.wake()

    def facts(self) -> Facts:
        """What the front has to know."""
        engine, parts = self._llm.engine, self._llm.tokenizer.parts()
        has_encoder = engine.target.source_rules is not None
        return Facts(engine.target.vocab_size, engine.max_length, engine.max_batch, has_encoder, parts, self.report())

    def report(self) -> Report:
        """What the engine is doing; any thread may ask."""
        engine, spent = self._llm.engine, (seconds_of(main_thread()), process_time())
        rounds, read = progress_of(engine)
        self._waits_for_prepared += bool(self._preparing)  # a long one counts as progress: nothing hangs
        progress = rounds + self._waits_for_prepared, read
        return Report(load_of(engine), *spent, progress, engine.default_drafter, lost_process_of(engine))

    def obey(self, orders: Sequence[Packed]) -> None:
        """What the front has sent, in its order; called by the thread that reads."""
        for name, *given in orders:
            self._orders[name](*given)

    def _write(self, key: int, every_round: bool, packed: Packed) -> None:
        if not takes_preparing(packed):
            self._submit(key, every_round, packed)
            return
        self._preparing.add(key)  # others need not wait for its grammar or its adapter
        self._preparer.submit(self._submit_prepared, key, every_round, packed)

    def _submit_prepared(self, key: int, every_round: bool, packed: Packed) -> None:
        if key in self._preparing:
            self._submit(key, every_round, packed)

    def _submit(self, key: int, every_round: bool, packed: Packed) -> None:
        try:
            handle = self._llm.driver.prepared(unpack_request(packed))
        except Exception as error:
            self._preparing.discard(key)
            self._channel.send(("texts", [(key, (), None, pack_error(error))]))
            return
        # log-probabilities go with the events alone: at the end of a long text they would take long
        self._texts[key] = _Text(handle, every_round or handle.request.params.logprobs is not None)
        if takes_preparing(packed) and key not in self._preparing:  # dropped meanwhile
            self._abort(key)
            return
        self._preparing.discard(key)
        self._llm.driver.post(handle.queue_in, at_once=False)

    def _abort(self, key: int) -> None:
        self._preparing.discard(key)
        text = self._texts.pop(key, None)
        if text is not None:
            self._llm.driver.abort(text.handle, at_once=False)

    def _report(self, number: int) -> None:
        self._channel.send(("reply", number, self.report().packed(), None))

    def _swap(self, number: int, folder: str) -> None:
        order = HeadSwap(Path(folder))

        def swap(engine: Engine) -> None:
            order(engine)
            error = None if order.error is None else pack_error(order.error)
            self._channel.send(("reply", number, None, error))

        self._llm.driver.post(swap, at_once=False)

    def _adapter(self, number: int, name: str, folder: str | None) -> None:
        """Read beside the rounds: a large one takes seconds."""

        def change() -> None:
            error = None
            try:
                change_adapter(self._llm, name, folder)
            except Exception as failed:
                error = pack_error(failed)
            self._channel.send(("reply", number, None, error))

        self._preparer.submit(change)

    def is_ready(self) -> bool:
        """Asked after every round, and after orders: `wake` looks closer."""
        return bool(self._texts)

    def wake(self) -> None:
        """Send what is new, in one message. Called by the engine's thread."""
        news = list[Packed]()
        for key, text in list(self._texts.items()):  # copied: the thread that reads adds and takes away
            seq = text.seq
            if seq is None:
                if not text.handle.is_decided:
                    continue
                if text.handle.refused is not None:
                    self._texts.pop(key, None)
                    news.append((key, (), None, pack_error(text.handle.refused)))
                    continue
                seq = text.seq = text.handle.seq
            is_finished = seq.finished is not None  # read first: no event comes after it is set
            events = seq.events
            if len(events) > text.read and (text.every_round or not text.read):
                fresh = [pack_event(event) for event in events[text.read :]]
                text.read = len(events)
            elif is_finished:
                fresh = []
            else:
                continue
            news.append((key, fresh, *self._ending(key, seq)) if is_finished else (key, fresh, None, None))
        if news:
            self._channel.send(("texts", news))

    def _ending(self, key: int, seq: SequenceState) -> tuple[Packed | None, Packed | None]:
        """How a text has ended: with its figures, or with an error."""
        self._texts.pop(key, None)
        if (error := raised_by(seq)) is not None:
            return None, pack_error(error)
        return pack_ended(ended_of(seq, self._llm.engine.verifiers.get(seq.verifier).exact)), None
