"""The files and folders that a command is to write: looked at before the work that they are for, and written.

A run of minutes must not end with the discovery that its result has nowhere to go.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from forerun.core.errors import InvalidInput

STDOUT = Path("-")  # of --json: standard output


def check_file(flag: str, file: Path) -> None:
    """Raise where this file cannot be written; nothing is created, and whether the disk has room shows only later."""
    if file.is_dir():
        raise InvalidInput(f"{flag} {str(file)!r} is a folder; name a file in it")
    if not file.absolute().parent.is_dir():
        raise InvalidInput(f"{flag} {str(file)!r}: there is no folder {str(file.parent)!r}; make it first")
    if not os.access(file if file.exists() else file.absolute().parent, os.W_OK):
        raise InvalidInput(f"{flag} {str(file)!r} may not be written; choose another file")


def check_folder(flag: str, folder: Path) -> None:
    """Raise where this folder can be neither written to nor made."""
    there = next(place for place in (folder.absolute(), *folder.absolute().parents) if place.exists())
    if not there.is_dir():
        raise InvalidInput(f"{flag} {str(folder)!r}: {str(there)!r} is a file; choose another folder")
    if not os.access(there, os.W_OK):
        raise InvalidInput(
            f"{flag} {str(folder)!r}: {str(there)!r} may not be written; choose another folder"
        )


def write_file(flag: str, file: Path, text: str) -> None:
    """Write a result; where that fails, say which flag named the file."""
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InvalidInput(f"cannot write {str(file)!r}: {error.strerror}; choose another {flag}") from None


def check_json(file: Path | None) -> Path | None:
    """The same for --json, when the command line is read."""
    if file is not None and file != STDOUT:
        check_file("--json", file)
    return file


def write_document(file: Path | None, document: object, *, escape: bool = True) -> bool:
    """Write a result where --json says, if it was given; True = to standard output, which then holds nothing else."""
    if file is not None:
        line = json.dumps(document, ensure_ascii=escape)
        if file == STDOUT:
            print(line)
        else:
            write_file("--json", file, line + "\n")
    return file == STDOUT


@contextmanager
def interruption(folder: str | Path) -> Iterator[None]:
    """Say where Ctrl-C leaves what was done, for commands that resume from a folder."""
    try:
        yield
    except KeyboardInterrupt:
        print(f"interrupted; the same command resumes from what is in {folder}", file=sys.stderr)
        raise
