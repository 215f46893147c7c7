"""A built site as data: which ids its pages have, where their links point, what they load. Knows nothing of mkdocs."""

from __future__ import annotations

import posixpath
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit


@dataclass
class HtmlPage:
    """What a test asks of one page."""

    text: str
    ids: set[str] = field(default_factory=set)
    links: set[str] = field(default_factory=set)  # what a reader can follow
    loads: set[str] = field(default_factory=set)  # what a browser fetches unasked


class _Reader(HTMLParser):
    def __init__(self, page: HtmlPage) -> None:
        super().__init__()
        self.page = page

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.page.ids |= {given[name] for name in ("id", "name") if name in given}
        if tag == "a" and "href" in given:
            self.page.links.add(given["href"])
        elif tag == "link" and given.get("rel") not in ("canonical", "next", "prev", "alternate"):
            self.page.loads.add(given.get("href", ""))
        elif tag in ("script", "img", "iframe", "source") and "src" in given:
            self.page.loads.add(given["src"])


def read_page(text: str) -> HtmlPage:
    page = HtmlPage(text)
    _Reader(page).feed(text)
    return page


def read_site(folder: Path) -> dict[str, HtmlPage]:
    """Every page by its address; other files are pages without content."""
    return {
        file.relative_to(folder).as_posix(): read_page(file.read_text()) if file.suffix == ".html" else HtmlPage("")
        for file in sorted(folder.rglob("*"))
        if file.is_file() and file.name != "404.html"  # the server's own page has absolute addresses
    }


def dead_links(site: Mapping[str, HtmlPage]) -> Iterator[str]:
    """What points to a page, a file or a place of a page that is not there; other sites are not asked."""
    for address, page in site.items():
        for link in sorted(page.links | page.loads):
            parts = urlsplit(link)
            if parts.scheme or parts.netloc or link in ("", "#"):
                continue
            place = posixpath.normpath(posixpath.join(posixpath.dirname(address), unquote(parts.path)))
            target = site.get(place if parts.path else address)
            if target is None or (parts.fragment and unquote(parts.fragment) not in target.ids):
                yield f"{address}: {link}"


def outside_loads(site: Mapping[str, HtmlPage]) -> Iterator[str]:
    """What a browser would fetch from other hosts."""
    for address, page in site.items():
        for load in sorted(page.loads):
            if urlsplit(load).netloc:
                yield f"{address}: {load}"
