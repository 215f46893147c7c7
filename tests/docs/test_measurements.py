"""The pages of figures hold together: the summary repeats what stands below it, and sections lead to earlier runs."""

from __future__ import annotations

import re

from tests.readme.pages import ROOT

NEWEST = ROOT / "docs" / "benchmarks.md"
EARLIER = ROOT / "docs" / "benchmarks-history.md"
SUMMARY = "In short"


def sections(text: str) -> dict[str, str]:
    """What stands under each heading, up to the next one."""
    parts = re.split(r"^##+ (.+)$", text, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def figures(text: str) -> set[str]:
    """Its figures and commits: numbers with a point or a comma, and seven hexadecimal digits."""
    commits = {word for word in re.findall(r"\b[0-9a-f]{7}\b", text) if re.search(r"\d", word)}
    return commits | set(re.findall(r"(?<![\w.])\d+[.,]\d+", text))


def not_repeated(text: str) -> set[str]:
    """Figures of the summary that no section below it has."""
    found = sections(text)
    below = figures("\n".join(body for heading, body in found.items() if heading != SUMMARY))
    return figures(found[SUMMARY]) - below


def without_a_link(newest: str, earlier: str) -> set[str]:
    """Headings of earlier runs that the newest ones do not have, or whose section does not link to them."""
    today = sections(newest)
    return {name for name in sections(earlier) if f"({EARLIER.name}#" not in today.get(name, "")}


def test_the_summary_repeats_what_stands_below_it() -> None:
    text = NEWEST.read_text(encoding="utf-8")
    assert len(figures(sections(text)[SUMMARY])) > 40
    assert not_repeated(text) == set()


def test_every_section_leads_to_its_earlier_runs() -> None:
    earlier = EARLIER.read_text(encoding="utf-8")
    assert len(sections(earlier)) > 10
    assert without_a_link(NEWEST.read_text(encoding="utf-8"), earlier) == set()


def test_negative_control_a_stale_summary_and_a_lost_section_are_found() -> None:
    page = f"# P\n\n## {SUMMARY}\n| a | 1.03x, 2,880 texts | 0b11229 |\n\n## A\n1.04x of 2,880 at 0b11229\n\n## B\n"
    assert not_repeated(page) == {"1.03"}
    assert not_repeated(page.replace("1.04x", "1.03x").replace("at 0b11229", "")) == {"0b11229"}
    assert without_a_link(page, "## A\n\n## C\n") == {"A", "C"}
    assert without_a_link(page.replace("## A\n", f"## A\n[old]({EARLIER.name}#a) "), "## A\n") == set()
