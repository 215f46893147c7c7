"""What memory gives, by a clock that is known, and by the real one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from forerun.measure import machine as measuring
from forerun.measure.machine import copy_bandwidth, rate
from lab import cpu as formats
from lab.cpu import bandwidth


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "SIZE", 1 << 20)
    monkeypatch.setattr(formats, "SIZE", 1 << 20)


def fake_clock(monkeypatch: pytest.MonkeyPatch, spent: list[float]) -> None:
    """Every piece of work takes the next of these seconds."""

    def looks() -> Iterator[float]:
        now = 0.0
        for seconds in spent:
            yield now
            now += seconds
            yield now

    found = looks()
    monkeypatch.setattr(measuring, "perf_counter", lambda: next(found))


def test_the_best_of_a_few_counts_since_noise_only_slows(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_clock(monkeypatch, [9.0, 0.5, 0.25, 4.0])
    done: list[int] = []
    assert rate(lambda: done.append(1), 10**9, repeats=3) == pytest.approx(4.0)
    assert len(done) == 4, "one more than asked for: the first maps the pages"


@pytest.mark.usefixtures("small")
def test_a_copy_counts_twice_what_a_sum_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_clock(monkeypatch, [0.001] * 6)
    found = bandwidth(repeats=1)
    assert found["copy"] == pytest.approx(2 * found["sum"])
    assert found["matrix_by_vector"] == pytest.approx(found["sum"])
    assert found["sum"] == pytest.approx((1 << 20) / 0.001 / 1e9)
    assert found["best"] == found["copy"]


@pytest.mark.usefixtures("small")
def test_the_copy_of_machine_facts_is_counted_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_clock(monkeypatch, [0.001] * 2)
    assert copy_bandwidth(repeats=1) == pytest.approx(2 * (1 << 20) / 0.001 / 1e9)


@pytest.mark.usefixtures("small")
def test_the_work_is_really_done(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[object] = []

    def noted(work: object, size: int, repeats: int) -> float:
        done.append(work())  # type: ignore[operator]
        return 1.0

    monkeypatch.setattr(formats, "rate", noted)
    bandwidth()
    copied, total, product = done
    assert isinstance(copied, torch.Tensor)
    assert isinstance(product, torch.Tensor)
    assert copied.numel() * 4 == 1 << 20
    assert float(copied.min()) == 1.0, "the copy holds what was copied"
    assert float(total) == copied.numel()  # type: ignore[arg-type]
    assert product.tolist() == [4096.0] * (copied.numel() // 4096)


@pytest.mark.usefixtures("small")
def test_a_real_machine_moves_bytes() -> None:
    found = bandwidth(repeats=1)
    assert all(0.01 < gigabytes < 100_000 for gigabytes in found.values())
