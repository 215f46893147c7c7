"""Compile the kernels with nvcc into one file per format: python -m forerun.models.cuda.cubin.build [names]

It needs no GPU. What it makes lies in a folder named after the architecture, beside the sources.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from forerun.models.cuda.cubin.products import path_of
from forerun.models.cuda.cubin.wgmma_header import wgmma_header

HERE = Path(__file__).parent
ARCHITECTURE = "sm_90a"
_OPTIONS = ["-std=c++20", "-O3", "-fmad=false", "-cubin", "-split-compile=0", "-Xptxas", "-v"]
_FORMATS = (  # as in source/product.cuh
    "BF16", "E4M3", "INT8", "E4M3_WEIGHTS", "INT4", "INT4_ZEROS", "INT4_MINS", "INT4_K", "BYTES_K", "INT8_GROUPS",
)  # fmt: skip
FILES = {  # name: format, columns of a group
    "bf16": ("BF16", 128),
    "e4m3": ("E4M3", 128),
    "int8": ("INT8", 128),
    "e4m3_weights": ("E4M3_WEIGHTS", 128),
    "int4_128": ("INT4", 128),
    "int4_32": ("INT4", 32),
    "int4_zeros_128": ("INT4_ZEROS", 128),
    "int4_zeros_32": ("INT4_ZEROS", 32),
    "int4_mins_32": ("INT4_MINS", 32),
    "int4_k_32": ("INT4_K", 32),
    "bytes_k_16": ("BYTES_K", 16),
    "int8_groups_32": ("INT8_GROUPS", 32),
}


def compile_one(name: str, headers: Path, extra: list[str]) -> str:
    """Compile one file and return what the compiler says of registers and memory."""
    into = path_of(name)
    into.parent.mkdir(exist_ok=True)
    code = f"-gencode=arch={ARCHITECTURE.replace('sm', 'compute')},code={ARCHITECTURE}"
    given: list[str] = ["quantise.cu"]
    if name in FILES:
        kind, group = FILES[name]
        code_of = _FORMATS.index(kind)
        given = ["product.cu", f"-DKIND={kind}", f"-DKIND_CODE={code_of}", f"-DGROUPED={group}"]
    source = str(HERE / "source" / given[0])
    command = ["nvcc", *_OPTIONS, code, f"-I{HERE / 'source'}", f"-I{headers}", *given[1:], *extra, source]
    done = subprocess.run([*command, "-o", str(into)], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{name}: {done.stderr}")
    return done.stderr


def build(names: list[str], extra: list[str], jobs: int = 2) -> dict[str, str]:
    """The compiler's reports by file."""
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(jobs) as pool:
        headers = Path(folder)
        (headers / "wgmma.cuh").write_text(wgmma_header())
        return dict(zip(names, pool.map(lambda name: compile_one(name, headers, extra), names), strict=True))


if __name__ == "__main__":
    options = [option for option in sys.argv[1:] if option.startswith("-")]
    chosen = [name for name in sys.argv[1:] if not name.startswith("-")] or ["quantise", *FILES]
    for name, report in build(chosen, options).items():
        lines = [line for line in report.splitlines() if "spill" in line or "Used" in line or "arning" in line]
        print(name, *lines, sep="\n  ")  # noqa: T201
