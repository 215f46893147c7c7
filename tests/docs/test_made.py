"""Generated parts of pages are what the code and the result documents say today, and what generates them is right."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from forerun.models.load.quants import LAYOUTS
from forerun.models.native import library, packing
from tests.readme.pages import ROOT, name_of
from tools.docs_pages import BLOCKS, FIGURES, first_line, pages
from tools.docs_supported import kernel_types

pytest.importorskip("gguf")  # which types can be read depends on it
MADE = pages()


@pytest.mark.parametrize("page", MADE, ids=name_of)
def test_a_page_is_what_the_code_says(page: Path) -> None:
    assert page.read_text(encoding="utf-8") == MADE[page], "run: make docs"


def test_every_part_is_on_a_page_once() -> None:
    marks = [name for text in MADE.values() for name in re.findall(r"<!-- made: (\S+)", text)]
    assert sorted(name for name in marks if name in BLOCKS) == sorted(BLOCKS)
    assert set(FIGURES) == {name for name in marks if name not in BLOCKS and "/" not in name}
    ends = sum(text.count("<!-- /made -->") for text in MADE.values())
    assert ends == len(marks)


def test_the_layers_of_the_page_are_the_linters() -> None:
    """Read from the page by a rule of its own, against the contracts themselves."""
    page = (ROOT / "docs" / "architecture.md").read_text()
    shown: list[str] = []
    for number, module in re.findall(r"^\| (\d*) ?\| `([\w.]+)` \|", page, re.MULTILINE):
        if number:
            assert int(number) == len(shown) + 1
            shown.append(f"forerun.{module}")
        else:
            shown[-1] += f" | forerun.{module}"
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    assert shown == next(contract["layers"] for contract in contracts if contract["type"] == "layers")
    assert [contract["name"] for contract in contracts if f"- {contract['name']}." not in page] == [
        "Imports point down only"
    ]


def test_first_lines_are_those_of_the_modules() -> None:
    assert first_line("forerun.core.errors") == "The errors that Forerun raises for its users, as one class tree."


@pytest.mark.skipif(not library.available(), reason="the C library is not built")
def test_types_that_the_kernels_read_are_those_that_the_library_reads() -> None:
    said = kernel_types() | {"F16"}  # packing takes it, as float32
    assert said == {layout.name for kind, layout in LAYOUTS.items() if packing.is_packable(kind)}


def test_the_paths_of_this_machine_are_on_the_page() -> None:
    page = (ROOT / "docs" / "supported.md").read_text()
    here = ", ".join(f"`{path}`" for path in library.paths())
    assert f"| {here} |" in page or not library.available()
