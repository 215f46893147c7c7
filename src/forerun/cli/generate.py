"""`forerun generate`: answers one prompt."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from forerun.cli import loading
from forerun.cli.flags import JsonFile, Settings, TraceFile, with_settings
from forerun.cli.outputs import STDOUT, write_document
from forerun.cli.show import Screen
from forerun.cli.write import as_document, over_the_context, room_for, write_text
from forerun.core.errors import InvalidInput

if TYPE_CHECKING:
    from forerun.api.llm import LLM
    from forerun.api.prompts import Prompt


@with_settings
def generate(
    settings: Settings,
    prompt: Annotated[
        str | None, typer.Argument(help="The prompt, @FILE to read it from a file, or - for standard input.")
    ] = None,
    file: Annotated[Path | None, typer.Option("--file", "-f", help="Read the prompt from this file.")] = None,
    system: Annotated[str | None, typer.Option(help="A system message in front of the prompt.")] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="No chat template: continue the prompt as it is.")
    ] = False,
    prediction: Annotated[
        Path | None,
        typer.Option(help="A file with what the answer should be: drafted, it changes no text."),
    ] = None,
    trace: TraceFile = None,
    json_file: JsonFile = None,
) -> None:
    """Answer a prompt, and print speed, tokens per round, drafter and verifier."""
    text = read_prompt(prompt, file)
    if not text.strip():
        raise InvalidInput("the prompt is empty; give it as an argument, with --file, or on standard input")
    if raw and system is not None:
        raise InvalidInput(
            "a system message needs the chat template, and --raw does without; drop one of them"
        )
    predicted = (
        None
        if prediction is None
        else _text_of(_bytes_of(prediction, "prediction"), f"the file {prediction}")
    )
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
    """The prompt from the argument, a file or standard input."""
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
        from forerun.api.prompts import as_messages

        return as_messages(text.rstrip("\r\n"), system)  # the newline that ends a file is not a part of it
    if system is not None:
        raise InvalidInput(f"a system message needs a chat template and {llm.name!r} has none; drop --system")
    return text
