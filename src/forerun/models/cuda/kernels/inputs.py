"""Triton: inputs of layers (Gemma 4), which a token has beside its embedding: how they are made, and how they gate.

The products around them leave the parts of their splits in memory, as those in front of kernels/rows.py.
"""

# mypy: ignore-errors
# The bodies are Triton's language, not Python: types and operators mean something else there.

import triton
import triton.language as tl

from forerun.models.cuda.kernels.linear import open_gate
from forerun.models.cuda.kernels.rows import inverse_root


@triton.jit
def _added_up(parts, place, inside, stride, COLUMNS: tl.constexpr, PARTS: tl.constexpr):
    total = tl.zeros((COLUMNS,), dtype=tl.float32)
    for i in tl.static_range(PARTS):
        total += tl.load(parts + i * stride + place, mask=inside, other=0.0, cache_modifier=".cg")
    return total


@triton.jit(do_not_specialize=["APART"])
def make(parts, tokens, table, norm, out, APART, eps, share, scale, P: tl.constexpr, UP: tl.constexpr,
         LAYERS: tl.constexpr, PARTS: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """One row's input of one layer: its share of the product, normed, and the token's own numbers times `scale`."""
    m, layer = tl.program_id(0), tl.program_id(1)
    n = tl.arange(0, UP)
    inside, column = n < P, layer * P + n
    token = tl.load(tokens + m).to(tl.int64)
    own = tl.load(table + token * (LAYERS * P) + column, mask=inside, other=0.0)
    weight = tl.load(norm + n, mask=inside, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    place = m.to(tl.int64) * (LAYERS * P) + column
    made = _added_up(parts, place, inside, APART.to(tl.int64) * (LAYERS * P), UP, PARTS) * share
    made = made * inverse_root(made, P, UP, eps) * weight
    own = (own.to(tl.float32) * scale).to(table.dtype.element_ty).to(tl.float32)  # in the table's type
    tl.store(out + place, (made + own) * 0.7071067811865476, mask=inside)


@triton.jit(do_not_specialize=["APART", "layer"])
def gate(parts, inputs, out, APART, layer, P: tl.constexpr, UP: tl.constexpr, LAYERS: tl.constexpr,
         PARTS: tl.constexpr, GELU: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """One row's input of a layer times the opened sums of a product."""
    m = tl.program_id(0)
    n = tl.arange(0, UP)
    inside = n < P
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    sums = _added_up(parts, m * P + n, inside, APART.to(tl.int64) * P, UP, PARTS)
    own = tl.load(inputs + m.to(tl.int64) * (LAYERS * P) + layer * P + n, mask=inside, other=0.0, cache_modifier=".cg")
    tl.store(out + m * P + n, open_gate(sums, own, GELU).to(out.dtype.element_ty), mask=inside)
