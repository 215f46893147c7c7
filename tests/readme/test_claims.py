"""What is said of speed is measured: no promise without a figure. tests/docs/test_figures.py checks the figures."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

import forerun
from forerun.cli.app import _forerun
from tests.readme.pages import GUIDES, README, ROOT, name_of

PROMISE = re.compile(r"\b(several|many|\w+) times (sooner|faster)\b", re.IGNORECASE)


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


def test_the_readme_says_where_nothing_is_gained() -> None:
    assert "no gain" in README.read_text()
