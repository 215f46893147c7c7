"""The front's backend when a replica dies in mid-text: which texts another replica goes on with, and which end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ray")
pytest.importorskip("prometheus_client")

from ray.exceptions import RayError

from forerun.core.types import Event
from forerun.models.load.tokenizer import Tokenizer
from forerun.server.cluster.backend import ClusterBackend, StreamLost
from forerun.server.cluster.replica import NOTHING, Begun, Item, Report

FIRST, SECOND = Event(0, (1, 2), 1, "a"), Event(0, (3,), 0, "b")


class Answer:
    """What a replica writes before it dies."""

    def __init__(self, items: Sequence[Item]) -> None:
        self._items = items

    async def __aiter__(self) -> AsyncIterator[Item]:
        for item in self._items:
            yield item
        raise RayError("dead")

    def cancel(self) -> None:
        """Nothing: it has ended."""


class Handle:
    """Replicas that write these items in turn and die; keeps the options that each was given."""

    def __init__(self, *texts: Sequence[Event]) -> None:
        self._texts, self.given = list(texts), list[dict[str, Any]]()
        self.write = SimpleNamespace(remote=self._remote)

    def options(self, stream: bool) -> Handle:
        return self

    def _remote(self, prompt: Sequence[int], options: dict[str, Any], **known: Any) -> Answer:
        self.given.append(options)
        return Answer([Begun("r"), *self._texts.pop(0)])


def written(handle: Handle, default: str, **options: Any) -> list[int]:
    """Tokens that the client gets before the text is lost: all replicas die."""

    async def write() -> list[int]:
        report = Report("r", "node", 1, "m", "ngram", default, 10, 64, 4, False, None, NOTHING)
        backend, tokens = ClusterBackend(handle, Tokenizer.__new__(Tokenizer), report), list[int]()
        try:
            async for item in backend.stream((1,), **options):
                assert isinstance(item, Event)
                tokens += item.tokens
        except StreamLost:
            return tokens
        finally:
            await backend.close()
        raise AssertionError("every replica dies")

    return asyncio.run(write())


@pytest.mark.parametrize(
    ("default", "options", "resumed"),
    [
        ("auto", {"temperature": 0.0}, True),
        ("auto", {"temperature": 1.0}, True),
        ("coupled", {"temperature": 1.0}, True),
        ("typical", {"temperature": 1.0}, False),
        ("typical", {"temperature": 0.0}, False),
        ("typical", {"temperature": 1.0, "seed": 3}, False),
        ("exact", {"temperature": 1.0, "seed": 3}, False),
        ("exact", {"temperature": 0.0}, True),
        ("typical", {"temperature": 1.0, "verifier": "coupled"}, True),
        ("typical", {"temperature": 1.0, "verifier": "auto"}, True),
    ],
)
def test_the_verifier_of_the_servers_decides_whether_another_goes_on(
    default: str, options: dict[str, Any], resumed: bool
) -> None:
    handle = Handle([FIRST], [FIRST, SECOND], [], [])
    tokens = written(handle, default, **options)
    assert (tokens, len(handle.given)) == (([1, 2, 3], 4) if resumed else ([1, 2], 1))


def test_a_seed_is_given_only_where_it_fixes_the_text() -> None:
    for verifier, seeded in (("auto", True), ("coupled", True), ("exact", False), ("typical", False)):
        handle = Handle([FIRST], [], [], [])
        written(handle, verifier, temperature=1.0)
        assert ("seed" in handle.given[0]) == seeded
