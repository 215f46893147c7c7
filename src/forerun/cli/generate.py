"""`forerun generate` answers one prompt; `forerun demo` writes two texts plainly and with drafting, and compares them.

The rates of the demo are those of the text alone, of the faster of two runs: every prompt is read before anything is
timed.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from forerun.api.calls import as_messages
from forerun.cli import loading
from forerun.cli.flags import DEFAULT_MODEL, HELP, STDOUT, JsonFile, Settings, TraceFile, with_settings, write_document
from forerun.cli.show import Screen, Written, as_document, over_the_context, room_for, table_console, write_text
from forerun.core.errors import InvalidInput
from forerun.core.params import SamplingParams

if TYPE_CHECKING:
    from forerun.api.calls import Prompt
    from forerun.api.llm import LLM


@with_settings
def generate(
    settings: Settings,
    prompt: Annotated[
        str | None, typer.Argument(help="The prompt, @FILE to read it from a file, or - for standard input.")
    ] = None,
    file: Annotated[Path | None, typer.Option("--file", "-f", help="Read the prompt from this file.")] = None,
    system: Annotated[str | None, typer.Option(help="A system message in front of the prompt.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="No chat template: continue the prompt as it is.")] = False,
    prediction: Annotated[
        Path | None, typer.Option(help="A file with the expected answer: it is drafted and changes no text.")
    ] = None,
    trace: TraceFile = None,
    json_file: JsonFile = None,
) -> None:
    """Answer a prompt, and print speed, tokens per round, drafter and verifier."""
    text = read_prompt(prompt, file)
    if not text.strip():
        raise InvalidInput("the prompt is empty; give it as an argument, with --file, or on standard input")
    if raw and system is not None:
        raise InvalidInput("a system message needs the chat template, and --raw does without; drop one of them")
    predicted = None if prediction is None else _text_of(_bytes_of(prediction, "prediction"), f"the file {prediction}")
    llm = loading.load_llm(settings)
    asked, screen = _in_template(llm, text, system, raw), Screen()
    prompt_tokens, params = len(llm.encode(asked)), settings.sampling
    room = room_for(llm, prompt_tokens, params)
    with loading.traced(llm, trace):
        if json_file == STDOUT:
            written = write_text(llm, asked, params, prediction=predicted)
        else:
            if 0 < room < params.max_tokens:
                screen.say(over_the_context(llm, prompt_tokens, params))
            written = write_text(
                llm, asked, params, show=screen.write, visible=screen.is_terminal, prediction=predicted
            )
            screen.close(written)
    if written.completion is None:
        raise KeyboardInterrupt  # the text so far is shown; the exit code says that it was stopped
    write_document(json_file, as_document(written, settings.model, room), escape=False)


def read_prompt(prompt: str | None, file: Path | None) -> str:
    if file is not None and prompt is not None:
        raise InvalidInput(f"two prompts were given, {prompt!r} and --file {file}; give one of them")
    if prompt is not None and prompt.startswith("@"):
        file = Path(prompt[1:])
    if file is not None:
        return _text_of(_bytes_of(file), f"the file {file}")
    if prompt is not None and prompt != "-":
        return prompt
    if prompt is None and sys.stdin.isatty():
        raise InvalidInput("there is no prompt; give it as an argument, with --file, or on standard input")
    return _text_of(sys.stdin.buffer.read(), "standard input")


def _bytes_of(file: Path, what: str = "prompt") -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        why = error.strerror or type(error).__name__
        raise InvalidInput(f"cannot read the {what} file {str(file)!r}: {why}; check the path") from None


def _text_of(data: bytes, where: str) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidInput(
            f"{where} is not UTF-8 text (byte {error.start} is {data[error.start]:#04x}); convert it first"
        ) from None


def _in_template(llm: LLM, text: str, system: str | None, raw: bool) -> Prompt:
    """The prompt as the model wants it: a chat message where there is a template for it."""
    if llm.tokenizer.has_chat_template and not raw:
        from forerun.api.calls import as_messages

        return as_messages(text.rstrip("\r\n"), system)  # the newline that ends a file is not a part of it
    if system is not None:
        raise InvalidInput(f"a system message needs a chat template and {llm.name!r} has none; drop --system")
    return text


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
    """Write two texts with and without drafting, and compare texts and tokens per second."""
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
        for shown, written, style in (("plain", compared.plain, "dim"), ("drafted", compared.drafted, "green")):
            line = Text(f"  {shown:<8}").append("█" * round(_BAR * _rate(written) / longest), style)
            line.append(f" {_rate(written):.0f} tokens/s")
            if written is compared.drafted:
                line.append(f", {compared.gain:.2f}x", "bold").append(", ")
                line.append(*(("texts equal", "green") if compared.equal else ("TEXTS DIFFER", "bold red")))
            console.print(line)
    console.print("forerun advise measures prompts of your own", style="dim")
