"""Summary sentences of a benchmark result; the terminal and the HTML page both print these."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from forerun.measure.bench.figures import Spread
from forerun.measure.bench.settings import PLAIN

INTERVALS = (
    "Intervals are 95% intervals over prompts (jackknife, Student's t): how far other prompts of the same kind and "
    "other repeats would move the ratio. One prompt gives none."
)


def spread_of(cell: Mapping[str, Any]) -> Spread:
    return Spread(cell["speedup"], cell["low"], cell["high"])


def ratio_over(result: Mapping[str, Any], name: str, base: str) -> Spread | None:
    """How many times as fast one contender is as another; None where the two were not divided."""
    if name == base:
        return Spread(1.0, 1.0, 1.0)
    for key, inverse in ((f"{name}_vs_{base}", False), (f"{base}_vs_{name}", True)):
        value = result["ratios"].get(key)
        if value is None:
            continue
        low, high = result["intervals"].get(key) or (None, None)
        if not inverse:
            return Spread(value, low, high)
        return Spread(1 / value, 1 / high if high else None, 1 / low if low else None)
    return None


def verdict(drafter: str, found: Spread) -> str:
    """One sentence on a speed-up that claims no more than its interval supports."""
    if not found.interval:
        return (
            f"{drafter} ran at {found.value:.2f} times the speed of plain decoding on one prompt, "
            "which gives no interval and says little."
        )
    interval = f"95% interval {found.interval}"
    if not found.is_clear:
        return (
            f"{drafter} shows no clear gain or loss over plain decoding: {found.value:.2f} times its speed "
            f"({interval}, which holds 1)."
        )
    direction = "faster than" if found.value > 1.0 else "slower than"
    return f"{drafter} is {direction} plain decoding: {found.value:.2f} times its speed ({interval})."


def headline(result: Mapping[str, Any]) -> str | None:
    """The verdict on the first drafter asked for; None where nothing was drafted."""
    drafter = next(iter(result["speedup"]), None)
    return None if drafter is None else verdict(drafter, spread_of(result["speedup"][drafter]))


def busy_warning(conditions: Mapping[str, Any]) -> str | None:
    if not conditions.get("busy"):
        return None
    return (
        f"The machine was busy before the run (load average {conditions['load_before']:g} on "
        f"{conditions['cores']} cores): other processes affect these figures. Measure again on an idle machine."
    )


def extent(conditions: Mapping[str, Any]) -> str:
    """Model, prompts and repeats that the figures come from."""
    prompts, repeats = conditions["prompts"], conditions["repeats"]
    whole = conditions.get("suite_prompts", prompts)
    some = f"{prompts} of the suite's {whole} prompts" if prompts < whole else counted(prompts, "prompt")
    return (
        f"{conditions['model']}, {some} of {counted(len(conditions['tasks']), 'task')}, "
        f"{counted(repeats, 'repeat')}, at most {counted(conditions['max_tokens'], 'new token')} each, "
        f"{counted(conditions['threads'], 'thread')}."
    )


def equality(result: Mapping[str, Any]) -> str:
    compared = sum(cell["compared"] for cell in result["cells"])
    differing = sum(len(cell["differing"]) for cell in result["cells"])
    return f"{compared - differing} of {compared} texts equal what {result['conditions']['reference']} wrote."


def left_out(conditions: Mapping[str, Any]) -> list[str]:
    """Contenders that could not be measured to the end, and why."""
    return [f"{name} left out: {why}" for name, why in (conditions.get("left_out") or {}).items()]


def instruction_sets(conditions: Mapping[str, Any]) -> str | None:
    found = conditions.get("isa") or {}
    said = "; ".join(f"{name} {isa}" for name, isa in found.items() if isa)
    return f"Instruction sets: {said}." if said else None


def notes(result: Mapping[str, Any]) -> list[str]:
    """Everything that a reader of the figures must know besides, most urgent first."""
    conditions = result["conditions"]
    found = [busy_warning(conditions), *left_out(conditions), extent(conditions), instruction_sets(conditions)]
    return [line for line in found if line]


def accepted_cells(result: Mapping[str, Any], drafter: str) -> list[str]:
    """Acceptance by depth with its counts: "0.82 (98 of 120)"."""
    counts = result["contenders"][drafter]["accepted_counts"]
    return [f"{kept / drafted:.2f} ({kept} of {drafted})" for kept, drafted in counts]


def drafters_of(result: Mapping[str, Any]) -> list[str]:
    return [name for name in result["speedup"] if name != PLAIN]


def counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
