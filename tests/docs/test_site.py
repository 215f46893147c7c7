"""The site builds without a warning, has no dead link or anchor, fetches nothing, and holds every page and name."""

from __future__ import annotations

import importlib
import inspect
import re

import pytest

import forerun
import forerun.testing
from tests.docs.html_pages import HtmlPage, dead_links, outside_loads, read_page
from tests.readme.pages import ROOT

REFERENCE = ROOT / "docs" / "api"
SEAMS = (
    "forerun.drafters.base.Drafter",
    "forerun.models.base.Target",
    "forerun.verify.base.Verifier",
    "forerun.control.base.Controller",
)


def referenced() -> list[str]:
    """The names that the reference is made of."""
    pages = sorted(REFERENCE.glob("*.md"))
    return [name for page in pages for name in re.findall(r"^::: (\S+)$", page.read_text(), re.MULTILINE)]


def test_every_link_and_anchor_resolves(site: dict[str, HtmlPage]) -> None:
    assert sum(len(page.links) for page in site.values()) > 500
    assert list(dead_links(site)) == []


def test_nothing_is_fetched_from_elsewhere(site: dict[str, HtmlPage]) -> None:
    assert sum(len(page.loads) for page in site.values()) > 50
    assert list(outside_loads(site)) == []


def test_every_page_is_there(site: dict[str, HtmlPage]) -> None:
    written = {page.relative_to(ROOT / "docs").with_suffix(".html").as_posix() for page in ROOT.glob("docs/**/*.md")}
    examples = {f"examples/{path.stem}.html" for path in ROOT.glob("examples/*.py")}
    assert written | examples | {"overview.html", "contributing.html", "changelog.html"} <= set(site)


def test_links_out_of_docs_lead_to_pages_of_the_site(site: dict[str, HtmlPage]) -> None:
    assert "overview.html" in site["index.html"].links
    assert "examples/nano.html" in site["index.html"].links
    assert "contributing.html" in site["overview.html"].links
    assert "how-it-works.html" in site["overview.html"].links


@pytest.mark.parametrize("page", ["index", "seams", "testing"])
def test_names_of_the_reference_are_shown(site: dict[str, HtmlPage], page: str) -> None:
    names = re.findall(r"^::: (\S+)$", (REFERENCE / f"{page}.md").read_text(), re.MULTILINE)
    assert names
    assert [name for name in names if name not in site[f"api/{page}.html"].ids] == []


def test_calls_that_two_classes_share_are_shown_with_both(site: dict[str, HtmlPage]) -> None:
    calls = ("generate", "chat", "stream", "stream_chat", "load", "abort", "close")
    wanted = {f"forerun.{name}.{call}" for name in ("LLM", "AsyncLLM") for call in calls}
    wanted |= {f"forerun.{name}.{each}" for name in ("Stream", "AsyncStream") for each in ("completion", "close")}
    assert wanted - set(site["api/index.html"].ids) == set()


def test_the_reference_has_every_public_name() -> None:
    wanted = {f"forerun.{name}" for name in forerun.__all__}
    wanted |= {f"forerun.testing.{name}" for name in forerun.testing.__all__}
    assert wanted | {*SEAMS} <= set(referenced())
    assert len(set(referenced())) == len(referenced())


@pytest.mark.parametrize("name", referenced())
def test_what_is_referenced_says_what_it_is(name: str) -> None:
    module, _, attribute = name.rpartition(".")
    assert inspect.getdoc(getattr(importlib.import_module(module), attribute))


def test_fields_are_described_by_their_comments(site: dict[str, HtmlPage]) -> None:
    source = (ROOT / "src" / "forerun" / "core" / "params.py").read_text()
    assert "# sequences decoded together" in source
    assert "Sequences decoded together" in site["api/index.html"].text


def test_negative_control_what_is_dead_or_fetched_is_found() -> None:
    text = '<h1 id="top">x</h1><a href="a.html#top">1</a><a href="a.html#no">2</a><a href="b.html">3</a>'
    text += '<a href="#no">4</a><a href="https://example.org/no">5</a><script src="https://example.org/x.js"></script>'
    text += '<link rel="stylesheet" href="no.css"><img src="//example.org/p.png">'
    found = {"a.html": read_page(text)}
    assert list(dead_links(found)) == [f"a.html: {link}" for link in ("#no", "a.html#no", "b.html", "no.css")]
    assert list(outside_loads(found)) == ["a.html: //example.org/p.png", "a.html: https://example.org/x.js"]
