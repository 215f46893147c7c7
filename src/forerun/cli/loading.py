"""Loading the model behind a command: the one place where the command line meets the library.

A name that leads nowhere is answered before torch is imported, which takes a second or two.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from typer.core import TyperCommand

if TYPE_CHECKING:
    from forerun.cli.flags import Settings
    from forerun.llm import LLM

_MODEL_FLAGS = ("model", "target")


class ModelCommand(TyperCommand):
    """A command that looks the models up that its flags name, before it does anything else."""

    def invoke(self, ctx: Any) -> Any:
        for flag in _MODEL_FLAGS:
            check_model(ctx.params.get(flag))
        check_draft_model(ctx.params.get("draft_model"))
        return super().invoke(ctx)


def check_model(name: str | None) -> None:
    """Raise where there is no such model; torch is not needed to know."""
    from forerun.models.load.locate import find_model

    if name is not None:
        find_model(name)


def check_draft_model(name: str | None) -> None:
    """The same for what drafts: a model, or any folder, which may be a head's."""
    if name is not None and not Path(name).expanduser().is_dir():
        check_model(name)


def load_llm(settings: Settings) -> LLM:
    """The model that the flags ask for; a person at a terminal sees that something is going on."""
    from rich.console import Console

    with Console(stderr=True).status(f"loading {settings.model}"), _without_collector():
        check_model(settings.model)
        from forerun.llm import LLM

        return LLM.load(settings.model, speculative_config=settings.speculative, config=settings.engine)


@contextmanager
def _without_collector() -> Iterator[None]:
    """Nearly all that is made while libraries are imported stays: looking for garbage in it takes a tenth longer."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
