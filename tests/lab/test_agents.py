"""The ratios that `python -m lab agents` reports, and its parts at their smallest."""

from __future__ import annotations

import argparse
from types import SimpleNamespace
from typing import Any

from lab.agents import alternate, ratios
from lab.runner import parse


def test_ratios_are_of_speeds_or_of_seconds() -> None:
    times = [
        {("a", "wall"): 2.0, ("b", "wall"): wall, ("a", "cpu"): 2.0, ("b", "cpu"): 1.0} for wall in (1.0, 4.0, 2.0)
    ]
    assert ratios(times, {"b over a": ("a", "b")}) == {"b over a, wall": [1.0, 0.5, 2.0], "b over a, cpu": [2.0] * 3}
    assert ratios(times, {"b": ("a", "b")}, cpu=False, slower=True) == {"b, wall": [1.0, 0.5, 2.0]}


def test_contenders_take_turns_and_texts_are_compared() -> None:
    called, run = list[str](), SimpleNamespace(flags=argparse.Namespace(repeats=2), say=print)

    def contender(name: str, ids: list[int]) -> Any:
        return lambda i: called.append(name) or [SimpleNamespace(token_ids=ids, tokens=len(ids), rounds=1)]

    _, tokens, equal, per_round = alternate(run, {"a": contender("a", [1, 2]), "b": contender("b", [1, 2])}, 3)  # type: ignore[arg-type]
    assert (tokens, equal, sorted(called)) == (6, True, ["a"] * 7 + ["b"] * 7)
    assert per_round == {"a": 2.0, "b": 2.0}
    assert called[2:4] != called[4:6], "not always the same one first"
    assert not alternate(run, {"a": contender("a", [1, 2]), "b": contender("b", [1])}, 1)[2]  # type: ignore[arg-type]


def test_the_command_line() -> None:
    assert parse("agents", ["schemas", "--schemas", "5"]).schemas == 5
