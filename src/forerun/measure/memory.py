"""Resident memory of a model, measured in a process of its own.

The process notes what it holds when torch is imported, when our own modules are, when the model is loaded as a
user loads it, and when a text has been written. Only such differences say what the model costs: in the process of
a benchmark the weights of all contenders are resident too.
"""

from __future__ import annotations

import os
import platform
from pathlib import Path

from forerun.core.errors import InvalidInput
from forerun.measure.bench.alternate import ContenderLost
from forerun.measure.peers.process import PeerProcess

PROMPT = "Write a short story about a lighthouse keeper who finds a letter in a bottle, and what it says."
TOKENS = 64  # written before the last reading


def resident(model: str, dtype: str, threads: int | None = None) -> dict[str, float]:
    """Megabytes of a fresh process that loads a model and writes a text; see `read_stages`."""
    asked = {"model": model, "dtype": dtype, "threads": threads}
    try:
        with PeerProcess() as process:
            found: dict[str, float] = process.call("forerun.measure.memory:read_stages", **asked)
    except (InvalidInput, ContenderLost) as error:
        raise InvalidInput(f"memory of {model!r} as {dtype} could not be measured: {error}") from None
    return found


def read_stages(model: str, dtype: str, threads: int | None = None) -> dict[str, float]:
    """Load and write, and return what was resident at each stage, in megabytes.

    `above_torch_mb` is what counts: everything beyond the interpreter and torch. `model_mb` is the part of it that
    is not code: weights, caches and what loading them left behind.
    """
    import torch

    torch.ones(8) @ torch.ones(8)  # torch sets up its threads and its arithmetic when first used
    torch_alone = held()
    import transformers.utils  # noqa: F401  # what the tokenizer and the templates bring in

    from forerun.api.llm import LLM
    from forerun.core.params import EngineConfig, SamplingParams

    imported = held()
    llm = LLM.load(model, config=EngineConfig(dtype=dtype, device="cpu", threads=threads))  # type: ignore[arg-type]
    loaded = held()
    llm.generate(PROMPT, SamplingParams(max_tokens=TOKENS))
    written = held()
    stages = {
        "torch_mb": torch_alone,
        "above_torch_mb": written - torch_alone,
        "model_mb": written - imported,
        "loaded_mb": loaded - imported,
        "peak_mb": peak(),
    }
    return {name: round(size, 1) for name, size in stages.items()}


def held() -> float:
    """Resident megabytes of this process; its peak where the system reports only that."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except OSError:
        return peak()
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def peak() -> float:
    """The most megabytes that this process has held."""
    try:  # getrusage counts the parent's pages too, from before the new program began
        lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) * 1024 / 1e6
    except (OSError, StopIteration):
        import resource

        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return most * (1 if platform.system() == "Darwin" else 1024) / 1e6
