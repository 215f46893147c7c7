"""What a server does with a request, apart from HTTP: reading it, admission, texts, and their figures.

Of `forerun train refresh` it records texts to train on, and follows the newest version of a head. Only texts of
requests that say `"record": true` are recorded, and only where the server has `--record FOLDER`: one JSON object a line
with the token ids of prompt and answer, in a file that its owner alone can read. `HeadWatch` follows the link `current`
of a folder of heads: it swaps a new head in, and moves the link back where tokens per round fall.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from time import monotonic, perf_counter, time
from typing import Any

from forerun.api.completion import Completion
from forerun.core.errors import ForerunError, InvalidInput, UnknownName
from forerun.core.request import Event
from forerun.heads import HeadVersions
from forerun.server.answers import Answer
from forerun.server.backends.base import Backend
from forerun.server.errors import ApiError
from forerun.server.generation import Job, Timing, write_all
from forerun.server.metrics import Metrics
from forerun.server.parsers.thinking import parser_of
from forerun.server.parsers.tools import Found, found_in
from forerun.server.reading import ReaderFacts, ReaderProcess, RequestReader, What
from forerun.server.schemas import Generation
from forerun.server.settings import ServerSettings
from forerun.server.sse import encoded

log = logging.getLogger(__name__)
QUICK = 8192  # bytes of a body that is read in a few milliseconds


class Service:
    """One model behind one server."""

    def __init__(self, backend: Backend, settings: ServerSettings) -> None:
        self.backend, self.settings = backend, settings
        self.model = settings.model_names[0]
        self.metrics = Metrics(backend, self.model)
        facts = ReaderFacts(
            backend.vocab_size, backend.has_encoder, settings.model_names, settings.max_choices, settings.log_prompts
        )
        self.reader = RequestReader(backend.tokenizer, facts)
        self.reader_process = ReaderProcess(backend.tokenizer, facts)
        self.adapters = dict(settings.adapters)  # those that are served now
        self.recorder = None if settings.record is None else Recorder(settings.record)
        self.head_watch = (
            None if settings.heads is None else HeadWatch(settings.heads, backend.drafter, backend.swap_head)
        )
        self.draining = False
        self.sleeping = False  # the engine's memory is free, or will be once no text is waited for
        self._sleep_lock = asyncio.Lock()
        self.must_replace = False  # the engine hangs: the process is to start anew
        self.started, self.created = monotonic(), int(time())
        self.active = 0  # texts that are waited for

    def read_now(self, what: What, raw: bytes) -> Any:
        """What a body asks for, as `RequestReader.read` has it; None where that may take long."""
        if len(raw) > QUICK:
            return None
        return self.reader.read(what, raw, self.backend.max_length, (*self.adapters,))

    async def read_beside(self, what: What, raw: bytes) -> Any:
        """The same, by a process of its own: nobody else waits for it."""
        return await self.reader_process.read(what, raw, self.backend.max_length, (*self.adapters,))

    def _refuse_asleep(self) -> None:
        if self.sleeping:
            raise ApiError(503, "the server sleeps; wake it with POST /wake_up", "server_error", code="sleeping")

    async def load_adapter(self, name: str, folder: str) -> None:
        """Serve the LoRA adapter in a folder as a model of this name."""
        self._refuse_asleep()
        if name in (*self.settings.model_names, *self.adapters):
            raise ApiError(
                400, f"{name!r} is served already; unload it first, or choose another name", param="lora_name"
            )
        await self.backend.change_adapter(name, folder)
        self.adapters[name] = folder
        log.info("the adapter %r is loaded", name)

    async def unload_adapter(self, name: str) -> None:
        """Serve it no longer; texts that are being written with it are finished."""
        self._refuse_asleep()
        if self.adapters.pop(name, None) is None:
            known = ", ".join(self.adapters) or "none"
            raise ApiError(
                404, f"there is no adapter {name!r} here; served: {known}", "not_found_error", param="lora_name"
            )
        with suppress(UnknownName):  # an engine that was started again could not read it
            await self.backend.change_adapter(name, None)
        log.info("the adapter %r is unloaded", name)

    async def sleep(self) -> None:
        """Let the texts that are being written end, then have the engine give its memory back; others are refused."""
        self.sleeping = True
        while self.active and self.sleeping:
            await asyncio.sleep(0.02)
        async with self._sleep_lock:
            if not self.sleeping:
                raise ApiError(409, "the server was woken before its last text had ended", code="woken")
            if self.backend.problem is None:
                try:
                    await self.backend.sleep()
                except BaseException:
                    self.sleeping = False
                    raise
                self.metrics.asleep.set(1)
                log.info("the engine sleeps: the memory of weights and KV cache is freed")

    async def wake_up(self) -> None:
        """Load the model again, and serve."""
        async with self._sleep_lock:
            if self.sleeping and self.backend.problem is not None:
                started = monotonic()
                if await self.backend.restart() != "yes":
                    raise ApiError(503, "the engine could not be started, see the log; try again", "server_error")
                log.info("the engine is awake after %.1f s", monotonic() - started)
            self.sleeping = False
            self.metrics.asleep.set(0)

    def stats(self) -> dict[str, Any]:
        """What the page shows: counts so far, and what is going on."""
        load = self.backend.load()
        return {
            "model": self.model, "drafter": self.backend.drafter, "drafters": self.backend.drafters,
            "uptime": monotonic() - self.started, "running": load.running, "waiting": load.waiting,
            "used_slots": load.used_slots, "cached_slots": load.cached_slots, "reused": load.reused,
            "read": load.read, "preemptions": load.preemptions, "rounds": load.rounds, "tokens": load.tokens,
            "sequence_rounds": load.sequence_rounds, "forms": dict(load.forms),
            "accepted_per_position": load.accepted_per_position,
            "head": None if self.head_watch is None else self.head_watch.running.name,
            "adapters": {name: _drafting(*counts) for name, counts in load.adapters.items()},
            "captures": load.captures,
        }  # fmt: skip

    @contextmanager
    def admitted(self, texts: int) -> Iterator[None]:
        """A place for so many texts in batch or queue, or a word on when to come again."""
        room = self.backend.max_batch + self.settings.max_queue
        if self.draining:
            raise _leaving()
        self._refuse_asleep()
        if self.active + texts > room:
            message = f"{self.active} texts are being written or wait, and there is room for {room}; try again soon"
            raise ApiError(429, message, "rate_limit_error", code="queue_full", headers={"Retry-After": "1"})
        self.active += texts
        try:
            yield
        finally:
            self.active -= texts

    async def write(self, body: Generation, answer: Answer, jobs: list[Job]) -> bytes:
        """The whole answer of a request, as JSON."""
        done, size = dict[int, Completion](), answer.at_once(self.backend.max_batch)
        for some in (jobs[first : first + size] for first in range(0, len(jobs), size)):
            async with aclosing(self._counted(some, answer)) as items:
                async for index, item in items:
                    if isinstance(item, Completion):
                        done[index] = item
        texts = [done[job.index] for job in jobs]
        spelt = [part for i, each in enumerate(texts) for part in await answer.spelt(i, each)]
        found = [self._found(body, job, done[job.index]) for job in jobs]
        return encoded(answer.whole(texts, found), spelt)

    async def stream(self, body: Generation, answer: Answer, jobs: list[Job]) -> AsyncGenerator[bytes]:
        """The answer in messages, as it grows."""
        done, opened, called = dict[int, Completion](), set[int](), set[int]()
        parsers = {job.index: parser_of(body, self.backend.tokenizer, job.prompt) for job in jobs}
        async with aclosing(self._counted(jobs, answer)) as items:
            async for index, item in items:
                if index not in opened:
                    opened.add(index)
                    for line in answer.opening(index):
                        yield line
                parser = parsers[index]
                if isinstance(item, Completion):
                    done[index] = item
                if parser is not None:
                    pieces = parser.end() if isinstance(item, Completion) else parser.feed(item.text)
                    called.update(index for piece in pieces if piece.kind == "call")
                    for line in answer.parsed(index, pieces, None if isinstance(item, Completion) else item):
                        yield line
                elif not isinstance(item, Completion) and (item.text or item.tokens):
                    yield answer.piece(index, item)
                if isinstance(item, Completion):
                    for line in answer.ending(index, item, index in called):
                        yield line
        for line in answer.closing([done[job.index] for job in jobs]):
            yield line

    async def _counted(self, jobs: list[Job], answer: Answer) -> AsyncGenerator[tuple[int, Event | Completion]]:
        """The texts of all jobs as they grow, in metrics, log and trace: those that end and those that are dropped."""
        timings, prompts = ({job.index: Timing(answer.arrived) for job in jobs}, {job.index: job for job in jobs})
        left = set(timings)
        try:
            async with aclosing(self._texts(jobs)) as items:
                async for index, item in items:
                    timings[index].mark()
                    if isinstance(item, Completion):
                        left.discard(index)
                        self._count(item, timings[index], answer)
                        self._record(prompts[index], item, answer)
                    yield index, item
        except InvalidInput:
            raise
        except BaseException as error:
            reason = "error" if isinstance(error, Exception) else "aborted"
            self.metrics.count_dropped(len(left), reason)
            log.info("%s", json.dumps({**answer.asked_by, "answer": answer.id, "finished": reason}))
            raise

    async def _texts(self, jobs: list[Job]) -> AsyncGenerator[tuple[int, Event | Completion]]:
        """The texts of all jobs as they grow, within the deadline; what ends because the server does says so.

        Each wait has the limit for itself: a stream is not read by the task that began it.
        """
        limit = self.settings.deadline
        until = None if limit is None else asyncio.get_running_loop().time() + limit
        async with aclosing(write_all(self.backend, jobs)) as items:
            while True:
                try:
                    if until is None:
                        news = await anext(items)
                    else:
                        async with asyncio.timeout_at(until):
                            news = await anext(items)
                except StopAsyncIteration:
                    return
                except InvalidInput:
                    raise
                except ForerunError as error:
                    raise (_leaving() if self.draining else error) from None
                yield news

    def _record(self, job: Job, done: Completion, answer: Answer) -> None:
        """Keep a text for training, where server and request both say so."""
        if self.head_watch is not None and done.embedding is None:
            self.head_watch.observe(done, answer.arrived)
        if self.recorder is not None and answer.body.record is True:
            self.recorder.write(job.prompt, done, answer.body.temperature)

    def _found(self, body: Generation, job: Job, done: Completion) -> Found:
        """The text, what was thought before it, and the calls of offered tools; a text that broke off calls nothing."""
        parser = parser_of(body, self.backend.tokenizer, job.prompt)
        return Found(done.text) if parser is None or done.error is not None else found_in(parser, done.text)

    def _count(self, done: Completion, timing: Timing, answer: Answer) -> None:
        timing.ended = perf_counter()
        self.metrics.count(done, timing, answer.body.priority or 0)
        answer.span.note(done, timing)
        facts: dict[str, object] = {
            **answer.asked_by, "answer": answer.id, "prompt_tokens": done.prompt_tokens, "tokens": done.tokens,
            "seconds": round(timing.ended - timing.started, 3), "queued": round(done.queue_seconds, 3),
            "drafter": done.drafter, "tokens_per_round": round(done.tokens_per_round, 2),
            "drafted": done.drafted, "accepted": done.accepted,
            "finished": done.finish_reason,
        }  # fmt: skip
        if answer.body.priority:
            facts["priority"] = answer.body.priority
        if answer.model != self.model:  # unloaded meanwhile or not
            facts["adapter"] = answer.model
        if answer.predicted:
            facts["predicted"] = {"in_text": done.accepted_prediction_tokens, "not": done.rejected_prediction_tokens}
        if done.error is not None:
            facts["error"] = done.error
        if self.settings.log_prompts:
            asked = answer.body.model_dump(include={"messages", "prompt"})
            facts |= {"asked": asked, "text": done.text}
        log.info("%s", json.dumps(facts, ensure_ascii=False))


def _drafting(rounds: int, tokens: int, drafted: int, accepted: int) -> dict[str, float]:
    """How an adapter's texts are drafted."""
    return {
        "rounds": rounds, "tokens": tokens, "drafted": drafted, "accepted": accepted,
        "tokens_per_round": tokens / rounds if rounds else 0.0,
    }  # fmt: skip


def _leaving() -> ApiError:
    return ApiError(503, "the server is shutting down", "server_error", headers={"Retry-After": "5"})


MOST_BYTES = 1 << 30  # of one server's file; then it records no more


class Recorder:
    def __init__(self, folder: Path, most_bytes: int = MOST_BYTES) -> None:
        self._left = most_bytes
        started = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
        self.file = folder / f"traffic-{started}-{os.getpid()}.jsonl"
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._descriptor = os.open(self.file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        except OSError as error:
            raise InvalidInput(
                f"texts cannot be recorded in {folder}: {error.strerror}; name another --record"
            ) from None

    def write(self, prompt: Sequence[int], done: Completion, temperature: float | None) -> None:
        """One text that has ended by itself; what was dropped or failed is not recorded."""
        if done.finish_reason not in ("stop", "length") or not done.token_ids:
            return
        facts = {
            "prompt": list(prompt), "tokens": done.token_ids, "temperature": temperature, "drafter": done.drafter,
            "rounds": done.rounds, "drafted": done.drafted, "accepted": done.accepted,
        }  # fmt: skip
        line = json.dumps(facts, separators=(",", ":")).encode() + b"\n"
        if len(line) > self._left:
            if self._left >= 0:
                log.warning("%s is full: nothing more is recorded", self.file)
            self._left = -1
            return
        try:
            os.write(self._descriptor, line)
            self._left -= len(line)
        except OSError as error:  # a full disk is no reason to fail a request
            log.warning("a text could not be recorded in %s: %s", self.file, error.strerror)

    def close(self) -> None:
        os.close(self._descriptor)


ENOUGH = 2000  # rounds with a head until it is judged
FALL = 0.97  # of the tokens per round before, below which a head is taken out again


class Window:
    def __init__(self, texts: int = 1000) -> None:
        self._texts: deque[tuple[int, int]] = deque(maxlen=texts)

    def add(self, done: Completion) -> None:
        self._texts.append((done.tokens, done.rounds))

    @property
    def rounds(self) -> int:
        return sum(rounds for _, rounds in self._texts)

    @property
    def rate(self) -> float:
        return sum(tokens for tokens, _ in self._texts) / max(1, self.rounds)


class HeadWatch:
    def __init__(
        self,
        folder: Path,
        drafter: str,
        swap: Callable[[Path], Awaitable[None]],
        *,
        enough: int = ENOUGH,
        fall: float = FALL,
    ) -> None:
        self._versions, self._drafter, self._swap = HeadVersions(folder), drafter, swap
        self._enough, self._fall = enough, fall
        self.running = self._versions.must_have_current()
        self._previous: tuple[Path, Window] | None = None
        self._now, self._since = Window(), 0.0

    def observe(self, done: Completion, started: float) -> None:
        """A text that has ended; those that began with another head are not counted."""
        if done.drafter == self._drafter and started >= self._since:
            self._now.add(done)

    async def check(self) -> None:
        """Swap where the link has moved, and move it back where that was a mistake. Asked often."""
        wanted = self._versions.current()
        if wanted is not None and wanted != self.running:
            await self._change(wanted)
        elif self._previous is not None and self._has_fallen(self._previous[1]):
            await self._roll_back(*self._previous)

    def _has_fallen(self, before: Window) -> bool:
        if self._now.rounds < self._enough or before.rounds < self._enough:
            return False
        return self._now.rate < self._fall * before.rate

    async def _change(self, wanted: Path) -> None:
        former, window = self.running, self._now
        try:
            await self._swap(wanted)
        except ForerunError as error:
            log.error("the head %s cannot be used, and %s stays: %s", wanted.name, former.name, error)
            self._publish(former)
            return
        log.info("drafting with the head %s now, instead of %s", wanted.name, former.name)
        self.running, self._previous = wanted, (former, window)
        self._now, self._since = Window(), perf_counter()

    async def _roll_back(self, former: Path, before: Window) -> None:
        failed, found = self.running, {"tokens_per_round": self._now.rate, "before": before.rate}
        log.warning(
            "the head %s gives %.2f tokens per round and %s gave %.2f: rolled back",
            failed.name, self._now.rate, former.name, before.rate,
        )  # fmt: skip
        await self._swap(former)
        self.running, self._previous = former, None
        self._now, self._since = before, perf_counter()
        self._publish(former)
        try:
            (failed / "rolled_back.json").write_text(json.dumps(found), encoding="utf-8")
        except OSError as error:
            log.warning("%s cannot be written: %s", failed, error.strerror)

    def _publish(self, version: Path) -> None:
        try:
            self._versions.publish(version.name)
        except (OSError, ForerunError) as error:
            log.warning("the link in %s could not be moved back: %s", version.parent, error)
            # else it would be swapped again and again
            self.running = self._versions.current() or self.running
