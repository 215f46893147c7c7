"""Provenance of a trained drafter: commit, arguments, data, versions, machine."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from forerun.train.options import DataOptions, TrainOptions


def write_provenance(folder: Path, options: TrainOptions | DataOptions, **facts: Any) -> None:
    """Write provenance.json beside the output; FORERUN_COMMIT names the commit where git is not available."""
    named = {name: Path(given).name for name in ("data", "init") if (given := getattr(options, name, ""))}
    record = {
        "made": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": _commit(),
        "arguments": {**asdict(options), **named, "out": folder.name},
        "versions": {name: _version(name) for name in ("forerun", "torch", "transformers", "safetensors")},
        "python": platform.python_version(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine(),
        **facts,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "provenance.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def _commit() -> str:
    here = Path(__file__).parent
    if named := os.environ.get("FORERUN_COMMIT"):
        return named
    try:
        asked = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=here, capture_output=True, text=True, timeout=10, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return asked.stdout.strip() or "unknown"


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"
