"""What the figures were measured on: read from the system, and told where the system does not tell."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from forerun.measure import machine
from forerun.measure.machine import cores, is_busy, load_average, machine_facts, peak_memory, weight_bytes
from forerun.models.config import DecoderConfig
from forerun.models.decoder import Decoder
from forerun.models.native import library as native_library
from forerun.models.native.target import NativeDecoder
from forerun.testing import TableLM
from tests.measure.conftest import CONFIG, random_weights


def test_machine_facts_are_there_to_be_read() -> None:
    facts = machine_facts()
    assert facts["cores"] >= 1
    assert facts["threads"] >= 1
    assert facts["copy_gb_per_s"] > 0
    assert facts["torch"]
    assert facts["cpu"]
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", facts["date"])


@pytest.mark.parametrize(("load", "busy"), [(None, False), (0.9, False), (1.1, True)])
def test_a_load_of_half_the_cores_is_busy(load: float | None, busy: bool) -> None:
    assert is_busy(load, available=2) is busy


def test_a_system_that_does_not_tell_its_load_is_not_called_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    def silent() -> Any:
        raise OSError

    monkeypatch.setattr(os, "getloadavg", silent)
    assert load_average() is None
    assert not is_busy(load_average(), cores())


def cpu_named(text: str, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(Path, "read_text", lambda self, encoding: text)
    name = machine._cpu_model()
    monkeypatch.undo()
    return name


def test_a_cpu_is_called_what_the_kernel_calls_it(monkeypatch: pytest.MonkeyPatch) -> None:
    first = "processor : 0\nmodel name : Fast Chip 9\n\nprocessor : 1\nmodel name : Slow Chip 1\n"
    assert cpu_named(first, monkeypatch) == "Fast Chip 9"
    arm = "processor : 0\nCPU implementer : 0x41\nCPU part : 0xd0c\n"
    assert cpu_named(arm, monkeypatch).endswith(" 0x41 0xd0c")


def test_memory_is_counted_in_megabytes() -> None:
    held = peak_memory()["process_mb"]
    assert held is not None
    assert 20 < held < 100_000  # an interpreter with torch: in kilobytes or gigabytes it would be neither
    assert peak_memory()["process_mb"] >= held  # type: ignore[operator]


def test_a_commit_has_a_plus_sign_where_files_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = {"rev-parse": "abc1234\n", "status": ""}

    def git(words: list[str], **options: Any) -> Any:
        return subprocess.CompletedProcess(words, 0, answers[words[3]], "")

    monkeypatch.setattr(subprocess, "run", git)
    assert machine._commit() == "abc1234"
    answers["status"] = " M a.py\n"
    assert machine._commit() == "abc1234+"
    answers["rev-parse"] = ""
    assert machine._commit() is None


def test_bytes_of_weights_are_told_or_counted_or_not_known() -> None:
    config, weights = DecoderConfig.from_hf(CONFIG), random_weights()
    assert weight_bytes(TableLM(8)) is None
    matrices = [weight for weight in weights.values() if weight.dim() == 2]
    counted = Decoder(config, weights, dtype=torch.float32, device="cpu", kv_slots=None)
    # read once each; norms are small
    assert weight_bytes(counted) == 4 * sum(weight.numel() for weight in matrices)
    if native_library.available():
        told = NativeDecoder(config, weights, mode="bfloat16", kv_slots=None)
        assert weight_bytes(told) == told.weight_bytes < weight_bytes(counted)
