"""How long one nasty request keeps other streams waiting: a table, from the real server with the default model.

    python tools/stalls.py [--only TEXT] [--streams 8] [-- --front thread]

Eight streams run. Each request below is sent once, and the largest gap between two messages of any stream until a
second after its answer is compared with the largest gap while nothing else was asked. What follows `--` goes to the
server.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any, NamedTuple

CHAT, TEXT, TOKENIZE, DETOKENIZE = "/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"
LONG = 1_950_000  # characters, the most that fit a body of 4 MiB twice escaped
UNDISTURBED = 10.0  # seconds
AFTER = 1.0  # seconds behind an answer in which a gap still counts
PATIENCE = 60.0


def post(path: str, body: Any, headers: str = "") -> bytes:
    """A request as bytes; a body that is bytes is sent as it is."""
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n{headers}"
    return f"{head}Content-Length: {len(raw)}\r\nConnection: close\r\n\r\n".encode() + raw


def get(head: str) -> bytes:
    return f"GET /health HTTP/1.1\r\nHost: x\r\n{head}Connection: close\r\n\r\n".encode()


def chat(content: Any, **options: Any) -> bytes:
    return post(CHAT, {"messages": [{"role": "user", "content": content}], "max_tokens": 1, **options})


def text(prompt: Any, **options: Any) -> bytes:
    return post(TEXT, {"prompt": prompt, "max_tokens": 1, **options})


def chunked(raw: bytes) -> bytes:
    """A body in chunks of one byte."""
    head = f"POST {TOKENIZE} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nConnection: close\r\n"
    parts = b"".join(b"1\r\n%c\r\n" % each for each in raw)
    return head.encode() + b"Transfer-Encoding: chunked\r\n\r\n" + parts + b"0\r\n\r\n"


def many(count: int, role: str = "user") -> list[dict[str, str]]:
    return [{"role": role, "content": "x"}] * count


def nested(depth: int) -> bytes:
    return b'{"messages": ' + b"[" * depth + b"]" * depth + b"}"


SCHEMA = {"type": "object", "properties": {f"p{i}": {"type": "string", "pattern": "^[a-z]{1,40}$"} for i in range(400)}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}

REQUESTS: dict[str, Callable[[], bytes]] = {
    "tokenize, 1,950,000 letters": lambda: post(TOKENIZE, {"prompt": "a" * LONG}),
    "tokenize, 1,950,000 characters of words": lambda: post(TOKENIZE, {"prompt": ("The fox jumps. " * LONG)[:LONG]}),
    "tokenize, 4,100,000 digits": lambda: post(TOKENIZE, {"prompt": "7" * 4_100_000}),
    "tokenize, 660,000 digits": lambda: post(TOKENIZE, {"prompt": "7" * 660_000}),
    "tokenize, 660,000 digits, spelt": lambda: post(TOKENIZE, {"prompt": "7" * 660_000, "return_token_strs": True}),
    "tokenize, 16,000 digits": lambda: post(TOKENIZE, {"prompt": "7" * 16_000}),
    "tokenize, 8,000 digits": lambda: post(TOKENIZE, {"prompt": "7" * 8_000}),
    "tokenize, 100,000 messages": lambda: post(TOKENIZE, {"messages": many(100_000)}),
    "detokenize, 1,000,000 ids": lambda: post(DETOKENIZE, {"tokens": [5000] * 600_000}),
    "detokenize, 8,000 ids": lambda: post(DETOKENIZE, {"tokens": [5000] * 8000}),
    "chat, 1,950,000 letters": lambda: chat("a" * LONG),
    "chat, 660,000 digits": lambda: chat("7" * 660_000),
    "chat, 100,000 messages": lambda: post(CHAT, {"messages": many(100_000), "max_tokens": 1}),
    "chat, 8,000 messages": lambda: post(CHAT, {"messages": many(8_000), "max_tokens": 1}),
    "chat, 100,000 messages of strange roles": lambda: post(
        CHAT, {"messages": [{"role": f"r{i}", "content": "x"} for i in range(100_000)], "max_tokens": 1}
    ),
    "chat, 200,000 content parts": lambda: chat([{"type": "text", "text": ""}] * 120_000),
    "chat, 1,000,000 empty objects as messages": lambda: post(CHAT, {"messages": [{}] * 1_000_000}),
    "chat, 200,000 tools": lambda: chat("x", tools=[{"function": {"name": "f"}}] * 100_000),
    "chat, template variables of 4 MB": lambda: chat("x", chat_template_kwargs={"x": [[]] * 1_000_000}),
    "chat, 300,000 unknown fields": lambda: chat("x", **{f"k{i}": 0 for i in range(280_000)}),
    "chat, a JSON schema of 400 patterns": lambda: chat(
        "x", response_format={"type": "json_schema", "json_schema": {"schema": SCHEMA}}
    ),
    "chat, a forced tool of 400 patterns": lambda: chat("x", tools=[TOOL], tool_choice="required"),
    "chat, nested 2,000,000 deep": lambda: post(CHAT, nested(2_000_000)),
    "completion, 1,950,000 letters": lambda: text("a" * LONG),
    "completion, 1,300,000 ids": lambda: text([17] * 1_000_000),
    "completion, 400,000 prompts": lambda: text(["x"] * 700_000),
    "completion, 1,000,000 prompts of no type": lambda: text(["x", 1] * 400_000),
    "completion, 1,000,000 prompts of ids": lambda: text([[1]] * 700_000),
    "completion, one prompt of 1,000 ids": lambda: text([*range(1000, 2000)]),
    "completion, 128 stop strings of 30,000": lambda: text("x", stop=[f"{i}" + "a" * 30_000 for i in range(128)]),
    "completion, the same, 200 tokens": lambda: text(
        "aaaaaaaa", stop=["a" * 30_000 + f"{i}" for i in range(128)], max_tokens=200, ignore_eos=True
    ),
    "completion, cache_salt of 4 MB": lambda: text("x", cache_salt="s" * 4_000_000),
    "completion, model of 4 MB": lambda: text("x", model="m" * 4_000_000),
    "completion, drafter of 4 MB": lambda: text("x", speculative={"drafter": "d" * 4_000_000}),
    "completion, logit_bias of 400,000": lambda: text("x", logit_bias={str(i): 1 for i in range(300_000)}),
    "completion, 16 texts of 60 tokens": lambda: text("x", n=16, max_tokens=60, ignore_eos=True),
    "completion, the same with 64 logprobs": lambda: text("x", n=16, max_tokens=60, ignore_eos=True, logprobs=64),
    "completion, a number of 4,000,000 digits": lambda: post(
        TEXT, b'{"prompt": "x", "seed": ' + b"7" * 4_000_000 + b"}"
    ),
    "completion, surrogates": lambda: post(TEXT, b'{"prompt": "' + b"\\ud800" * 600_000 + b'"}'),
    "tokenize, 4 MB in chunks of one byte": lambda: chunked(b'{"prompt": "' + b"a" * 4_000_000 + b'"}'),
    "GET /openapi.json": lambda: get("").replace(b"/health", b"/openapi.json"),
    "headers, 50,000 of them": lambda: get("".join(f"x{i}: y\r\n" for i in range(50_000))),
    "headers, one of 2 MB": lambda: get(f"x: {'y' * 2_000_000}\r\n"),
    "headers, one of 2 MB at chats": lambda: post(CHAT, b"{}", f"x: {'y' * 2_000_000}\r\n"),
    "a path of 2 MB": lambda: f"GET /{'x' * 2_000_000} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode(),
}  # fmt: skip


class Streams:
    """Texts that are written without end, and the largest gap between two messages of one of them."""

    def __init__(self, port: int, count: int) -> None:
        self.port, self.worst, self.messages = port, 0.0, 0
        self.tasks = [asyncio.create_task(self._read(i)) for i in range(count)]

    async def _read(self, number: int) -> None:
        body = {"prompt": f"Count: {number} {number + 1}", "max_tokens": 3000, "ignore_eos": True,
                "stream": True, "temperature": 0, "speculative": "off"}  # fmt: skip
        while True:
            reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
            writer.write(post(TEXT, body))
            last = None
            async for line in reader:
                if not line.startswith(b"data: {"):
                    continue
                assert b'"error"' not in line, line
                now = perf_counter()
                if last is not None:
                    self.worst = max(self.worst, now - last)
                last, self.messages = now, self.messages + 1
            writer.close()


class Probe:
    """Asks /health again and again."""

    def __init__(self, port: int) -> None:
        self.port, self.worst = port, 0.0
        self.task = asyncio.create_task(self._ask())

    async def _ask(self) -> None:
        while True:
            began = perf_counter()
            await send(self.port, get(""))
            self.worst = max(self.worst, perf_counter() - began)
            await asyncio.sleep(0.05)


async def send(port: int, raw: bytes) -> bytes:
    """The answer's head and body; a server may close while a request is still being sent."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(raw)
    got = b""
    try:
        while part := await reader.read(1 << 16):
            got = got[:4096] + part if len(got) > 4096 else got + part
    except OSError:
        pass
    writer.close()
    return got


async def measure(port: int, given: argparse.Namespace) -> list[dict[str, Any]]:
    streams, probe = Streams(port, given.streams), Probe(port)
    await asyncio.sleep(5)
    usual = await watched(streams, probe, asyncio.sleep(UNDISTURBED))
    print(f"{'undisturbed':50} gap {usual.gap:5.2f}  health {usual.health:5.2f}", flush=True)
    rows = []
    for name, make in REQUESTS.items():
        if given.only not in name:
            continue
        raw = await asyncio.to_thread(make)
        seen = []
        for _ in range(given.repeats):
            await asyncio.sleep(AFTER)
            seen.append(await watched(streams, probe, send(port, raw)))
        least = min(seen, key=lambda each: each.gap)  # what the machine's other work adds is not there every time
        beyond = max(0.0, least.gap - usual.gap)
        rows.append({"request": name, "beyond": beyond, **least._asdict()})
        figures = f"gap {least.gap:5.2f}  beyond {beyond:5.2f}  health {least.health:5.2f}"
        print(f"{name:50} {figures}  status {least.status} in {least.seconds:.2f} s", flush=True)
    for task in [*streams.tasks, probe.task]:
        task.cancel()
    return rows


class Seen(NamedTuple):
    """What others met while a request was answered; seconds."""

    gap: float
    health: float
    status: str
    seconds: float


async def watched(streams: Streams, probe: Probe, work: Coroutine[Any, Any, bytes | None]) -> Seen:
    streams.worst = probe.worst = 0.0
    began = perf_counter()
    try:
        answer = await asyncio.wait_for(work, PATIENCE)
        status = (answer or b"")[9:12].decode() or "none"
    except TimeoutError:
        status = "none yet"
    seconds = perf_counter() - began
    await asyncio.sleep(AFTER)
    for task in [*streams.tasks, probe.task]:
        if task.done():
            task.result()
    return Seen(streams.worst, probe.worst, status, seconds)


@contextmanager
def served(flags: list[str]) -> Iterator[int]:
    """The real command's port."""
    places = ["--max-num-seqs", "32"]  # for the streams and what is asked beside them
    command = [sys.executable, "-m", "forerun", "serve", "--port", "0", *places, *flags]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stderr is not None
        line = next((line for line in process.stderr if "serving" in line), None)
        if line is None:
            raise SystemExit("the server did not start")
        address = next(word for word in line.split() if word.startswith("http"))
        yield int(address.rstrip("/,;").rpartition(":")[2])
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGINT)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="requests whose name holds this")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=3, help="of each request; the smallest of its gaps counts")
    parser.add_argument("flags", nargs="*", help="for the server")
    given = parser.parse_args()
    with served(given.flags) as port:
        rows = asyncio.run(measure(port, given))
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
