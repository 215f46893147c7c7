"""How many replicas a load wants with each drafter, how long its answers take, and what a million tokens cost then.

One replica under load is simulated round by round, with the times that were measured: who waits, and how long. These
times are a `Profile`: seconds per token by drafter and batch size, and of prompts, of one model on one machine. It
comes from a file (`forerun plan --measure --save FILE`, or the JSON of a batch sweep: `make bench-cpu`, `make
bench-gpu`), or from the figures in benchmarks/ that come with the package.
"""

from __future__ import annotations

import json
import random
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from importlib.resources import files
from math import ceil
from pathlib import Path
from statistics import fmean
from typing import Any

from forerun.core.checks import as_real
from forerun.core.errors import DamagedFile, InvalidInput, brief

PLAIN = "plain"
PAGE = 64  # tokens of a page of the KV cache (models/pages.py; this module loads without torch)
_GET_ONE = "make one with `forerun plan --measure --save FILE`"
BUILT_IN = tuple(("h200", model) for model in ("8b", "8b-fp8", "8b-int8", "8b-w4"))


@dataclass(frozen=True, slots=True)
class Point:
    """One drafter at one batch size, as it ran."""

    setup: str  # a drafter, and its budget where that was fixed
    batch: int
    decode_seconds: float  # per token that the whole batch wrote, without the time of prompts
    prompt_seconds: float  # per token of prompts that were read beside it
    tokens_per_round: float
    error: float  # half the width of the 95% interval, as a share
    context: float  # tokens of a sequence while it was measured


@dataclass(frozen=True, slots=True)
class Memory:
    """What a model takes of a machine's memory, in bytes."""

    weights: int  # as they are held
    room: int | None  # that the KV cache may take where nobody says (kv_memory); None = unknown
    token_bytes: Mapping[str, int]  # keys and values of one token, by kv_dtype
    kv_dtype: str = "auto"  # the one that was measured

    def tokens(self, kv_dtype: str | None = None) -> int | None:
        """How many the KV cache holds."""
        return None if self.room is None else self.room // self.token_bytes[kv_dtype or self.kv_dtype]

    def sequences(self, length: int, kv_dtype: str | None = None) -> int | None:
        """How many of so many tokens the KV cache holds, each with a page for its drafts."""
        tokens = self.tokens(kv_dtype)
        return None if tokens is None else tokens // PAGE // (-(-length // PAGE) + 1)

    def told(self, lengths: Sequence[int]) -> list[str]:
        """In words: weights, and by kv_dtype what a token takes and how many tokens and sequences fit."""
        said = [f"weights about {self.weights / 1e9:.1f} GB"]
        for name in sorted(self.token_bytes, key=lambda name: name != self.kv_dtype):
            fits = f"kv_dtype {name}: {self.token_bytes[name]:,} bytes for a token"
            if self.room is not None:
                counts = ", ".join(f"{self.sequences(length, name):,} of {length:,}" for length in lengths)
                fits += f", {self.tokens(name):,} tokens fit, or sequences: {counts} tokens"
            said.append(fits)
        return said


@dataclass(frozen=True, slots=True)
class Profile:
    machine: str
    model: str
    source: str  # command, date, commit, conditions
    points: tuple[Point, ...]
    context_seconds: float = 0.0  # per sequence, round and token of context more than was measured
    prompt_square_seconds: float = 0.0  # of a prompt's attention, per square of its tokens
    memory: Memory | None = None

    @property
    def setups(self) -> list[str]:
        return list(dict.fromkeys(point.setup for point in self.points))

    def of(self, setup: str) -> list[Point]:
        """Its points by batch size."""
        return sorted((point for point in self.points if point.setup == setup), key=lambda p: p.batch)

    def max_batch(self, setup: str) -> int:
        return self.of(setup)[-1].batch

    def round_seconds(self, setup: str, batch: int, context: float) -> float:
        """One round of so many sequences, by straight lines between measured batch sizes."""
        base = self._at(setup, batch, lambda point: point.decode_seconds * point.batch * point.tokens_per_round)
        measured = self._at(setup, batch, lambda point: point.context)
        return max(0.25 * base, base + self.context_seconds * batch * (context - measured))

    def tokens_per_round(self, setup: str, batch: int) -> float:
        return self._at(setup, batch, lambda point: point.tokens_per_round)

    def prompt_seconds(self, setup: str, batch: int, tokens: int) -> float:
        """A whole prompt: every token passes the layers once, and attends to all before it."""
        each = self._at(setup, batch, lambda point: point.prompt_seconds)
        return tokens * (each + self.prompt_square_seconds * tokens)

    def guesses_prompts(self, tokens: int) -> bool:
        """Are prompts of so many tokens far longer than what was measured, without a law for long ones?"""
        return not self.prompt_square_seconds and tokens > 8 * max(point.context for point in self.points)

    def _at(self, setup: str, batch: int, value: Callable[[Point], float]) -> float:
        """By a straight line between the neighbours; outside, the nearest."""
        points = self.of(setup)
        above = bisect_left(points, batch, key=lambda point: point.batch)
        low, high = points[max(0, above - 1)], points[min(above, len(points) - 1)]
        share = (batch - low.batch) / (high.batch - low.batch) if high is not low else 0.0
        return value(low) * (1 - share) + value(high) * share

    def error(self, setup: str) -> float:
        return max(point.error for point in self.of(setup))

    def to_json(self) -> str:
        return json.dumps({"what": "forerun-profile", "schema": 1, **asdict(self)}, indent=1) + "\n"


def built_in(gpu: str, model: str) -> Profile:
    if (gpu, model) not in BUILT_IN:
        known = ", ".join(f"--gpu {g} --model {m}" for g, m in BUILT_IN)
        raise InvalidInput(
            f"nothing is known of {model} on {gpu}; there is {known}; give --file, or --measure on that machine"
        )
    text = (files("forerun.measure.plan") / f"{gpu}-{model}.json").read_text(encoding="utf-8")
    return _of_profile(json.loads(text))


def read_profile(file: Path) -> Profile:
    """A profile of ours, or the batch sweep in a benchmark's JSON."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidInput(f"cannot read {str(file)!r}: {error.strerror}; {_GET_ONE}") from None
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"{str(file)!r} is not JSON ({brief(error)}); {_GET_ONE}") from None
    try:
        if isinstance(found, dict) and found.get("what") == "forerun-profile":
            return _of_profile(found)
        rows = next(_sweeps(found), None)
        if rows is None:
            raise InvalidInput(f"{file} holds no batch sweep; {_GET_ONE}")
        head = found if isinstance(found, dict) else {}
        machine = head.get("machine") or {}
        name = str(machine.get("gpu") or machine.get("cpu") or "this machine")
        source = f"{file.name}, {head.get('date', 'no date')}"
        return Profile(name, str(head.get("model", "?")), source, points_of(rows))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        if isinstance(error, InvalidInput):
            raise
        raise DamagedFile(f"{file} is no profile: {type(error).__name__}: {brief(error)}") from None


def points_of(rows: Sequence[Mapping[str, Any]]) -> tuple[Point, ...]:
    if not all("prompt_tokens" in row for row in rows):
        raise InvalidInput("the batch sweep does not say how long its prompts were; measure it again")
    return tuple(_point(row) for row in rows)


def _point(row: Mapping[str, Any]) -> Point:
    tokens, texts, prompts = float(row["tokens"]), int(row["texts"]), float(row["prompt_tokens"])
    in_prompts = 1e-3 * float(row["ms_by_part"].get("prompt", 0.0))
    rate, within = float(row["tokens_per_s"]), row.get("interval")
    error = 0.15 if within is None else (within[1] - within[0]) / 2 / rate
    return Point(
        str(row["setup"]), int(row["batch"]), max(1e-9, float(row["seconds"]) - in_prompts) / tokens,
        in_prompts / prompts, float(row["tokens_per_round"]), error, (prompts + tokens / 2) / texts,
    )  # fmt: skip


def _of_profile(found: Mapping[str, Any]) -> Profile:
    points = tuple(Point(**point) for point in found["points"])
    if not any(point.setup == PLAIN for point in points):
        raise InvalidInput("a profile needs points of the setup plain")
    if not all(point.decode_seconds > 0 and point.tokens_per_round >= 1 for point in points):
        raise InvalidInput("a profile has times above 0 and at least one token per round")
    memory = found.get("memory")
    if memory is not None and not _is_sound(memory := Memory(**memory)):
        raise InvalidInput("a profile's memory has whole numbers of bytes, and its kv_dtype among token_bytes")
    return Profile(
        str(found["machine"]), str(found["model"]), str(found["source"]), points, float(found["context_seconds"]),
        float(found.get("prompt_square_seconds", 0.0)), memory,
    )  # fmt: skip


def _is_sound(memory: Memory) -> bool:
    sizes = [memory.weights, *([] if memory.room is None else [memory.room])]
    each = [*memory.token_bytes.values()]
    whole = all(type(size) is int for size in (*sizes, *each))
    return whole and min(sizes) >= 0 and min(each, default=0) >= 1 and memory.kv_dtype in memory.token_bytes


def _sweeps(found: Any) -> Iterator[list[dict[str, Any]]]:
    """Lists of rows of a batch sweep, wherever they are in a document."""
    wanted = {"batch", "setup", "tokens_per_s", "ms_by_part"}
    if isinstance(found, list) and found and all(isinstance(row, dict) and wanted <= set(row) for row in found):
        yield found
        return
    inside = found.values() if isinstance(found, dict) else found if isinstance(found, list) else ()
    for each in inside:
        yield from _sweeps(each)


REQUESTS = 200  # simulated for each number of replicas
MOST_BUSY = 0.9  # share of the time that a replica may work: random arrivals need the rest
SAME_COST = 1.02  # times the lowest cost, within which the sooner answer counts
STEPS = 24  # numbers of replicas that are tried from the first guess on


@dataclass(frozen=True, slots=True)
class Load:
    rate: float  # requests a second, of all replicas
    prompt: int  # tokens
    answer: int
    first_seconds: float = 2.0  # within which 99 of 100 answers begin
    token_seconds: float = 0.1  # per token, on average

    def __post_init__(self) -> None:
        for name in ("rate", "prompt", "answer", "first_seconds", "token_seconds"):
            as_real(name, getattr(self, name), low=5e-324, limit="a number above 0")


@dataclass(frozen=True, slots=True)
class Range:
    """A figure with what it is when everything is as fast, or as slow, as its interval allows."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Choice:
    setup: str
    batch: int  # sequences at once that serve it best
    replicas: Range
    capacity: Range  # tokens a second of one replica that is never idle
    gpu_hours: Range  # for a million tokens of answers at this load
    ttft_p99: float
    token_seconds: float
    answer_seconds: float  # of one request, waiting included
    used: float  # share of what the replicas could write
    reaches: bool  # the times that were asked for

    @property
    def full_hours(self) -> Range:
        """Hours of one machine for a million tokens if it is never idle."""
        per = [1e6 / 3600 / each for each in (self.capacity.value, self.capacity.high, self.capacity.low)]
        return Range(*per)


def plan(profile: Profile, load: Load) -> list[Choice]:
    """Every drafter of the profile, cheapest first; of those that cost as little, the one that answers sooner.

    Plain decoding is always among them, and comes first where nothing else tells them apart. No more sequences run
    together than the KV cache holds, where it is known how many that are.
    """
    if fitting(profile, load) == 0:
        raise InvalidInput(
            f"a prompt and an answer of {load.prompt + load.answer} tokens do not fit the KV cache of {profile.model} "
            f"on {profile.machine}, which holds {profile.memory and profile.memory.tokens()}"
        )
    made = [choose(profile, setup, load) for setup in profile.setups]
    reaching = [choice.gpu_hours.value for choice in made if choice.reaches]
    least = SAME_COST * min(reaching, default=0.0)

    def rank(one: Choice) -> tuple[bool, float, float, bool]:
        return not one.reaches, max(least, one.gpu_hours.value), one.answer_seconds, one.setup != PLAIN

    return sorted(made, key=rank)


def choose(profile: Profile, setup: str, load: Load) -> Choice:
    error = profile.error(setup)
    batch = best_batch(profile, setup, load)
    counts, worst = [], None
    for slower in (1.0, 1.0 / (1.0 + error), 1.0 / max(0.05, 1.0 - error)):
        count, outcome, fine = _replicas(profile, setup, load, batch, slower)
        counts.append(count)
        worst = worst or (outcome, fine)
    assert worst is not None
    replicas = Range(counts[0], min(counts), max(counts))
    whole = capacity(profile, setup, load, batch)
    tokens = load.rate * load.answer * 3600 / 1e6  # millions an hour
    outcome, fine = worst
    return Choice(
        setup, batch, replicas, Range(whole, whole * (1 - error), whole * (1 + error)),
        Range(*(count / tokens for count in (replicas.value, replicas.low, replicas.high))),
        outcome.ttft(0.99), outcome.mean_tpot, outcome.ttft(0.5) + (load.answer - 1) * outcome.mean_tpot,
        load.rate * load.answer / (replicas.value * whole), fine,
    )  # fmt: skip


def fitting(profile: Profile, load: Load) -> int | None:
    """How many sequences of this load the KV cache holds; None = unknown."""
    return None if profile.memory is None else profile.memory.sequences(load.prompt + load.answer)


def best_batch(profile: Profile, setup: str, load: Load) -> int:
    """The measured batch size with the highest throughput whose tokens come often enough; else the smallest.

    Where the KV cache holds fewer, so many.
    """
    sizes, fits = [point.batch for point in profile.of(setup)], fitting(profile, load)
    if fits is not None and fits < sizes[-1]:
        sizes = [size for size in sizes if size < fits] + [fits]
    fine = [size for size in sizes if _token_seconds(profile, setup, load, size) <= load.token_seconds]
    return max(fine or sizes[:1], key=lambda batch: capacity(profile, setup, load, batch))


def capacity(profile: Profile, setup: str, load: Load, batch: int) -> float:
    """Tokens a second of one replica that always has so many sequences, prompts included."""
    return batch / _token_seconds(profile, setup, load, batch)


def _token_seconds(profile: Profile, setup: str, load: Load, batch: int) -> float:
    """What one sequence of a full batch waits for a token: its rounds, and the prompts of those that follow."""
    context = load.prompt + load.answer / 2
    per_round = profile.round_seconds(setup, batch, context) / profile.tokens_per_round(setup, batch)
    return per_round + batch * profile.prompt_seconds(setup, batch, load.prompt) / load.answer


def _replicas(profile: Profile, setup: str, load: Load, batch: int, slower: float) -> tuple[int, Outcome, bool]:
    """The fewest that keep the promise of the load under random arrivals, each with an equal share of them."""
    whole, wanted = capacity(profile, setup, load, batch), load.rate * load.answer
    count = max(1, ceil(wanted * slower / (MOST_BUSY * whole)))
    number, outcome = count, Outcome()
    for more in range(STEPS):
        number = count + more * max(1, count // 8)
        asks = poisson(load.rate / number, REQUESTS, load.prompt, load.answer)
        outcome = simulate(profile, setup, asks, batch, slower)
        if outcome.ttft(0.99) <= load.first_seconds and outcome.mean_tpot <= load.token_seconds:
            return number, outcome, True
        if wanted < 0.02 * number * whole or outcome.sequence_rounds < 1.2 * outcome.rounds:  # more would not help
            return number, outcome, False
    return number, outcome, False


LONG = 1e6  # tokens: where the cost of context is read off


@dataclass(frozen=True, slots=True)
class Ask:
    """A request: when it comes, and how long its prompt and its answer are."""

    at: float
    prompt: int
    answer: int


@dataclass(slots=True)
class _Running:
    ask: Ask
    written: float = 0.0
    first: float = 0.0


@dataclass(slots=True)
class Outcome:
    seconds: float = 0.0  # until the last answer was there
    tokens: int = 0
    sequence_rounds: float = 0.0
    rounds: int = 0
    first: list[float] = field(default_factory=list)  # seconds to the first token
    per_token: list[float] = field(default_factory=list)

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def mean_tpot(self) -> float:
        return fmean(self.per_token) if self.per_token else 0.0

    def ttft(self, share: float) -> float:
        """By nearest rank."""
        ranked = sorted(self.first)
        return ranked[min(len(ranked) - 1, int(share * len(ranked)))] if ranked else 0.0


def poisson(rate: float, count: int, prompt: int, answer: int, seed: int = 0) -> list[Ask]:
    dice, now, asks = random.Random(seed), 0.0, list[Ask]()
    for _ in range(count):
        asks.append(Ask(now, prompt, answer))
        now += dice.expovariate(rate)
    return asks


class _Times:
    def __init__(self, profile: Profile, setup: str, batch: int, slower: float) -> None:
        sizes = range(1, batch + 1)
        self.gained = [0.0, *(profile.tokens_per_round(setup, size) for size in sizes)]
        self._prompt = partial(profile.prompt_seconds, setup)
        self._slower = slower
        self.short = [0.0, *(slower * profile.round_seconds(setup, size, 0.0) for size in sizes)]
        long = [0.0, *(slower * profile.round_seconds(setup, size, LONG) for size in sizes)]
        self.per_context = [(after - before) / LONG for before, after in zip(self.short, long, strict=True)]

    def prompt(self, tokens: int, running: int) -> float:
        return self._slower * self._prompt(max(1, running), tokens)

    def round(self, running: Sequence[_Running]) -> float:
        size, context = len(running), 0.0
        if self.per_context[size]:
            context = sum(one.ask.prompt + one.written for one in running) / size
        return self.short[size] + self.per_context[size] * context


def simulate(profile: Profile, setup: str, asks: Sequence[Ask], batch: int, slower: float = 1.0) -> Outcome:
    """The requests of one replica in the order in which they come; all times are `slower` times the measured ones."""
    times = _Times(profile, setup, batch, slower)
    now, place, running, out = 0.0, 0, list[_Running](), Outcome()
    while place < len(asks) or running:
        if not running and asks[place].at > now:
            now = asks[place].at
        while place < len(asks) and len(running) < batch and asks[place].at <= now:
            now += times.prompt(asks[place].prompt, len(running))
            running.append(_Running(asks[place]))
            place += 1
        size = len(running)
        now += times.round(running)
        out.rounds, out.sequence_rounds = out.rounds + 1, out.sequence_rounds + size
        ended = False
        for one in running:
            one.first = one.first or now
            one.written += times.gained[size]
            ended = ended or one.written >= one.ask.answer
        if ended:
            for one in running:
                if one.written >= one.ask.answer:
                    _count(out, one, now)
            running = [one for one in running if one.written < one.ask.answer]
    out.seconds = now - (asks[0].at if asks else 0.0)
    return out


def _count(out: Outcome, one: _Running, now: float) -> None:
    out.tokens += one.ask.answer
    out.first.append(one.first - one.ask.at)
    if one.ask.answer > 1:
        out.per_token.append((now - one.first) / (one.ask.answer - 1))
