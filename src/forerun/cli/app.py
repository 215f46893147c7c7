"""The `forerun` command: its subcommands, error messages and exit codes.

A user's error is one line on stderr and exit code 2, as for a misspelt flag; so is a file that cannot be read or
written, or a disk that is full. An interrupt exits with
130, and a closed pipe (`forerun generate ... | head`) ends the command without a message.
"""

from __future__ import annotations

import errno
import os
import sys
from functools import cache
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperGroup, TyperOption

from forerun import __version__
from forerun.build.memory_limit import as_out_of_memory, check_limit
from forerun.cli.flags import in_flags
from forerun.cli.loading import ModelCommand
from forerun.core.errors import ForerunError

# The module of each command, in the order of `--help`; a function or group there has the command's name.
COMMANDS = {
    "generate": "generate", "chat": "chat", "serve": "serve", "demo": "generate", "models": "models",
    "drafters": "drafters", "train": "train", "data": "train", "corpus": "drafters", "layers": "drafters",
    "bench": "bench", "compare": "bench", "verify": "verify", "advise": "advise", "diagnose": "advise",
    "quality": "bench", "quantize": "models", "plan": "advise", "doctor": "doctor",
}  # fmt: skip
_WITHOUT_TORCH = ("models", "drafters", "compare", "verify", "doctor")  # the last says what is wrong with torch
_LEAVE_AT_ONCE = ("generate", "chat")  # they leave nothing behind, and unloading torch is slow
_UsageError: Any = typer.BadParameter.__bases__[0]  # typer does not export its base class
# what a user can change about a file or a disk; other errors of the system are ours, and keep their traceback
_FILES = {
    errno.EACCES, errno.EDQUOT, errno.EEXIST, errno.EFBIG, errno.EISDIR, errno.ENAMETOOLONG, errno.ENOENT,
    errno.ENOSPC, errno.ENOTDIR, errno.EPERM, errno.EROFS,
}  # fmt: skip
_USER_ERROR, _INTERRUPTED, _NO_READER = 2, 130, 141  # the last two as shells count them: 128 + the signal


class Commands(TyperGroup):
    """Commands whose errors are one line; also when they are run inside a test."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        _hide_types_of_flags(self, ctx)
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()  # a closed pipe raises here, not when the interpreter ends
            return result
        except ForerunError as error:
            said, command = " ".join(str(error).split()), self.commands.get(ctx.invoked_subcommand, self)
            print("forerun:", in_flags(said, command), file=sys.stderr)
            raise SystemExit(_USER_ERROR) from None
        except KeyboardInterrupt:
            raise SystemExit(_INTERRUPTED) from None
        except _UsageError as error:
            said = error.format_message()
            if ("\n" in said and not said.startswith("Missing")) or not said:  # a help page: no command was named
                raise
            said = " ".join(said.split()).removesuffix(".").replace(": Value error, ", ": ")  # pydantic's words
            end = "" if said.endswith("?") else "."
            path = f"forerun {ctx.invoked_subcommand}" if error.ctx is None else error.ctx.command_path
            print(f"forerun: {said}{end} Try `{path} --help`.", file=sys.stderr)
            raise SystemExit(_USER_ERROR) from None
        except BrokenPipeError:
            _drop_what_is_buffered()
            raise SystemExit(_NO_READER) from None
        except Exception as error:
            if (told := as_out_of_memory(error)) is not None:
                print("forerun:", told, file=sys.stderr)
                raise SystemExit(_USER_ERROR) from None
            if not isinstance(error, OSError) or error.errno not in _FILES:
                raise
            if error.filename is None:  # of a file that is open already, mostly of stdout on a full disk
                _drop_what_is_buffered()
                said = f"cannot write: {error.strerror}"
            else:
                said = f"{os.fsdecode(error.filename)!r}: {error.strerror}; check the path"
            print("forerun:", said, file=sys.stderr)
            raise SystemExit(_USER_ERROR) from None


def _drop_what_is_buffered() -> None:
    """What stdout still holds must go somewhere, or the interpreter complains when it ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def _hide_types_of_flags(command: Any, ctx: Any) -> None:
    """Flags take no value: help must not show `<bool>` behind them, as typer 0.29 does."""
    for parameter in command.get_params(ctx):
        if isinstance(parameter, TyperOption) and parameter.is_flag:
            parameter.metavar = ""
    for part in command.commands.values() if isinstance(command, TyperGroup) else ():
        _hide_types_of_flags(part, ctx)


def make_app(only: str | None = None) -> typer.Typer:
    """The command line with all of its commands, or with one: the others need not be imported to run it."""
    made = typer.Typer(
        cls=Commands,
        add_completion=False,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    made.callback()(_forerun)
    for name in COMMANDS if only is None else (only,):
        part = getattr(import_module(f"forerun.cli.{COMMANDS[name]}"), name)
        if isinstance(part, typer.Typer):
            made.add_typer(part, name=name)
        else:
            made.command(cls=ModelCommand)(part)
    return made


@cache
def _whole_app() -> typer.Typer:
    return make_app()


def __getattr__(name: str) -> Any:
    if name == "app":  # made on first use: it imports every command
        return _whole_app()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _say_version(asked: bool) -> None:
    if asked:
        print(f"forerun {__version__}")
        raise typer.Exit


def _forerun(
    version: Annotated[
        bool, typer.Option("--version", callback=_say_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Exactly a language model's own text, by speculative decoding: sooner where drafting pays."""


def main() -> None:
    try:
        if _named() not in (None, *_WITHOUT_TORCH) and "--help" not in sys.argv:
            check_limit()
        command = make_app(_named())
    except (ImportError, MemoryError, OSError) as error:
        told = as_out_of_memory(error)
        if told is None:
            raise
        print("forerun:", told, file=sys.stderr)
        raise SystemExit(_USER_ERROR) from None
    command(prog_name="forerun")


def run() -> None:
    """Run the command that was named, and leave."""
    try:
        main()
    except SystemExit as ended:
        if _named() not in _LEAVE_AT_ONCE:
            raise
        code = ended.code
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))


def _named() -> str | None:
    """The command that was named; None where there is none, or none of that name."""
    first = sys.argv[1] if len(sys.argv) > 1 else ""
    return first if first in COMMANDS else None
