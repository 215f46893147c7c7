"""What is said of speed is measured: no promise without a figure, and no figure that the measurements do not have."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

import forerun
from forerun.cli.app import _forerun
from tests.readme.pages import GUIDES, README, ROOT, name_of

MEASURED = ROOT / "docs" / "benchmarks.md"
PROMISE = re.compile(r"\b(several|many|\w+) times (sooner|faster)\b", re.IGNORECASE)
RATIO = re.compile(r"(\d+\.\d+)x\b")
COMMIT = re.compile(r"\b[0-9a-f]{7}\b")


def descriptions() -> dict[str, str]:
    """What people read before they read anything else."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return {
        "pyproject.toml": project["description"],
        "forerun --help": _forerun.__doc__ or "",
        "help(forerun)": forerun.__doc__ or "",
        "the README's first lines": "\n".join(README.read_text().splitlines()[:8]),
    }


@pytest.mark.parametrize("page", GUIDES, ids=name_of)
def test_no_page_promises_a_speed_without_a_figure(page: Path) -> None:
    assert PROMISE.findall(page.read_text(encoding="utf-8")) == []


def test_descriptions_promise_what_holds_everywhere() -> None:
    for where, text in descriptions().items():
        assert PROMISE.search(text) is None, where
        if "sooner" in text or "faster" in text:
            assert "where drafting pays" in text, where


def test_such_a_promise_would_be_noticed() -> None:
    assert PROMISE.search("A language model's own text, several times sooner.")
    assert PROMISE.search("up to three times faster")
    assert not PROMISE.search("may be given several times")


def not_measured(told: str, measured: str) -> list[str]:
    """Ratios of a text that are no figure of another."""
    figures = set(re.findall(r"\d+\.\d+", measured))
    return [ratio for ratio in RATIO.findall(told) if ratio not in figures]


def test_every_ratio_of_the_readme_is_in_the_measurements() -> None:
    told = README.read_text()
    assert len(RATIO.findall(told)) >= 8
    assert not_measured(told, MEASURED.read_text()) == []
    assert not_measured("math 3.7x, 3.66x, qa 3.65x", "| math | 3.66 |") == ["3.7", "3.65"]


def test_every_row_of_the_readme_says_where_it_was_measured() -> None:
    block = README.read_text().partition("<!-- bench-cpu -->")[2].partition("<!-- /bench-cpu -->")[0]
    rows = [line for line in block.splitlines() if line.startswith("|") and RATIO.search(line)]
    assert len(rows) >= 3
    known = set(COMMIT.findall(MEASURED.read_text()))
    for row in rows:
        assert COMMIT.findall(row), row
        assert set(COMMIT.findall(row)) <= known, row


def test_the_readme_says_where_nothing_is_gained() -> None:
    assert "no gain" in README.read_text()
