"""Dynamic trees (EAGLE-2) on the device: the rule of drafters/heads/growth.py in operations that a graph can capture.

Every node of the frontier proposes its likeliest children, the best of these by cumulative confidence are the
next frontier, and of all that were proposed the best n are the tree. Sizes are known before the draft starts, so
nothing is read on the way. On a GPU a level is two kernels; elsewhere it is plain torch.

`complete` works out, on the device, what a draft must know of its rows and levels from what the host has sent. Where
the last round was not read, what it decided is taken from the device's own record of it.

`DraftNoise` has temperature and shared noise, where the verifier couples by noise: with the verifier's own noise added
to a head's logits, the likeliest tokens are those that the target would sample if its law were the head's. Noise is
hashed from seed and position: the host sends the seeds, the device knows positions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from importlib.util import find_spec

import numpy as np
import torch
from torch import Tensor

from forerun.core.noise import device_uniforms, mixed_seed
from forerun.core.types import CUT, Seq
from forerun.drafters.device.plan import KNOWN, MOST, ROOM, DraftForm, aligned, extent_of
from forerun.drafters.model.draft_law import Noised, factor_of, has_noise
from forerun.models.cuda.compile.together import starts_early
from forerun.models.cuda.device_trees import STEPS, LastRound
from forerun.models.cuda.graphs import Replays as Replays  # for heads that have no tree growth of their own
from forerun.models.cuda.graphs import Work as Work
from forerun.models.cuda.plan import FIELDS, MAX_ROWS, SentInts, splits_at
from forerun.models.pages import PAGE

CHUNK = 2048  # logits that one program looks through
MOST_CUT = 4096  # candidates that one program chooses the best of


@dataclass(frozen=True, slots=True)
class HeadOutput:
    """How a head's output is read: its vocabulary, and its calibration (scale * q^power)."""

    ids: Tensor  # [Vd] the target's ids
    log_scale: float = 0.0
    power: float = 1.0

    def log_confidence(self, log_probs: Tensor) -> Tensor:
        if self.power != 1.0 or self.log_scale:
            log_probs = log_probs * self.power + self.log_scale
        return log_probs.clamp(max=0.0)


@dataclass(frozen=True, slots=True)
class Frontier:
    """Nodes that go through the head next, the best first."""

    log_survivals: Tensor  # [B, W] log survivals
    places: Tensor  # [B, W] where they are in the pool; -1 = the root
    tokens: Tensor  # [B, W]
    parents: Tensor  # [B W] rows of their parents in the last frontier, over all trees
    ancestors: Tensor  # [B, W, L] places among the drafted slots, from the first level down to themselves

    @classmethod
    @cache  # captured drafts read them
    def of_roots(cls, trees: int, device: torch.device) -> Frontier:
        """Made once: a frontier is never written to."""
        with torch.inference_mode(False):
            none = torch.full((trees, 1), -1, device=device)
            ancestors = torch.zeros(trees, 1, 0, dtype=torch.long, device=device)
            return cls(torch.zeros(trees, 1, device=device), none, none, none.flatten(), ancestors)


class Pool:
    """All candidates, level by level: [B, N] each."""

    def __init__(self, trees: int, width: int, branch: int, depth: int, device: torch.device) -> None:
        self.width, self.branch = width, branch
        size = branch + (depth - 1) * width * branch
        self.scores = torch.empty(trees, size, device=device)
        self.tokens = torch.empty(trees, size, dtype=torch.long, device=device)
        self.parents = torch.empty(trees, size, dtype=torch.long, device=device)
        self.used = 0

    def add(self, count: int) -> slice:
        self.used += count
        return slice(self.used - count, self.used)


def grow_level(
    pool: Pool,
    frontier: Frontier,
    logits: Tensor,
    head_output: HeadOutput,
    into: tuple[Tensor, Tensor] | None = None,
    fused: bool | None = None,
) -> Frontier:
    """Add the children of a frontier, whose logits are [B W, Vd], to the pool; returns the next frontier.

    `into`: where its tokens [B W] and ancestors [B W L] are to be written, flat, for the pass over it.
    """
    by_kernels = logits.device.type == "cuda" if fused is None else fused
    if by_kernels and pool.branch <= 16 and pool.width <= 16:
        return _grow_fused(pool, frontier, logits, head_output, into)
    grown = grow_plainly(pool, frontier, logits, head_output)
    if into is not None:
        into[0].copy_(grown.tokens.flatten())
        into[1].copy_(grown.ancestors.flatten())
    return grown


def grow_plainly(pool: Pool, frontier: Frontier, logits: Tensor, head_output: HeadOutput) -> Frontier:
    """The same in plain torch."""
    trees, wide = frontier.log_survivals.shape
    values, rows = logits.topk(pool.branch)  # [B W, K]
    values = head_output.log_confidence((values - logits.logsumexp(-1, keepdim=True)).clamp(max=0.0))
    scores = (frontier.log_survivals[:, :, None] + values.view(trees, wide, -1)).flatten(1)
    tokens = head_output.ids[rows].view(trees, -1)
    first, span = pool.used, pool.add(scores.shape[1])
    pool.scores[:, span], pool.tokens[:, span] = scores, tokens
    pool.parents[:, span] = frontier.places.repeat_interleave(pool.branch, 1)
    log_survivals, best = scores.topk(min(pool.width, scores.shape[1]))  # [B, W]
    parents = best // pool.branch
    level, fresh = frontier.ancestors.shape[-1], best.shape[1]
    own = level * pool.width + torch.arange(fresh, device=best.device)
    ancestors = frontier.ancestors.gather(1, parents[..., None].expand(-1, -1, level))
    ancestors = torch.cat((ancestors, own.expand(trees, -1)[..., None]), -1)
    over_all = parents + torch.arange(0, trees * wide, wide, device=best.device)[:, None]
    return Frontier(log_survivals, best + first, tokens.gather(1, best), over_all.flatten(), ancestors)


def _grow_fused(
    pool: Pool, frontier: Frontier, logits: Tensor, head_output: HeadOutput, into: tuple[Tensor, Tensor] | None
) -> Frontier:
    from forerun.drafters.device import kernels

    trees, wide = frontier.log_survivals.shape
    vocab, branch, device = logits.shape[1], pool.branch, logits.device
    chunks, level = -(-vocab // CHUNK), frontier.ancestors.shape[-1]
    found = torch.empty(trees * wide, chunks, branch, device=device)
    rows = torch.empty(trees * wide, chunks, branch, dtype=torch.int32, device=device)
    highs, sums = (torch.empty(trees * wide, chunks, device=device) for _ in range(2))
    pdl = starts_early(device)
    kernels.tops[(trees * wide, chunks)](
        logits, found, rows, highs, sums, vocab, K=branch, CHUNK=CHUNK, PDL=pdl, num_warps=4, launch_pdl=pdl
    )
    first = pool.add(wide * branch).start
    fresh = min(pool.width, wide * branch)

    def integers(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.long, device=device)

    tokens, ancestors = into or (integers(trees * fresh), integers(trees * fresh * (level + 1)))
    nexts = Frontier(
        torch.empty(trees, fresh, device=device), integers(trees, fresh), tokens.view(trees, fresh),
        integers(trees * fresh), ancestors.view(trees, fresh, level + 1),
    )  # fmt: skip
    kernels.advance[(trees,)](
        found, rows, highs, sums, head_output.ids, frontier.log_survivals, frontier.places, frontier.ancestors,
        pool.scores, pool.tokens, pool.parents, nexts.log_survivals, nexts.places, nexts.tokens, nexts.parents,
        nexts.ancestors, first, pool.scores.shape[1], head_output.log_scale, head_output.power, level,
        WIDE=wide, WIDE_UP=_power(wide), K=branch, K_UP=_power(branch), C=chunks, C_UP=_power(chunks),
        FOUND_UP=_power(chunks * branch), FRESH=fresh, FRESH_UP=_power(fresh), WIDTH=pool.width, PDL=pdl,
        num_warps=4, launch_pdl=pdl,
    )  # fmt: skip
    return nexts


def cut_trees(
    pool: Pool, roots: Tensor, nodes: int, into: Tensor, fused: bool | None = None, prices: Tensor | None = None
) -> None:
    """Write [2, B, nodes + 1] tokens and parents of the best nodes and their root; ties go to the one made first.

    `prices` [n + 1]: what a tree of 0 to n nodes costs, in tokens. As many of the best stay as gain most beyond that
    (core/request.py: best_count); the token of every other one is CUT.
    """
    size = pool.scores.shape[1]
    if size <= MOST_CUT and (roots.device.type == "cuda" if fused is None else fused):
        from forerun.drafters.device import kernels

        pdl = starts_early(roots.device)
        kernels.cut[(len(roots),)](
            pool.scores, pool.tokens, pool.parents, roots, torch.empty_like(pool.scores, dtype=torch.int32), into,
            pool.scores if prices is None else torch.empty(len(roots), nodes, device=roots.device),
            pool.scores if prices is None else prices, size, into.stride(0), nodes, UP=_power(size),
            NODES_UP=0 if prices is None else _power(nodes), PDL=pdl,
            num_warps=1 if size <= 1024 and prices is None else 4, launch_pdl=pdl,
        )  # fmt: skip
        return
    order = pool.scores.sort(dim=1, descending=True, stable=True).indices[:, :nodes]
    places, ranks = order.sort(dim=1)  # parents were added before their children
    above = pool.parents.gather(1, places)
    # the root's children have none above
    into[1, :, 1:] = (torch.searchsorted(places, above) + 1) * (above >= 0)
    into[0, :, 1:] = pool.tokens.gather(1, places)
    if prices is not None:
        gains = pool.scores.gather(1, order).exp().cumsum(1) - prices[1 : nodes + 1]
        most, best = gains.max(1, keepdim=True)
        into[0, :, 1:][(ranks > best) | (most <= -prices[0])] = CUT
    into[0, :, 0], into[1, :, 0] = roots, -1


def _power(value: int) -> int:
    """The power of two that is no less, and at least 4."""
    return 1 << max(2, (value - 1).bit_length())


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
    def of(cls, ints: Tensor, form: DraftForm, last: LastRound) -> Sent:
        count, at = form.sequences, MAX_ROWS + form.sent_at
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


def complete(ints: Tensor, form: DraftForm, last: LastRound, fused: bool | None = None) -> None:
    """Work out all integers of a draft from what was sent, on the device."""
    if ints.device.type == "cuda" if fused is None else fused:
        _complete_fused(ints, form, last)
    else:
        _complete_plainly(ints, form, last)


def _complete_fused(ints: Tensor, form: DraftForm, last: LastRound) -> None:
    from forerun.drafters.device import kernels

    size, shape = form.level, form.shape
    kernels.plan[(form.sequences, shape.depth)](
        ints, last.accepted, last.tokens, MAX_ROWS, MAX_ROWS + form.sent_at, MAX_ROWS + form.last_at,
        MAX_ROWS + form.level_at(0), extent_of(size), MAX_ROWS + form.ancestors_at(0),
        MAX_ROWS + form.caught_at, form.caught.groups // form.sequences, aligned(form.unread),
        aligned(form.sequences), aligned(size.rows), form.sequences, form.behind, shape.width, shape.depth,
        form.group_nodes, STEPS, ROOM=ROOM, BEHIND_UP=1 << max(2, shape.depth.bit_length()),
        WIDTH_UP=1 << max(2, (shape.width - 1).bit_length()), num_warps=1,
    )  # fmt: skip


def _complete_plainly(ints: Tensor, form: DraftForm, last: LastRound) -> None:
    sent = Sent.of(ints, form, last)
    ends = sent.first + sent.fresh
    own = ints[MAX_ROWS : MAX_ROWS + form.level_at(form.shape.depth - 1)]
    _catch_up(ints, own, form, sent, ends)
    if form.shape.depth > 1:
        _levels(ints, own[form.level_at(0) :], form, sent, ends)


def _catch_up(ints: Tensor, own: Tensor, form: DraftForm, sent: Sent, ends: Tensor) -> None:
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
    caught = form.caught.groups
    if caught:  # rows of one sequence share what they see, up to each one's position
        low = torch.arange(0, behind, form.group_nodes, dtype=torch.int32, device=ints.device)
        high, length, pages = (
            part[:, None].expand(-1, len(low)) for part in (splits_at(ends - 1) + 1, ends, sent.starts)
        )
        nodes = (behind - low).clamp(max=form.group_nodes).expand(count, -1)
        fields = high, lanes[:, None] * behind + low, nodes, length, pages
        own[form.caught_at :][: FIELDS * caught].view(count, -1, FIELDS).copy_(_fields((1, 2, 3, 5, 7), fields))


def _levels(ints: Tensor, own: Tensor, form: DraftForm, sent: Sent, ends: Tensor) -> None:
    """Of every level [tokens | positions | slots | groups]."""
    count, width, size = form.shape.depth - 1, form.shape.width, form.level
    rows, levels = aligned(size.rows), own.view(count, -1)
    levels.copy_(_same_of_levels(form, ints.device))
    steps = torch.arange(count, dtype=torch.int32, device=ints.device)
    positions = levels[:, rows : rows + size.rows].view(count, -1, width)
    positions.copy_((ends + steps[:, None])[..., None].expand_as(positions))
    places = torch.arange(count * width, dtype=torch.int32, device=ints.device)
    slots = sent.slots(ints, ends[:, None] + places).view(-1, count, width)
    levels[:, 2 * rows : 2 * rows + size.rows].view(count, -1, width).copy_(slots.transpose(0, 1))
    groups = levels[:, 3 * rows :].view(count, form.sequences, -1, FIELDS)
    start, behind = splits_at(ends)[:, None], splits_at(ends + form.shape.depth)[:, None] + 1
    shared = -(-width // form.group_nodes)
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
def _same_of_levels(form: DraftForm, device: torch.device) -> Tensor:
    """[levels, integers of one] the groups' rows and ancestors, which are the same in every draft."""
    width, size = form.shape.width, form.level
    ints = np.zeros((form.shape.depth - 1, extent_of(size)), dtype=np.int32)
    for level, row in enumerate(ints):
        groups = row[3 * aligned(size.rows) :].reshape(form.sequences, -1, FIELDS)
        for b in range(form.sequences):
            low = range(0, width, form.group_nodes)
            alone = range(width) if width > 1 else ()
            groups[b, :, 2] = [b * width + node for node in (*low, *alone)]
            groups[b, :, 3] = [*(min(form.group_nodes, width - node) for node in low), *[1] * len(alone)]
            first = MAX_ROWS + form.ancestors_at(level)
            groups[b, len(low) :, 6] = [first + (b * width + node) * (level + 1) for node in alone]
    with torch.inference_mode(False):
        return torch.from_numpy(ints).to(device)


BLOCK = 1024  # numbers of one program
AT_ONCE = 1 << 23  # numbers that are made together; more are made level by level

Settings = tuple[int, float]  # mixed seed, and what logits are multiplied by


def settings_of(seq: Seq) -> Settings | None:
    """None where no noise is shared."""
    return (mixed_seed(seq.seed), factor_of(seq)) if has_noise(seq) else None


class DraftNoise:
    """The noise of the sequences of one draft."""

    def __init__(self, ids: Tensor, fused: bool | None = None) -> None:
        """`ids` are the target's ids of the head's vocabulary."""
        has_kernels = ids.device.type == "cuda" and find_spec("triton") is not None
        self.fused = has_kernels if fused is None else fused  # by a kernel, or in plain torch
        self._ids = ids.int()
        self._sent = SentInts(ids.device, 3 * MOST, torch.long)
        self._last: list[Settings | None] = []
        self.is_on = False  # has a sequence of the draft noise?

    @property
    def sent(self) -> Tensor:
        """[3 MOST] mixed seeds, factors as fp64 bits, and whether there is noise: of each sequence."""
        return self._sent.all

    def send(self, settings: Sequence[Settings | None]) -> None:
        """Of the sequences of the next draft; padding may be left out."""
        self.is_on = any([one is not None for one in settings])  # noqa: C419 - quicker
        if self.is_on and self._last != settings:
            table = np.zeros((3, MOST), dtype=np.int64)  # padding has none
            factors = np.ones(MOST)
            for b, one in enumerate(settings):
                if one is not None:
                    table[0, b], factors[b], table[2, b] = *one, 1
            table[1] = factors.view(np.int64)
            self._sent.send(table)
            self._last = list(settings)

    def factors(self, count: int) -> Tensor:
        """[B, 1, 1] what the logits of so many sequences are multiplied by."""
        bits = self._sent.all[MOST : MOST + count]
        return bits.contiguous().view(torch.float64).float()[:, None, None]

    def rehearse(self, draft: Callable[[], None]) -> None:
        """Capture a draft with noise too."""
        self.is_on = True
        draft()
        self.is_on = False

    def of(self, positions: Tensor, depth: int) -> Noised:
        """For a draft so deep behind rows at these positions [B]: the first token it drafts lies two further."""
        if not self.is_on:
            return lambda logits, level: logits
        if self.fused:
            return partial(self._add_noise, positions)
        count = len(positions)
        seeds, _, noisy = self._sent.all.view(3, MOST)[:, :count, None]
        factors, firsts = self.factors(count), positions.long()[:, None] + 2
        steps = torch.arange(depth, device=positions.device)
        many = count * depth * len(self._ids) > AT_ONCE
        whole = None if many else self._log_noise(seeds, firsts + steps, noisy)  # [B, depth, Vd]

        def noised(logits: Tensor, level: int) -> Tensor:
            own = self._log_noise(seeds, firsts + level, noisy) if whole is None else whole[:, level, None]
            found: Tensor = logits.view(count, -1, logits.shape[-1]) * factors - own
            return found.view_as(logits)

        return noised

    def _add_noise(self, positions: Tensor, logits: Tensor, level: int) -> Tensor:
        """The same by a kernel; logits may be the first columns of wider rows."""
        from forerun.drafters.device import kernels

        rows, vocab = logits.shape
        found = logits.new_empty(rows, vocab)
        kernels.add_noise[(rows, -(-vocab // BLOCK))](
            logits, found, self._ids, self._sent.all, positions, logits.stride(0), vocab, rows // len(positions), level,
            MOST, BLOCK=BLOCK, num_warps=4,
        )  # fmt: skip
        return found

    def _log_noise(self, seeds: Tensor, positions: Tensor, noisy: Tensor) -> Tensor:
        """[B, n, Vd] log E of positions [B, n]; 0 where no noise is shared."""
        noise = device_uniforms(seeds, positions, self._ids).neg_().log1p_().neg_().log_()
        return torch.where(noisy[..., None] > 0, noise, 0.0)
