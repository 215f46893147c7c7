"""Draws docs/assets/demo.svg from a real run: python docs/assets/make_picture.py

What the picture shows is what `forerun demo` prints in a terminal of the texts with drafting: accepted tokens in green,
the target's own plain. Nothing in it is typed by hand. The speed is left out: a picture cannot say on which machine it
was measured, and what else ran there.
"""

from __future__ import annotations

import io
import re
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

from forerun import LLM, SamplingParams
from forerun.cli.generate import MAX_TOKENS, PROMPTS
from forerun.cli.show import Written, write_text

WIDTH = 92
FILE = Path(__file__).with_name("demo.svg")


def write(llm: LLM, prompt: str) -> tuple[Text, Written]:
    """The text in its two colours, and how it came about."""
    text = Text()

    def show(piece: str, drafted: bool) -> None:
        text.append(piece, "bright_green" if drafted else None)

    asked = [{"role": "user", "content": prompt}]
    return text, write_text(llm, asked, SamplingParams(max_tokens=MAX_TOKENS), show=show)


def draw(llm: LLM) -> str:
    """The screen as SVG, in a font that the reader's machine has."""
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True)
    console.print(Text("$ ", "bold").append("forerun demo", "not bold"))
    for about, _, prompt in PROMPTS:
        text, written = write(llm, prompt)
        console.print(Text(f"\n{about}, with drafting\n", "bold"))
        console.print(text)
        assert written.completion is not None, "nobody interrupted it"
        exact = "exact" if written.completion.exact else "NOT EXACT"
        said = f"{written.tokens} tokens, {written.tokens / written.rounds:.2f} per round, {exact}, "
        line = Text(said, "dim")
        console.print(line.append("green", "not dim bright_green").append(" = drafted"))
    svg = console.export_svg(title="forerun demo", theme=MONOKAI, unique_id="forerun")
    return re.sub(r"@font-face \{.*?\}", "", svg, flags=re.DOTALL).replace("Fira Code,", "")


if __name__ == "__main__":
    FILE.write_text(draw(LLM.load("smollm2")), encoding="utf-8")
