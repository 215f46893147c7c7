"""Triton: verdicts on the device. The greedy rule for all trees of a round, and the tokens of coupled sequences.

greedy.py and sampled.py say what they compute. In torch the coupled tokens are ten operations on as many numbers as all
nodes have logits. Here logits are read twice, the noise is hashed where it is used, and nothing else of that size is
written. Every number is made as torch makes it on a GPU, by the same functions of the CUDA library and by divisions
that round correctly: ratios are equal to the bit wherever they could be the least. (Numbers too small for a normal
float become zero here; their tokens are never drawn.)
"""

# mypy: ignore-errors
# The bodies are Triton's language, not Python: types and operators mean something else there.

import triton
import triton.language as tl

from forerun.core.noise_kernel import hash32, mix

CHUNK = 4096  # logits of one program


def coupled_by_kernels(logits, positions, table, coupled: int):
    """[B, N] tokens after nodes from logits [B, N, V], positions [B, N] and settings [4, B] (see SampledTokens).

    `coupled` is the rule of sequences that share noise; others are greedy.
    """
    import torch  # not above: processes that compile kernels import this file, and start sooner without

    trees, nodes, vocab = logits.shape
    chunks, count, device = triton.cdiv(vocab, CHUNK), trees * nodes, logits.device
    peaks, leasts = (torch.empty(count, chunks, device=device) for _ in range(2))
    spots, places = (torch.empty(count, chunks, dtype=torch.int32, device=device) for _ in range(2))
    found = torch.empty(trees, nodes, dtype=torch.long, device=device)
    positions, up = positions.contiguous(), triton.next_power_of_2(chunks)
    by_library = device.type == "cuda"
    highest[(count, chunks)](logits, peaks, spots, vocab, CHUNK=CHUNK, num_warps=4)
    rarest[(count, chunks)](
        logits, peaks, positions, table, leasts, places, table.stride(0), nodes, vocab, coupled, CHUNK=CHUNK,
        C=chunks, C_UP=up, LIBRARY=by_library, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    settle[(count,)](
        peaks, spots, leasts, places, table, found, table.stride(0), nodes, coupled, C=chunks, C_UP=up, num_warps=1
    )
    return found


@triton.jit(do_not_specialize=["vocab"])
def highest(logits, peaks, spots, vocab, CHUNK: tl.constexpr):
    """The first of the highest logits of a stretch of one row."""
    row, c = tl.program_id(0), tl.program_id(1)
    n = c * CHUNK + tl.arange(0, CHUNK)
    values = tl.load(logits + row.to(tl.int64) * vocab + n, mask=n < vocab, other=float("-inf"))
    high = tl.max(values, 0)
    at = row * tl.num_programs(1) + c
    tl.store(peaks + at, high)
    tl.store(spots + at, tl.min(tl.where(values == high, n, vocab - 1), 0))


@triton.jit(do_not_specialize=["stride", "nodes", "vocab", "coupled"])
def rarest(logits, peaks, positions, table, leasts, places, stride, nodes, vocab, coupled, CHUNK: tl.constexpr,
           C: tl.constexpr, C_UP: tl.constexpr, LIBRARY: tl.constexpr):  # fmt: skip
    """The first of the least E / p of a stretch of one row; E is the noise of the position behind it."""
    row, c = tl.program_id(0), tl.program_id(1)
    b, k = row // nodes, tl.arange(0, C_UP)
    if tl.load(table + stride + b) == coupled:
        hot = tl.load(table + 2 * stride + b).to(tl.float64, bitcast=True).to(tl.float32)
        factor = tl.div_rn(1.0, hot)
        top = tl.max(tl.load(peaks + row * C + k, mask=k < C, other=float("-inf")), 0) * factor
        n = c * CHUNK + tl.arange(0, CHUNK)
        here = n < vocab
        law = tl.load(logits + row.to(tl.int64) * vocab + n, mask=here, other=float("-inf")) * factor
        key = tl.load(table + b).to(tl.uint64, bitcast=True) ^ (tl.load(positions + row).to(tl.int64) + 1).to(tl.uint64)
        key = mix(mix(key) ^ 4)  # noise.COUPLE
        low, high = (key & 0x7FFFFFFF).to(tl.uint32), (key >> 33).to(tl.uint32)
        h = hash32(hash32(n.to(tl.uint32) ^ low) ^ high) & 0x7FFFFFFF
        u = (h.to(tl.float32) + 0.5) * 4.656612873077393e-10  # 2^-31
        if LIBRARY:
            noise = -tl.extra.cuda.libdevice.log1p(-u)
            weight = tl.extra.cuda.libdevice.exp(law - top)
        else:
            noise, weight = -tl.log(1.0 - u), tl.exp(law - top)
        ratio = tl.where(here, tl.div_rn(noise, weight), float("inf"))
        least = tl.min(ratio, 0)
        tl.store(leasts + row * C + c, least)
        tl.store(places + row * C + c, tl.min(tl.where(ratio == least, n, vocab - 1), 0))


@triton.jit(do_not_specialize=["stride", "nodes", "coupled"])
def settle(peaks, spots, leasts, places, table, found, stride, nodes, coupled, C: tl.constexpr, C_UP: tl.constexpr):
    row, k = tl.program_id(0), tl.arange(0, C_UP)
    inside, at = k < C, row * C + k
    if tl.load(table + stride + row // nodes) == coupled:
        ratio = tl.load(leasts + at, mask=inside, other=float("inf"))
        first = tl.min(tl.where(inside & (ratio == tl.min(ratio, 0)), k, C - 1), 0)
        token = tl.load(places + row * C + first)
    else:
        high = tl.load(peaks + at, mask=inside, other=float("-inf"))
        first = tl.min(tl.where(inside & (high == tl.max(high, 0)), k, C - 1), 0)
        token = tl.load(spots + row * C + first)
    tl.store(found + row, token.to(tl.int64))


def walk_by_kernel(trees, ancestors, argmax, paths, accepted, bonus) -> None:
    _, count, nodes = trees.shape
    depth = paths.shape[1]
    follow[(count,)](
        trees[0], trees[1], ancestors, argmax, paths, accepted, bonus, nodes, depth,
        N_UP=1 << max(2, (nodes - 1).bit_length()), STEPS_UP=1 << max(2, depth.bit_length()), num_warps=4,
    )  # fmt: skip


@triton.jit(do_not_specialize=["N", "DEPTH"], do_not_specialize_on_alignment=["ancestors", "accepted", "bonus"])
def follow(tokens, parents, ancestors, argmax, paths, accepted, bonus, N, DEPTH,
           N_UP: tl.constexpr, STEPS_UP: tl.constexpr):  # fmt: skip
    """One tree: the deepest node that is accepted with all its ancestors, and the path to it."""
    b = tl.program_id(0)
    n, s = tl.arange(0, N_UP), tl.arange(0, STEPS_UP)
    here = n < N
    inside = here[:, None] & (s <= DEPTH)[None, :]
    first = b * N
    above_to = tl.load(ancestors + (first + n)[:, None] * (DEPTH + 1) + s[None, :], mask=inside, other=0)
    above = tl.load(parents + first + above_to, mask=inside, other=-1)
    said = tl.load(argmax + first + tl.maximum(above, 0), mask=inside, other=0)
    right = (tl.load(tokens + first + above_to, mask=inside, other=0) == said) | (above < 0)
    fits = tl.min(right.to(tl.int32), 1) > 0
    depth = tl.sum(((above_to != n[:, None]) & inside).to(tl.int32), 1)
    reach = tl.where(fits & here, depth, -1)
    length = tl.max(reach, 0)
    last = tl.min(tl.where(reach == length, n, N - 1), 0)
    step = tl.load(ancestors + (first + last) * (DEPTH + 1) + s, mask=s <= DEPTH, other=0)
    below = (s > 0) & (s <= DEPTH)
    tl.store(paths + b * DEPTH + s - 1, tl.where(s <= length, step, -1).to(tl.int64), mask=below)
    tl.store(accepted + b, length.to(tl.int64))
    tl.store(bonus + b, tl.load(argmax + first + last))
