"""What pages say of the code is so: classes, members and functions that they name; budgets, prices and offers."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from dataclasses import fields
from functools import cache

import pytest

from forerun.core.types import Budget
from tests.readme.pages import ALL, ROOT, prose
from tools.request_files import files_of

PAGE = prose(ROOT / "docs" / "architecture.md")
MOST_OF_A_REQUEST = 30
NOT_OURS = {"fastapi", "matplotlib", "prompt_toolkit"}


def members(found: ast.ClassDef) -> set[str]:
    """Methods, fields, and what any method sets on `self`."""
    names = {node.name for node in found.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    for node in ast.walk(found):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
            names.add(node.attr)
    return names


@cache  # when a test asks: both workers import this file, one of them runs its tests
def definitions() -> tuple[dict[str, set[str]], set[str]]:
    """Every class of the package with its members, those of its bases too, and every function."""
    classes, functions, bases = dict[str, set[str]](), set[str](), dict[str, list[str]]()
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                classes.setdefault(node.name, set()).update(members(node))
                bases.setdefault(node.name, []).extend(ast.unparse(base).partition("[")[0] for base in node.bases)
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                functions.add(node.name)
    for name, above in bases.items():
        classes[name] |= set[str]().union(*(classes.get(base, set()) for base in above))
    return classes, functions


@pytest.mark.parametrize(
    ("name", "member"),
    sorted({found for page in ALL for found in re.findall(r"`([A-Z]\w+)\.(\w+)[\w.()]*`", prose(page))}),
)
def test_members_that_are_named_exist(name: str, member: str) -> None:
    classes, _ = definitions()
    assert member in classes[name]


def test_classes_and_functions_that_are_named_exist() -> None:
    written = re.sub(r"<!-- (made|files):.*?<!-- /\1 -->", "", PAGE, flags=re.DOTALL)  # the rest is generated
    named = set(re.findall(r"`([A-Za-z_]\w*)`", written))
    classes, functions = definitions()
    fields = set[str]().union(*classes.values())
    packages = {path.parent.name for path in (ROOT / "src" / "forerun").rglob("__init__.py")}
    modules = {path.stem for path in (ROOT / "src" / "forerun").glob("*.py")}
    assert len(named) > 12
    assert named - NOT_OURS - set(classes) - functions - fields - packages - modules == set()


def test_negative_control_what_is_not_there_is_not_found() -> None:
    classes, _ = definitions()
    assert "settle_at_once" not in classes["Scores"]
    assert "form" in classes["TreeBatch"]
    assert "outcome" in classes["Verdict"]


def test_a_budget_is_explained_field_by_field() -> None:
    said = (
        prose(ROOT / "docs" / "how-it-works.md")
        .partition("gives every sequence a `Budget`")[2]
        .partition("\nPrices")[0]
    )
    assert [field.name for field in fields(Budget) if f"`{field.name}`" not in said] == []


def test_prices_are_in_tokens_in_the_code_and_in_the_glossary() -> None:
    glossary = (ROOT / "docs" / "glossary.md").read_text()
    assert "`price` and `level` are in tokens" in (Budget.__doc__ or "")
    assert re.search(r"^\| \*\*price\*\* \|.* in tokens", glossary, re.MULTILINE)


def test_the_protocols_that_the_engine_knows_are_those_it_imports() -> None:
    """The page names the files, as many as it says; import-linter allows the engine these and no others."""
    count, named = re.findall(r"The engine knows (\w+) protocols only: (.*)", PAGE)[0]
    files = re.findall(r"`src/(forerun/\S+)\.py`", named)
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    allowed = next(one["ignore_imports"] for one in contracts if one["name"] == "The engine knows the protocols only")
    assert sorted(files) == sorted(line.rpartition(" ")[2].replace(".", "/") for line in allowed)
    assert count == ["no", "one", "two", "three", "four", "five", "six"][len(files)]


@pytest.mark.slow
def test_the_files_of_a_cpu_request_are_few_and_those_listed() -> None:
    """Traced in a process of its own: what other tests have cached would not be called again."""
    program = "from tools.request_files import cpu_request, listed; print(listed(cpu_request()))"
    ended = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    traced = re.findall(r"^\d+\. `(\S+)`", ended.stdout, re.MULTILINE)
    block = PAGE.partition("<!-- files: cpu -->")[2].partition("<!-- /files -->")[0]
    assert sorted(re.findall(r"^\d+\. `(\S+)`", block, re.MULTILINE)) == sorted(traced)
    assert len(traced) <= MOST_OF_A_REQUEST
    assert f"`Completion` (goal: at most {MOST_OF_A_REQUEST} files)" in PAGE


def test_the_files_of_a_request_are_listed_once_each() -> None:
    """`python -m tools.request_files` traces and writes them; other tests see that the files exist."""
    for name in ("cpu", "gpu"):
        block = PAGE.partition(f"<!-- files: {name} -->")[2].partition("<!-- /files -->")[0]
        files = re.findall(r"^\d+\. `(src/forerun/\S+\.py)`: \S", block, re.MULTILINE)
        assert len(set(files)) == len(files) > 10
        assert "src/forerun/engine/engine.py" in files


def test_a_traced_file_is_one_whose_function_is_called() -> None:
    from forerun.core.request import derived_seed

    assert [path.name for path in files_of(lambda: derived_seed(1, 2))] == ["request.py"]
    assert files_of(lambda: None) == []
