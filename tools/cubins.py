"""Compile the GPU kernels with nvcc into one file per format: python tools/cubins.py [names]

It needs no GPU. What it makes lies in a folder named after the architecture, beside the sources. The header of
tensor-core instructions is written first: one inline assembly function per kind and number of rows.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from forerun.models.cuda.cubin import products
from forerun.models.cuda.cubin.products import FILES, path_of

HERE = Path(products.__file__).parent
ARCHITECTURE = "sm_90a"
_OPTIONS = ["-std=c++20", "-O3", "-fmad=false", "-cubin", "-split-compile=0", "-Xptxas", "-v"]
_FORMATS = (  # as in source/product.cuh
    "BF16", "E4M3", "INT8", "E4M3_WEIGHTS", "INT4", "INT4_ZEROS", "INT4_MINS", "INT4_K", "BYTES_K", "INT8_GROUPS",
)  # fmt: skip
ROWS = (8, 16, 32, 64, 128, 256)
_KINDS = {  # name: shape along K, types, weights in registers?, flags behind the types
    "wgmma_bf16_registers": (16, "bf16.bf16", True, ", 1, 1, 0"),
    "wgmma_bf16": (16, "bf16.bf16", False, ", 1, 1, 0, 0"),
    "wgmma_e4m3": (32, "e4m3.e4m3", False, ", 1, 1"),
}


def wgmma_header() -> str:
    """The functions by kind, each a template over the number of rows; `add` false starts a new sum."""
    lines = ["#pragma once", "#include <stdint.h>"]
    lines.append("// the 128-byte swizzle, groups of eight lines 1,024 bytes apart")
    whole = "return (uint64_t(0x40000040) << 32) | low;"
    lines.append(f"__device__ __forceinline__ uint64_t whole(uint32_t low) {{ {whole} }}")
    for name, (depth, types, registers, flags) in _KINDS.items():
        weights = "const uint32_t (&a)[4]" if registers else "uint32_t a"
        declared = f"float (&d)[ROWS / 2], {weights}, uint32_t rows, int add"
        lines.append(f"template <int ROWS> __device__ __forceinline__ void {name}({declared});")
        for rows in ROWS:
            count = rows // 2
            sums = ", ".join(f"%{i}" for i in range(count))
            behind = [f"%{count + i}" for i in range(6)]
            left, rest = ("{" + ", ".join(behind[:4]) + "}", behind[4:]) if registers else (behind[0], behind[1:])
            given = ['"r"(a[0])', '"r"(a[1])', '"r"(a[2])', '"r"(a[3])'] if registers else ['"l"(whole(a))']
            own = declared.replace("ROWS / 2", str(count))
            instruction = f"wgmma.mma_async.sync.aligned.m64n{rows}k{depth}.f32.{types}"
            lines += [
                f"template <> __device__ __forceinline__ void {name}<{rows}>({own}) {{",
                f'    asm volatile("{{\\n .reg .pred p;\\n setp.ne.b32 p, {rest[1]}, 0;\\n"',
                f'        "{instruction} {{{sums}}}, {left}, {rest[0]}, p{flags};\\n}}"',
                "        : " + ", ".join(f'"+f"(d[{i}])' for i in range(count)),
                "        : " + ", ".join([*given, '"l"(whole(rows))', '"r"(add)']) + ");",
                "}",
            ]  # fmt: skip
    return "\n".join(lines) + "\n"


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
        print(name, *lines, sep="\n  ")
