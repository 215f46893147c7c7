"""Fixtures that several folders share: the real default model, loaded once per worker."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # two workers on two cores: one thread each


@pytest.fixture(scope="session")
def smollm2_path() -> str:
    """The default model's file; tests that need it skip where it was not pulled."""
    from forerun.models.load.catalog import known_models

    model = next(model for model in known_models() if model.name == "smollm2")
    if model.path is None:
        pytest.skip("the default model is not here; run `forerun models pull smollm2`")
    return str(model.path)


@pytest.fixture(scope="session")
def checkpoint(smollm2_path: str) -> Iterator[object]:
    from forerun.models.load.checkpoint import open_checkpoint

    return open_checkpoint(smollm2_path)
