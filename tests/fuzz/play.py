"""Plays a scenario and compares every text with what the request gives alone; says what went wrong first."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import pytest
import torch

from forerun.core.types import Event, Request
from forerun.drafters.compose import HybridDrafter
from forerun.drafters.device.model import SparseDraft
from forerun.engine import engine as engine_module
from forerun.engine.engine import Engine
from forerun.engine.sequence import SequenceState
from tests.fuzz.scenario import Order, Scenario, Setting, without_drafts
from tests.fuzz.world import World, make_plain, make_world

INJECTED = "injected"
PATIENCE = 400  # steps in a row without an event


class Wrong(AssertionError):
    """What a scenario has shown."""


@dataclass(frozen=True)
class Alone:
    """What a request gives."""

    tokens: tuple[int, ...]
    text: str
    finished: str | None
    logprobs: tuple[Any, ...]
    error: str = ""


@dataclass
class Counts:
    """What scenarios have really done."""

    steps: int = 0
    tokens: int = 0
    accepted: int = 0
    followed: int = 0
    preempted: int = 0
    reused: int = 0
    faults: int = 0
    aborted: int = 0
    captured: int = 0

    def add(self, other: Counts) -> None:
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)


@lru_cache(maxsize=8)
def _plain(shape: str, words: int, target: str, context: int) -> Engine:
    return make_plain(Setting(0, target=target, shape=shape, words=words, context=context))


_known: dict[Any, Alone] = {}


def alone(request: Request, setting: Setting) -> Alone:
    """Written by a plain engine, one request at a time."""
    request = without_drafts(request)
    model = setting.shape, setting.words, setting.target, setting.context
    key = *model, repr(request)
    if key not in _known:
        engine = _plain(*model)
        seq = engine.find(engine.submit(request))
        assert seq is not None
        while engine.busy:
            engine.step()
        assert engine.target.used_slots == 0
        _known[key] = result_of(seq, seq.events)
    return _known[key]


def result_of(seq: SequenceState, events: Sequence[Event]) -> Alone:
    tokens = tuple(token for event in events for token in event.tokens)
    logprobs = tuple(one for event in events for one in event.logprobs)
    error = "" if seq.error is None else str(seq.error)
    return Alone(tokens, "".join(event.text for event in events), seq.finished, logprobs, error)


@dataclass
class Player:
    """One run of a scenario."""

    scenario: Scenario
    world: World
    seqs: dict[int, SequenceState] = field(default_factory=dict)  # by request
    events: dict[int, list[Event]] = field(default_factory=dict)  # by sequence
    dropped: set[int] = field(default_factory=set)
    counts: Counts = field(default_factory=Counts)
    armed: dict[str, type[BaseException]] = field(default_factory=dict)

    def play(self) -> Counts:
        idle = 0
        for orders in self.scenario.steps:
            for order in orders:
                self.do(order)
            self.step()
        while self.world.engine.busy:
            before = sum(map(len, self.events.values()))
            self.step()
            idle = 0 if sum(map(len, self.events.values())) > before else idle + 1
            if idle > PATIENCE:
                raise Wrong(f"{PATIENCE} steps without an event: {self.world.engine.running}")
        self.check_end()
        return self.counts

    def do(self, order: Order) -> None:
        engine = self.world.engine
        if order.kind == "submit":
            number = engine.submit(self.scenario.requests[order.which])
            seq = engine.find(number)
            assert seq is not None
            self.seqs[order.which], self.events[number] = seq, []
        elif order.kind == "abort" and order.which in self.seqs:
            self.dropped.add(order.which)
            engine.abort(self.seqs[order.which].id)
        elif order.kind == "settle":
            engine.settle()
        elif order.kind == "fault":
            self.armed[order.place] = KeyboardInterrupt if order.interrupt else RuntimeError

    def step(self) -> None:
        self.counts.steps += 1
        engine = self.world.engine
        try:
            events = engine.step()
        except KeyboardInterrupt as error:
            if str(error) != INJECTED:
                raise
            return
        for event in events:
            self.events[event.seq_id].append(event)
        for which, seq in self.seqs.items():
            self.check_text(which, seq)
        self.check_pages()

    def check_text(self, which: int, seq: SequenceState) -> None:
        """What is written so far is how its text begins."""
        wanted = alone(self.scenario.requests[which], self.scenario.setting)
        found = tuple(seq.tokens[seq.prompt_length :])
        if found != wanted.tokens[: len(found)]:
            raise Wrong(f"request {which}: {found} instead of {wanted.tokens}")

    def check_pages(self) -> None:
        """No page is written by one and read by another: only named ones are shared, and none is lost."""
        pool, holders = self.world.target.kv.pool, dict[int, int]()
        for pages in pool.held.values():
            for page in pages:
                holders[page] = holders.get(page, 0) + 1
        for page, count in holders.items():
            if count > 1 and page not in pool.contents:
                raise Wrong(f"page {page} has {count} holders and no name")
        if pool.free + pool.cached + pool.used != pool.size:
            raise Wrong("pages were lost")

    def check_end(self) -> None:
        engine, target = self.world.engine, self.world.target
        for which, seq in self.seqs.items():
            self.check_result(which, seq)
        if target.used_slots:
            raise Wrong(f"{target.used_slots} slots are still held: {target.kv.pool.held}")
        if not (engine.timeline.is_idle):
            raise Wrong("a round is still under way")
        if engine.running or engine.reading or engine.waiting:
            raise Wrong("sequences are left in queues")
        self.check_drafters()
        self.counts.preempted += engine.stats.preemptions
        for seq in self.seqs.values():
            self.counts.tokens += len(seq.tokens) - seq.prompt_length
            self.counts.accepted += sum(event.accepted for event in seq.events)
            self.counts.reused += seq.cached_tokens

    def check_drafters(self) -> None:
        """Nothing of sequences that have ended stays with those who drafted for them."""
        for draft in self.world.device_drafts():
            if isinstance(draft, SparseDraft):
                left = draft.context._chosen
            else:
                left = draft.rows._states if "rows" in vars(draft) else draft.views._views
            if left:
                raise Wrong(f"a drafter keeps {left}")
        for drafter in self.world.drafters.values():
            if isinstance(drafter, HybridDrafter) and drafter._sequences:
                raise Wrong(f"a composition keeps {drafter._sequences}")

    def check_result(self, which: int, seq: SequenceState) -> None:
        setting = self.scenario.setting
        wanted, found = alone(self.scenario.requests[which], setting), result_of(seq, self.events[seq.id])
        if found.tokens != tuple(seq.tokens[seq.prompt_length :]):
            raise Wrong(f"request {which}: events have {found.tokens}, its sequence {seq.tokens}")
        if seq.finished == "aborted" and which in self.dropped:
            self.counts.aborted += 1
            return  # what is written was compared with the start of its text
        if seq.finished == "error" and INJECTED in found.error:
            return
        if (found.tokens, found.text, found.finished) != (wanted.tokens, wanted.text, wanted.finished):
            raise Wrong(f"request {which}: {found} instead of {wanted}")
        if not _alike(found.logprobs, wanted.logprobs):
            raise Wrong(f"request {which}: {found.logprobs} instead of {wanted.logprobs}")


def _alike(found: Sequence[Any], wanted: Sequence[Any]) -> bool:
    """Logprobs of the same tokens; the likeliest by their numbers, as ties may be in any order."""
    if [one.token for one in found] != [one.token for one in wanted]:
        return False
    for one, other in zip(found, wanted, strict=True):
        if not _near(one.logprob, other.logprob) or len(one.top) != len(other.top):
            return False
        if not all(_near(a.logprob, b.logprob) for a, b in zip(one.top, other.top, strict=True)):
            return False
    return True


def _near(one: float, other: float) -> bool:
    return math.isclose(one, other, abs_tol=1e-4, rel_tol=1e-4)


def play(scenario: Scenario, breaks: Callable[[pytest.MonkeyPatch], None] | None = None) -> Counts:
    """Raise Wrong if a text, or anything else, is not what it must be; `breaks` does damage first."""
    with pytest.MonkeyPatch.context() as patch:
        alone_first = [alone(one, scenario.setting) for one in scenario.requests]
        assert alone_first
        if breaks is not None:
            breaks(patch)
        torch.manual_seed(0)
        player = Player(scenario, make_world(scenario.setting, patch))
        _inject(player, patch)
        _count_followed(player, patch)
        try:
            return player.play()
        except Wrong:
            raise
        except Exception as error:
            raise Wrong(f"{type(error).__name__}: {error}") from error


def _inject(player: Player, patch: pytest.MonkeyPatch) -> None:
    """Everything that may fail, fails when it is armed."""
    engine, target = player.world.engine, player.world.target
    places: list[tuple[str, Any, str]] = [
        ("propose", engine.drafters, "propose"), ("observe", engine.drafters, "observe"),
        ("prompts", engine, "_observe_prompts"), ("commit", target, "commit"), ("prefill", target, "prefill"),
        ("outcome", engine_module, "outcome_of"), ("controller", engine.controller, "observe"),
        ("plan", engine.controller, "plan"),
    ]  # fmt: skip
    if player.scenario.setting.target == "twin":
        places += [
            ("grown", target, "_score_grown"), ("trees", target, "_score_trees"), ("verdict", target.grown, "read"),
            ("sampled", target.sampler, "_decide_grown"), ("keep", target.after, "keep_rows"),
            ("move", target.after, "move_decided"),
            ("grown", target.plain, "score"), ("verdict", target.plain.results, "read"),
            ("sampled", target.sampler, "decide_plain"), ("move", target.plain, "next_roots"),
        ]  # fmt: skip
    for drafter in player.world.drafters.values():
        places += [("drafter-propose", drafter, "propose"), ("drafter-observe", drafter, "observe")]
    for draft in player.world.device_drafts():
        if "rows" in vars(draft):
            places += [("append", draft.rows, "append_decided"), ("draft", draft, "_draft_for")]
        else:
            places += [("draft", draft, "_draft")]
    for place, owner, name in places:
        patch.setattr(owner, name, _failing(player, place, getattr(owner, name)))


def _failing(player: Player, place: str, real: Callable[..., object]) -> Callable[..., object]:
    def call(*args: object, **more: object) -> object:
        kind = player.armed.pop(place, None)
        if kind is not None:
            player.counts.faults += 1
            raise kind(INJECTED)
        return real(*args, **more)

    return call


def _count_followed(player: Player, patch: pytest.MonkeyPatch) -> None:
    real = Engine._next_round

    def follow(*args: Any) -> Any:
        found = real(*args)
        player.counts.followed += found is not None
        return found

    patch.setattr(Engine, "_next_round", follow)
