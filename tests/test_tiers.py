"""Which tests `make test` runs: all but those marked slow, of which `keep` cases stay."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.conftest import left_out_of_the_fast_tier


class Case(SimpleNamespace):
    """As much of a test as the choice looks at."""

    def get_closest_marker(self, name: str) -> Any:
        return next(self.iter_markers(name), None)

    def iter_markers(self, name: str) -> Any:
        return (mark for mark in self.marks if mark.name == name)


def cases(name: str, count: int, *marks: Any) -> list[Any]:
    return [Case(nodeid=f"{name}[{i}]", marks=[mark.mark for mark in marks]) for i in range(count)]


def test_slow_tests_are_left_out_and_some_cases_stay() -> None:
    fast, slow = cases("fast", 3, pytest.mark.model), cases("slow", 2, pytest.mark.slow)
    some, lone = cases("some", 6, pytest.mark.slow(keep=2)), cases("lone", 1, pytest.mark.slow(keep=4))
    left = [case.nodeid for case in left_out_of_the_fast_tier([*fast, *slow, *some, *lone])]
    assert left == ["slow[0]", "slow[1]", "some[1]", "some[2]", "some[4]", "some[5]"]


def test_a_function_keeps_cases_in_a_file_that_is_slow() -> None:
    both = cases("both", 3, pytest.mark.slow(keep=1), pytest.mark.slow)
    assert [case.nodeid for case in left_out_of_the_fast_tier(both)] == ["both[1]", "both[2]"]
