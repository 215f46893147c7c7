"""What the documentation site adds to the pages in docs/: files of the repository that those pages link to.

README, CONTRIBUTING, CHANGELOG, the licence and the examples become pages of the site, and links between the two are
turned so that they hold in both places: in the repository and on the site. mkdocs calls the two `on_` functions.
"""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterable
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
PAGES = {
    "README.md": "overview.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "LICENSE": "license.md",
    "examples": "examples/index.md",
    **{f"examples/{file.name}": f"examples/{file.stem}.md" for file in sorted((ROOT / "examples").glob("*.py"))},
}
_SOURCES = {page: source for source, page in PAGES.items()}
_FENCE = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)
# A list or table right under a paragraph: repositories' viewers show it, Python's Markdown wants an empty line first.
_BLOCK = re.compile(r"^((?![-*|#> ])\S.*\n)(?=- |\| )", re.MULTILINE)
_LINK = re.compile(r"(\]\()([^)\s#]+)(#[^)\s]*)?(\))")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that are not in docs/."""
    for source, page in PAGES.items():
        files.append(File.generated(config, page, content=_page_of(source)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Make a page of the repository one of the site."""
    uri = page.file.src_uri
    return as_on_site(markdown, _SOURCES.get(uri, f"docs/{uri}"), uri)


def as_on_site(markdown: str, source: str, uri: str) -> str:
    """The file `source` of the repository as the page `uri` of the site must have it: links, and empty lines."""

    def turned(link: re.Match[str]) -> str:
        target = link[2]
        if re.match(r"\w+:", target):
            return link[0]
        folder = source if source == "examples" else str(PurePosixPath(source).parent)
        place = os.path.normpath(f"{folder}/{target}")
        page = PAGES.get(place) or (place.removeprefix("docs/") if place.startswith("docs/") else None)
        if page is None:
            return link[0]  # not on the site: the strict build says so
        return f"{link[1]}{os.path.relpath(page, PurePosixPath(uri).parent)}{link[3] or ''}{link[4]}"

    parts = _FENCE.split(markdown)
    return "".join(part if i % 2 else _BLOCK.sub(r"\1\n", _LINK.sub(turned, part)) for i, part in enumerate(parts))


def _page_of(source: str) -> str:
    """The Markdown of a file of the repository."""
    path = ROOT / source
    if path.is_dir():
        return _list_of(sorted(path.glob("*.py")))
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        return f"# {path.name}\n\n`{source}`\n\n```python\n{text}```\n"
    return text if path.suffix == ".md" else f"# {source.capitalize()}\n\n```text\n{text}```\n"


def _list_of(programs: Iterable[Path]) -> str:
    lines = ["# Examples", "", "Each is complete and runs as it is: `python examples/NAME.py`.", ""]
    for program in programs:
        says = (ast.get_docstring(ast.parse(program.read_text(encoding="utf-8"))) or "").splitlines()
        lines.append(f"- [{program.name}]({program.name}): {says[0] if says else ''}")
    return "\n".join(lines) + "\n"
