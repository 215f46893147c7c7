"""`forerun inflate`: writes a large checkpoint with a small model's output, to benchmark with."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress

from forerun.errors import InvalidInput


def inflate(
    shape: Annotated[str, typer.Argument(help="1b or 8b.")],
    folder: Annotated[Path, typer.Argument(help="Where to write the checkpoint.")],
    model: Annotated[str, typer.Option("--model", "-m", help="The small Llama to inflate.")] = "smollm2",
    head: Annotated[
        Path | None, typer.Option("--head", help="Inflate this head of the small model, and not the model.")
    ] = None,
) -> None:
    """Write a large checkpoint that computes what a small one does: same tokens, same acceptance, larger cost."""
    from forerun.models.inflate import find_shape
    from forerun.models.inflate import inflate as write
    from forerun.models.load.checkpoint import open_checkpoint

    wanted = find_shape(shape)
    if head is not None:
        from forerun.drafters.inflate_heads import inflate_folder
        from forerun.heads import open_head

        found = open_head(head)
        if found is None:
            raise InvalidInput(f"{head} holds no head of a known kind; give the folder of a trained head")
        print(inflate_folder(head, found.kind, wanted, folder))
        return
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(f"inflating {model} to {shape}", total=None)
        write(
            open_checkpoint(model),
            wanted,
            folder,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )
    print(folder)
