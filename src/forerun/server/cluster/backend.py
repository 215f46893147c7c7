"""The model behind the front's server: replicas elsewhere, one of which writes each text.

A request whose replica dies before a token was handed on is sent to another one. One whose text has begun is
sent again too, and goes on where it was (see `resume`). After `ATTEMPTS` replicas it ends with an error: a request that
ends every engine it meets must not meet all of them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from contextvars import ContextVar
from pathlib import Path
from time import process_time, thread_time
from typing import Any

from ray.exceptions import RayError, RayTaskError, TaskCancelledError

from forerun.api.completion import Completion
from forerun.core.errors import ForerunError, UnsupportedModel
from forerun.core.request import Event
from forerun.models.load.tokenizer import Tokenizer
from forerun.server.backend import Backend, Load, Restarted
from forerun.server.cluster.loads import Loads, Report
from forerun.server.cluster.replica import Begun, Ended
from forerun.server.cluster.resume import Replay, StreamLost, can_resume, with_seed

log = logging.getLogger(__name__)
ATTEMPTS = 4
LOOK_EVERY = 1.0  # seconds between two looks at all replicas
session_of_request: ContextVar[str | None] = ContextVar("session_of_request", default=None)


class ReplicaLost(ForerunError):
    """The replica that wrote a text is gone, or its engine has failed."""


class ClusterBackend(Backend):
    """Replicas behind a Ray Serve handle, as a Backend."""

    def __init__(self, handle: Any, tokenizer: Tokenizer, first: Report) -> None:
        self._handle, self.tokenizer, self._facts = handle, tokenizer, first
        self.loads = Loads()
        self.loads.update([first])
        self.resumed = self.resent = 0
        self._looking = asyncio.create_task(self._look())

    @property
    def vocab_size(self) -> int:
        return self._facts.vocab_size

    @property
    def max_length(self) -> int:
        return self._facts.max_length

    @property
    def has_encoder(self) -> bool:
        return self._facts.has_encoder

    @property
    def max_batch(self) -> int:
        """Of all replicas together."""
        return self._facts.max_batch * max(1, len(self.loads.usable()))

    @property
    def drafter(self) -> str:
        return next((report.drafter for report in self.loads.usable()), self._facts.drafter)

    def load(self) -> Load:
        return self.loads.total()

    def cpu_seconds(self) -> dict[str, float]:
        """CPU time of this process so far, by thread: engines have others."""
        front = thread_time()
        return {"front": front, "others": max(0.0, process_time() - front)}

    @property
    def failure(self) -> BaseException | None:
        return None  # Ray Serve looks after the replicas

    @property
    def problem(self) -> str | None:
        return None if self.loads.usable() else "no replica answers"

    @property
    def lost_process(self) -> str | None:
        return None  # a replica that has lost one says so itself

    async def swap_head(self, folder: Path) -> None:
        raise UnsupportedModel("--heads works with one replica; with several, give each the head by `update`")

    def looks_hung(self, patience: float) -> bool:
        return False  # each replica looks for itself

    def give_up(self) -> None:
        """Nothing: it never looks hung."""

    async def restart(self) -> Restarted:
        return "no"

    async def close(self) -> None:
        """Look no more; the replicas are Ray Serve's."""
        self._looking.cancel()

    async def refresh(self) -> None:
        """Nothing: all replicas are asked every second."""

    async def stream(self, prompt: tuple[int, ...], **options: Any) -> AsyncGenerator[Event | Completion]:
        """One text as it grows, from as many replicas as it takes."""
        every_round = options.pop("every_round", True)
        options = with_seed(options, self._facts.verifier)
        replay, gone = Replay(can_resume(options, self._facts.verifier)), list[str]()
        for attempt in range(1, ATTEMPTS + 1):
            try:
                replay.restart()
                async with aclosing(self._from_one(prompt, options, every_round, gone)) as items:
                    async for item in items:
                        for news in replay.take(item):
                            yield news
                return
            except ReplicaLost as error:
                if attempt == ATTEMPTS:
                    raise StreamLost(f"{attempt} replicas in turn did not end this text: {error}") from None
                self.resumed, self.resent = self.resumed + replay.started, self.resent + (not replay.started)
                log.warning("%s: its text is %s", error, "resumed" if replay.started else "sent again")

    async def _from_one(
        self, prompt: tuple[int, ...], options: dict[str, Any], every_round: bool, gone: list[str]
    ) -> AsyncGenerator[Event | Completion]:
        """The text as one replica writes it; a replica that is lost is added to `gone`."""
        known = {"every_round": every_round, "session": session_of_request.get(), "avoid": tuple(gone)}
        answer, where = self._handle.options(stream=True).write.remote(prompt, options, **known), ""
        try:
            async for item in answer:
                if isinstance(item, Begun):
                    where = item.replica
                elif isinstance(item, Ended):
                    if not item.engine_failed:
                        raise item.error
                    gone.append(where)
                    raise ReplicaLost(f"the engine of replica {where} has failed")
                else:
                    yield item
                    if isinstance(item, Completion):
                        return
        except (RayTaskError, TaskCancelledError):
            raise
        except RayError as error:
            gone.append(where)
            raise ReplicaLost(f"replica {where or '?'} is gone ({type(error).__name__})") from None
        finally:
            answer.cancel()  # does nothing to one that has ended
        gone.append(where)
        raise ReplicaLost(f"replica {where} ended a text before its end")

    async def _look(self) -> None:
        """Ask all replicas how they are, now and then."""
        while True:
            await asyncio.sleep(LOOK_EVERY)
            try:
                found = await self._handle.broadcast("report").results_async(
                    timeout_s=5.0, return_exceptions=True
                )
                self.loads.update([each for each in found if isinstance(each, Report)])
            except (TimeoutError, RayError) as error:
                log.warning("the replicas could not be asked: %s", error)
