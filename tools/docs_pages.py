"""Writes the generated parts of the documentation: `python -m tools.docs_pages`, or `make docs`.

In README.md and docs/, the text between `<!-- made: NAME -->` and `<!-- /made -->` is the answer of the function NAME
of `BLOCKS`, made from the code, or of `FIGURES`, made from the result documents in benchmarks/.
`<!-- made: DOCUMENT/TABLE -->` is a table of a result document, `<!-- made: DOCUMENT/TABLE a,b -->` two of its columns.
Tests compare the pages and plots with what this command would write.
"""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tools import docs_figures as measured
from tools import docs_models as models
from tools import docs_supported as supported
from tools.docs_plots import plots

ROOT = Path(__file__).parents[1]
_BLOCK = re.compile(r"(<!-- made: (\S+)(?: (\S+))? -->\n)(?:(?!<!-- made).)*?(<!-- /made -->)", re.DOTALL)


def pages(known: measured.Documents | None = None) -> dict[Path, str]:
    """Every page with generated parts, as it should be; `known` stands in for the documents in benchmarks/."""

    def made(block: re.Match[str]) -> str:
        opening, name, keys, closing = block.groups()
        if "/" in name:
            text = measured.figures(name, keys or "", known)
        elif name in FIGURES:
            text = FIGURES[name](known)
        else:
            text = BLOCKS[name]()
        return f"{opening}\n{text}\n\n{closing}"

    found = {}
    for path in sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]):
        text = path.read_text(encoding="utf-8")
        if _BLOCK.search(text):
            found[path] = _BLOCK.sub(made, text)
    return found


def contracts() -> list[dict[str, Any]]:
    """Who may import whom, as import-linter reads it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    found: list[dict[str, Any]] = project["tool"]["importlinter"]["contracts"]
    return found


def layers() -> list[list[str]]:
    """The layers from the top down; modules of one layer do not import each other."""
    listed = contracts()[0]["layers"]
    return [layer.split(" | ") for layer in listed]


def layer_table() -> str:
    """The layers with what is in each module, and the other contracts by name."""
    rows = [
        (str(i) if module == layer[0] else "", f"`{module.removeprefix('forerun.')}`", first_line(module))
        for i, layer in enumerate(layers(), start=1)
        for module in layer
    ]
    others = [f"- {contract['name']}." for contract in contracts()[1:]]
    return "\n".join([supported.table(("layer", "module", "what is in it"), rows), "", "And:", "", *others])


def first_line(module: str) -> str:
    """What a module's docstring says first."""
    path = ROOT.joinpath("src", *module.split("."))
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return text.split("\n\n")[0].replace("\n", " ").replace("|", "\\|")


BLOCKS: dict[str, Callable[[], str]] = {
    "layers": layer_table,
    "families": supported.families,
    "gguf_types": supported.gguf_types,
    "quantised_files": supported.quantised_files,
    "number_formats": supported.number_formats,
    "wheels": supported.wheels,
    "processors": supported.processors,
    "drafters": supported.drafters,
    "verifiers": supported.verifiers,
    "models": supported.models,
    "heads": supported.heads,
    "model_matrix": models.model_matrix,
    "file_formats": models.file_formats,
}


FIGURES: dict[str, Callable[[measured.Documents | None], str]] = {
    "gains": measured.gain_table,
    "laptop": measured.laptop,
    "batch_line": measured.batch_line,
    "load": measured.load_table,
    "methods": measured.method_table,
    "race": measured.race,
}


def main() -> None:
    for path, text in {**pages(), **plots()}.items():
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
            print(f"wrote {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
