"""How the work of a pass is cut up among programs: products of few rows, and attention.

Splits of a product depend on the weight's shape alone and never on the number of rows, because sums depend on them.

In attention, groups of nodes attend to splits of their contexts. Where there are few groups, several programs share the
splits of each; their results go through memory, and another kernel adds them up. Where there are many groups, one
program takes all splits of a group and adds them up itself, in the same order: the same bits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from forerun.models.config import DecoderConfig
from forerun.models.cuda.network import Model
from forerun.models.cuda.plan import SPLIT_SIZES, TILED_QUERIES, Size

SHARED = 104 << 10  # bytes of shared memory that one program may fill: two to a multiprocessor
ALL_SHARED = 192 << 10  # where there is one to each, on GPUs that have so much
FEW = 132  # programs: as many as an H200 has multiprocessors
MANY = 90  # programs that keep the memory busy, where each has a multiprocessor for itself
LEAST = 512  # of the depth: of a split, where there would be few programs
ATTENDING, FEWEST = 32, 4  # programs to a multiprocessor, about; to a group and head, at least
ALONE = 8  # programs of one warp to a multiprocessor, at least: fewer leave the memory idle
SHORT_SPLITS = 20  # up to here splits of the context have no more than 256 positions
FULL = 0.9  # share of the multiprocessors that have a program of a prompt: enough that no context is shared out
FEWEST_ROWS = 16  # of a program of a tiled pass
MOST_ROOTS = 256  # rows up to which a pass with as many groups is more likely one of lone roots than of trees
THINNEST = 32  # numbers of a head that eight threads read, a word each at least (kernels/few.py)
COPIED = (64, 128)  # numbers of heads that kernels/hopper/prompts.py was compiled for and timed with
WIDEST = 128  # of a head whose programs have registers and shared memory for more than one step


@dataclass(frozen=True, slots=True)
class Tile:
    """How a product is cut up."""

    outputs: int  # BN
    depth: int  # BK
    splits: int
    stages: int
    warps: int = 4


def choose_tile(outputs: int, depth: int, tile: int, whole: bool = False) -> Tile:
    """Tiles of 64 outputs keep the memory busy where weights are large; 16 give more programs where not.

    Splits along the depth make up for few tiles, to about one program per multiprocessor, which then has all of its
    shared memory. All of it was found by measuring on an H200. Where bytes are multiplied (`whole`), a step is twice as
    deep, and there are about two programs.
    """
    step = next(size for size in (128, 64, 32, 16) if depth % size == 0)
    if whole and tile == 64 and depth % 256 == 0:
        step = 256
    if tile < 64:
        splits = 2 if depth >= 12 * step and depth % (2 * step) == 0 else 1
        return Tile(tile, step, splits, depth // step // splits, 2)
    tiles, splits = outputs // tile, 1
    enough = 145 if whole else MANY
    while splits < 8 and tiles * splits < enough and depth % (splits * 2 * step) == 0:
        splits *= 2
    for size in () if whole else dict.fromkeys((step, min(step, 64))):
        if tiles * splits < FEW // 2:
            step, splits = max([(step, splits), *_finer(tiles, depth, size)], key=lambda cut: cut[1])
    return Tile(tile, step, splits, 4)


def _finer(tiles: int, depth: int, step: int) -> list[tuple[int, int]]:
    """Steps and splits, also of numbers that are no power of two, which make about one program per multiprocessor."""
    counts = [count for count in range(3, 9) if tiles * count <= FEW and depth % (count * step) == 0]
    return [(step, count) for count in counts if depth // count >= LEAST]


def stages_of(tile: Tile, depth: int, stage: int, alone: int, deep: int) -> int:
    """Steps of a product that are fetched at once: `deep`, as far as two programs fit a multiprocessor.

    Where there is no more than one program to each, it may have `alone` bytes (0 = there are more), and needs them: its
    own reads are all that keeps the memory busy. `stage`: bytes of one step.
    """
    if alone > SHARED:
        deep = max(deep, depth // tile.depth // tile.splits)
    return max(2, min(deep, max(alone, SHARED) // stage))


def outputs_per_tile(model: Model) -> int:
    """One width of tile for all products of a model, because norms are handed on tile by tile."""
    config = model.config
    inner = config.inner  # 0 where every layer has experts, and the files say no other size
    if not inner and config.moe is not None:
        inner = config.moe.per_token * config.moe.inner
    most = 64 if config.width * inner >= 1 << 22 else 16
    sizes = {config.width, config.varied.input_width if config.varied is not None else 0}
    for layer in range(config.layers):
        kv_heads, dim = config.kv_sizes(layer)
        sizes |= {2 * config.inner_of(layer), kv_heads * dim, config.heads * dim}
    return math.gcd(most, *sizes)


def rows_per_tile(rows: int, whole: bool = False) -> int:
    """The width of a product: it changes its speed, not its result. Rows of two bytes count twice."""
    sizes = (8, 16, 32, 64) if whole else (16, 32, 64, 128)
    return next((size for size in sizes if rows <= size), sizes[-1])


def power_of_two(value: int) -> int:
    return 1 << max(0, value - 1).bit_length()


@dataclass(frozen=True, slots=True)
class Sharing:
    """How many programs there are, which groups have just one, and how those are compiled."""

    programs: int  # to a group that is not lone and a key-value head
    # a group with all splits of its nodes, and no more than this number, has one program; 0: none has
    walked: int
    stages: int  # steps that are on their way at once
    registers: int | None = None  # of a thread, at most
    narrow: bool = False  # are there programs of few rows for groups of few queries?
    rows: int = 64  # queries of a program of a tiled pass; groups of more are read in parts
    warps: int = 4  # 1: of those that read numbers of 8 bits by themselves (kernels/few.py)
    spread: bool = False  # are keys and values of 8 bits written as numbers of 16 before large groups read them?
    copied: bool = False  # may Hopper's copy engine fetch what whole groups see (kernels/hopper/prompts.py)?


def sharing_for(size: Size, each: int, heads: int, head_dim: int, processors: int, hopper: bool = True) -> Sharing:
    """For passes of this size over `heads` key-value heads of `each` queries. Hopper alone was measured."""
    few = 2 * size.shared * heads < 3 * processors  # so few groups that a program each would leave some idle
    if few or head_dim > WIDEST or not hopper or _may_branch(size):
        return shared_out(size, heads, head_dim, processors)
    if size.rows < 8 * size.groups:
        return Sharing(min(FEWEST, programs_for(size, heads, processors)), SHORT_SPLITS, stages=2, narrow=True)
    # no other passes than those over prompts have so few groups: two programs to a multiprocessor, however long
    if size.splits <= SHORT_SPLITS or _fills(size, each, heads, processors):
        return Sharing(1, size.splits, stages=3, narrow=True)
    return Sharing(programs_for(size, heads, processors), SHORT_SPLITS, stages=3, narrow=True)


def _fills(size: Size, each: int, heads: int, processors: int) -> bool:
    """Do programs of full groups, one to a group and head, fill a GPU?"""
    return size.rows * each * heads >= FULL * processors * TILED_QUERIES


def _may_branch(size: Size) -> bool:
    """Is this a size of passes over trees that branch, mostly? Few of their groups have all splits of their nodes."""
    return size.lone > 0 or size.groups >= (1 if size.rows > MOST_ROOTS else 2) * size.rows


def shared_out(size: Size, heads: int, head_dim: int, processors: int) -> Sharing:
    """No program takes a whole group: for few groups."""
    programs, narrow = programs_for(size, heads, processors), not size.lone
    if head_dim > WIDEST:
        return Sharing(programs, 0, stages=1, warps=4 if head_dim <= 2 * WIDEST else 8)
    if size.splits > SHORT_SPLITS:
        return Sharing(programs, 0, stages=3)
    many = size.attending(programs) * heads > 2 * processors
    # a program has few steps, and prefetching gains nothing; but three programs fit a multiprocessor
    return Sharing(programs, 0, stages=1, registers=168 if many else None, narrow=narrow)


def tiled_sharing(
    size: Size, each: int, heads: int, head_dim: int, processors: int, hopper: bool = True, kept_in_bytes: bool = False
) -> Sharing:
    """For tiled passes over `heads` key-value heads of `each` queries; keys and values may be kept in 8 bits."""
    rows = _rows_for(size, each, head_dim)
    queries, programs = each * -(-size.rows // max(1, size.shared)), programs_for(size, heads, processors)
    many = programs * size.shared * heads >= ALONE * processors
    if kept_in_bytes and THINNEST <= head_dim <= WIDEST and queries <= FEWEST_ROWS and many:
        return Sharing(programs, 0, stages=1, rows=8 if queries <= 8 else FEWEST_ROWS, warps=1)
    warps = 8 if rows == TILED_QUERIES or rows * head_dim >= 1 << 14 else 4
    full = _fills(size, each, heads, processors)
    few = 2 * size.shared * heads < 3 * processors and not full
    if few or head_dim > WIDEST or not hopper or size.lone or size.rows < 8 * size.shared:
        stages = 1 if head_dim > WIDEST else 4 if rows == FEWEST_ROWS else 3
        # what is asked for ahead lies in registers then: three programs to a multiprocessor have as many of them
        most = 168 if kept_in_bytes and stages == 4 else None
        return Sharing(programs, 0, stages, most, rows=rows, warps=warps)
    # no other passes than those over prompts have so few groups: one program to a multiprocessor, however long
    how = Sharing(1, size.splits, stages=3, narrow=True, rows=rows, warps=warps)
    if full:
        return replace(how, spread=kept_in_bytes, copied=not kept_in_bytes and head_dim in COPIED)
    return replace(how, programs=programs, walked=SHORT_SPLITS)


def copies_prompts(rows: int, config: DecoderConfig, kv: Tensor) -> bool:
    """Does kernels/hopper/prompts.py attend in a tiled pass over so many rows of prompts, in every layer?"""
    special = config.latent or config.varied or config.attention_softcap or any(config.windows)
    if special or kv.dtype != torch.bfloat16 or not kv.is_cuda or torch.cuda.get_device_capability(kv.device)[0] != 9:
        return False
    processors = torch.cuda.get_device_properties(kv.device).multi_processor_count
    size, each = Size(rows, rows // 8, SPLIT_SIZES[1], tiled=True), power_of_two(config.heads // config.kv_heads)
    return tiled_sharing(size, each, config.kv_heads, config.head_dim, processors).copied


def _rows_for(size: Size, each: int, head_dim: int) -> int:
    """Queries of a program: those of a group, mostly; few where the pass has few. Groups of prompts are full."""
    nodes = -(-size.rows // max(1, size.shared))
    if each * size.rows <= FEWEST_ROWS:
        return FEWEST_ROWS
    full = each * nodes > 64 or (nodes >= 8 and each * size.rows > 64 and not size.lone)
    return TILED_QUERIES if full and head_dim <= WIDEST else 64


def programs_for(size: Size, heads: int, processors: int) -> int:
    """Programs of attention to a group that is not lone and a key-value head: they take its splits in turn.

    One for each split, but fewer where there are many groups: programs that find nothing to do take time to start too.
    """
    return min(size.splits, max(FEWEST, ATTENDING * processors // (max(1, size.shared) * heads)))
