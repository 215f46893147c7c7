"""Triton: recurrent layers and the attention beside them, for decoders whose rows have the same bits in any company.

`scan` walks the recurrence of one head, some columns of its memory at a time: the memory stays in registers from node
to node, and is read again where a node does not follow the one before it. `attend` computes one head of one node, in
blocks of positions. Each has one compiled form whatever the pass holds, so a row's bits depend on its own path alone.
"""

# mypy: ignore-errors
# The bodies are Triton's language, not Python: types and operators mean something else there.

import triton
import triton.language as tl

from forerun.models.cuda.kernels.rows import _added_up

COLUMNS, POSITIONS = 32, 64  # of a memory in one program; of keys that are read at once


@triton.jit(do_not_specialize=["first", "nodes", "wide"])
def scan(prepared, found, start, kept, parents, slots, skip, first, nodes, wide, HEADS: tl.constexpr,
         KEYS: tl.constexpr, VALUES: tl.constexpr, ROWS: tl.constexpr, DELTA: tl.constexpr,
         BLOCK: tl.constexpr):  # fmt: skip
    """`prepared` [.., wide] as mixers.Memory lays it out, `found` [.., HEADS VALUES]: rows `first` and behind.

    `start` [HEADS, KEYS, VALUES]; memories of nodes go to `kept` [.., HEADS, KEYS, VALUES], at their number in `slots`
    (-1 = nobody asks for it; children that do not follow at once do). ROWS is KEYS, filled up to a power of two.
    """
    head, column = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tl.arange(0, ROWS)
    there, here = row < KEYS, column < VALUES
    at = (head * KEYS + row)[:, None] * VALUES + column[None, :]
    inside = there[:, None] & here[None, :]
    memory = tl.load(start + at, mask=inside, other=0.0)
    skipped = tl.load(skip + head)
    for node in range(nodes):
        parent = tl.load(parents + node)
        if parent != node - 1:
            slot = tl.load(slots + parent).to(tl.int64)
            memory = tl.load(kept + slot * (HEADS * KEYS * VALUES) + at, mask=inside, other=0.0)
        line = prepared + (first + node).to(tl.int64) * wide
        query = tl.load(line + head * KEYS + row, mask=there, other=0.0)
        key = tl.load(line + (HEADS + head) * KEYS + row, mask=there, other=0.0)
        value = tl.load(line + 2 * HEADS * KEYS + head * VALUES + column, mask=here, other=0.0)
        strength = tl.load(line + HEADS * (2 * KEYS + VALUES) + head)
        left = tl.load(line + HEADS * (2 * KEYS + VALUES + 1) + head)
        memory = memory * left
        written = value
        if DELTA:
            written = value - tl.sum(key[:, None] * memory, 0)
        memory = memory + key[:, None] * (written * strength)[None, :]
        read = tl.sum(query[:, None] * memory, 0)
        if not DELTA:
            read = read + skipped * value
        tl.store(found + (first + node).to(tl.int64) * (HEADS * VALUES) + head * VALUES + column, read, mask=here)
        slot = tl.load(slots + node).to(tl.int64)
        if slot >= 0:
            tl.store(kept + slot * (HEADS * KEYS * VALUES) + at, memory, mask=inside)
            tl.debug_barrier()  # a child may read it again


@triton.jit(do_not_specialize=["first", "depth"])
def attend(queries, data, found, places, contexts, tails, first, depth, half, stride, row, scale, HEADS: tl.constexpr,
           GROUP: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """`queries`, `found` [.., HEADS, DIM]; `data` [2, HEADS / GROUP, slots, DIM], its halves, heads and slots `half`,
    `stride` and `row` numbers apart.

    A node sees contexts[node, 0] positions, whose slots are in `places`, and then contexts[node, 1] slots in its row of
    `tails` [.., depth]. WIDE is DIM, filled up to a power of two.
    """
    node, head = tl.program_id(0), tl.program_id(1)
    column, place = tl.arange(0, WIDE), tl.arange(0, BLOCK)
    there = column < DIM
    own = ((first + node).to(tl.int64) * HEADS + head) * DIM + column
    query = tl.load(queries + own, mask=there, other=0.0).to(tl.float32) * scale
    context, tail = tl.load(contexts + 2 * node), tl.load(contexts + 2 * node + 1)
    rows = data + (head // GROUP).to(tl.int64) * stride
    most, total, acc = -float("inf"), 0.0, tl.zeros([WIDE], tl.float32)
    for begin in range(0, context + tail, BLOCK):
        position = begin + place
        seen, behind = position < context + tail, position - context
        slot = tl.load(places + position, mask=position < context, other=0)
        slot += tl.load(tails + node * depth + behind, mask=seen & (behind >= 0), other=0)
        at = slot.to(tl.int64)[:, None] * row + column[None, :]
        inside = seen[:, None] & there[None, :]
        keys = tl.load(rows + at, mask=inside, other=0.0).to(tl.float32)
        values = tl.load(rows + half + at, mask=inside, other=0.0).to(tl.float32)
        scores = tl.where(seen, tl.sum(keys * query[None, :], 1), -float("inf"))
        higher = tl.maximum(most, tl.max(scores, 0))
        weights, kept = tl.exp(scores - higher), tl.exp(most - higher)
        total = total * kept + tl.sum(weights, 0)
        acc = acc * kept + tl.sum(weights[:, None] * values, 0)
        most = higher
    tl.store(found + own, (acc / total).to(found.dtype.element_ty), mask=there)


@triton.jit
def _above(parents, row, STEPS: tl.constexpr):
    """What is STEPS above a row: a row, or below 0 a place, and how far back in its inputs (1 = the last of them)."""
    beyond = row * 0
    for _ in tl.static_range(STEPS):
        row = tl.where(row < 0, row, tl.load(parents + tl.maximum(row, 0)))
        beyond += (row < 0).to(tl.int32)
    return row, beyond


@triton.jit
def _factor(inverses, squares, m, square_stride, eps, WIDTH: tl.constexpr, PIECES: tl.constexpr):
    """Of the norm of the row that went into the first product."""
    if PIECES == 0:
        return tl.load(inverses + m, cache_modifier=".cg")
    pieces = tl.load(squares + m * square_stride + tl.arange(0, PIECES), cache_modifier=".cg")
    return tl.rsqrt(tl.sum(pieces, 0).to(tl.float32) / WIDTH + eps)


@triton.jit(do_not_specialize=["APART", "layer"])
def short_conv(parts, inverses, squares, links, taps, bias, joined, states, out, APART, eps, square_stride, room,
               place_stride, layer, C: tl.constexpr, BLOCK: tl.constexpr, K: tl.constexpr, WIDTH: tl.constexpr,
               PIECES: tl.constexpr, PARTS: tl.constexpr, BIAS: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """Some channels of one row of LFM2's convolution between two gates, along the row's own path.

    `parts` [PARTS, APART, 3 C]; `links` [.., room] parents and where states go (models/cuda/states.py); `taps` [K, C];
    `joined` [rows, C] of this layer; `states` [places, R, K - 1, C]; `out` [rows, C].
    """
    m, c = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside, stride = c < C, APART.to(tl.int64) * (3 * C)
    into = tl.load(links + room + m).to(tl.int64)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    zeros = tl.zeros((BLOCK,), dtype=tl.float32)
    total = zeros
    own = states + layer.to(tl.int64) * ((K - 1) * C) + c
    for t in tl.static_range(K):
        row, beyond = _above(links, m, K - 1 - t)
        here = inside & (row >= 0)
        at = tl.maximum(row, 0)
        factor = _factor(inverses, squares, at, square_stride, eps, WIDTH, PIECES)
        place = at.to(tl.int64) * (3 * C) + c
        before = _added_up(parts, place, here, stride, zeros, PARTS) * factor
        inner = _added_up(parts, place + 2 * C, here, stride, zeros, PARTS) * factor
        made = (before * inner).to(joined.dtype.element_ty)
        back = own + (-1 - tl.minimum(row, -1)).to(tl.int64) * place_stride + tl.maximum(K - 1 - beyond, 0) * C
        made = tl.where(row >= 0, made, tl.load(back, mask=inside & (row < 0), other=0.0))
        total += made.to(tl.float32) * tl.load(taps + t * C + c, mask=inside, other=0.0)
        if t > 0:
            tl.store(own + into * place_stride + (t - 1) * C, made, mask=inside & (into >= 0))
        if t == K - 1:
            tl.store(joined + m.to(tl.int64) * C + c, made, mask=inside)
            behind = _added_up(parts, place + C, inside, stride, zeros, PARTS) * factor
            if BIAS:
                total += tl.load(bias + c, mask=inside, other=0.0)
            tl.store(out + m.to(tl.int64) * C + c, (behind * total).to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["layer_stride"])
def keep_inputs(joined, parents, rows, places, states, layer_stride, place_stride, C: tl.constexpr,
                BLOCK: tl.constexpr, K: tl.constexpr):  # fmt: skip
    """Some channels of the inputs before what follows a row, in one layer: from `joined` [R, rows, C] to its place."""
    entry, layer = tl.program_id(0), tl.program_id(1)
    c = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    m, into = tl.load(rows + entry).to(tl.int32), tl.load(places + entry).to(tl.int64)
    own = states + layer.to(tl.int64) * ((K - 1) * C) + c
    for t in tl.static_range(1, K):
        row, beyond = _above(parents, m, K - 1 - t)
        here = (c < C) & (into >= 0)
        at = layer.to(tl.int64) * layer_stride + tl.maximum(row, 0).to(tl.int64) * C + c
        made = tl.load(joined + at, mask=here & (row >= 0), other=0.0)
        back = own + (-1 - tl.minimum(row, -1)).to(tl.int64) * place_stride + tl.maximum(K - 1 - beyond, 0) * C
        made = tl.where(row >= 0, made, tl.load(back, mask=here & (row < 0), other=0.0))
        tl.store(own + into * place_stride + (t - 1) * C, made, mask=here)
