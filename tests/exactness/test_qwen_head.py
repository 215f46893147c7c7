"""The head for Qwen2.5-Coder-1.5B that comes with the package: found by itself, accepted, texts as without it.

It needs that model's file (docs/tutorial-train-and-serve.md), in a folder that FORERUN_MODELS names or in the cache;
elsewhere these tests are skipped.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from forerun.api.llm import LLM
from forerun.build.fingerprint import find_head
from forerun.core.types import Budget
from forerun.models.load.catalog import cache_folder
from forerun.models.load.checkpoint import open_checkpoint

pytestmark = [pytest.mark.model, pytest.mark.slow]

FILE = "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf"
QUESTION = "Write a Python function that returns the n-th Fibonacci number, with a docstring."
TOKENS = 32


@pytest.fixture(scope="module")
def model() -> str:
    homes = [Path(os.environ.get("FORERUN_MODELS", cache_folder())).expanduser(), cache_folder() / "models"]
    found = next((path for home in homes for path in sorted(home.glob(f"**/{FILE}"))), None)
    if found is None:
        pytest.skip(f"{FILE} is not here; run: forerun models pull qwen-1.5b")
    return str(found)


@pytest.fixture(scope="module")
def loaded(model: str) -> Iterator[LLM]:
    checkpoint = open_checkpoint(model)
    if find_head(checkpoint, "eagle3") is None:
        pytest.skip("no head for this model is in the package")
    return LLM(model, drafter="eagle3")


def test_it_is_found_and_accepted_and_writes_the_plain_text(loaded: LLM) -> None:
    chat = [{"role": "user", "content": QUESTION}]
    plain = loaded.chat(chat, drafter="none", max_tokens=TOKENS)
    drafted = loaded.chat(chat, budget=Budget(5, 5, 1), max_tokens=TOKENS)
    assert drafted.token_ids == plain.token_ids
    assert plain.tokens_per_round == 1.0
    assert drafted.tokens_per_round > 1.8  # a head of another model, or on other layers, has 1.0 to 1.1


def test_other_models_of_the_family_do_not_get_it(model: str) -> None:
    checkpoint = open_checkpoint(model)
    assert find_head(replace(checkpoint, config={**checkpoint.config, "hidden_size": 896})) is None
