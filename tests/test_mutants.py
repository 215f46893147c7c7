"""The faults of tools/mutants.toml fit the source: one whose fragment is gone would be tried on nothing."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tools.mutants import ROOT, Mutant, read_mutants, selections

MUTANTS = read_mutants()


def test_every_fragment_is_in_its_file_exactly_once() -> None:
    found = [(mutant.label, mutant.found(ROOT / "src")) for mutant in MUTANTS]
    assert len(MUTANTS) >= 260
    assert [stale for stale in found if stale[1] != 1] == [], "mend tools/mutants.toml"


def test_every_fault_changes_something_and_names_tests_that_are_there() -> None:
    assert [mutant.label for mutant in MUTANTS if mutant.old == mutant.new] == []
    named = {word.split("::")[0] for mutant in MUTANTS for word in mutant.tests.split() if "/" in word}
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []


@pytest.mark.slow
def test_every_fault_is_python() -> None:
    """Any test notices a file that cannot be read: that says nothing about the tests."""
    for mutant in MUTANTS:
        source = (ROOT / "src" / "forerun" / mutant.file).read_text(encoding="utf-8")
        ast.parse(source.replace(mutant.old, mutant.new), mutant.label)


def test_negative_control_a_stale_fragment_is_found(tmp_path: Path) -> None:
    (tmp_path / "forerun").mkdir()
    (tmp_path / "forerun" / "a.py").write_text("x = 1\nx = 1\ny = 2\n")
    counts = [
        Mutant("area", file, old, "", "").found(tmp_path)
        for file, old in (("a.py", "x = 1"), ("a.py", "y = 2"), ("a.py", "z"), ("gone.py", "y = 2"))
    ]
    assert counts == [2, 1, 0, 0]


def test_selections_with_options_are_tried_by_themselves() -> None:
    """`-k` of one would leave out the tests of all others."""
    named = ("a.py b.py", "b.py -k some", "b.py c.py", "b.py -k some")
    mutants = [Mutant("area", "a.py", "x", "y", tests) for tests in named]
    assert selections(mutants) == ["a.py b.py c.py", "b.py -k some"]
    assert selections(mutants[1:2]) == ["b.py -k some"]
