"""What the documentation says is there is there: links, files, commands, flags, names, folders and words."""

from __future__ import annotations

import importlib
import re
import shlex
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
import typer

from forerun.cli.app import app
from tests.readme.pages import ALL, EXAMPLES, GUIDES, README, ROOT, blocks, links, name_of, prose

WORDS = (
    "target", "drafter", "tree", "node", "root", "chain", "round", "law", "verdict", "path", "accepted",
    "bonus", "budget", "tokens per round",
)  # fmt: skip
SYNONYMS = ("verifier model", "speculator", "assistant", "base model", "candidate", "posterior")
MACHINE = re.compile(r"(?<![\w.])/(work|tmp|home|root|usr|mnt)\b")

every_page = pytest.mark.parametrize("page", ALL, ids=name_of)
every_guide = pytest.mark.parametrize("page", GUIDES, ids=name_of)


def commands(group: Any = None, before: tuple[str, ...] = ()) -> dict[tuple[str, ...], set[str]]:
    """Every command as its words, with its flags."""
    group = typer.main.get_command(app) if group is None else group
    flags = {name for parameter in group.params for name in (*parameter.opts, *parameter.secondary_opts)}
    found = {before: flags | {"--help", "-h"}}
    for name, command in getattr(group, "commands", {}).items():
        found |= commands(command, (*before, name))
    return found


def shell_lines() -> list[list[str]]:
    """The commands that README and CONTRIBUTING tell people to type, in words, without comments."""
    pages = (README, ROOT / "CONTRIBUTING.md")
    lines = [line for page in pages for block in blocks(page, "sh") for line in block.splitlines()]
    words = [shlex.split(part, comments=True) for line in lines for part in line.split("&&")]
    return [line for line in words if line]


def test_the_readme_is_short() -> None:
    assert len(README.read_text(encoding="utf-8").splitlines()) < 150


@every_page
def test_links_resolve(page: Path) -> None:
    for link in links(page):
        if not link.startswith(("https://", "http://", "#")):
            assert (page.parent / link.partition("#")[0]).exists(), link


@every_page
def test_files_that_are_named_exist(page: Path) -> None:
    named = re.findall(r"`((?:src|tests|docs|examples|tools|lab|benchmarks)/[\w./-]+)`", prose(page))
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_every_guide_is_linked_from_the_index() -> None:
    linked = {(ROOT / "docs" / link).resolve() for link in links(ROOT / "docs" / "index.md")}
    assert {*GUIDES, *EXAMPLES} - {ROOT / "docs" / "index.md"} <= linked


def test_commands_in_the_readme_exist() -> None:
    known = commands()
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    seen = {line[0] for line in shell_lines()}
    assert {"git", "make", "forerun"} <= seen
    for program, *words in shell_lines():
        if program == "make":
            assert set(words) <= targets
        if program == "forerun":
            flags = [word for word in words if word.startswith("-")]
            command = max((name for name in known if tuple(words[: len(name)]) == name), key=len)
            assert command, words
            assert set(flags) <= known[command], words


@every_guide
def test_flags_that_are_named_exist(page: Path) -> None:
    known = set().union(*commands().values())
    named = re.findall(r"(?<![\w-])--[a-z][a-z-]+", prose(page).replace("<!--", "").replace("-->", ""))
    assert set(named) <= known


@every_guide
def test_dotted_names_exist(page: Path) -> None:
    for dotted in re.findall(r"(?<![\w./])forerun(?:\.[A-Za-z_]\w*)+", prose(page)):
        found: Any = importlib.import_module("forerun")
        for part in dotted.split(".")[1:]:
            found = getattr(found, part, None) or importlib.import_module(f"{found.__name__}.{part}")


def test_the_glossary_has_the_words() -> None:
    defined = re.findall(r"^\| \*\*(.+?)\*\* \|", (ROOT / "docs" / "glossary.md").read_text(), re.MULTILINE)
    assert defined[: len(WORDS)] == list(WORDS)
    assert len(set(defined)) == len(defined)


@pytest.mark.parametrize("page", [*GUIDES, *EXAMPLES], ids=name_of)
def test_no_synonyms_and_no_machine_paths(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    plain = re.sub(r"\w*assistant_\w+", "", text)  # names of transformers' arguments
    assert [word for word in SYNONYMS if re.search(rf"\b{word}", plain, re.IGNORECASE)] == []
    assert MACHINE.search(text) is None


def test_examples_are_short() -> None:
    lengths = {path.stem: len(path.read_text().splitlines()) for path in EXAMPLES}
    assert [name for name, length in lengths.items() if length >= (200 if name == "nano" else 60)] == []


def test_the_picture_has_both_colours_and_fetches_nothing() -> None:
    source = (ROOT / "docs" / "assets" / "demo.svg").read_text(encoding="utf-8")
    ET.fromstring(source)
    assert "url(http" not in source
    assert "exact" in source
    assert len(set(re.findall(r"\.forerun-r\d+ \{ fill: (#\w+)", source))) >= 2
