"""What runs in the engine's process: it loads the model, says that it is ready, and makes rounds for the front.

The main thread is the engine's. A second one reads what the front sends. When the front closes its end, or is gone,
this process ends: after the round that is under way, or without it where that takes too long. Signals are the front's.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from threading import Event, Thread
from typing import Any

from forerun.build.memory_limit import without_collector
from forerun.core.errors import ForerunError
from forerun.server.backends.base import CLOSING
from forerun.server.backends.start import Loader
from forerun.server.backends.wire import Channel, pack_error
from forerun.server.settings import LOG_FORMAT

log = logging.getLogger(__name__)
_PARENT_DEATH = 1  # Linux: PR_SET_PDEATHSIG


def main(number: int) -> int:
    """The whole life of the process; `number` is the socket that the front has left open for it."""
    channel = take_channel(number)
    messages = channel.receive()
    order = next(messages, None)
    if order is None:
        return 0
    logging.basicConfig(level=order["level"], format=LOG_FORMAT)
    reader = Reader(channel, messages)
    try:
        return serve(channel, reader, Loader(order["function"], order["arguments"]), order["trace"])
    except ForerunError as error:  # told in one line by the front
        channel.send(("ended", pack_error(error)))
    except BaseException as error:
        log.exception("the engine ended with an error")
        channel.send(("ended", pack_error(error)))
    return 1


def take_channel(number: int) -> Channel:
    """Our end of the channel to the front, which alone gets signals, and with which this process ends."""
    os.set_inheritable(number, False)
    end_with_parent()
    # of a terminal, or of systemd to all processes
    for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(each, signal.SIG_IGN)
    return Channel(socket.socket(fileno=number))


def serve(channel: Channel, reader: Reader, loader: Loader, trace: str | None) -> int:
    """Load, and make rounds."""
    with without_collector():
        llm = loader()
        from forerun.server.backends.texts import Texts

        texts = Texts(llm, channel)
    from forerun.engine.stats import traced

    with traced(llm.engine.stats, None if trace is None else Path(trace)):
        reader.texts = texts  # first: orders may come as soon as the front knows
        channel.send(("ready", texts.facts().packed()))
        if not reader.has_left.is_set():
            texts.make_rounds()
    llm.close()
    return 0


class Reader:
    """The thread that reads what the front sends; when the front is gone the process ends, by force if it must."""

    def __init__(self, channel: Channel, messages: Iterator[Any]) -> None:
        self.texts: Any = None  # a Texts, once the model is loaded
        self.has_left = Event()
        self._messages = messages
        Thread(target=self._read, name="forerun-orders", daemon=True).start()

    def _read(self) -> None:
        try:
            for orders in self._messages:
                self.texts.obey(orders)
        except BaseException:
            log.exception("what the front sends can no longer be read")
            os._exit(1)  # it would wait for ever
        self.has_left.set()
        if self.texts is None:
            os._exit(0)  # it was loading
        self.texts.close()
        Event().wait(CLOSING)
        os._exit(1)  # a round that hangs


def end_with_parent() -> None:
    """Be killed when the front is: by the system where it can do that, whatever this process is doing then."""
    if sys.platform == "linux":
        parent = os.getppid()
        ctypes.CDLL(None).prctl(_PARENT_DEATH, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(0)
