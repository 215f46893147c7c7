"""What docs/architecture.md names is in the code: classes, their members, functions."""

from __future__ import annotations

import ast
import re

import pytest

from tests.readme.pages import ROOT, prose

PAGE = prose(ROOT / "docs" / "architecture.md")
NOT_OURS = {"fastapi", "matplotlib", "prompt_toolkit"}


def members(found: ast.ClassDef) -> set[str]:
    """Methods, fields, and what any method sets on `self`."""
    names = {node.name for node in found.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    for node in ast.walk(found):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
        if (
            isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store)
            and ast.unparse(node.value) == "self"
        ):
            names.add(node.attr)
    return names


def definitions() -> tuple[dict[str, set[str]], set[str]]:
    """Every class of the package with its members, and every function."""
    classes, functions = dict[str, set[str]](), set[str]()
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                classes.setdefault(node.name, set()).update(members(node))
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                functions.add(node.name)
    return classes, functions


CLASSES, FUNCTIONS = definitions()


@pytest.mark.parametrize(("name", "member"), sorted(set(re.findall(r"`([A-Z]\w+)\.(\w+)[\w.()]*`", PAGE))))
def test_members_that_are_named_exist(name: str, member: str) -> None:
    assert member in CLASSES[name]


def test_classes_and_functions_that_are_named_exist() -> None:
    named = set(
        re.findall(r"`([A-Za-z_]\w*)`", re.sub(r"<!-- made.*?<!-- /made -->", "", PAGE, flags=re.DOTALL))
    )
    fields = set[str]().union(*CLASSES.values())
    packages = {path.parent.name for path in (ROOT / "src" / "forerun").rglob("__init__.py")}
    modules = {path.stem for path in (ROOT / "src" / "forerun").glob("*.py")}
    assert len(named) > 12
    assert named - NOT_OURS - set(CLASSES) - FUNCTIONS - fields - packages - modules == set()


def test_negative_control_what_is_not_there_is_not_found() -> None:
    assert "settle_at_once" not in CLASSES["Scores"]
    assert "form" in CLASSES["TreeBatch"]
    assert "outcome" in CLASSES["Verdict"]
