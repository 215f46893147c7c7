"""Forerun: exactly a language model's own text, sooner where drafting pays. Public names, imported when used."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from forerun.async_llm import AsyncLLM
    from forerun.completion import Completion
    from forerun.dropin.wrapped import wrap
    from forerun.errors import ForerunError
    from forerun.law_processor import LawProcessor, Prefix
    from forerun.llm import LLM
    from forerun.params import EngineConfig, SamplingParams, SpeculativeConfig
    from forerun.streams import AsyncStream, Stream
    from forerun.types import Budget, Event, Request, TokenLogprob

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
    "AsyncLLM": "forerun.async_llm",
    "AsyncStream": "forerun.streams",
    "Stream": "forerun.streams",
    "LLM": "forerun.llm",
    "Completion": "forerun.completion",
    "Budget": "forerun.types",
    "Event": "forerun.types",
    "Request": "forerun.types",
    "TokenLogprob": "forerun.types",
    "EngineConfig": "forerun.params",
    "SamplingParams": "forerun.params",
    "SpeculativeConfig": "forerun.params",
    "ForerunError": "forerun.errors",
    "LawProcessor": "forerun.law_processor",
    "Prefix": "forerun.law_processor",
    "wrap": "forerun.dropin.wrapped",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'forerun' has no attribute {name!r}")
    if name in _RUN_MODELS:
        from forerun.memory_limit import check_limit

        check_limit()
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
