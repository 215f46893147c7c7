"""Requests, events, endings and errors as plain values that a Channel carries, and back. No torch here.

What an engine made is turned into Python's own numbers: they may be a library's, which would arrive as bytes. A message
is anything that `marshal` writes: Python's own numbers, texts, lists, tuples and dicts. Both ends of a Channel, a pair
of sockets, run the same Python, and nobody else can reach them. Sending never waits.
"""

from __future__ import annotations

import marshal
import socket
import struct
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import MISSING, astuple, fields
from threading import Condition, Thread
from typing import Any, NamedTuple

from forerun.api.completion import Completion, Ended
from forerun.core import errors
from forerun.core.errors import ForerunError, InvalidInput
from forerun.core.params import SamplingParams
from forerun.core.request import Branch, Budget, Event, Request, TokenLogprob
from forerun.engine.stats import RoundCounts
from forerun.models.load.tokenizer import TokenizerParts
from forerun.server.backends.base import EngineError, Load

_LENGTH = struct.Struct("!I")
_PLAIN = 2  # marshal's format without references: half the time
_AT_ONCE = 1 << 18  # bytes read by one call
_KERNEL = 1 << 20  # bytes that the system is asked to hold


class Channel:
    """One end. Any thread may send; one receives."""

    def __init__(self, own: socket.socket) -> None:
        own.setblocking(True)
        own.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _KERNEL)
        self._socket = own
        self._lock = Condition()
        self._backlog: deque[bytes] = deque()  # not taken by the system yet; the first may be on its way
        self._sender: Thread | None = None
        self._read = bytearray()

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: Any) -> None:
        """Have it sent. What the other end is too slow for waits here; where the other end is gone it is dropped."""
        body = marshal.dumps(message, _PLAIN)
        frame = _LENGTH.pack(len(body)) + body
        with self._lock:
            if not self._backlog:
                frame = frame[self._try(frame) :]
            if frame:
                self._backlog.append(frame)
                self._have_sent_later()

    def receive(self) -> Iterator[Any]:
        """What comes, until the other end closes; waits."""
        while True:
            yield from self._whole()
            read = self._receive()
            if not read:
                return
            self._read += read

    def receive_ready(self) -> list[Any] | None:
        """What has come; None = the other end has closed. To be called when there is something to read."""
        try:
            read = self._receive(socket.MSG_DONTWAIT)
        except BlockingIOError:
            return []
        self._read += read
        return list(self._whole()) if read else None

    def close(self) -> None:
        """Both ends read no more than what is there."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def release(self) -> None:
        """Close the socket; this end must not be used after that."""
        self._socket.close()

    def _receive(self, how: int = 0) -> bytes:
        try:
            return self._socket.recv(_AT_ONCE, how)
        except BlockingIOError:
            raise
        except OSError:  # the other end was killed, or this one was given back
            return b""

    def _whole(self) -> Iterator[Any]:
        """Messages that are there; what was handed out is gone, however early the caller stops."""
        at, read = 0, self._read
        try:
            while len(read) - at >= _LENGTH.size:
                (length,) = _LENGTH.unpack_from(read, at)
                start, end = at + _LENGTH.size, at + _LENGTH.size + length
                if len(read) < end:
                    return
                with memoryview(read) as view, view[start:end] as body:
                    message = marshal.loads(body)
                at = end
                yield message
        finally:
            del read[:at]

    def _try(self, frame: bytes) -> int:
        """Bytes that the system takes now."""
        try:
            return self._socket.send(frame, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return 0
        except OSError:
            return len(frame)

    def _have_sent_later(self) -> None:
        if self._sender is None:
            self._sender = Thread(target=self._send_backlog, name="forerun-backlog", daemon=True)
            self._sender.start()
        self._lock.notify()

    def _send_backlog(self) -> None:
        while True:
            with self._lock:
                while not self._backlog:
                    self._lock.wait()
                frame = self._backlog[0]  # stays first until it is sent: what comes meanwhile goes behind it
            with suppress(OSError):
                self._socket.sendall(frame)
            with self._lock:
                self._backlog.popleft()


Packed = tuple[Any, ...]
_DEFAULTS = {
    each.name: each.default if each.default_factory is MISSING else each.default_factory()
    for each in fields(SamplingParams)
}


def pack_request(request: Request) -> Packed:
    """Of its parameters those that are not the default."""
    params = {name: value for name, default in _DEFAULTS.items() if (value := getattr(request.params, name)) != default}
    if "processors" in params:
        raise InvalidInput("processors cannot leave this process; serve from a thread (--front thread)")
    budget = None if request.budget is None else astuple(request.budget)
    rest = request.drafter, request.verifier, budget, request.shows_rejected, request.cache_salt
    return (request.prompt, params, *rest, request.prediction, request.adapter, request.pooling, request.priority)


_ADAPTER = 8  # its place in what `pack_request` makes


def unpack_request(packed: Packed) -> Request:
    prompt, params, drafter, verifier, budget, shows_rejected, cache_salt, *others = packed
    own = None if budget is None else Budget(*budget)
    rest = drafter, verifier, own, shows_rejected, cache_salt
    return Request(prompt, SamplingParams(**params), *rest, None, *others)


def takes_preparing(packed: Packed) -> bool:
    """Must a grammar be compiled for it, or an adapter be read perhaps?"""
    return packed[_ADAPTER] is not None or not {"response_format", "structured_outputs"}.isdisjoint(packed[1])


def pack_event(event: Event) -> Packed:
    """All but whose it is, and its error, which ends the text and comes by itself."""
    entries = _pack_logprobs(event.logprobs) if event.logprobs else ()
    branches = tuple(map(_pack_branch, event.rejected)) if event.rejected else ()
    return (*map(int, event.tokens),), int(event.accepted), event.text, event.finished, entries, branches


def unpack_event(key: int, packed: Packed) -> Event:
    tokens, accepted, text, finished, entries, branches = packed
    if not entries and not branches:
        return Event(key, tokens, accepted, text, (), finished)
    rejected = tuple(Branch(*each) for each in branches)
    return Event(key, tokens, accepted, text, tuple(_logprobs(entries)), finished, None, rejected)


def pack_ended(ended: Ended) -> Packed:
    """All but its log-probabilities: the events have them, and for a long text they are many."""
    plain = ended._asdict()
    plain["token_ids"] = [*map(int, ended.token_ids)]
    plain["rounds"] = [(*map(int, counts[:4]), counts.seconds) for counts in ended.rounds]
    plain["logprobs"] = []
    if ended.prompt_logprobs is not None:
        plain["prompt_logprobs"] = _pack_logprobs(filter(None, ended.prompt_logprobs))
    return tuple(plain.values())


def unpack_ended(packed: Packed, logprobs: Sequence[TokenLogprob] = ()) -> Completion:
    """`logprobs` are those of the text's events."""
    ended = Ended(*packed)
    rounds = [RoundCounts(*each) for each in ended.rounds]
    known = None if ended.prompt_logprobs is None else [None, *_logprobs(ended.prompt_logprobs)]
    return ended._replace(rounds=rounds, logprobs=[*logprobs], prompt_logprobs=known).completion()


def _pack_branch(branch: Branch) -> Packed:
    return int(branch.after), (*map(int, branch.tokens),)


def _pack_logprobs(entries: Iterable[TokenLogprob]) -> Packed:
    return tuple(
        (int(each.token), float(each.logprob), tuple((int(one.token), float(one.logprob)) for one in each.top))
        for each in entries
    )


def _logprobs(packed: Iterable[Any]) -> Iterable[TokenLogprob]:
    return (TokenLogprob(token, logprob, tuple(TokenLogprob(*one) for one in top)) for token, logprob, top in packed)


def pack_error(error: BaseException) -> Packed:
    """Our own errors by class; others by name: the class may be of a library that the front has not loaded."""
    if isinstance(error, ForerunError):
        ours = next(each for each in type(error).__mro__ if each.__module__ == errors.__name__)
        return ours.__name__, str(error), True
    if isinstance(error, TypeError | ValueError):  # options that no engine takes
        return InvalidInput.__name__, str(error), True
    return type(error).__name__, str(error), False


def unpack_error(packed: Packed) -> Exception:
    name, message, is_ours = packed
    known = vars(errors).get(name) if is_ours else None
    if isinstance(known, type) and issubclass(known, ForerunError):
        return known(message)
    return EngineError(name, message)


class Report(NamedTuple):
    """What an engine's process says of itself when it is asked."""

    load: Load
    engine_seconds: float  # CPU time of the engine's thread
    process_seconds: float  # and of the whole process
    progress: tuple[int, int]
    drafter: str
    lost_process: str | None

    def packed(self) -> Packed:
        return (astuple(self.load), *self[1:])

    @classmethod
    def unpacked(cls, packed: Packed) -> Report:
        return cls(Load(*packed[0]), *packed[1:])


class Facts(NamedTuple):
    """What does not change while an engine's process runs."""

    vocab_size: int
    max_length: int
    max_batch: int
    has_encoder: bool
    tokenizer: TokenizerParts
    report: Report

    def packed(self) -> Packed:
        return *self[:4], tuple(self.tokenizer), self.report.packed()

    @classmethod
    def unpacked(cls, packed: Packed) -> Facts:
        *plain, tokenizer, report = packed
        return cls._make((*plain, TokenizerParts(*tokenizer), Report.unpacked(report)))
