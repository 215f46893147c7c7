"""Facts about the machine that a benchmark ran on: CPU, GPU, memory, load, software versions, commit."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Callable
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from forerun.control.cost import cores as cores
from forerun.control.cost import is_busy as is_busy
from forerun.control.cost import load_average as load_average
from forerun.models.base import Target
from forerun.models.cuda.target import CudaDecoder
from forerun.models.native.target import NativeDecoder

SIZE = 128 << 20  # bytes that are copied to measure memory bandwidth: far more than any cache holds


def machine_facts() -> dict[str, Any]:
    return {
        "cpu": _cpu_model(),
        "machine": platform.machine(),
        "system": platform.system(),
        "cores": cores(),
        "threads": torch.get_num_threads(),
        "memory_gb": _memory_gb(),
        "copy_gb_per_s": round(copy_bandwidth(), 1),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": _version("transformers"),
        "llama_cpp_python": _version("llama-cpp-python"),
        "forerun": _version("forerun"),
        "commit": _commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def peak_memory() -> dict[str, float | None]:
    """The most memory this process has held, in megabytes, and the most that was allocated on a GPU."""
    try:
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        held: float | None = round(peak / (1 << 20 if platform.system() == "Darwin" else 1 << 10), 1)
    except ImportError:
        held = None
    on_gpu = torch.cuda.max_memory_allocated() / (1 << 20) if torch.cuda.is_available() else None
    return {"process_mb": held, "device_mb": None if on_gpu is None else round(on_gpu, 1)}


def weight_bytes(target: Target) -> int | None:
    """Bytes of weights that a pass over one node reads, where the target or its configuration says so."""
    if isinstance(target, NativeDecoder):
        return target.weight_bytes
    if isinstance(target, CudaDecoder) and target.config.moe is None:
        model = target.model
        weights = [weight for layer in model.layers for weight in layer.weights]
        weights += [model.head] if model.inputs is None else [model.head, model.inputs.projection]
        return sum(weight.nbytes for weight in weights)
    shared = target.shared()
    if shared is None or shared.config is None or shared.config.special is not None:
        return None
    config = shared.config
    attention = config.width * config.head_dim * 2 * (config.heads + config.kv_heads)
    moe = config.moe
    inner = config.inner if moe is None else moe.per_token * moe.inner + (moe.shared_inner or 0)
    numbers = config.layers * (attention + 3 * config.width * inner) + config.vocab_size * config.width
    return int(numbers * torch.empty((), dtype=shared.dtype).element_size())


def _cpu_model() -> str:
    """The name the kernel gives the CPU; on ARM it gives part numbers only."""
    facts: dict[str, str] = {}
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            key, found, value = line.partition(":")
            if found:
                facts.setdefault(key.strip().lower(), value.strip())
    except OSError:
        return platform.processor() or platform.machine()
    if name := facts.get("model name") or facts.get("hardware"):
        return name
    part = [facts[key] for key in ("cpu implementer", "cpu part") if key in facts]
    return " ".join([platform.machine(), *part])


def _memory_gb() -> float | None:
    try:
        return round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 1e9, 1)
    except (AttributeError, OSError, ValueError):
        return None


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _commit() -> str | None:
    """The commit this source is at, with a plus sign when files differ from it; None outside a checkout."""
    folder = Path(__file__).parent

    def git(*words: str) -> str:
        done = subprocess.run(["git", "-C", str(folder), *words], capture_output=True, text=True, timeout=10)
        return done.stdout.strip() if done.returncode == 0 else ""

    try:
        commit = git("rev-parse", "--short", "HEAD")
        return f"{commit}+" if commit and git("status", "--porcelain") else commit or None
    except (OSError, subprocess.SubprocessError):
        return None


def copy_bandwidth(repeats: int = 5) -> float:
    """GB/s of a large copy, read and written bytes counted."""
    source = torch.ones(SIZE // 4)
    into = torch.empty_like(source)
    return rate(lambda: into.copy_(source), 2 * SIZE, repeats)


def rate(work: Callable[[], object], size: int, repeats: int) -> float:
    """GB/s of some work on so many bytes: the best of a few, since noise only slows."""
    fastest = float("inf")
    for _ in range(repeats + 1):  # the first one maps the pages
        started = perf_counter()
        work()
        fastest = min(fastest, perf_counter() - started)
    return size / fastest / 1e9
