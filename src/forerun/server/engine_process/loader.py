"""How an engine's process makes its model: a function by name, with arguments that JSON can hold. No torch here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from forerun.api.llm import LLM

LOAD_LLM = "forerun.server.engine_process.loader:load_llm"


@dataclass(frozen=True, slots=True)
class Loader:
    """Called where the engine is to be: here, or in a process that was started for it."""

    function: str  # module:name; what it returns is an LLM
    arguments: Mapping[str, Any] = field(default_factory=dict)

    def __call__(self) -> LLM:
        module, _, name = self.function.partition(":")
        llm: LLM = getattr(import_module(module), name)(**self.arguments)
        return llm


def load_llm(
    model: str, engine: Mapping[str, Any], drafting: Mapping[str, Any], heads: str | None = None
) -> LLM:
    """A model by name, as `forerun serve` has it; `heads` = drafting with the version that folder is at now."""
    from forerun.api.llm import LLM
    from forerun.core.params import EngineConfig
    from forerun.heads.versions import HeadVersions

    given = dict(drafting)
    if heads is not None:
        given["draft_model"] = str(HeadVersions(Path(heads)).must_have_current())
    return LLM.load(model, config=EngineConfig.from_dict(engine), **given)
