"""Fast and slow cores: counted from what the system says, and left alone where all are alike."""

import os
from pathlib import Path

import pytest

from forerun.models.native import library as cores


@pytest.fixture
def eight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)


def _capacities(system: Path, values: list[int]) -> Path:
    for core, capacity in enumerate(values):
        folder = system / "system" / "cpu" / f"cpu{core}"
        folder.mkdir(parents=True)
        (folder / "cpu_capacity").write_text(f"{capacity}\n")
    return system


@pytest.mark.parametrize(
    ("listed", "count"), [("0-3\n", 4), ("0-1,4,6-7", 5), ("0-7", None), ("0-15", None), ("9", None)]
)
def test_intel_lists_its_fast_cores(tmp_path: Path, eight: None, listed: str, count: int | None) -> None:
    (tmp_path / "cpu_core").mkdir()
    (tmp_path / "cpu_core" / "cpus").write_text(listed)
    assert cores.fast_cores(tmp_path) == count


@pytest.mark.parametrize(
    ("values", "count"),
    [([1024, 1024, 900, 900, 400, 400, 400, 400], 4), ([1024] * 8, None), ([500] * 7 + [1024], 1), ([], None)],
)
def test_arm_gives_capacities(tmp_path: Path, eight: None, values: list[int], count: int | None) -> None:
    assert cores.fast_cores(_capacities(tmp_path, values)) == count


def test_slow_cores_are_left_out_unless_threads_were_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cores, "fast_cores", lambda: 4)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert [cores.thread_count(n) for n in (2, 4, 8)] == [2, 4, 4]
    monkeypatch.setenv("OMP_NUM_THREADS", "8")
    assert cores.thread_count(8) == 8
    monkeypatch.setattr(cores, "fast_cores", lambda: None)
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert [cores.thread_count(n) for n in (8, 100)] == [8, 64]
