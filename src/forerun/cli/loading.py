"""Loading the model behind a command: the one place where the command line meets the library."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console

from forerun.cli.flags import Settings

if TYPE_CHECKING:
    from forerun.llm import LLM


def load_llm(settings: Settings) -> LLM:
    """The model that the flags ask for; a person at a terminal sees that something is going on."""
    with Console(stderr=True).status(f"loading {settings.model}"):
        from forerun.llm import LLM

        return LLM.load(settings.model, speculative_config=settings.speculative, config=settings.engine)
