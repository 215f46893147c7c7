"""How the programs of attention share the work of a pass (kernels_attention.py).

Groups of nodes attend to splits of their contexts. Where there are few groups, several programs share the splits of
each; what they find goes through memory, and another kernel adds it up. Where there are many groups, one program takes
all splits of a group and adds them up itself, in the same order: the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass

from forerun.models.cuda.plan import Size

ATTENDING, FEWEST = 32, 4  # programs to a multiprocessor, about; to a group and head, at least
MANY = 3  # pairs of a group and a head to a multiprocessor: enough to keep it busy with a program each
SHORT_SPLITS = 20  # up to here splits of the context have no more than 256 positions


@dataclass(frozen=True, slots=True)
class Sharing:
    """How many programs there are, which groups have just one, and how those are compiled."""

    programs: int  # to a group that is not lone and a key-value head
    walked: (
        int  # a group with all splits of its nodes, and no more than so many, has one program; 0: none has
    )
    stages: int  # steps that are on their way at once
    registers: int | None = None  # of a thread, at most
    queries: int = 64  # of a program at once: nodes times heads of a group
    warps: int = 4
    parts: bool = True  # may there be groups that leave parts to add up?


def sharing_for(size: Size, heads: int, each: int, head_dim: int, processors: int) -> Sharing:
    """For passes of this size over so many key-value heads, which serve `each` heads of queries, padding included."""
    if size.lone or size.shared * heads < MANY * processors:  # trees that branch have no whole groups
        return shared_out(size, heads, head_dim, processors)
    programs = 1 if size.splits <= SHORT_SPLITS else programs_for(size, heads, processors)
    single = size.rows <= size.groups  # nearly all groups are single nodes
    return Sharing(programs, SHORT_SPLITS, stages=3, queries=fewest_queries(each) if single else 64)


def shared_out(size: Size, heads: int, head_dim: int, processors: int) -> Sharing:
    """No program takes a whole group: for few groups."""
    programs = programs_for(size, heads, processors)
    if size.splits > SHORT_SPLITS:
        return Sharing(programs, 0, stages=3)
    many = size.attending(programs) * heads > 2 * processors and head_dim <= 128
    # a program has few steps, and prefetching gains nothing; but three programs fit a multiprocessor
    return Sharing(programs, 0, stages=1, registers=168 if many else None)


def programs_for(size: Size, heads: int, processors: int) -> int:
    """Programs of attention to a group that is not lone and a key-value head: they take its splits in turn.

    One for each split, but fewer where there are many groups: programs that find nothing to do take time to start too.
    """
    return min(size.splits, max(FEWEST, ATTENDING * processors // (max(1, size.shared) * heads)))


def fewest_queries(each: int) -> int:
    """Queries of a program for single nodes with so many heads each: tensor cores take 16 at least."""
    return max(16, each)
