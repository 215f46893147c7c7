"""`forerun corpus build`: indexes texts that the drafter `suffix` looks up."""

from __future__ import annotations

from pathlib import Path
from time import perf_counter
from typing import Annotated

import typer
from rich.console import Console

from forerun.cli.flags import DEFAULT_MODEL, HELP
from forerun.cli.loading import check_model
from forerun.cli.outputs import check_file

corpus = typer.Typer(no_args_is_help=True, help="Texts that the drafter suffix looks up.")


@corpus.callback()
def _corpus() -> None:
    """Texts that the drafter suffix looks up."""


@corpus.command()
def build(
    files: Annotated[
        list[Path],
        typer.Argument(help="Texts: one per file, or one per line of a .jsonl.", show_default=False),
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="Where the index goes.", show_default=False)],
    model: Annotated[str, typer.Option("--model", "-m", help=HELP["model"])] = DEFAULT_MODEL,
) -> None:
    """Index texts in the tokens of a model; --corpus FILE then looks them up."""
    check_model(model)
    check_file("--out", out)
    with Console(stderr=True).status("indexing"):
        from forerun.drafters.lookup.suffix_corpus import read_documents, write_corpus
        from forerun.models.load.checkpoint import open_checkpoint

        checkpoint = open_checkpoint(model)
        tokenizer = checkpoint.tokenizer()
        started = perf_counter()
        documents = (tokenizer.encode(text, add_special=False) for text in read_documents(files))
        count = write_corpus(out, documents, tokenizer.vocab_size, checkpoint.name)
    print(f"{count} tokens of {_files(len(files))} are in {out} ({perf_counter() - started:.1f} s)")


def _files(count: int) -> str:
    return "1 file" if count == 1 else f"{count} files"
