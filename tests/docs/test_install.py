"""The install page is complete: every environment variable that the code reads, every extra, the version."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator

import forerun
from tests.readme.pages import ROOT

PAGE = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")
OURS, _, BENEATH = PAGE.partition("## Environment variables")[2].partition("Libraries underneath")


def variables(table: str) -> set[str]:
    """What the first column of a table names."""
    cells = re.findall(r"^\| (`[^|]+) \|", table, re.MULTILINE)
    return {name for cell in cells for name in re.findall(r"`(\w+)`", cell)}


def read_variables(source: str) -> Iterator[str]:
    """What a module asks of its environment: os.environ[...], .get(...), `in`, and os.getenv(...)."""
    if not re.search("environ|getenv|envvar", source):
        return
    for node in ast.walk(ast.parse(source)):
        key: ast.expr | None = None
        if isinstance(node, ast.Subscript) and ast.unparse(node.value).endswith("environ"):
            key = node.slice
        elif isinstance(node, ast.Call) and re.search(r"environ\.\w+$|getenv$", ast.unparse(node.func)):
            key = next(iter(node.args), None)
        elif isinstance(node, ast.Compare) and ast.unparse(node.comparators[0]).endswith("environ"):
            key = node.left
        elif isinstance(node, ast.keyword) and node.arg == "envvar":  # typer's
            key = node.value
        if key is not None:
            assert isinstance(key, ast.Constant), f"a variable without a name: {ast.unparse(node)}"
            yield str(key.value)


def test_every_variable_that_is_read_is_on_the_page_and_no_other() -> None:
    modules = [*ROOT.glob("src/**/*.py"), ROOT / "setup.py"]
    found = {name for module in modules for name in read_variables(module.read_text(encoding="utf-8"))}
    native = [*ROOT.glob("src/**/*.c"), *ROOT.glob("src/**/*.h")]
    found |= {name for file in native for name in re.findall(r'getenv\("(\w+)"\)', file.read_text())}
    assert {"FORERUN_CACHE", "FORERUN_NATIVE", "FORERUN_ISA"} <= found
    assert variables(OURS) == found
    assert variables(BENEATH)
    assert variables(BENEATH).isdisjoint(found)


def test_negative_control_every_way_of_reading_is_found() -> None:
    source = 'import os\nos.environ["A"]; os.environ.get("B", ""); os.getenv("C"); "D" in os.environ\n'
    source += 'from os import environ, getenv\nenviron.pop("E"); getenv("F"); Option(envvar="G"); environ_of("H")\n'
    assert sorted(read_variables(source)) == list("ABCDEFG")


def test_extras_are_those_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = PAGE.partition("## Extras")[2].partition("## ")[0]
    assert variables(extras) == set(project["optional-dependencies"])
    for extra, added in re.findall(r"^\| `(\w+)` \| ([^|]+) \|", extras, re.MULTILINE):
        required = [re.split(r"[\[>=]", name)[0] for name in project["optional-dependencies"][extra]]
        assert extra == "dev" or added.split(", ") == required, extra
    assert f"forerun-{forerun.__version__}-" in PAGE
    assert f"Python {project['requires-python'].removeprefix('>=')} or later" in PAGE


def test_the_cache_is_where_the_page_says() -> None:
    from forerun.models.load.catalog import cache_folder

    said = " ".join((cache_folder.__doc__ or "").split())
    assert "FORERUN_CACHE, else XDG_CACHE_HOME/forerun, else ~/.cache/forerun" in said
    assert "`FORERUN_CACHE`, else `forerun` in `XDG_CACHE_HOME`, else `~/.cache/forerun`" in PAGE
