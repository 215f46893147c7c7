"""Draws docs/assets/generate.svg from a real run: python docs/assets/make_picture.py

What the picture shows is what `forerun generate` prints in a terminal: accepted tokens in green, the target's
own plain, and the closing line. Nothing in it is typed by hand but the prompt. The speed is left out: a
picture cannot say on which machine it was measured, and what else ran there.
"""

from __future__ import annotations

import io
import re
import shlex
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

from forerun import LLM, SamplingParams
from forerun.cli.show import closing_line
from forerun.cli.write import Written, write_text

DEMO = Path(__file__).parents[2] / "examples" / "demo.txt"
PROMPT = DEMO.read_text(encoding="utf-8").strip()
WIDTH, MAX_TOKENS = 92, 110
FILE = Path(__file__).with_name("generate.svg")


def write() -> tuple[Text, Written]:
    """The text in its two colours, and how it came about."""
    llm, text = LLM.load("smollm2"), Text()
    prompt = [{"role": "user", "content": PROMPT}]

    def show(piece: str, drafted: bool) -> None:
        text.append(piece, "bright_green" if drafted else None)

    return text, write_text(llm, prompt, SamplingParams(max_tokens=MAX_TOKENS), show=show)


def draw(text: Text, written: Written) -> str:
    """The screen as SVG, in a font that the reader's machine has."""
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True)
    command = f"forerun generate {shlex.quote(PROMPT)} --max-tokens {MAX_TOKENS}"
    console.print(Text("$ ", "bold").append(command, "not bold"))
    console.print()
    console.print(text)
    console.print()
    assert written.completion is not None, "nobody interrupted it"
    said = re.sub(r", [\d.]+ tokens/s", "", closing_line(written))
    line = Text(said, "dim").append(" · exact" if written.completion.exact else " · NOT EXACT")
    console.print(line.append(" · ").append("green", "not dim bright_green").append(" = drafted"))
    svg = console.export_svg(title="forerun generate", theme=MONOKAI, unique_id="forerun")
    return re.sub(r"@font-face \{.*?\}", "", svg, flags=re.DOTALL).replace("Fira Code,", "")


if __name__ == "__main__":
    FILE.write_text(draw(*write()), encoding="utf-8")
