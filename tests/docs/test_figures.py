"""Every figure of the documentation comes from a result document in benchmarks/, and pages and documents agree."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from copy import deepcopy
from datetime import date
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from tests.readme.pages import ROOT, name_of
from tools.docs_figures import documents, load_table, number
from tools.docs_pages import pages
from tools.docs_plots import batches, drafters, plots

FIELDS = ["question", "command", "commit", "date", "machine", "conditions", "raw_samples", "tables"]
README, BENCHMARKS = ROOT / "README.md", ROOT / "docs" / "benchmarks.md"
# decisions name the notes that they were made from; a changelog tells of its day
PAGES = [page for page in (README, *sorted(ROOT.glob("docs/**/*.md"))) if page.parent.name != "decisions"]
MADE = re.compile(r"<!-- made: (\S+)(?: \S+)? -->.*?<!-- /made -->", re.DOTALL)
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
FIGURE = re.compile(r"(?<![\w.])(\d[\d,]*(?:\.\d+)?)(?:x\b| tokens/s\b| tokens per round\b)")


def numbers(value: Any) -> Iterator[float]:
    """Every number of a document, in tables and in what it says of its conditions."""
    if isinstance(value, bool) or value is None:
        return
    if isinstance(value, int | float):
        yield float(value)
    elif isinstance(value, str):
        yield from (float(found.replace(",", "")) for found in re.findall(r"\d[\d,]*(?:\.\d+)?", value))
    else:
        for part in value.values() if isinstance(value, Mapping) else value:
            yield from numbers(part)


def named(text: str) -> set[str]:
    """The documents that a page takes tables from, or names."""
    tables = {name.partition("/")[0] for name in re.findall(r"<!-- made: (\S+/\S+)", text)}
    return tables | set(re.findall(r"benchmarks/([\w.-]+)\.json", text))


def without_a_source(text: str, known: Mapping[str, Any]) -> list[str]:
    """Ratios, rates and tokens per round of a page's prose that no document named on the page has."""
    measured = [value for name in named(text) for value in numbers(known[name])]
    found = []
    for figure in FIGURE.findall(FENCE.sub("", MADE.sub("", text))):
        digits = len(figure.partition(".")[2])
        as_told = {number(value, f",.{digits}f") for value in measured}
        if figure not in as_told and figure not in {value.replace(",", "") for value in as_told}:
            found.append(figure)
    return found


@pytest.mark.parametrize("name", documents())
def test_a_document_says_how_it_was_measured(name: str) -> None:
    found = json.loads((ROOT / "benchmarks" / f"{name}.json").read_text(encoding="utf-8"))
    assert list(found) == FIELDS
    assert all(found[field] for field in FIELDS)
    assert re.fullmatch(r"[0-9a-f]{7}", found["commit"])
    assert date.fromisoformat(found["date"])
    for part in found["tables"].values():
        assert part["rows"]
        assert all(set(row) <= set(part["columns"]) for row in part["rows"])


def test_every_document_is_used_and_every_document_that_is_named_exists() -> None:
    used = set[str]().union(*(named(page.read_text(encoding="utf-8")) for page in PAGES))
    assert used == set(documents())


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_figures_in_prose_are_those_of_a_document(page: Path) -> None:
    assert without_a_source(page.read_text(encoding="utf-8"), documents()) == []


@pytest.mark.parametrize("path", plots(), ids=lambda path: path.name)
def test_a_plot_is_what_its_document_says(path: Path) -> None:
    drawn = path.read_text(encoding="utf-8")
    assert drawn == plots()[path], "run: make docs"
    ElementTree.fromstring(drawn)


def test_negative_control_a_changed_document_changes_the_pages_and_the_plots() -> None:
    """tests/docs/test_made.py compares pages with what the documents render: both sides must move together."""
    changed: Any = deepcopy(dict(documents()))
    changed["h200-batches-8b"]["tables"]["batches"]["rows"][1]["gain"][0] = 1.99
    changed["h200-batches-8b"]["tables"]["batches"]["rows"][1]["vllm_head"] = 1
    rendered = pages(changed)
    assert {README, BENCHMARKS} <= {path for path, text in rendered.items() if text != path.read_text("utf-8")}
    assert batches(changed) != batches()
    changed["h200-spec-bench-default"]["tables"]["t0"]["rows"][0]["all"][0] = 9.99
    assert drafters(changed) != drafters()


def test_negative_control_the_newer_run_of_the_batch_sizes_is_on_the_page() -> None:
    changed: Any = deepcopy(dict(documents()))
    changed["h200-mixtures-8b"]["tables"]["mixtures"]["rows"][-1]["default"] = 9.99
    assert load_table(changed) != load_table()
    assert "9.99x" in pages(changed)[BENCHMARKS]


def test_negative_control_a_figure_without_a_document_is_found() -> None:
    known = {"run": {"tables": [{"x": [1.5, 1.25, 1.7], "rate": 1234}], "conditions": "at 2.5x"}}
    page = "1.5x and 1.50x, 1,234 tokens/s of 1234 tokens/s, 2.5x; `benchmarks/run.json`\n```\n9.9x\n```\n"
    assert without_a_source(page, known) == []
    assert without_a_source(page + "<!-- made: a -->\n7.7x\n<!-- /made -->\n", known) == []
    assert without_a_source(page + "1.51x, 4 tokens per round", known) == ["1.51", "4"]
    assert without_a_source("1.5x", known) == ["1.5"], "the page names no document"


def test_the_pages_of_figures_are_short() -> None:
    assert len(BENCHMARKS.read_text(encoding="utf-8").splitlines()) <= 150
    text = README.read_text(encoding="utf-8")
    table = text.partition("<!-- made: gains -->")[2].partition("<!-- /made -->")[0]
    assert 3 <= len([line for line in table.splitlines() if line.startswith("|")]) - 2 <= 8
    assert len(re.findall(r"!\[[^]]*\]\(docs/assets/batches\.svg\)", text)) == 1


def test_decisions_are_few_and_short() -> None:
    records = sorted(ROOT.glob("docs/decisions/[0-9]*.md"))
    assert 1 <= len(records) <= 15
    for record in records:
        text = record.read_text(encoding="utf-8")
        assert len(text.splitlines()) <= 20, record.name
        parts = ("**Question.**", "**Measured.**", "**Decision.**", "**What would reopen it.**")
        assert all(part in text for part in parts), record.name
