"""Which files a request passes through, for docs/architecture.md: `python -m tools.request_files` writes both lists.

A file counts if a function of it is called. The CPU request is a greedy text of the default model with n-gram lookups,
from `LLM.generate` to the `Completion`. The GPU tree is a round of an EAGLE-3 head on the decoder's twin, which runs
the GPU code with torch in place of Triton kernels: `Engine.step` while drafted rounds overlap. Loading is not counted.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "forerun"
PAGE = ROOT / "docs" / "architecture.md"


def files_of(work: Callable[[], object]) -> list[Path]:
    """The files of the package whose functions are called by `work`, in the order of their first call."""
    found: dict[str, None] = {}

    def called(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(str(PACKAGE)):
            found.setdefault(frame.f_code.co_filename)

    sys.setprofile(called)
    try:
        work()
    finally:
        sys.setprofile(None)
    return [Path(name) for name in found]


def cpu_request() -> list[Path]:
    """A greedy text with lookups on a CPU, after a first one that loads and captures everything."""
    from forerun import LLM

    llm = LLM.load("smollm2", drafter="ngram", device="cpu")
    text = "one two three one two three one two three one"
    llm.generate(text, max_tokens=24)
    return files_of(lambda: llm.generate(text + " two", max_tokens=24))


class _OneShape:
    """A controller that asks for the same tree in every round and lets rounds overlap."""

    def plan(self, seqs: Sequence[Any]) -> list[Any]:
        from forerun.core.types import Budget

        return [Budget(5, 3, 2, repeats=8)] * len(seqs)

    def observe(self, outcome: object) -> None:
        """Learn nothing."""

    def forget(self, seq: object) -> None:
        """Keep nothing."""


def gpu_tree() -> list[Path]:
    """Rounds of a head's trees on the decoder's twin, once prompts are prefilled."""
    from forerun.build.engine import make_engine
    from forerun.core.params import EngineConfig, SamplingParams, SpeculativeConfig
    from forerun.core.types import Request
    from tests.gpu.heads import both_drafters
    from tests.gpu.tiny import make_target

    target = make_target("llama", "cpu")
    engine = make_engine(target, frozenset(), SpeculativeConfig("none", controller="fixed"), EngineConfig(max_batch=2))
    engine.drafters.add("device", both_drafters(target, borrows=True)[0])
    controller: Any = _OneShape()
    engine.controller = controller
    for first in (3, 7):
        engine.submit(Request((first, 5, 9, 4), SamplingParams(max_tokens=40), drafter="device"))
    for _ in range(4):
        engine.step()
    return files_of(lambda: [engine.step() for _ in range(4)])


def listed(files: Sequence[Path]) -> str:
    """The files as a numbered list, each with the first line of its docstring."""
    lines = []
    for place, path in enumerate(files, start=1):
        says = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        first = says.split("\n\n")[0].replace("\n", " ")
        lines.append(f"{place}. `{path.relative_to(ROOT).as_posix()}`: {first}")
    return "\n".join(lines)


def main() -> None:
    page = PAGE.read_text(encoding="utf-8")
    for name, trace in (("cpu", cpu_request), ("gpu", gpu_tree)):
        files = trace()
        before, marker, rest = page.partition(f"<!-- files: {name} -->")
        page = f"{before}{marker}\n\n{listed(files)}\n\n<!-- /files -->{rest.partition('<!-- /files -->')[2]}"
        print(f"{name}: {len(files)} files")
    PAGE.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
