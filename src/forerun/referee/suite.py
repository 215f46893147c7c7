"""Checks: how they are registered, what they are given, what they return, and the run over all of them.

A check is a function of a Court. Others add theirs in a module of their own, named with `--with`:

    from forerun.referee.suite import Court, Finding, check

    @check("mine.short", "answers are short")
    def short(court: Court) -> Finding:
        asks = court.greedy_asks(4)
        for ask, answer in zip(asks, court.ask(asks)):
            if len(answer.text) > 100:
                return court.fail("a long answer", ask, got=answer.text)
        return court.passed("4 answers were short")
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from forerun.core.checks import unknown
from forerun.core.errors import InvalidInput
from forerun.referee.ask import Answer, Ask, Broken, Mode, Refused, Target
from forerun.referee.evidence import FALSE_ALARMS
from forerun.referee.tables import Pair, Table

Status = Literal["pass", "fail", "skip"]
TIE = 0.02  # logits closer than this are a tie that rounding may decide
_FIXED_PART, _LAWS_PART = 0.1, 0.7  # of the time left: one check of a fixed size; the laws, where such checks wait
TEXTS = (
    "Write a short story about a lighthouse keeper.", "def fibonacci(n):", "The capital of France is",
    "Count from one to twenty:", "Dear Sir or Madam,", "1 + 1 = 2, 2 + 2 = 4, 3 + 3 =",
    "List the planets of the solar system:", "Once upon a time", "The quick brown fox", "import numpy as np\n",
    "Translate to German: good morning.", "Roses are red,",
)  # prompts where no table is known  # fmt: skip


@dataclass(frozen=True)
class Budget:
    """What a run may take: whichever ends first."""

    tokens: int = 60_000
    seconds: float = 180.0


@dataclass(frozen=True)
class Finding:
    status: Status
    detail: str
    p_value: float | None = None
    counterexample: dict[str, Any] = field(default_factory=dict)
    command: str = ""  # reproduces the counterexample
    bars: Sequence[tuple[str, float, float]] = ()  # label, observed, due
    trace: Sequence[tuple[int, float]] = ()  # tokens, log of the evidence


@dataclass(frozen=True)
class Result:
    name: str
    about: str
    finding: Finding
    requests: int
    tokens: int
    seconds: float

    @property
    def status(self) -> Status:
        return self.finding.status


@dataclass(frozen=True)
class Report:
    target: str
    results: list[Result]
    budget: Budget
    false_alarms: float
    seconds: float
    command: str = ""
    versions: dict[str, str] = field(default_factory=dict)

    @property
    def failed(self) -> list[Result]:
        return [each for each in self.results if each.status == "fail"]

    @property
    def passed(self) -> bool:
        """Did no check fail, and was anything checked at all?"""
        return not self.failed and any(each.status == "pass" for each in self.results)

    @property
    def verdict(self) -> str:
        if self.failed:
            return f"{len(self.failed)} of {len(self.results)} checks failed"
        skipped = sum(each.status == "skip" for each in self.results)
        if skipped == len(self.results):
            return "nothing was checked: every check was skipped"
        return f"{len(self.results) - skipped} checks passed, {skipped} skipped"

    @property
    def tokens(self) -> int:
        return sum(each.tokens for each in self.results)


Run = Callable[["Court"], Finding]


@dataclass(frozen=True)
class Check:
    """A registered check. `needs`: `table` = a closed-form law, `off` = speculation can be switched off."""

    name: str
    about: str
    run: Run
    needs: frozenset[str]
    share: float  # of the sampled tokens; 0 = as few as it takes
    bets: bool  # has it a share in the false alarms?


CHECKS: dict[str, Check] = {}


def check(
    name: str, about: str, needs: Iterable[str] = (), share: float = 0.0, bets: bool = False
) -> Callable[[Run], Run]:
    def registered(run: Run) -> Run:
        CHECKS[name] = Check(name, about, run, frozenset(needs), share, bets)
        return run

    return registered


@dataclass
class Court:
    """What a check is given: the engine, the known law if there is one, its share of the budget."""

    target: Target
    pair: Pair | None = None
    seed: int = 0
    alarms: float = FALSE_ALARMS  # of this check
    tokens: int = 4000  # that a statistical check may sample
    deadline: float = math.inf  # by time.monotonic
    slowest: float = 2.0  # how many times plain decoding's time drafting may take
    requests: int = 0
    spent: int = 0

    @property
    def table(self) -> Table:
        assert self.pair is not None, "a check that needs a table says so"
        return self.pair.target

    @property
    def clock(self) -> Callable[[], float]:
        found: Callable[[], float] = getattr(self.target, "clock", time.perf_counter)
        return found

    @property
    def late(self) -> bool:
        return time.monotonic() > self.deadline

    def ask(self, asks: Sequence[Ask], mode: Mode = "on") -> list[Answer]:
        """All at once."""
        found = self.target.answer(asks, mode)
        self.requests += len(asks)
        self.spent += sum(each.completion_tokens or len(each.text) for each in found)
        return found

    def alone(self, asks: Sequence[Ask], mode: Mode = "on") -> list[Answer]:
        """One after the other."""
        return [self.ask([ask], mode)[0] for ask in asks]

    def prompts(self, count: int, salt: int = 0) -> list[str]:
        """Random texts of the table's alphabet, else the first of a fixed list."""
        if self.pair is not None:
            return self.table.prompts(count, self.seed * 1000 + salt)
        return [TEXTS[i % len(TEXTS)] for i in range(count)]

    def greedy_asks(self, count: int, max_tokens: int = 32, salt: int = 0) -> list[Ask]:
        return [Ask(prompt, max_tokens) for prompt in self.prompts(count, salt)]

    def expected(self, ask: Ask) -> str | None:
        """The greedy text by the table; None where there is no table."""
        if self.pair is None:
            return None
        out = self.table.greedy(self.table.encode(ask.prompt), ask.max_tokens)
        return self.table.decode([token for token in out if token != self.table.end])

    @cached_property
    def _alone(self) -> dict[tuple[str, int], str]:
        return {}

    def reference(self, ask: Ask) -> str:
        """The greedy text that is due: by the table, else what the engine itself writes for the request alone."""
        if (known := self.expected(ask)) is not None:
            return known
        key = (ask.prompt, ask.max_tokens)
        if key not in self._alone:
            self._alone[key] = self.alone([ask])[0].text
        return self._alone[key]

    def compare(self, asks: Sequence[Ask], answers: Sequence[Answer], how: str, mode: Mode = "on") -> Finding | None:
        """A failure where a greedy text is not the one due; ties that rounding may decide are not failures."""
        for ask, answer in zip(asks, answers, strict=True):
            due = self.reference(ask)
            if answer.text != due and not self.is_tie(ask, answer.text, due):
                return self.fail(f"{how}: a greedy text is not the one due", ask, answer.text, due, mode)
        return None

    def is_tie(self, ask: Ask, got: str, due: str) -> bool:
        """Do two greedy texts part where two symbols are equally likely, up to rounding?"""
        if self.pair is None:
            return False
        place = next((i for i, (a, b) in enumerate(zip(got, due, strict=False)) if a != b), min(len(got), len(due)))
        table, common = self.table, self.table.encode(due[:place])
        logits = table.logits(table.contexts(table.encode(ask.prompt), common).last)[-1]
        pick = [table.encode(text[place])[0] if place < len(text) else table.end for text in (got, due)]
        return table.other not in pick and abs(float(logits[pick[0]] - logits[pick[1]])) < TIE

    def passed(self, detail: str, **more: Any) -> Finding:
        return Finding("pass", detail, **more)

    def fail(
        self, detail: str, ask: Ask | None = None, got: Any = None, due: Any = None, mode: Mode = "on", **more: Any
    ) -> Finding:
        """A failure with what was asked, what came, what was due, and the command that asks again."""
        example = {} if ask is None else {"prompt": ask.prompt, "got": got, "due": due}
        command = "" if ask is None else self.target.command(ask, mode)
        return Finding("fail", detail, counterexample=example, command=command, **more)


def chosen_checks(only: Sequence[str] = ()) -> list[Check]:
    """Those whose names begin with one of these words; all if none is given."""
    import forerun.referee.law_checks  # noqa: F401

    for word in only:
        if not any(name.startswith(word) for name in CHECKS):
            raise InvalidInput(unknown("check", word, sorted(CHECKS)))
    return [each for name, each in CHECKS.items() if not only or any(name.startswith(word) for word in only)]


def run_suite(
    target: Target,
    pair: Pair | None = None,
    budget: Budget | None = None,
    checks: Sequence[Check] | None = None,
    seed: int = 0,
    slowest: float = 2.0,
    false_alarms: float = FALSE_ALARMS,
    progress: Callable[[Result | str], None] = lambda _: None,
) -> Report:
    """Run checks on a target; no check's failure keeps the others from running.

    Checks of a fixed size come first, greedy ones before all, up to half of the time: on a slow engine the others of
    them wait until the laws have been sampled.
    """
    budget = budget or Budget()
    chosen = chosen_checks() if checks is None else checks
    bettors = max(1, sum(each.bets for each in chosen))
    court = Court(target, pair, seed, false_alarms / bettors, slowest=slowest)
    fixed = sorted((each for each in chosen if not each.share), key=lambda each: not each.name.startswith("greedy"))
    laws = [each for each in chosen if each.share]
    started, results = time.monotonic(), []
    while fixed or laws:
        left_s = budget.seconds - (time.monotonic() - started)
        waits = left_s < budget.seconds / 2 and bool(laws)
        each = (laws if waits or not fixed else fixed).pop(0)
        progress(each.name)
        left = budget.tokens - court.spent
        part = each.share / sum(one.share for one in (each, *laws)) if each.share else _FIXED_PART
        court.tokens = max(0, int(left * part))
        time_part = part * (_LAWS_PART if each.share and fixed else 1.0)
        court.deadline = time.monotonic() + max(0.0, left_s) * time_part
        results.append(_judged(each, court, spent=left <= 0 or left_s <= 0))
        progress(results[-1])
    return Report(target.name, results, budget, false_alarms, time.monotonic() - started)


def _judged(each: Check, court: Court, spent: bool) -> Result:
    requests, tokens, started = court.requests, court.spent, time.monotonic()
    try:
        if spent:
            finding = Finding("skip", "the budget is spent; give --tokens or --seconds more")
        elif "table" in each.needs and court.pair is None:
            finding = Finding("skip", "needs the law of a table model: --table FOLDER")
        elif "off" in each.needs and "off" not in court.target.modes:
            finding = Finding("skip", "needs a way to switch speculation off: --plain URL or --off FIELDS")
        else:
            finding = each.run(court)
    except Refused as error:
        finding = Finding("skip", f"the engine refuses it: {error}")
    except Broken as error:
        finding = Finding("fail", str(error), command=error.command)
    except Exception as error:  # of an engine in this process; the other checks still run
        finding = Finding("fail", f"it raised {type(error).__name__}: {str(error)[:200]}")
    seconds = time.monotonic() - started
    return Result(each.name, each.about, finding, court.requests - requests, court.spent - tokens, seconds)
