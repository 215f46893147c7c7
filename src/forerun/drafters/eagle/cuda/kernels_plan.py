"""Triton: the plan of a draft in one kernel. draft_completion.py has the same in torch, and the tests compare both.

In torch these are a hundred small operations before every draft. Sizes of forms are no constants of the kernel: there
are many forms, and one would be compiled for each.
"""

# mypy: ignore-errors
# The bodies are Triton's language, not Python: types and operators mean something else there.

import triton
import triton.language as tl

from forerun.models.cuda.kernels_grown import FIELDS, PAGE, split_at, write_group


@triton.jit(
    do_not_specialize=[
        "sent_at", "last_at", "level_at", "level_size", "ancestors_at", "caught_at", "caught", "unread_rows",
        "last_rows", "level_rows", "B", "BEHIND", "WIDTH", "DEPTH", "GROUP", "STEPS",
    ]
)  # fmt: skip
def plan(ints, accepted, path, first_at, sent_at, last_at, level_at, level_size, ancestors_at, caught_at, caught,
         unread_rows, last_rows, level_rows, B, BEHIND, WIDTH, DEPTH, GROUP, STEPS, ROOM: tl.constexpr,
         BEHIND_UP: tl.constexpr, WIDTH_UP: tl.constexpr):  # fmt: skip
    """One sequence: its unread rows and the last of them, or one of its levels."""
    b, part = tl.program_id(0), tl.program_id(1)
    sent = ints + sent_at + b
    first, known, pages = tl.load(sent), tl.load(sent + B), tl.load(sent + 3 * B)
    follows = tl.load(sent + 5 * B)  # its tree in the last round; -1 = the host has read that round
    tree = tl.maximum(follows, 0)
    added = tl.where(follows < 0, known, tl.load(accepted + tree).to(tl.int32) + 1)
    fresh = tl.minimum(added, BEHIND)
    skipped = added - fresh  # of a deeper tree: read by another draft
    first += skipped
    if part == 0:
        unread = ints + sent_at + 6 * B + b * BEHIND
        _catch_up(ints, b, sent, unread, path + tree * STEPS + skipped, follows, first, fresh, pages, ints + first_at,
                  ints + last_at, unread_rows, last_rows, B, BEHIND, ROOM, BEHIND_UP)  # fmt: skip
        end, g = first + fresh, tl.arange(0, BEHIND_UP)  # unread rows of one sequence share what they see
        write_group(ints + caught_at + (b * caught + g) * FIELDS, 0, split_at(end - 1) + 1, b * BEHIND + g * GROUP,
                    tl.minimum(GROUP, BEHIND - g * GROUP), end, 0, pages, g < caught)  # fmt: skip
    else:
        level = part - 1
        ways = ancestors_at + level_rows * (level * (level + 1) // 2)
        _level(ints, b, level, first + fresh, pages, ints + level_at + level * level_size, ways, level_rows, WIDTH,
               DEPTH, GROUP, WIDTH_UP)  # fmt: skip


@triton.jit
def _catch_up(ints, b, sent, unread, path, follows, first, fresh, pages, rows, lasts, unread_rows, last_rows, B,
              BEHIND, ROOM: tl.constexpr, BEHIND_UP: tl.constexpr):  # fmt: skip
    """[tokens | positions | slots | sources] of the unread rows, pads written nowhere; then the last row."""
    s, end = tl.arange(0, BEHIND_UP), first + fresh
    here, inside = s < BEHIND, s < fresh
    given = tl.load(unread + s, mask=here, other=0)
    decided = tl.load(path + s, mask=here, other=0).to(tl.int32)
    token = tl.where(follows < 0, given, decided)
    root = tl.where(follows < 0, tl.load(sent + 4 * B), tl.sum(tl.where(s == fresh - 1, token, 0), 0))
    at = tl.where(inside, first + s, 0)
    slot = tl.load(ints + pages + at // PAGE, mask=here, other=0) * PAGE + at % PAGE
    row = rows + b * BEHIND + s
    tl.store(row, tl.where(inside, token, 0), mask=here)
    tl.store(row + unread_rows, at, mask=here)
    tl.store(row + 2 * unread_rows, tl.where(inside, slot, -1), mask=here)
    tl.store(row + 3 * unread_rows, tl.load(sent + 2 * B) + at % ROOM, mask=here)
    tl.store(lasts + b, root)
    tl.store(lasts + last_rows + b, b * BEHIND + fresh - 1)
    tl.store(lasts + 2 * last_rows + b, end - 1)
    group = lasts + 3 * last_rows + b * FIELDS
    write_group(group, 0, split_at(end - 1) + 1, b, 1, end, 0, pages, None)


@triton.jit
def _level(ints, b, level, end, pages, own, ways, level_rows, WIDTH, DEPTH, GROUP, WIDTH_UP: tl.constexpr):
    """[tokens | positions | slots | groups] of a level that starts behind `end` rows; tokens come later."""
    n = tl.arange(0, WIDTH_UP)
    here, node, place = n < WIDTH, b * WIDTH + n, end + level * WIDTH + n
    slot = tl.load(ints + pages + place // PAGE, mask=here, other=0) * PAGE + place % PAGE
    tl.store(own + node, 0, mask=here)
    tl.store(own + level_rows + node, end + level, mask=here)
    tl.store(own + 2 * level_rows + node, slot, mask=here)
    start, behind = split_at(end), split_at(end + DEPTH) + 1
    shared, branches = (WIDTH + GROUP - 1) // GROUP, WIDTH > 1
    each = shared + tl.where(branches, WIDTH, 0)
    groups = own + 3 * level_rows + (b * each + n) * FIELDS
    write_group(groups, 0, tl.where(branches, start, behind), b * WIDTH + n * GROUP,
                tl.minimum(GROUP, WIDTH - n * GROUP), end, 0, pages, n < shared)  # fmt: skip
    write_group(groups + shared * FIELDS, start, behind, node, 1, end, ways + node * (level + 1), pages,
                here & branches)  # fmt: skip
