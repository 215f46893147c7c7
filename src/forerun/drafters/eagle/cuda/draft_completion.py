"""What a draft must know of its rows and levels, worked out on the device from what the host has sent.

One kernel does it on a GPU (kernels_plan.py), torch elsewhere. Where the last round was not read, what it decided is
taken from the device's own record of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from forerun.drafters.eagle.cuda.draft_plan import KNOWN, ROOM, DraftForm, aligned, extent_of
from forerun.models.cuda.last_round import STEPS, LastRound
from forerun.models.cuda.plan import FIELDS, MAX_ROWS, splits_at
from forerun.models.pages import PAGE


@dataclass(frozen=True, slots=True)
class Sent:
    """What the host has sent of all sequences of a draft, completed by what the last round decided.

    Of a deeper tree than this draft's the last rows count; those before them were read by another draft.
    """

    first: Tensor  # [B] int32, as all of these
    fresh: Tensor  # [B] unread rows
    ring: Tensor
    starts: Tensor  # [B] where each sequence's pages start among all integers
    tokens: Tensor  # [B, behind]
    roots: Tensor  # [B]

    @classmethod
    def of(cls, ints: Tensor, form: DraftForm, group_nodes: int, last: LastRound) -> Sent:
        count, at = form.sequences, MAX_ROWS + form.sent_at(group_nodes)
        first, known, ring, starts, root, follows = ints[at : at + KNOWN * count].view(KNOWN, count)
        given = ints[at + KNOWN * count :][: count * form.behind].view(count, form.behind)
        decided, trees = follows >= 0, follows.clamp(min=0).long()
        added = last.accepted[trees] + 1
        fresh = torch.where(decided, added.clamp(max=form.behind), known)
        skipped = torch.where(decided, added - fresh, 0)
        steps = skipped[:, None] + torch.arange(form.behind, device=ints.device)
        found = last.tokens[trees].gather(1, steps.clamp(max=STEPS - 1))
        tokens = torch.where(decided[:, None], found, given)
        roots = torch.where(decided, tokens.gather(1, (fresh - 1)[:, None])[:, 0], root)
        return cls(first + skipped.int(), fresh.int(), ring, starts, tokens, roots)

    def slots(self, ints: Tensor, positions: Tensor) -> Tensor:
        """Of positions [B, n] of every sequence."""
        return ints[self.starts[:, None] + positions // PAGE] * PAGE + positions % PAGE


def complete(
    ints: Tensor, form: DraftForm, group_nodes: int, last: LastRound, fused: bool | None = None
) -> None:
    """Work out all integers of a draft from what was sent, on the device."""
    if ints.device.type == "cuda" if fused is None else fused:
        _complete_fused(ints, form, group_nodes, last)
    else:
        _complete_plainly(ints, form, group_nodes, last)


def _complete_fused(ints: Tensor, form: DraftForm, group_nodes: int, last: LastRound) -> None:
    from forerun.drafters.eagle.cuda import kernels_plan

    size, shape = form.level(group_nodes), form.shape
    kernels_plan.plan[(form.sequences, shape.depth)](
        ints, last.accepted, last.tokens, MAX_ROWS, MAX_ROWS + form.sent_at(group_nodes), MAX_ROWS + form.last_at,
        MAX_ROWS + form.level_at(0, group_nodes), extent_of(size), MAX_ROWS + form.ancestors_at(0, group_nodes),
        MAX_ROWS + form.caught_at, form.caught(group_nodes).groups // form.sequences, aligned(form.unread),
        aligned(form.sequences), aligned(size.rows), form.sequences, form.behind, shape.width, shape.depth,
        group_nodes, STEPS, ROOM=ROOM, BEHIND_UP=1 << max(2, shape.depth.bit_length()),
        WIDTH_UP=1 << max(2, (shape.width - 1).bit_length()), num_warps=1,
    )  # fmt: skip


def _complete_plainly(ints: Tensor, form: DraftForm, group_nodes: int, last: LastRound) -> None:
    sent = Sent.of(ints, form, group_nodes, last)
    ends = sent.first + sent.fresh
    own = ints[MAX_ROWS : MAX_ROWS + form.level_at(form.shape.depth - 1, group_nodes)]
    _catch_up(ints, own, form, group_nodes, sent, ends)
    if form.shape.depth > 1:
        _levels(ints, own[form.level_at(0, group_nodes) :], form, group_nodes, sent, ends)


def _catch_up(ints: Tensor, own: Tensor, form: DraftForm, group_nodes: int, sent: Sent, ends: Tensor) -> None:
    """[tokens | positions | slots | sources] of the unread rows, pads written nowhere; then the last rows; groups."""
    count, behind, rows = form.sequences, form.behind, aligned(form.unread)
    steps = torch.arange(behind, dtype=torch.int32, device=ints.device)
    inside = steps < sent.fresh[:, None]  # [B, behind]
    at = (sent.first[:, None] + steps) * inside
    parts = own[: 4 * rows].view(4, rows)[:, : count * behind].view(4, count, behind)
    parts[0] = torch.where(inside, sent.tokens, 0)
    parts[1] = at
    parts[2] = torch.where(inside, sent.slots(ints, at), -1)
    parts[3] = sent.ring[:, None] + at % ROOM
    wide, lanes = aligned(count), torch.arange(count, dtype=torch.int32, device=ints.device)
    roots, lasts, positions = own[form.last_at :][: 3 * wide].view(3, wide)[:, :count]
    roots.copy_(sent.roots)
    lasts.copy_(lanes * behind + sent.fresh - 1)
    positions.copy_(ends - 1)
    groups = own[form.last_at + 3 * wide :][: FIELDS * count].view(count, FIELDS)
    fields = splits_at(ends - 1) + 1, lanes, torch.ones_like(lanes), ends, sent.starts
    groups.copy_(_fields((1, 2, 3, 5, 7), fields))
    caught = form.caught(group_nodes).groups
    if caught:  # rows of one sequence share what they see, up to each one's position
        low = torch.arange(0, behind, group_nodes, dtype=torch.int32, device=ints.device)
        high, length, pages = (
            part[:, None].expand(-1, len(low)) for part in (splits_at(ends - 1) + 1, ends, sent.starts)
        )
        nodes = (behind - low).clamp(max=group_nodes).expand(count, -1)
        fields = high, lanes[:, None] * behind + low, nodes, length, pages
        own[form.caught_at :][: FIELDS * caught].view(count, -1, FIELDS).copy_(
            _fields((1, 2, 3, 5, 7), fields)
        )


def _levels(ints: Tensor, own: Tensor, form: DraftForm, group_nodes: int, sent: Sent, ends: Tensor) -> None:
    """Of every level [tokens | positions | slots | groups]."""
    count, width, size = form.shape.depth - 1, form.shape.width, form.level(group_nodes)
    rows, levels = aligned(size.rows), own.view(count, -1)
    levels.copy_(_same_of_levels(form, group_nodes, ints.device))
    steps = torch.arange(count, dtype=torch.int32, device=ints.device)
    positions = levels[:, rows : rows + size.rows].view(count, -1, width)
    positions.copy_((ends + steps[:, None])[..., None].expand_as(positions))
    places = torch.arange(count * width, dtype=torch.int32, device=ints.device)
    slots = sent.slots(ints, ends[:, None] + places).view(-1, count, width)
    levels[:, 2 * rows : 2 * rows + size.rows].view(count, -1, width).copy_(slots.transpose(0, 1))
    groups = levels[:, 3 * rows :].view(count, form.sequences, -1, FIELDS)
    start, behind = splits_at(ends)[:, None], splits_at(ends + form.shape.depth)[:, None] + 1
    shared = -(-width // group_nodes)
    if width == 1:  # nodes of a chain share everything
        groups[..., 1] = behind
    else:  # committed tokens are shared; from the split in which the tree starts, every node attends alone
        groups[:, :, :shared, 1] = start
        groups[:, :, shared:, 0] = start
        groups[:, :, shared:, 1] = behind
    groups[..., 5] = ends[:, None]
    groups[..., 7] = sent.starts[:, None]


def _fields(which: Sequence[int], values: Sequence[Tensor]) -> Tensor:
    """Groups that have these fields, and no others."""
    columns = [torch.zeros_like(values[0])] * FIELDS
    for field, value in zip(which, values, strict=True):
        columns[field] = value
    return torch.stack(columns, -1)


@lru_cache(maxsize=512)
def _same_of_levels(form: DraftForm, group_nodes: int, device: torch.device) -> Tensor:
    """[levels, integers of one] the groups' rows and ancestors, which are the same in every draft."""
    width, size = form.shape.width, form.level(group_nodes)
    ints = np.zeros((form.shape.depth - 1, extent_of(size)), dtype=np.int32)
    for level, row in enumerate(ints):
        groups = row[3 * aligned(size.rows) :].reshape(form.sequences, -1, FIELDS)
        for b in range(form.sequences):
            low = range(0, width, group_nodes)
            alone = range(width) if width > 1 else ()
            groups[b, :, 2] = [b * width + node for node in (*low, *alone)]
            groups[b, :, 3] = [*(min(group_nodes, width - node) for node in low), *[1] * len(alone)]
            first = MAX_ROWS + form.ancestors_at(level, group_nodes)
            groups[b, len(low) :, 6] = [first + (b * width + node) * (level + 1) for node in alone]
    with torch.inference_mode(False):
        return torch.from_numpy(ints).to(device)
