"""Every `forerun` command in the documentation is one that the command line takes, with the flags that it shows."""

from __future__ import annotations

import re
import shlex
from contextlib import suppress
from functools import cache
from importlib.util import find_spec
from typing import Any

import pytest
import typer

from forerun.cli import app
from tests.readme.pages import ROOT

PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
BLOCK = re.compile(r"^```(?:sh|bash|console)?\n(.*?)^```", re.MULTILINE | re.DOTALL)


def commands() -> list[tuple[str, str]]:
    """Page and command of every line in a code block that starts with `forerun`."""
    found = []
    for page in PAGES:
        for block in BLOCK.findall(page.read_text("utf-8")):
            lines = [line for line in block.replace("\\\n", " ").split("\n") if line.startswith("forerun ")]
            found += [(page.name, line.split(" && ")[0].split(" | ")[0].replace("$", "")) for line in lines]
    return found


@cache
def command_line() -> Any:
    return typer.main.get_command(app.app)


def parse(command: str) -> None:
    """What the real command line makes of it, without running it; raises where it takes no such flag."""
    words = shlex.split(command, comments=True)[1:]
    group: Any = command_line()
    while words and hasattr(group, "commands") and words[0] in group.commands:
        group = group.commands[words.pop(0)]
    group.make_context("forerun", words, resilient_parsing=False)


@pytest.mark.parametrize(("page", "command"), commands())
def test_a_command_that_is_shown_parses(page: str, command: str) -> None:
    with suppress(typer.Exit):  # --help and --version end at once
        parse(command)


def test_the_pages_show_commands_and_a_wrong_one_would_be_noticed() -> None:
    assert len(commands()) > 40
    assert any("serve" in command for page, command in commands() if page.startswith("tutorial"))
    with pytest.raises(Exception, match=r"[Nn]o such option"):
        parse("forerun serve --modle FILE")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_module_that_is_shown_can_be_run(page: Any) -> None:
    for name in re.findall(r"(?:python|launch) (?:-P )?-m (forerun[\w.]*)", page.read_text("utf-8")):
        found = find_spec(name)
        assert found is not None, name
        assert found.submodule_search_locations is None or find_spec(f"{name}.__main__"), name
