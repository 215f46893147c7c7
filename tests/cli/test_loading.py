"""What commands do around loading a model."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest

from forerun.build.memory_limit import without_collector
from forerun.cli.loading import short_name


def test_what_was_loaded_is_left_out_of_later_collections() -> None:
    before = gc.get_freeze_count()
    try:
        with without_collector():
            assert not gc.isenabled()
            loaded: list[list[int]] = [[] for _ in range(1000)]
        assert gc.get_freeze_count() >= before + len(loaded)
        assert gc.isenabled()
    finally:
        gc.unfreeze()


def test_nothing_is_left_out_where_loading_failed_or_the_collector_was_off() -> None:
    before = gc.get_freeze_count()
    with pytest.raises(OSError, match="no such model"), without_collector():
        raise OSError("no such model")
    assert gc.isenabled()
    gc.disable()
    try:
        with without_collector():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
    assert gc.get_freeze_count() == before


def test_progress_names_a_file_without_its_path(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").touch()
    assert short_name(str(tmp_path / "model.gguf")) == "model.gguf"
    assert short_name("org/name") == "org/name"
