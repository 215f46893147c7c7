"""How the programs of attention share the work of a pass (kernels_attention.py).

Groups of nodes attend to splits of their contexts. Where there are few groups, several programs share the splits of
each; what they find goes through memory, and another kernel adds it up. Where there are many groups, one program takes
all splits of a group and adds them up itself, in the same order: the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass

from forerun.models.cuda.plan import Size

ATTENDING, FEWEST = 32, 4  # programs to a multiprocessor, about; to a group and head, at least
SHORT_SPLITS = 20  # up to here splits of the context have no more than 256 positions
FULL_NODES = 16  # of a group of a prompt, mostly
MOST_ROOTS = 256  # rows up to which a pass with as many groups is more likely one of lone roots than of trees
WIDEST = 128  # of a head whose programs have registers and shared memory for more than one step


@dataclass(frozen=True, slots=True)
class Sharing:
    """How many programs there are, which groups have just one, and how those are compiled."""

    programs: int  # to a group that is not lone and a key-value head
    # a group with all splits of its nodes, and no more than so many, has one program; 0: none has
    walked: int
    stages: int  # steps that are on their way at once
    registers: int | None = None  # of a thread, at most
    narrow: bool = False  # are there programs of few rows for groups of few queries?


def sharing_for(size: Size, heads: int, head_dim: int, processors: int, hopper: bool = True) -> Sharing:
    """For passes of this size over so many key-value heads. Other GPUs than Hopper's were not measured."""
    few = 2 * size.shared * heads < 3 * processors  # so few groups that a program each would leave some idle
    if few or head_dim > WIDEST or not hopper or _may_branch(size):
        return shared_out(size, heads, head_dim, processors)
    if size.rows < 8 * size.groups:
        return Sharing(
            min(FEWEST, programs_for(size, heads, processors)), SHORT_SPLITS, stages=2, narrow=True
        )
    # no other passes than those over prompts have so few groups: two programs to a multiprocessor, however long
    if size.splits <= SHORT_SPLITS or size.rows * heads >= 2 * FULL_NODES * processors:
        return Sharing(1, size.splits, stages=3, narrow=True)
    return Sharing(programs_for(size, heads, processors), SHORT_SPLITS, stages=3, narrow=True)


def _may_branch(size: Size) -> bool:
    """Is this a size of passes over trees that branch, mostly? Few of their groups have all splits of their nodes."""
    return size.lone > 0 or size.groups >= (1 if size.rows > MOST_ROOTS else 2) * size.rows


def shared_out(size: Size, heads: int, head_dim: int, processors: int) -> Sharing:
    """No program takes a whole group: for few groups."""
    programs, narrow = programs_for(size, heads, processors), not size.lone
    if head_dim > WIDEST:
        return Sharing(programs, 0, stages=1)
    if size.splits > SHORT_SPLITS:
        return Sharing(programs, 0, stages=3)
    many = size.attending(programs) * heads > 2 * processors
    # a program has few steps, and prefetching gains nothing; but three programs fit a multiprocessor
    return Sharing(programs, 0, stages=1, registers=168 if many else None, narrow=narrow)


def programs_for(size: Size, heads: int, processors: int) -> int:
    """Programs of attention to a group that is not lone and a key-value head: they take its splits in turn.

    One for each split, but fewer where there are many groups: programs that find nothing to do take time to start too.
    """
    return min(size.splits, max(FEWEST, ATTENDING * processors // (max(1, size.shared) * heads)))
