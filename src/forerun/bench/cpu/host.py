"""CPU time of Python in a round: what `Engine.step` takes beyond the native calls (python -m forerun.bench.cpu.host).

CPU seconds of the thread that runs the engine, with one thread: others may use the machine meanwhile.
Rounds are told apart by what they did, as drafted ones cost more. A pass evicts the caches, so Python after it is
several times slower than in a loop of its own, and only whole rounds say what it costs. Plain rounds whose passes were
run ahead in one native call (models/native/plain_run.py) are counted together with the plain round that made the call,
or by themselves behind a drafted one, and what Python took is given by round and by token: a plain round has one token,
a drafted one has more. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from time import thread_time
from typing import Any, cast

from forerun.bench.machine import load_average, machine_facts
from forerun.errors import InvalidInput

NATIVE = ("fr_decode", "fr_decode_run", "fr_head_draft", "fr_head_run", "fr_head_rank")  # calls of rounds
QUESTIONS = (
    "Write a short story about a lighthouse keeper who finds a message in a bottle.",
    "Repeat this list twice: apples, pears, plums, apples, pears, plums. Then explain photosynthesis.",
    "What is 17 times 23? Explain step by step.",
)


@dataclass(slots=True)
class Spent:
    """CPU seconds inside native calls, and how many there were."""

    seconds: float = 0.0
    calls: int = 0


@contextmanager
def native_time(library: Any) -> Iterator[Spent]:
    """Count what the library's calls take; models that are loaded meanwhile call the counted ones."""
    spent, plain = Spent(), {name: getattr(library, name) for name in NATIVE}

    def counted(function: Any) -> Callable[..., int]:
        def call(*given: Any) -> int:
            began = thread_time()
            result: int = function(*given)
            spent.seconds += thread_time() - began
            spent.calls += 1
            return result

        return call

    for name, function in plain.items():
        setattr(library, name, counted(function))
    try:
        yield spent
    finally:
        for name, function in plain.items():
            setattr(library, name, function)


def kind_of(drafted: int, calls: int) -> str:
    """What a round did: `plain`, `looked` (a head ran, and nothing was worth drafting) or `drafted`."""
    return "drafted" if drafted else "plain" if calls <= 1 else "looked"


@dataclass(slots=True)
class Group:
    """A round that made native calls, and those of its kind behind it that only took what these had found."""

    rounds: int
    tokens: int
    host: float  # CPU seconds of Python
    native: float | None  # None = they lie in a call that rounds of another kind share

    def add(self, tokens: int, host: float) -> None:
        self.rounds += 1
        self.tokens += tokens
        self.host += host


def measure(model: str, drafter: str, tokens: int, repeats: int) -> dict[str, list[Group]]:
    """By kind of round, what each took."""
    from forerun.load_engine import load_engine
    from forerun.models.native import head_library, library
    from forerun.params import SamplingParams
    from forerun.types import Request

    if not (library.available() and head_library.available()):
        raise InvalidInput(f"there are no native kernels here: {library.why_not()}")
    found: dict[str, list[Group]] = {}
    with native_time(library.library()) as spent:
        engine, tokenizer = load_engine(model, {"drafter": drafter, "threads": 1, "device": "cpu"})
        params, stats = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True), engine.stats
        for question in QUESTIONS * repeats:
            engine.submit(Request(tuple(tokenizer.encode(question)), params))
            last, last_kind = cast("Group | None", None), ""
            while engine.busy:
                spent.seconds, spent.calls = 0.0, 0
                drafted, prompts, written = stats.drafted, stats.read, stats.tokens
                began = thread_time()
                engine.step()
                host, written = thread_time() - began - spent.seconds, stats.tokens - written
                if stats.read != prompts:  # a prompt was read
                    continue
                kind = kind_of(stats.drafted - drafted, spent.calls)
                if last is not None and not spent.calls:
                    if kind == last_kind:
                        last.add(written, host)
                        continue
                    last.native = None
                last = Group(1, written, host, spent.seconds if spent.calls else None)
                last_kind = kind
                found.setdefault(kind, []).append(last)
    if all(group.native is None for groups in found.values() for group in groups):
        raise InvalidInput(f"{model} made no native call here, so that nothing can be told apart")
    return found


def at_share(values: Sequence[float], share: float) -> float:
    """The value that so large a share lies below."""
    return sorted(values)[int(share * (len(values) - 1))]


def seconds_at(groups: Sequence[Group], of: Callable[[Group], float], share: float) -> float:
    """Seconds of all groups together, if each took what so large a share of its like stays below."""
    alike: dict[tuple[int, bool], list[float]] = {}  # those behind another's call find the caches warm
    for group in groups:
        alike.setdefault((group.rounds, group.native is None), []).append(of(group))
    return sum(len(values) * at_share(values, share) for values in alike.values())


def figures(groups: Sequence[Group]) -> dict[str, float]:
    """Milliseconds of Python by round and by token, and of native calls by round."""
    rounds, tokens = sum(group.rounds for group in groups), sum(group.tokens for group in groups)
    alone = [group for group in groups if group.native is not None]
    row = {"rounds": float(rounds), "tokens": float(tokens), "runs": float(len(groups))}
    for share in (10, 50):
        host = 1e3 * seconds_at(groups, lambda group: group.host, share / 100)
        native = 1e3 * seconds_at(alone, lambda group: group.native or 0.0, share / 100)
        row |= {f"host_p{share}_ms": host / rounds, f"host_token_p{share}_ms": host / tokens}
        row[f"native_p{share}_ms"] = native / max(1, sum(group.rounds for group in alone))
    return row


def main(words: Sequence[str] | None = None) -> int:
    """Measure drafters one after the other; print a line for each kind of round, and the document."""
    parser = argparse.ArgumentParser(prog="python -m forerun.bench.cpu.host")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--drafters", default="none,ngram,eagle3")
    parser.add_argument("--tokens", type=int, default=96, help="written per text")
    parser.add_argument("--repeats", type=int, default=2)
    flags, load = parser.parse_args(words), load_average()
    found: dict[str, dict[str, dict[str, float]]] = {}
    for drafter in flags.drafters.split(","):
        for kind, groups in sorted(measure(flags.model, drafter, flags.tokens, flags.repeats).items()):
            row = found.setdefault(drafter, {})[kind] = figures(groups)
            print(
                f"{drafter:<14} {kind:<8} {row['rounds']:5.0f} rounds in {len(groups)} runs  Python "
                f"{row['host_p10_ms']:.3f} ms a round (tenth), {row['host_p50_ms']:.3f} (median), "
                f"{row['host_token_p10_ms']:.3f}, {row['host_token_p50_ms']:.3f} a token; "
                f"native {row['native_p10_ms']:.2f}, {row['native_p50_ms']:.2f} a round"
            )
    conditions = {**machine_facts(), "load_before": load, "load_after": load_average()}
    print(json.dumps({"benchmark": "cpu_host", "rounds": found, "conditions": conditions}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
