"""What connections of ours do themselves: writes of one turn together, and an end for work whose client has left."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import ExitStack
from typing import Any

import pytest

from forerun.server.errors import ApiError
from forerun.server.sse import Attendance, ClientLeft, EventStream, Outbox, connection_of, is_chunked


class Wire:
    """A transport and its flow control, which keep what is written."""

    def __init__(self) -> None:
        self.written: list[bytes] = []
        self.closing = False
        self.write_paused = False
        self.resumed = asyncio.Event()

    def write(self, data: bytes) -> None:
        self.written.append(data)

    def is_closing(self) -> bool:
        return self.closing

    async def drain(self) -> None:
        await self.resumed.wait()


def send(outbox: Outbox, lines: AsyncGenerator[bytes], wire: Wire) -> Any:
    return outbox.send(lines, wire, wire)  # type: ignore[arg-type]


async def in_turns(*turns: list[bytes]) -> AsyncGenerator[bytes]:
    """What comes between two waits falls into one turn of the loop."""
    for turn in turns:
        for line in turn:
            yield line
        await asyncio.sleep(0)
        await asyncio.sleep(0)


def test_what_comes_in_one_turn_is_one_chunk() -> None:
    async def main() -> None:
        outbox, one, two = Outbox(), Wire(), Wire()
        turns = [b"a" * 20, b"b"], [], [b"c"]
        await asyncio.gather(send(outbox, in_turns(*turns), one), send(outbox, in_turns([b"x"], [b"y"]), two))
        assert one.written == [b"15\r\n" + b"a" * 20 + b"b\r\n", b"1\r\nc\r\n"]
        assert two.written == [b"1\r\nx\r\n", b"1\r\ny\r\n"]

    asyncio.run(main())


def test_a_message_of_no_bytes_is_not_written() -> None:
    """A chunk of length 0 is the end of a body: the client would take no more of the stream."""

    async def main() -> None:
        outbox, wire = Outbox(), Wire()
        await send(outbox, in_turns([b"a"], [b""], [b"", b"b"], [b""]), wire)
        assert wire.written == [b"1\r\na\r\n", b"1\r\nb\r\n"]

    asyncio.run(main())


def test_all_is_written_when_a_stream_ends_or_fails() -> None:
    async def fails() -> AsyncGenerator[bytes]:
        yield b"a"
        raise OSError

    async def main() -> None:
        outbox, wire = Outbox(), Wire()
        with pytest.raises(OSError):
            await send(outbox, fails(), wire)
        assert wire.written == [b"1\r\na\r\n"], "before anything else could be"
        await asyncio.sleep(0)
        assert wire.written == [b"1\r\na\r\n"], "and once"
        await send(outbox, in_turns([b"b"]), wire)
        assert wire.written[1:] == [b"1\r\nb\r\n"], "the outbox goes on"

    asyncio.run(main())


def test_a_full_connection_is_waited_for_and_a_closed_one_not_written_to() -> None:
    async def main() -> None:
        outbox, wire = Outbox(), Wire()
        wire.write_paused = True
        task = asyncio.create_task(send(outbox, in_turns([b"a"], [b"b"]), wire))
        await asyncio.sleep(0.01)
        assert not wire.written
        wire.write_paused = False
        wire.resumed.set()
        await task
        assert len(wire.written) == 2
        wire.closing = True
        await send(outbox, in_turns([b"c"]), wire)
        assert len(wire.written) == 2

    asyncio.run(main())


def test_work_ends_with_its_client_and_other_ends_stay_what_they_are() -> None:
    async def main() -> None:
        client = Attendance()
        assert await client.during(asyncio.sleep(0, 7)) == 7
        working = asyncio.create_task(client.during(asyncio.sleep(60)))
        await asyncio.sleep(0)
        working.cancel()
        with pytest.raises(asyncio.CancelledError):
            await working
        working = asyncio.create_task(client.during(asyncio.sleep(60)))
        await asyncio.sleep(0)
        client.end()
        with pytest.raises(ClientLeft):
            await working
        with pytest.raises(ClientLeft):
            await client.during(asyncio.sleep(60))
        both = asyncio.create_task(Attendance().during(asyncio.sleep(60)))
        await asyncio.sleep(0)
        both.cancel()
        with pytest.raises(asyncio.CancelledError):
            await both

    asyncio.run(main())


class Gone:
    """A connection whose client left before its answer began."""

    def __init__(self) -> None:
        self._client = Attendance()
        self._client.end()

    async def send_body(self, lines: AsyncGenerator[bytes]) -> None:
        raise AssertionError

    async def while_open(self, work: Any) -> Any:
        return await self._client.during(work)


class Endless:
    """No last message."""

    end = b""

    def failed(self, error: ApiError) -> bytes:
        raise error


def test_what_a_request_holds_is_freed_where_its_client_left_early() -> None:
    """Its place among the texts that are waited for, and the generator, which has begun."""
    ended = list[str]()

    async def lines() -> AsyncGenerator[bytes]:
        try:
            yield b"first"
            yield b"second"
        finally:
            ended.append("lines")

    async def main() -> None:
        rest, ends = lines(), ExitStack()
        ends.callback(ended.append, "place")
        stream = EventStream(await anext(rest), rest, ends, {}, Endless())
        scope = {"type": "http", "http_version": "1.1", "method": "POST", "state": {"connection": Gone()}}
        assert connection_of(scope) is not None
        assert is_chunked(scope)
        await stream(scope, None, None)  # type: ignore[arg-type]

    asyncio.run(main())
    assert ended == ["lines", "place"]
