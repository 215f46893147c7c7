"""Which models run where, as Markdown tables made from the code: by family, and by the format of the file.

Every cell is asked of the code that decides it; docs_supported.py has the single questions.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import get_args

from forerun.models.cuda.file_weights import BITS
from forerun.models.cuda.network import reason_against
from forerun.models.cuda.weights import WeightKind
from forerun.models.families import FAMILIES
from forerun.models.load.quants import LAYOUTS
from forerun.models.native.target import NativeDecoder
from forerun.train.network import is_plain
from tools import docs_supported as supported

TORCH = "torch"


def model_matrix() -> str:
    """One row per family: what computes it on a CPU and on a GPU, who drafts there, and who trains heads for it."""
    head = ("family", "files", "on a CPU", "on a GPU", "drafts on the GPU", "heads are trained by")
    return supported.table(head, ([f"`{family}`", *_places_of(family)] for family in FAMILIES))


def _places_of(family: str) -> Iterator[str]:
    config = supported._ordinary(family)
    yield "safetensors, GGUF" if FAMILIES[family].gguf else "safetensors"
    yield "C kernels" if NativeDecoder.reason_against(config) is None else TORCH
    if reason_against(config) is None:
        yield "Triton kernels, captured passes"
        yield "EAGLE heads and draft models, captured"
    else:
        parts = supported._parts_in_triton(config)
        yield TORCH if parts == supported.NO else f"torch, with {parts} in Triton"
        yield "by the host, step by step"
    yield "our own network" if is_plain(config) else "transformers"


def file_formats() -> str:
    """One row per kind of file: what it is held as."""
    packed = supported.kernel_types()
    read = [layout.name for kind, layout in LAYOUTS.items() if supported._is_read(kind)]
    own = [name for name in read if name in packed]
    other = [name for name in read if name not in packed]
    kinds = [f"`{kind}`" for kind in get_args(WeightKind) if kind not in ("plain", "file")]
    gpu = f"bfloat16; {', '.join(kinds[:-1])} or {kinds[-1]} on request"
    rows = [
        ("safetensors (a folder, or a hub id)", "float32; `bfloat16`, `q8` on request", gpu),
        (f"GGUF: {_names(own)}", "as the file has it", f"{gpu}; `gguf` keeps {_names(list(BITS))} packed (Hopper)"),
        (f"GGUF: {_names(other)}", "float32", gpu),
    ]
    return supported.table(("file", "CPU, where the C kernels run the family", "GPU"), rows)


def _names(types: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in types)
