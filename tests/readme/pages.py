"""The documentation as data: which pages there are, their fenced blocks, their links."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
GUIDES = [
    README,
    *(ROOT / "docs" / f"{name}.md" for name in ("index", "install", "supported", "architecture")),
    *(ROOT / "docs" / f"{name}.md" for name in ("how-it-works", "exactness", "write-a-drafter", "glossary")),
    ROOT / "docs" / "threads-and-failures.md",
]
ALL = sorted({*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")})
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(page: Path, language: str) -> list[str]:
    """The fenced blocks of one language, in order."""
    found = _FENCE.findall(page.read_text(encoding="utf-8"))
    return [body for tongue, body in found if tongue == language]


def prose(page: Path) -> str:
    """A page without its fenced blocks."""
    return _FENCE.sub("", page.read_text(encoding="utf-8"))


def links(page: Path) -> list[str]:
    """Where its links and pictures point."""
    return _LINK.findall(prose(page))


def needs_model(program: str) -> bool:
    return "LLM.load(" in program


def run_blocks(page: Path) -> ModuleType:
    """Run a page's Python blocks one after the other, as one module that can be imported by name."""
    module = ModuleType(f"page_{page.stem.replace('-', '_').lower()}")
    sys.modules[module.__name__] = module
    for number, block in enumerate(blocks(page, "python"), start=1):
        exec(compile(block, f"{name_of(page)}, block {number}", "exec"), module.__dict__)
    return module
