"""Write a large checkpoint that computes what a small one does: same tokens, same acceptance, larger cost."""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from forerun.core.errors import InvalidInput
from forerun.heads import open_head
from forerun.models.load.checkpoint import open_checkpoint
from lab.inflate.heads import inflate_folder
from lab.inflate.model import find_shape, inflate
from lab.runner import share


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shape", help="1b or 8b")
    parser.add_argument("folder", type=Path, help="where to write the checkpoint")
    share(parser, model="smollm2")
    parser.add_argument("--head", type=Path, help="inflate this head of the small model, and not the model")


def work(flags: argparse.Namespace) -> int:
    wanted = find_shape(flags.shape)
    if flags.head is not None:
        found = open_head(flags.head)
        if found is None:
            raise InvalidInput(f"{flags.head} holds no head of a known kind; give the folder of a trained head")
        print(inflate_folder(flags.head, found.kind, wanted, flags.folder))
        return 0
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(f"inflating {flags.model} to {flags.shape}", total=None)
        inflate(
            open_checkpoint(flags.model),
            wanted,
            flags.folder,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )
    print(flags.folder)
    return 0
