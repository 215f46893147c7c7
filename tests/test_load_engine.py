"""What happens when a model has been loaded."""

from __future__ import annotations

import gc

import pytest

from forerun.load_engine import collect_garbage


@pytest.mark.parametrize("is_on", [True, False])
def test_garbage_of_loading_is_collected_unless_the_collector_is_off(is_on: bool) -> None:
    """Where it is off, as in commands, what was loaded is left out of collections altogether."""
    found: list[int] = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "stop":
            found.append(info["generation"])

    if not is_on:
        gc.disable()
    gc.callbacks.append(note)
    try:
        collect_garbage()
    finally:
        gc.callbacks.remove(note)
        gc.enable()
    assert found == ([2] if is_on else [])
