"""Writes the parts of the documentation that are made from the code: `python -m tools.docs_pages`, or `make docs`.

In docs/*.md, what stands between `<!-- made: NAME -->` and `<!-- /made -->` is the answer of the function NAME of
`BLOCKS`. A test holds the pages against what this would write.
"""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tools import docs_models as models
from tools import docs_supported as supported

ROOT = Path(__file__).parents[1]
_BLOCK = re.compile(r"(<!-- made: (\w+) -->\n)(?:(?!<!-- made).)*?(<!-- /made -->)", re.DOTALL)


def pages() -> dict[Path, str]:
    """Every page with such parts, as it should be."""
    found = {}
    for path in sorted((ROOT / "docs").glob("*.md")):
        text = path.read_text(encoding="utf-8")
        if _BLOCK.search(text):
            found[path] = _BLOCK.sub(lambda block: f"{block[1]}\n{BLOCKS[block[2]]()}\n\n{block[3]}", text)
    return found


def contracts() -> list[dict[str, Any]]:
    """Who may import whom, as import-linter reads it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    found: list[dict[str, Any]] = project["tool"]["importlinter"]["contracts"]
    return found


def layers() -> list[list[str]]:
    """The layers from the top down; modules of one layer do not import each other."""
    listed = next(contract["layers"] for contract in contracts() if contract["type"] == "layers")
    return [layer.split(" | ") for layer in listed]


def layer_table() -> str:
    """The layers with what is in each module, and the other contracts by name."""
    rows = [
        (str(i) if module == layer[0] else "", f"`{module.removeprefix('forerun.')}`", first_line(module))
        for i, layer in enumerate(layers(), start=1)
        for module in layer
    ]
    others = [f"- {contract['name']}." for contract in contracts() if contract["type"] != "layers"]
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


def main() -> None:
    for path, text in pages().items():
        if path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
            print(f"wrote {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
