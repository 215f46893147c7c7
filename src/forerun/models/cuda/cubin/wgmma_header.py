"""Write the header of tensor-core instructions: one inline assembly function per kind and number of rows."""

from __future__ import annotations

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
