"""Forerun: exactly a language model's own text, sooner where drafting pays. Public names, imported when used."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from forerun.api.completion import AsyncStream, Completion, Stream
    from forerun.api.dropin import wrap
    from forerun.api.llm import LLM, AsyncLLM
    from forerun.core.errors import ForerunError
    from forerun.core.params import EngineConfig, LawProcessor, Prefix, SamplingParams, SpeculativeConfig
    from forerun.core.types import Budget, Event, Request, TokenLogprob

if "torch" not in sys.modules:
    # Threads of torch that spin after a small operation take a core from our own kernels: a pass over four nodes then
    # takes twice as long. OpenMP reads this once, when torch is imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "AsyncLLM",
    "AsyncStream",
    "Budget",
    "Completion",
    "EngineConfig",
    "Event",
    "ForerunError",
    "LawProcessor",
    "Prefix",
    "Request",
    "SamplingParams",
    "SpeculativeConfig",
    "Stream",
    "TokenLogprob",
    "wrap",
]

_RUN_MODELS = ("LLM", "AsyncLLM", "wrap")  # these import torch
_HOMES = {
    "AsyncLLM": "forerun.api.llm",
    "AsyncStream": "forerun.api.completion",
    "Stream": "forerun.api.completion",
    "LLM": "forerun.api.llm",
    "Completion": "forerun.api.completion",
    "Budget": "forerun.core.types",
    "Event": "forerun.core.types",
    "Request": "forerun.core.types",
    "TokenLogprob": "forerun.core.types",
    "EngineConfig": "forerun.core.params",
    "SamplingParams": "forerun.core.params",
    "SpeculativeConfig": "forerun.core.params",
    "ForerunError": "forerun.core.errors",
    "LawProcessor": "forerun.core.params",
    "Prefix": "forerun.core.params",
    "wrap": "forerun.api.dropin",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'forerun' has no attribute {name!r}")
    if name in _RUN_MODELS:
        from forerun.build.memory_limit import check_limit

        check_limit()
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
