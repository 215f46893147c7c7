"""How many replicas a load wants with each drafter, how long its answers take, and what a million tokens cost then."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from forerun.core.checks import as_real
from forerun.measure.plan.profile import PLAIN, Profile
from forerun.measure.plan.simulate import Outcome, poisson, simulate

REQUESTS = 200  # simulated for each number of replicas
MOST_BUSY = 0.9  # share of the time that a replica may work: random arrivals need the rest
SAME_COST = 1.02  # times the lowest cost, within which the sooner answer counts
STEPS = 24  # numbers of replicas that are tried from the first guess on


@dataclass(frozen=True, slots=True)
class Load:
    """What is to be served, and how well."""

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
    """One drafter: what it takes to serve the load."""

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

    Plain decoding is always among them, and comes first where nothing else tells them apart.
    """
    made = [choose(profile, setup, load) for setup in profile.setups]
    reaching = [choice.gpu_hours.value for choice in made if choice.reaches]
    least = SAME_COST * min(reaching, default=0.0)

    def rank(one: Choice) -> tuple[bool, float, float, bool]:
        return not one.reaches, max(least, one.gpu_hours.value), one.answer_seconds, one.setup != PLAIN

    return sorted(made, key=rank)


def choose(profile: Profile, setup: str, load: Load) -> Choice:
    """The replicas that this drafter wants."""
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


def best_batch(profile: Profile, setup: str, load: Load) -> int:
    """The measured batch size with the highest throughput whose tokens come often enough; else the smallest."""
    fine = [
        point.batch
        for point in profile.of(setup)
        if _token_seconds(profile, setup, load, point.batch) <= load.token_seconds
    ]
    sizes = fine or [profile.of(setup)[0].batch]
    return max(sizes, key=lambda batch: capacity(profile, setup, load, batch))


def capacity(profile: Profile, setup: str, load: Load, batch: int) -> float:
    """Tokens a second of one replica that always has so many sequences, prompts included."""
    return batch / _token_seconds(profile, setup, load, batch)


def _token_seconds(profile: Profile, setup: str, load: Load, batch: int) -> float:
    """What one sequence of a full batch waits for a token: its rounds, and the prompts of those that follow."""
    context = load.prompt + load.answer / 2
    per_round = profile.round_seconds(setup, batch, context) / profile.tokens_per_round(setup, batch)
    return per_round + batch * load.prompt * profile.prompt_seconds(setup, batch) / load.answer


def _replicas(
    profile: Profile, setup: str, load: Load, batch: int, slower: float
) -> tuple[int, Outcome, bool]:
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
        if wanted < 0.02 * number * whole or outcome.mean_batch < 1.2:  # more replicas would not help
            return number, outcome, False
    return number, outcome, False
