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
        found = tl.load(inverses + m, cache_modifier=".cg")
    else:
        pieces = tl.load(squares + m * square_stride + tl.arange(0, PIECES), cache_modifier=".cg")
        found = tl.rsqrt(tl.sum(pieces, 0).to(tl.float32) / WIDTH + eps)
    return found


@triton.jit
def _window(links, inverses, squares, square_stride, eps, m, K: tl.constexpr, UP: tl.constexpr, WIDTH: tl.constexpr,
            PIECES: tl.constexpr):  # fmt: skip
    """Of the K inputs that row m is convolved with: which they are, as `_above` says it, and the factors of rows."""
    t = tl.arange(0, UP)
    row, beyond = m + t * 0, t * 0
    for step in tl.static_range(K - 1):
        moves = t < K - 1 - step
        row = tl.where(moves & (row >= 0), tl.load(links + tl.maximum(row, 0)), row)
        beyond += (moves & (row < 0)).to(tl.int32)
    at = tl.maximum(row, 0)
    if PIECES == 0:
        factor = tl.load(inverses + at, cache_modifier=".cg")
    else:
        places = squares + at[:, None] * square_stride + tl.arange(0, PIECES)[None, :]
        factor = tl.rsqrt(tl.sum(tl.load(places, cache_modifier=".cg"), 1).to(tl.float32) / WIDTH + eps)
    return row, beyond, factor


@triton.jit
def _inputs(parts, stride, joined, own, place_stride, row, beyond, factor, c, inside, N: tl.constexpr, C: tl.constexpr,
            BLOCK: tl.constexpr, K: tl.constexpr, UP: tl.constexpr, PARTS: tl.constexpr,
            GATED: tl.constexpr):  # fmt: skip
    """[UP, BLOCK] channels c of what `_window` found: the first C of N sums of a row; GATED: times the last C of them.

    `own`: a layer's inputs in place 0. All is loaded before anything is stored, which later loads would wait for.
    """
    zeros, t = tl.zeros((UP, BLOCK), dtype=tl.float32), tl.arange(0, UP)
    there = inside[None, :] & (t < K)[:, None]
    here = there & (row >= 0)[:, None]
    place = tl.maximum(row, 0).to(tl.int64)[:, None] * N + c[None, :]
    given = _added_up(parts, place, here, stride, zeros, PARTS) * factor[:, None]
    if GATED:
        given = given * (_added_up(parts, place + 2 * C, here, stride, zeros, PARTS) * factor[:, None])
    back = (-1 - tl.minimum(row, -1)).to(tl.int64) * place_stride + tl.maximum(K - 1 - beyond, 0) * C
    kept = tl.load(own + back[:, None] + c[None, :], mask=there & (row < 0)[:, None], other=0.0)
    return tl.where((row >= 0)[:, None], given.to(joined.dtype.element_ty), kept)


@triton.jit
def _convolved(made, taps, bias, joined, own, into, place_stride, m, c, inside, C: tl.constexpr, BLOCK: tl.constexpr,
               K: tl.constexpr, UP: tl.constexpr, BIAS: tl.constexpr):  # fmt: skip
    """The convolution of these inputs; they go to `joined`, and to place `into`."""
    t = tl.arange(0, UP)
    there = inside[None, :] & (t < K)[:, None]
    found = made.to(tl.float32) * tl.load(taps + t[:, None] * C + c[None, :], mask=there, other=0.0)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for i in tl.static_range(K):  # in this order; that of a sum over all would follow from how threads share a block
        total += tl.sum(tl.where((t == i)[:, None], found, 0.0), 0)
    if BIAS:
        total += tl.load(bias + c, mask=inside, other=0.0)
    kept = own + into * place_stride + (t[:, None] - 1) * C + c[None, :]
    tl.store(kept, made, mask=there & (t > 0)[:, None] & (into >= 0))
    line = joined + m.to(tl.int64) * C + t[:, None] * 0 + c[None, :]
    tl.store(line, made, mask=there & (t == K - 1)[:, None])
    return total


@triton.jit(do_not_specialize=["APART", "layer"])
def short_conv(parts, inverses, squares, links, taps, bias, joined, states, out, APART, eps, square_stride, room,
               place_stride, layer, C: tl.constexpr, BLOCK: tl.constexpr, K: tl.constexpr, UP: tl.constexpr,
               WIDTH: tl.constexpr, PIECES: tl.constexpr, PARTS: tl.constexpr, BIAS: tl.constexpr,
               PDL: tl.constexpr):  # fmt: skip
    """Some channels of one row of LFM2's convolution between two gates, along the row's own path.

    `parts` [PARTS, APART, 3 C]; `links` [.., room] parents and where states go (models/cuda/states.py); `taps` [K, C];
    `joined` [rows, C] of this layer; `states` [places, R, K - 1, C]; `out` [rows, C].
    """
    m, c = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside, stride = c < C, APART.to(tl.int64) * (3 * C)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    into = tl.load(links + room + m).to(tl.int64)
    own = states + layer.to(tl.int64) * ((K - 1) * C)
    row, beyond, factors = _window(links, inverses, squares, square_stride, eps, m, K, UP, WIDTH, PIECES)
    made = _inputs(parts, stride, joined, own, place_stride, row, beyond, factors, c, inside, 3 * C, C, BLOCK, K, UP,
                   PARTS, True)  # fmt: skip
    total = _convolved(made, taps, bias, joined, own, into, place_stride, m, c, inside, C, BLOCK, K, UP, BIAS)
    factor = _factor(inverses, squares, m, square_stride, eps, WIDTH, PIECES)
    zeros = tl.zeros((BLOCK,), dtype=tl.float32)
    behind = _added_up(parts, m.to(tl.int64) * (3 * C) + C + c, inside, stride, zeros, PARTS) * factor
    tl.store(out + m.to(tl.int64) * C + c, (behind * total).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _silu(x, joined):
    """Of what a convolution gives, rounded as rows are before and behind it."""
    x = x.to(joined.dtype.element_ty).to(tl.float32)
    return (x / (1.0 + tl.exp(-x))).to(joined.dtype.element_ty).to(tl.float32)


@triton.jit
def _softplus(x):
    return tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))))


@triton.jit(do_not_specialize=["APART", "layer"])
def prepare(parts, inverses, squares, links, taps, bias, joined, states, rates, step_bias, out, APART, eps,
            square_stride, room, place_stride, layer, wide, least, N: tl.constexpr, C: tl.constexpr,
            HEADS: tl.constexpr, SHARED: tl.constexpr, IN_TURNS: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr,
            KEYS_UP: tl.constexpr, VALUES_UP: tl.constexpr, DELTA: tl.constexpr, K: tl.constexpr, UP: tl.constexpr,
            WIDTH: tl.constexpr, PIECES: tl.constexpr, PARTS: tl.constexpr, BIAS: tl.constexpr,
            PDL: tl.constexpr):  # fmt: skip
    """What one head of one row reads and writes, as mixers.Memory lays it out: `out` [rows, wide] of this layer.

    SHARED heads of keys and queries, the first ones of what is convolved (DELTA) or the last (Mamba-2).
    """
    m, head = tl.program_id(0), tl.program_id(1)
    key, value = tl.arange(0, KEYS_UP), tl.arange(0, VALUES_UP)
    there, here, stride = key < KEYS, value < VALUES, APART.to(tl.int64) * N
    rate, own_bias = tl.load(rates + head), tl.load(step_bias + head)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    into = tl.load(links + room + m).to(tl.int64)
    source = head % SHARED if IN_TURNS else head // (HEADS // SHARED)
    if DELTA:
        query_at, key_at, value_at = source * KEYS, (SHARED + source) * KEYS, 2 * SHARED * KEYS + head * VALUES
    else:
        value_at, key_at = head * VALUES, HEADS * VALUES + source * KEYS
        query_at = key_at + SHARED * KEYS
    own = states + layer.to(tl.int64) * ((K - 1) * C)
    row, beyond, factors = _window(links, inverses, squares, square_stride, eps, m, K, UP, WIDTH, PIECES)
    q, k, v = query_at + key, key_at + key, value_at + value
    asked = _inputs(parts, stride, joined, own, place_stride, row, beyond, factors, q, there, N, C, KEYS_UP, K, UP,
                    PARTS, False)  # fmt: skip
    under = _inputs(parts, stride, joined, own, place_stride, row, beyond, factors, k, there, N, C, KEYS_UP, K, UP,
                    PARTS, False)  # fmt: skip
    said = _inputs(parts, stride, joined, own, place_stride, row, beyond, factors, v, here, N, C, VALUES_UP, K, UP,
                   PARTS, False)  # fmt: skip
    factor = _factor(inverses, squares, m, square_stride, eps, WIDTH, PIECES)
    steps = parts + m.to(tl.int64) * N + C + HEADS * VALUES + head
    step, last = 0.0, 0.0
    for i in tl.static_range(PARTS):
        step += tl.load(steps + i * stride, cache_modifier=".cg")
        if DELTA:
            last += tl.load(steps + i * stride + HEADS, cache_modifier=".cg")
    step, last = (step * factor).to(joined.dtype.element_ty).to(tl.float32), (last * factor).to(joined.dtype.element_ty)
    asked = _convolved(asked, taps, bias, joined, own, into, place_stride, m, q, there, C, KEYS_UP, K, UP, BIAS)
    under = _convolved(under, taps, bias, joined, own, into, place_stride, m, k, there, C, KEYS_UP, K, UP, BIAS)
    said = _convolved(said, taps, bias, joined, own, into, place_stride, m, v, here, C, VALUES_UP, K, UP, BIAS)
    asked, under, said = _silu(asked, joined), _silu(under, joined), _silu(said, joined)
    if DELTA:
        asked = asked * tl.rsqrt(tl.sum(asked * asked, 0) + 1e-6) * (KEYS**-0.5)
        under = under * tl.rsqrt(tl.sum(under * under, 0) + 1e-6)
        strength = (1.0 / (1.0 + tl.exp(-step))).to(joined.dtype.element_ty).to(tl.float32)
        left = tl.exp(rate * _softplus(last.to(tl.float32) + own_bias))
    else:
        strength = tl.maximum(_softplus(step + own_bias), least)
        left = tl.exp(strength * rate)
    line = out + m.to(tl.int64) * wide
    tl.store(line + head * KEYS + key, asked, mask=there)
    tl.store(line + (HEADS + head) * KEYS + key, under, mask=there)
    tl.store(line + 2 * HEADS * KEYS + head * VALUES + value, said, mask=here)
    tl.store(line + HEADS * (2 * KEYS + VALUES) + head, strength)
    tl.store(line + HEADS * (2 * KEYS + VALUES + 1) + head, left)


@triton.jit
def _top(parents, row):
    """The first row of a path, and how many rows it has."""
    count, above = row * 0 + 1, tl.load(parents + row)
    while above >= 0:
        row, count = above, count + 1
        above = tl.load(parents + above)
    return row, count


@triton.jit(do_not_specialize=["entries", "layer", "layer_stride", "place_stride", "commits"])
def walk(prepared, found, states, skip, parents, walks, rows, keeps, entries, layer, layer_stride, place_stride, wide,
         commits, HEADS: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, ROWS: tl.constexpr,
         DELTA: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """Some columns of one head's memory along the rows of a chain, or along one row's own path.

    In a pass: an entry is a row, `walks` says what it has to do, `keeps` where the memory behind each row goes; what it
    finds goes to `found` [rows, HEADS VALUES]. Afterwards (`commits`): of all layers, memories behind `rows` alone, to
    the places `keeps`. One compiled form for both: a memory has the same bits whoever walks. `states` [places, R, ..].
    """
    entry, head = tl.program_id(0) % entries, tl.program_id(1)
    layer += tl.program_id(0) // entries
    column, key = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, ROWS)
    there, here = key < KEYS, column < VALUES
    inside = there[:, None] & here[None, :]
    at = layer.to(tl.int64) * (HEADS * KEYS * VALUES) + (head * KEYS + key)[:, None] * VALUES + column[None, :]
    skipped = tl.load(skip + head)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    first = tl.load(rows + entry)
    chain = tl.load(walks + first)
    if commits > 0:
        chain = tl.minimum(tl.load(keeps + entry), 0)  # its own path, or nothing
    if chain >= 0:
        top, count = first, chain
        if chain == 0:
            top, count = _top(parents, first)
        place = (-1 - tl.load(parents + top)).to(tl.int64)
        memory = tl.load(states + place * place_stride + at, mask=inside, other=0.0)
        for i in range(count):
            row = first + i
            if chain == 0:
                row = first
                for _ in range(count - 1 - i):
                    row = tl.load(parents + row)
            line = prepared + layer.to(tl.int64) * layer_stride + row.to(tl.int64) * wide
            query = tl.load(line + head * KEYS + key, mask=there, other=0.0)
            under = tl.load(line + (HEADS + head) * KEYS + key, mask=there, other=0.0)
            value = tl.load(line + 2 * HEADS * KEYS + head * VALUES + column, mask=here, other=0.0)
            strength = tl.load(line + HEADS * (2 * KEYS + VALUES) + head)
            left = tl.load(line + HEADS * (2 * KEYS + VALUES + 1) + head)
            memory = memory * left
            written = value
            if DELTA:
                written = value - tl.sum(under[:, None] * memory, 0)
            memory = memory + under[:, None] * (written * strength)[None, :]
            read = tl.sum(query[:, None] * memory, 0)
            if not DELTA:
                read = read + skipped * value
            ends = (chain > 0) | (i == count - 1)
            to = found + row.to(tl.int64) * (HEADS * VALUES) + head * VALUES + column
            tl.store(to, read, mask=here & ends & (commits == 0))
            into = tl.load(keeps + tl.where(commits > 0, entry, row)).to(tl.int64)
            tl.store(states + into * place_stride + at, memory, mask=inside & ends & (into >= 0))


@triton.jit(do_not_specialize=["APART"])
def finish_memory(parts, inverses, squares, found, norm, out, APART, eps, square_stride, N: tl.constexpr,
                  C: tl.constexpr, TOTAL: tl.constexpr, SIZE: tl.constexpr, UP: tl.constexpr, DELTA: tl.constexpr,
                  WIDTH: tl.constexpr, PIECES: tl.constexpr, PARTS: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """A group of SIZE of the TOTAL numbers that a row found: normed and gated, or gated and normed (Mamba-2)."""
    m, group, n = tl.program_id(0), tl.program_id(1), tl.arange(0, UP)
    inside, stride = n < SIZE, APART.to(tl.int64) * N
    place = group * SIZE + n
    weight = tl.load(norm + (n if DELTA else place), mask=inside, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    factor = _factor(inverses, squares, m, square_stride, eps, WIDTH, PIECES)
    zeros = tl.zeros((UP,), dtype=tl.float32)
    gate = _added_up(parts, m.to(tl.int64) * N + C + place, inside, stride, zeros, PARTS) * factor
    gate = gate.to(out.dtype.element_ty).to(tl.float32)
    gate = gate / (1.0 + tl.exp(-gate))
    row = tl.load(found + m.to(tl.int64) * TOTAL + place, mask=inside, other=0.0, cache_modifier=".cg")
    row = row.to(out.dtype.element_ty).to(tl.float32)
    if not DELTA:
        row = row * gate
    row = row * tl.rsqrt(tl.sum(row * row, 0) / SIZE + eps)
    row = (row.to(out.dtype.element_ty).to(tl.float32) * weight).to(out.dtype.element_ty).to(tl.float32)
    if DELTA:
        row = row * gate
    tl.store(out + m.to(tl.int64) * TOTAL + place, row.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["APART"])
def open_found(parts, inverses, squares, out, APART, eps, square_stride, N: tl.constexpr, BLOCK: tl.constexpr,
               WIDTH: tl.constexpr, PIECES: tl.constexpr, PARTS: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """What attention found, times the sigmoid of its gate, in place."""
    m, n = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside, place = n < N, m.to(tl.int64) * N + n
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    factor = _factor(inverses, squares, m, square_stride, eps, WIDTH, PIECES)
    zeros = tl.zeros((BLOCK,), dtype=tl.float32)
    gate = _added_up(parts, place, inside, APART.to(tl.int64) * N, zeros, PARTS) * factor
    gate = 1.0 / (1.0 + tl.exp(-gate.to(out.dtype.element_ty).to(tl.float32)))
    row = tl.load(out + place, mask=inside, other=0.0, cache_modifier=".cg").to(tl.float32)
    tl.store(out + place, (row * gate.to(out.dtype.element_ty).to(tl.float32)).to(out.dtype.element_ty), mask=inside)


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
