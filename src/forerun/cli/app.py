"""The `forerun` command: its parts, and how it ends.

What a user can mend is one line on stderr and exit code 2, as for a misspelt flag. An interrupt exits with
130, and a reader that went away (`forerun generate ... | head`) ends the command without a word.
"""

from __future__ import annotations

import os
import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from forerun import __version__
from forerun.cli.advise import advise
from forerun.cli.bench import bench
from forerun.cli.chat import chat
from forerun.cli.compare import compare
from forerun.cli.data import data
from forerun.cli.diagnose import diagnose
from forerun.cli.doctor import doctor
from forerun.cli.drafters import drafters
from forerun.cli.generate import generate
from forerun.cli.inflate import inflate
from forerun.cli.models import models
from forerun.cli.quality import quality
from forerun.cli.train import train
from forerun.errors import ForerunError

_UsageError: Any = typer.BadParameter.__bases__[0]  # typer shows its base class under no name of its own
_USER_ERROR, _INTERRUPTED, _NO_READER = 2, 130, 141  # the last two as shells count them: 128 + the signal


class Commands(TyperGroup):
    """Commands whose errors are one line; also when they are run inside a test."""

    def invoke(self, ctx: Any) -> Any:
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()  # a reader that went away shows itself here, not when the interpreter ends
            return result
        except ForerunError as error:
            print("forerun:", " ".join(str(error).split()), file=sys.stderr)
            raise SystemExit(_USER_ERROR) from None
        except KeyboardInterrupt:
            raise SystemExit(_INTERRUPTED) from None
        except _UsageError as error:
            said = error.format_message()
            if "\n" in said:  # a whole help page, because no command was named
                raise
            print(f"forerun: {said} Try `{error.ctx.command_path} --help`.", file=sys.stderr)
            raise SystemExit(_USER_ERROR) from None
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what is still buffered must go somewhere
            raise SystemExit(_NO_READER) from None


app = typer.Typer(
    cls=Commands,
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(generate)
app.command()(chat)
app.add_typer(models, name="models")
app.add_typer(drafters, name="drafters")
app.command()(train)
app.add_typer(data, name="data")
app.command()(bench)
app.command()(compare)
app.command()(advise)
app.command()(diagnose)
app.command()(quality)
app.command()(inflate)
app.command()(doctor)


def _say_version(asked: bool) -> None:
    if asked:
        print(f"forerun {__version__}")
        raise typer.Exit


@app.callback()
def _forerun(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_say_version, is_eager=True, help="Say the version and stop."),
    ] = False,
) -> None:
    """Exactly a language model's own text, by speculative decoding: sooner where drafting pays."""


def main() -> None:
    """Run the command line and exit."""
    app(prog_name="forerun")
