"""The rules of CONTRIBUTING.md that no linter has (lengths, names, layers), and that the page says what is checked."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import tomllib
from collections import Counter
from collections.abc import Collection
from pathlib import Path

import pytest

from tests.conftest import LONGEST
from tests.readme.pages import ROOT

MOST_LINES, MOST_LINES_OF_A_FUNCTION, MOST_FILES = 600, 60, 15
MOST_LINES_OF_THE_LAB = 6_000
MOST_FILES_OF_THE_PACKAGE = 330
NO_NAMES = {"utils", "helpers", "common", "misc"}
PACKAGE = ROOT / "src" / "forerun"
LAB = ROOT / "lab"
MODULES = sorted([*PACKAGE.rglob("*.py"), *LAB.rglob("*.py")])
# Folders that have more files than the rule allows, and how many: numbers and folders may only leave this list.
CROWDED: dict[str, int] = {}
RULES = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]


def long_functions(source: str) -> list[str]:
    if source.count("\n") <= MOST_LINES_OF_A_FUNCTION:
        return []
    found = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    return [node.name for node in found if _lines(node) > MOST_LINES_OF_A_FUNCTION]


def _lines(node: ast.AST) -> int:
    """Of a function, without the classes that are made in it: their methods are functions too."""
    inner = [each for each in ast.iter_child_nodes(node) if isinstance(each, ast.ClassDef)]
    own = (node.end_lineno or 0) - node.lineno + 1  # type: ignore[attr-defined]
    return own - sum((each.end_lineno or 0) - each.lineno + 1 for each in inner)


def test_files_are_short() -> None:
    lengths = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in MODULES}
    assert {name: length for name, length in lengths.items() if length > MOST_LINES} == {}


def test_folders_have_few_files() -> None:
    sources = [path for top in (PACKAGE, LAB) for path in top.rglob("*") if path.suffix in (".py", ".c", ".h")]
    counts = Counter(str(path.parent.relative_to(ROOT)) for path in sources)
    found = {folder: count for folder, count in counts.items() if count > MOST_FILES}
    assert {folder: count for folder, count in found.items() if count > CROWDED.get(folder, 0)} == {}
    assert [folder for folder in CROWDED if folder not in found] == [], "few enough now: take it off the list"


def test_the_package_has_few_files() -> None:
    """A file is a concept: a new one that is half of another belongs into that."""
    assert len(list(PACKAGE.rglob("*.py"))) <= MOST_FILES_OF_THE_PACKAGE


def test_the_lab_stays_small() -> None:
    assert sum(len(path.read_text().splitlines()) for path in LAB.rglob("*.py")) <= MOST_LINES_OF_THE_LAB
    assert len((LAB / "notes.md").read_text().splitlines()) <= 300


def test_functions_are_short() -> None:
    found = {str(path.relative_to(ROOT)): long_functions(path.read_text()) for path in MODULES}
    assert {name: functions for name, functions in found.items() if functions} == {}


def test_negative_control_a_long_function_is_found() -> None:
    body = "    pass\n" * (MOST_LINES_OF_A_FUNCTION - 1)
    assert long_functions(f"def short():\n{body}") == []
    assert long_functions(f"class A:\n  async def long(self):\n{body}    pass\n") == ["long"]


def test_no_module_has_a_name_that_says_nothing() -> None:
    assert [str(path) for path in MODULES if path.stem in NO_NAMES] == []


def test_rounds_drafts_and_passes_are_timed_by_the_clock_of_the_target() -> None:
    """`Abilities.clock`: a simulated device counts its own seconds, and nothing beside it reads another clock."""
    reads = re.compile(r"\b(perf_counter|monotonic|process_time|time\.time)\b")
    rooms = [path for room in ("engine", "control", "drafters") for path in (PACKAGE / room).rglob("*.py")]
    assert [str(path.relative_to(ROOT)) for path in rooms if reads.search(path.read_text())] == []
    assert reads.search((PACKAGE / "core" / "clock.py").read_text())


ASKS_DEVICE = re.compile(r"\.device\.type\b|\bdevice\.type\b|\.is_(cuda|cpu)\b")


def test_the_engine_asks_no_device_what_it_is() -> None:
    """The target states what it can do (`Abilities`)."""
    assert [path.name for path in (PACKAGE / "engine").rglob("*.py") if ASKS_DEVICE.search(path.read_text())] == []
    assert ASKS_DEVICE.search("return scores.logits.device.type != 'cpu'")
    assert ASKS_DEVICE.search((PACKAGE / "models" / "base.py").read_text())


def import_cycles(top: Path) -> list[list[str]]:
    """Modules of a package that import each other in a circle when they are loaded, or for their types alone.

    Imports inside functions are left out, and so is a package whose module is imported: only what a line names counts.
    """
    files = {_module_of(path, top): path for path in top.rglob("*.py")}
    graph = {name: _imports_of(path, name, files) for name, path in files.items()}
    reached = {name: _reached_from(name, graph) for name in graph}
    circles = {tuple(sorted(other for other in reached[name] if name in reached[other])) for name in graph}
    return sorted(list(circle) for circle in circles if circle)


def _module_of(path: Path, top: Path) -> str:
    return ".".join(path.relative_to(top.parent).with_suffix("").parts).removesuffix(".__init__")


def _imports_of(path: Path, name: str, known: Collection[str]) -> set[str]:
    """The modules of the package that its module-level lines import, those behind `if TYPE_CHECKING` too."""
    found: set[str] = set()
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    waiting: list[ast.AST] = [ast.parse(path.read_text(encoding="utf-8"))]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) + 1 - node.level] if node.level else []
            where = ".".join([*above, *([node.module] if node.module else [])])
            inside = {alias.name: f"{where}.{alias.name}" for alias in node.names}
            found |= {full if full in known else where for full in inside.values()}
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            waiting += ast.iter_child_nodes(node)
    return found & set(known)


def _reached_from(name: str, graph: dict[str, set[str]]) -> set[str]:
    """Every module that is imported behind this one; itself only where a circle leads back to it."""
    reached, waiting = set[str](), [*graph[name]]
    while waiting:
        if (one := waiting.pop()) not in reached:
            reached.add(one)
            waiting += graph[one]
    return reached


def test_no_modules_import_each_other_in_a_circle() -> None:
    assert import_cycles(PACKAGE) == []


def test_negative_control_circles_of_imports_are_found(tmp_path: Path) -> None:
    files = {
        "__init__": "",
        "a": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from top.b import B\n",
        "b": "from top import c\n",
        "c": "try:\n    from .a import A\nexcept ImportError:\n    pass\n",
        "d": "import top.e\n",
        "e": "def late():\n    from top.d import D\n",
        "f": "import top.a\n",
    }
    (tmp_path / "top").mkdir()
    for name, source in files.items():
        (tmp_path / "top" / f"{name}.py").write_text(source)
    assert import_cycles(tmp_path / "top") == [["top.a", "top.b", "top.c"]]
    (tmp_path / "top" / "e.py").write_text("import top.d\n")
    assert import_cycles(tmp_path / "top") == [["top.a", "top.b", "top.c"], ["top.d", "top.e"]]


def test_every_module_of_the_package_has_a_layer() -> None:
    layers = next(c["layers"] for c in PROJECT["importlinter"]["contracts"] if c["type"] == "layers")
    named = {module for layer in layers for module in layer.split(" | ")}
    real = {f"forerun.{path.stem}" for path in PACKAGE.glob("*.py") if path.stem != "__init__"}
    real |= {f"forerun.{path.parent.name}" for path in PACKAGE.glob("*/__init__.py")}
    # a folder may have its files in several layers
    inside = {".".join(module.split(".")[:2]) for module in named}
    assert real - inside == set()


@pytest.mark.parametrize(
    ("words", "number"),
    [
        ("at most {} lines", MOST_LINES),
        ("functions at most {}", MOST_LINES_OF_A_FUNCTION),
        ("folders at most {} files", MOST_FILES),
    ],
)
def test_the_page_has_the_limits_that_are_checked(words: str, number: int) -> None:
    assert words.format(number) in RULES


def test_rules_of_ruff_that_the_page_names_are_switched_on() -> None:
    table = RULES.partition("## Rules that are checked")[2].partition("## ")[0]
    rows = [line.rsplit("|", 2)[1] for line in table.splitlines() if "ruff" in line]
    named = [code for row in rows for code in re.findall(r"`([A-Z]+\d*)`", row)]
    chosen = PROJECT["ruff"]["lint"]["select"]
    assert len(named) >= 8
    assert [code for code in named if not any(code.startswith(rule) for rule in chosen)] == []
    assert f"at most {PROJECT['ruff']['line-length']} characters" in table


def test_the_linters_that_the_page_names_run() -> None:
    makefile = (ROOT / "Makefile").read_text()
    recipe = makefile.partition("\nlint:")[2].partition("\n\n")[0]
    for command in ("ruff format --check", "ruff check", "mypy", "lint-imports"):
        assert command in recipe
    assert PROJECT["mypy"]["strict"] is True


def test_every_folder_of_tests_that_the_page_names_is_collected() -> None:
    named = re.findall(r"`(tests/[\w/]+?)(?:\.py)?`", RULES)
    assert len(named) >= 8
    for name in named:
        path = Path(ROOT / name)
        assert list(path.glob("test_*.py")) or path.with_suffix(".py").is_file(), name


def test_the_files_that_run_first_are_there() -> None:
    """A file that was renamed would fall back into the middle, and the tests would take longer."""
    assert [name for name in LONGEST if not (ROOT / "tests" / name).is_file()] == []
    assert "--no-loadscope-reorder" in (ROOT / "Makefile").read_text()


def test_make_lets_python_keep_its_bytecode() -> None:
    """pip compiles nothing: where a shell forbids it, every process of the tests would compile torch anew."""
    if shutil.which("make") is None:
        pytest.skip("no make")
    ask = ["make", "--silent", "--eval", "ask: ; @echo kept=$$PYTHONDONTWRITEBYTECODE=", "ask"]
    shell = os.environ | {"PYTHONDONTWRITEBYTECODE": "1"}
    said = subprocess.run(ask, cwd=ROOT, env=shell, capture_output=True, text=True, check=True).stdout
    assert said.strip() == "kept=="


def test_every_test_of_a_card_is_in_a_group() -> None:
    script = (ROOT / "tests" / "gpu" / "check.sh").read_text()
    marked = [
        path
        for path in (ROOT / "tests" / "gpu").glob("test_*.py")
        if "mark.gpu" in path.read_text() or "DEVICES" in path.read_text()
    ]
    assert [path.name for path in marked if f"tests/gpu/{path.name}" not in script] == []
    assert "pytest -q --all " in script, "the fast tier leaves out most tests of a card"
