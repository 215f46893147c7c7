"""Load the model of a command; the one place where the command line calls the library.

An unknown name is reported before torch is imported, which takes a second or two.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from typer.core import TyperCommand

from forerun.build.memory_limit import without_collector
from forerun.cli.flags import Settings, check_file, check_folder, spelt
from forerun.core import registry
from forerun.heads import must_be_folder

if TYPE_CHECKING:
    from forerun.api.llm import LLM
    from forerun.core.params import SpeculativeConfig


class ModelCommand(TyperCommand):
    """A command that looks at the models and outputs that were named to it, before it does anything else."""

    def invoke(self, ctx: Any) -> Any:
        for parameter in self.params:
            source = ctx.get_parameter_source(parameter.name)
            if source is None or source.name == "DEFAULT":
                continue
            value, flag = ctx.params[parameter.name], parameter.opts[0]
            if parameter.name == "model":
                check_model(value)
            elif parameter.name == "draft_model":
                check_draft_model(value, ctx.params.get("drafter"))
            elif parameter.name in _FILES:
                check_file(flag, Path(value))
            elif parameter.name in _FOLDERS:
                check_folder(flag, Path(value))
        return super().invoke(ctx)


def check_model(name: str) -> None:
    """Raise where there is no such model; torch is not needed to know."""
    from forerun.models.load.catalog import find_model

    find_model(name)


def check_draft_model(name: str, drafter: str | None) -> None:
    """The same for a draft model: a model, or any folder, which may be a head's."""
    from forerun.models.load.catalog import find_draft_model

    if Path(name).expanduser().is_dir():
        return
    if drafter not in (None, "auto") and registry.drafters.spec(drafter).needs == "head":
        must_be_folder(Path(name))
    find_draft_model(name)


# parameters of commands, by their names in the code
_FILES, _FOLDERS = ("html", "save", "trace"), ("out", "folder", "record")


def short_name(model: str) -> str:
    """A model in a progress line: a file or folder without its path, which would fill the line."""
    return Path(model).name if Path(model).expanduser().exists() else model


def load_llm(settings: Settings) -> LLM:
    """The model that the flags ask for; a terminal shows a progress line."""
    from rich.console import Console

    name = short_name(settings.model)
    status = Console(stderr=True).status(f"loading {name}")
    with status, progress_shown(lambda what: status.update(f"loading {name}: {what}")), without_collector():
        check_model(settings.model)
        from forerun.api.llm import LLM

        alone = replace(settings.engine, max_batch=1)  # one text at a time: a GPU captures graphs for no more
        llm = LLM.load(settings.model, speculative_config=settings.speculative, config=alone)
    if (said := unused_flag(settings.speculative, llm.engine.default_drafter)) is not None:
        print(said, file=sys.stderr)
    return llm


def unused_flag(asked: SpeculativeConfig, drafter: str) -> str | None:
    """What to say of a flag that this drafter does not read; None where there is no such flag."""
    users = {
        "corpus": (asked.corpus, ("suffix",)),
        "shared": (asked.shared, ("suffix", "recycling", "lookahead")),
        "draft_layers": (asked.draft_layers, ("layer_skip",)),
    }
    for name, (given, readers) in users.items():
        if given and not any(reader in drafter for reader in readers):
            flag = spelt(name)
            return f"{flag} does nothing with the drafter {drafter}; it is for --drafter {' or '.join(readers)}"
    weightless = registry.drafters.spec(drafter).needs == "nothing"
    if asked.draft_dtype != "auto" and weightless:
        return f"--draft-dtype does nothing with the drafter {drafter}, which has no weights of its own"
    if asked.draft_model and weightless:
        return f"--draft-model does nothing with the drafter {drafter}; leave --drafter out to draft with it"
    return None


def traced(llm: LLM, file: Path | None) -> AbstractContextManager[None]:
    """Write every round of a model to a file meanwhile; None = to none."""
    from forerun.engine import stats

    return stats.traced(llm.engine.stats, file)


class _Progress(logging.Handler):
    def __init__(self, show: Callable[[str], None]) -> None:
        super().__init__(logging.INFO)
        self._show = show

    def emit(self, record: logging.LogRecord) -> None:
        self._show(record.getMessage())


@contextmanager
def progress_shown(show: Callable[[str], None]) -> Iterator[None]:
    """Show the library's progress messages, and only here."""
    logger, handler = logging.getLogger("forerun.progress"), _Progress(show)
    level, propagates = logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        logger.propagate = propagates
