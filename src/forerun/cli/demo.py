"""`forerun demo`: two texts, each written plainly and with drafting: one that gains, and one that gains less.

All are streamed, so that the difference can be seen, and compared token by token. The rates are those of the text
alone, of the faster of two runs: every prompt is read before anything is timed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from forerun.api.prompts import as_messages
from forerun.cli import loading
from forerun.cli.flags import DEFAULT_MODEL, HELP, Settings
from forerun.cli.show import Screen, table_console
from forerun.cli.write import Written, write_text
from forerun.core.params import SamplingParams

if TYPE_CHECKING:
    from forerun.api.llm import LLM

MAX_TOKENS = 144
_PLAIN, _BAR = "none", 24  # the drafter of plain decoding; characters of the longest bar
_EDIT = """Change the error messages to "width and height must be non-negative". Output all of the code.

```python
def area(width, height):
    if width < 0 or height < 0:
        raise ValueError("width and height must not be negative")
    return width * height


def perimeter(width, height):
    if width < 0 or height < 0:
        raise ValueError("width and height must not be negative")
    return 2 * (width + height)


def sides(width, height):
    if width < 0 or height < 0:
        raise ValueError("width and height must not be negative")
    return [width, height, width, height]
```"""
# what is asked, what of it can be drafted by looking it up, and the prompt
PROMPTS = (
    ("a code edit", "the answer repeats most of its prompt", _EDIT),
    ("a question", "the answer repeats little", "Why is the sky blue?"),
)


@dataclass(frozen=True, slots=True)
class Compared:
    """One prompt, written both ways."""

    plain: Written
    drafted: Written

    @property
    def equal(self) -> bool:
        plain, drafted = self.plain.completion, self.drafted.completion
        return plain is not None and drafted is not None and plain.token_ids == drafted.token_ids

    @property
    def gain(self) -> float:
        return _rate(self.drafted) / _rate(self.plain)


def demo(
    model: Annotated[str, typer.Option("--model", "-m", help=HELP["model"])] = DEFAULT_MODEL,
    max_tokens: Annotated[int, typer.Option(help="Tokens of each text at most.")] = MAX_TOKENS,
) -> None:
    """Write two texts plainly and with drafting, and compare: texts, and tokens per second."""
    params, screen = SamplingParams(max_tokens=max_tokens), Screen()
    llm = loading.load_llm(Settings.of({"model": model}))
    found = [_compare(llm, about, prompt, params, screen) for about, _, prompt in PROMPTS]
    _show(found, llm)
    if not all(compared.equal for compared in found):
        raise typer.Exit(1)


def _compare(llm: LLM, about: str, prompt: str, params: SamplingParams, screen: Screen) -> Compared:
    asked = as_messages(prompt) if llm.tokenizer.has_chat_template else prompt
    llm.generate(asked, max_tokens=8)  # kernels are warm, and the prefix cache has the prompt
    best = list[Written]()
    for drafter, title in ((_PLAIN, f"{about}, plain"), (None, f"{about}, with drafting")):
        screen.say(f"\n{title}\n", style="bold")
        shown = write_text(llm, asked, params, drafter=drafter, show=screen.write, visible=screen.is_terminal)
        screen.write("" if shown.text.endswith("\n") else "\n")
        again = write_text(llm, asked, params, drafter=drafter) if shown.completion is not None else shown
        if again.completion is None:
            raise KeyboardInterrupt
        best.append(max(shown, again, key=_rate))
        screen.say(f"{best[-1].tokens} tokens, {best[-1].tokens / best[-1].rounds:.2f} per round")
    return Compared(*best)


def _rate(written: Written) -> float:
    """Tokens of the text per second; of a text that one round has written, nothing was timed."""
    return written.text_rate or 1.0


def _show(found: list[Compared], llm: LLM) -> None:
    console, device = table_console(), llm.engine.target.device.type
    longest = max(_rate(written) for compared in found for written in (compared.plain, compared.drafted))
    console.print(f"\n{llm.name} on {device}, drafter {llm.engine.default_drafter}", style="bold")
    for compared, (about, why, _) in zip(found, PROMPTS, strict=True):
        console.print(Text(f"{about}: {why}"))
        for shown, written, style in (
            ("plain", compared.plain, "dim"),
            ("drafted", compared.drafted, "green"),
        ):
            line = Text(f"  {shown:<8}").append("█" * round(_BAR * _rate(written) / longest), style)
            line.append(f" {_rate(written):.0f} tokens/s")
            if written is compared.drafted:
                line.append(f", {compared.gain:.2f}x", "bold").append(", ")
                line.append(*(("texts equal", "green") if compared.equal else ("TEXTS DIFFER", "bold red")))
            console.print(line)
    console.print("forerun advise measures prompts of your own", style="dim")
