"""Run each peer in a process of its own, so that one that crashes is left out and the benchmark continues.

A library that was built for another processor ends its process with an illegal instruction, which nothing can catch.
So every engine that we compare with runs beside us (`main` here), one process for each. It takes its own time, so
the pipe's cost is in no figure; while it does not write, it waits.

A peer at an OpenAI-compatible URL (vLLM, SGLang, llama.cpp, forerun itself) gets prompts as token ids, so that every
contender answers the same prompt; tokens are counted by its own usage field. Its text is not compared with ours: it may
run in another number format, or be another model.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import import_module
from time import perf_counter
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from forerun.core.errors import ForerunError, InvalidInput
from forerun.measure.bench.alternate import Contender, ContenderLost, Written

WAIT = 10.0  # seconds for a process to end after it was asked to
_SIGNALS = {
    "SIGILL": "an illegal instruction: it was built for another processor",
    "SIGSEGV": "a segmentation fault",
    "SIGKILL": "killed, perhaps out of memory",
}


class PeerProcess:
    def __init__(self) -> None:
        self._said = tempfile.TemporaryFile()  # noqa: SIM115  # what it writes to stderr, closed with the process
        self._process = subprocess.Popen(
            [sys.executable, "-m", "forerun.measure.peers.process"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._said, text=True, encoding="utf-8",
        )  # fmt: skip

    def __enter__(self) -> PeerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def call(self, function: str, **arguments: Any) -> Any:
        """What a function ("module:name") returns there, as plain JSON values."""
        return self._ask({"call": function, "arguments": arguments})

    def load(self, function: str, **arguments: Any) -> list[Contender]:
        """The contenders that a function returns there; they write there, and are asked from here."""
        found = self._ask({"load": function, "arguments": arguments})
        return [Contender(name, self._writer(name), exact, like) for name, exact, like in found]

    def close(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with suppress(BrokenPipeError):
                    pipe.close()
        try:
            self._process.wait(WAIT)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._said.close()

    def _writer(self, name: str) -> Any:
        def write(prompts: Sequence[Sequence[int]], max_tokens: int) -> Written:
            ids = [list(prompt) for prompt in prompts]
            return Written(*self._ask({"write": name, "prompts": ids, "max_tokens": max_tokens}))

        return write

    def _ask(self, question: dict[str, Any]) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(question) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:  # it ended before
            line = ""
        if not line:
            raise ContenderLost(self._how_it_ended())
        answer = json.loads(line)
        if "refused" in answer:
            raise InvalidInput(answer["refused"])
        if "failed" in answer:
            raise ContenderLost(answer["failed"])
        return answer["result"]

    def _how_it_ended(self) -> str:
        code = self._process.wait(WAIT)
        if code < 0:
            name = signal.Signals(-code).name
            return f"its process died of {name} ({_SIGNALS.get(name, 'a signal')})"
        self._said.seek(0)
        lines = self._said.read().decode("utf-8", "replace").strip().splitlines()
        return f"its process ended with code {code}: {lines[-1] if lines else 'it said nothing'}"


@dataclass(slots=True)
class Peers:
    """The peers of a benchmark: who writes, with which instructions, and who was left out and why."""

    contenders: list[Contender] = field(default_factory=list)
    isa: dict[str, str | None] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    processes: list[PeerProcess] = field(default_factory=list)

    def host(self, engine: str, names: Sequence[str], module: str, **arguments: Any) -> None:
        """Start an engine's process and load its contenders; one that crashes while loading is left out.

        Its module has a function `load`, called with the names and arguments, and one `isa` without any.
        """
        process = PeerProcess()
        self.processes.append(process)
        try:
            self.contenders += process.load(f"{module}:load", names=list(names), **arguments)
            self.isa[engine] = process.call(f"{module}:isa")
        except ContenderLost as lost:
            self.left_out |= dict.fromkeys(names, str(lost))

    def close(self) -> None:
        for process in self.processes:
            process.close()


def main() -> int:
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what a library prints must not come between the answers
    hosted: dict[str, Contender] = {}
    for line in sys.stdin:
        answers.write(json.dumps(answer(json.loads(line), hosted)) + "\n")
        answers.flush()
    return 0


def answer(question: dict[str, Any], hosted: dict[str, Contender]) -> dict[str, Any]:
    """One question's answer; contenders that are loaded are added to `hosted`."""
    try:
        if "write" in question:
            contender = hosted[question["write"]]
            return {"result": contender.write(question["prompts"], question["max_tokens"])}
        module, _, name = (question.get("load") or question["call"]).partition(":")
        found = getattr(import_module(module), name)(**question["arguments"])
        if "call" in question:
            return {"result": found}
        hosted |= {contender.name: contender for contender in found}
        return {"result": [(contender.name, contender.exact, contender.like) for contender in found]}
    except ForerunError as error:
        return {"refused": str(error)}
    except Exception as error:  # whatever a peer raises is the benchmark's to report
        return {"failed": f"{type(error).__name__}: {error}"}


TIMEOUT = 600.0  # seconds for one answer


def endpoint_contender(url: str, ignore_eos: bool = False) -> Contender:
    """The model that a server lists first, asked greedily, one prompt at a time."""
    base, name = base_of(url), first_model(url)

    def write(prompts: Sequence[Sequence[int]], max_tokens: int) -> Written:
        texts = []
        started = perf_counter()
        for ids in prompts:
            question = {"model": name, "prompt": list(ids), "max_tokens": max_tokens, "temperature": 0.0}
            answer = _call(f"{base}/v1/completions", {**question, **({"ignore_eos": True} if ignore_eos else {})})
            texts.append([0] * int(answer["usage"]["completion_tokens"]))  # counted, not compared
        return Written(texts, perf_counter() - started)

    return Contender("endpoint", write, exact=False)


def base_of(url: str) -> str:
    """A server's address without the API's own part."""
    return url.rstrip("/").removesuffix("/v1")


def first_model(url: str) -> str:
    base = base_of(url)
    models = _call(f"{base}/v1/models", None).get("data") or []
    if not models:
        raise InvalidInput(f"{base}/v1/models lists no model; check that the server has loaded one")
    return str(models[0]["id"])


def _call(url: str, body: Mapping[str, Any] | None) -> dict[str, Any]:
    if not url.startswith(("http://", "https://")):
        raise InvalidInput(f"{url!r} is not a web address; write it as http://HOST:PORT")
    data = None if body is None else json.dumps(body).encode()
    request = Request(url, data, {"Content-Type": "application/json"})
    try:
        with urlopen(request, timeout=TIMEOUT) as response:
            answer = json.loads(response.read())
    except HTTPError as error:
        detail = " ".join(error.read().decode(errors="replace").split())[:160]
        raise InvalidInput(f"{url} answered {error.code}: {detail}; check the server") from None
    except (URLError, OSError, ValueError) as error:
        raise InvalidInput(f"{url} does not answer ({error}); check the address and the server") from None
    if not isinstance(answer, dict):
        raise InvalidInput(f"{url} answered something other than a JSON object; is it an OpenAI endpoint?")
    return answer


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:  # the benchmark was interrupted, and says so itself
        sys.exit(130)
