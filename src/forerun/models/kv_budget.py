"""The memory of the KV cache: how much a setting allows, how many slots that is, and for how many sequences.

`kv_memory` is in bytes, or a share of what is free when a model is loaded. Hidden rows that heads need are kept beside
keys and values (pages.py) and come on top: a fifth at most.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch

from forerun.models.config import DecoderConfig

CPU_SHARE = 0.25  # of the memory that is free: the store grows into it as it is needed
GPU_SHARE = 0.75  # of what the weights leave: the pool is made at once
GPU_BATCHES = (128, 64, 32, 16)  # of sequences: graphs are captured for up to 128
PER_CORE, CPU_BATCH = 4, 64  # on a CPU: more per core make every text slower and hardly more tokens a second
LEAST_BATCH = 8
KV_DTYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}  # of a KV cache with scales
GPU_KINDS = {"int8": (8, 0), "fp8": (8, 9)}  # of the KV cache, and the compute capability that its kernels need
USUAL_LENGTH = 512  # tokens that the KV cache must hold for each of a batch: pages are taken as texts grow


def row_numbers(config: DecoderConfig, dtype: torch.dtype) -> int:
    """Numbers of one head's keys of one token; those of 8 bits have the four bytes of their scale beside them.

    Where layers differ in size, a row has the keys of all heads.
    """
    heads = max(heads for heads, _ in config.varied.sizes) if config.varied is not None else 1
    return config.head_dim + (4 * heads if dtype.itemsize == 1 else 0)


def slot_bytes(config: DecoderConfig, dtype: torch.dtype) -> int:
    """Keys and values of one token in all layers that have them."""
    return config.kv_parts * config.kv_layers * config.kv_heads * row_numbers(config, dtype) * dtype.itemsize


def reason_against(kv_dtype: str, device: torch.device) -> str | None:
    """Why a KV cache on this device cannot be of this kind, and what can be done; None = it can."""
    if device.type == "cpu" and kv_dtype == "fp8":
        return "kv_dtype='fp8' needs a GPU; on a CPU use kv_dtype='int8' or kv_dtype='auto'"
    if device.type == "cuda" and kv_dtype in GPU_KINDS:
        has, needs = torch.cuda.get_device_capability(device), GPU_KINDS[kv_dtype]
        if has < needs:
            said = f"kv_dtype={kv_dtype!r} needs a GPU of compute capability {needs[0]}.{needs[1]}"
            return f"{said}, and this one has {has[0]}.{has[1]}; use kv_dtype={'int8' if has >= (8, 0) else 'auto'!r}"
    return None


def allowed_bytes(kv_memory: int | float | None, device: torch.device) -> int | None:
    """Bytes that the KV cache may take; None where it cannot be known how much is free."""
    if isinstance(kv_memory, int):
        return kv_memory
    free = free_memory(device)
    share = kv_memory or (CPU_SHARE if device.type == "cpu" else GPU_SHARE)
    return None if free is None else int(share * free)


def usual_batch(device: str, slots: int | None, threads: int) -> tuple[int, str]:
    """How many sequences are decoded together where nobody says, and why; `slots` = None is as many as are needed."""
    fitting = None if slots is None else slots // USUAL_LENGTH
    if device == "cpu":
        most, why = (
            max(LEAST_BATCH, min(PER_CORE * threads, CPU_BATCH)),
            f"{PER_CORE} per CPU thread (threads: {threads})",
        )
    else:
        most, why = GPU_BATCHES[0 if slots is not None else 1], "a GPU"
    if fitting is None or fitting >= most:
        return most, why if slots is None else f"{why}, room for {slots} tokens in the KV cache"
    found = next((batch for batch in (*GPU_BATCHES, LEAST_BATCH) if batch <= fitting), LEAST_BATCH)
    return found, f"room for {slots} tokens in the KV cache, {USUAL_LENGTH} for each"


def free_memory(device: torch.device) -> int | None:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration, ValueError):
        pass
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    except (AttributeError, OSError, ValueError):
        return None
