"""Tree attention: each node sees its sequence's committed tokens and its own ancestors.

What a node may see is computed once per pass, for each window that the model's layers use; a layer then
only writes its keys and values and runs one attention call per sequence. Where a sequence's pages lie in a row its
keys and values are read in place, as one view of the KV cache; else they are gathered, layer by layer. A draft pass may
read a part of the context: SparseContext chooses its pages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice, pairwise
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.core.tree import Topology
from forerun.core.types import Seq
from forerun.models.layers import softcap_
from forerun.models.pages import PAGE, TREE_MARGIN, Ints, pages_for, slots_of

SINKS = 1  # pages at the start of the text, of a sparse context
FOUND = 1 / 2  # of its other pages: those that are looked up
LONGEST = 8  # tokens of a match
LATEST = 128  # matches of one length that count: the others are further back
RENEWED = 16  # committed tokens, after which pages are looked up again


@dataclass(frozen=True, slots=True)
class Span:
    """The nodes of one sequence in a pass: rows `first` to `end`, written behind `length` committed positions."""

    first: int
    end: int
    pages: Sequence[int]  # of the sequence's positions
    length: int
    shape: Topology
    skipped: int = 0  # positions before these that the pages leave out: rotations count them, attention does not

    @property
    def nodes(self) -> int:
        return self.end - self.first

    @property
    def slots(self) -> list[int]:
        """Where the nodes are written."""
        return slots_of(self.pages, self.length, self.length + self.nodes)


class PassRows(NamedTuple):
    """What one pass computes: M rows, whose they are, and where their hidden rows and logits go."""

    tokens: Sequence[int]
    spans: Sequence[Span]
    seqs: Sequence[Seq]  # of the spans
    hidden: Mapping[int, Tensor]
    logits: Tensor | None = None  # of the first rows, as many as are given
    trees: int = 0  # of the spans that are trees, which come first; the others are pieces of prompts


@dataclass(frozen=True, slots=True)
class Reach:
    """What the nodes of one span see in layers of one window."""

    span: Span
    low: int  # first position in view; the view ends behind the last node
    mask: Tensor | None  # [M_b, N] added to the scores; None = all of it is seen


def reach_of(span: Span, window: int | None, dtype: torch.dtype, device: torch.device) -> Reach:
    """Work out view and mask of one span; `window` counts positions, the node's own included."""
    depths = np.array(span.shape.depths)
    if window is not None and span.length + int(depths.max()) < window:
        window = None
    near = 0 if window is None else max(0, span.length - window + 1)  # first position the root sees
    if span.nodes == 1:
        return Reach(span, near, None)
    seen = np.ones((span.nodes, span.length - near + span.nodes), dtype=bool)
    seen[:, span.length - near :] = span.shape.ancestors
    if window is not None:
        positions = np.concatenate((np.arange(near, span.length), span.length + depths))
        seen &= positions[None, :] > span.length + depths[:, None] - window
    mask = torch.zeros(seen.shape, dtype=dtype).masked_fill_(torch.from_numpy(~seen), float("-inf"))
    return Reach(span, near, mask.to(device))


@dataclass(frozen=True, slots=True)
class View:
    """One reach as views of the KV cache and of the row buffer, ready for every layer."""

    # per layer [2, Hkv, S, D], or only the N slots in view where they lie in a row
    layers: tuple[Tensor, ...]
    slots: Tensor | None  # [N] the slots in view where they do not
    made: Tensor  # [2, Hkv, M_b, D] the nodes' keys and values in the row buffer
    queries: Tensor  # [1, H, M_b, D]
    mask: Tensor | None  # [M_b, N]
    into: Tensor  # [1, H, M_b, D] where the result goes

    def write(self, layer: int) -> None:
        """The nodes' keys and values into the cache."""
        data, nodes = self.layers[layer], self.made.shape[2]
        if self.slots is None:
            data[:, :, -nodes:].copy_(self.made)
        else:
            data.index_copy_(2, self.slots[-nodes:], self.made)

    def seen(self, layer: int) -> Tensor:
        """All keys and values in view: [2, 1, Hkv, N, D]."""
        data = self.layers[layer]
        return (data if self.slots is None else data.index_select(2, self.slots)).unsqueeze(1)


def views_of(
    spans: Sequence[Span], window: int | None, data: Tensor, qkv: Tensor, result: Tensor, heads: int
) -> list[View]:
    """What all spans of a pass see in layers of one window; `view_of` says what the tensors are."""
    reaches = [reach_of(span, window, qkv.dtype, qkv.device) for span in spans]
    return [view_of(reach, data, qkv, result, heads) for reach in reaches]


def view_of(reach: Reach, data: Tensor, qkv: Tensor, result: Tensor, heads: int) -> View:
    """Cut the views once per pass: `data` is the KV cache, `qkv` [M, (H + 2 Hkv) D], `result` [M, H D]."""
    kv_heads, head_dim = data.shape[2], data.shape[4]
    span, slots = reach.span, None
    end = span.length + span.nodes
    low, last = reach.low // PAGE, (end - 1) // PAGE
    if all(after == page + 1 for page, after in pairwise(span.pages[low : last + 1])):
        first = span.pages[low] * PAGE + reach.low % PAGE
        data = data[:, :, :, first : first + end - reach.low]
    else:
        slots = torch.tensor(slots_of(span.pages, reach.low, end), device=data.device)
    rows = qkv[span.first : span.end].view(span.nodes, -1, head_dim)
    return View(
        layers=data.unbind(0),
        slots=slots,
        made=rows[:, heads:].view(span.nodes, 2, kv_heads, head_dim).permute(1, 2, 0, 3),
        queries=rows[:, :heads].transpose(0, 1).unsqueeze(0),
        mask=reach.mask,
        into=result[span.first : span.end].view(span.nodes, heads, head_dim).transpose(0, 1).unsqueeze(0),
    )


def attend(layer: int, view: View, scale: float, softcap: float | None, sinks: Tensor | None = None) -> None:
    """Write the nodes' keys and values, and the attention output, for one layer of one span; `sinks` [H]."""
    view.write(layer)
    queries, (keys, values) = view.queries, view.seen(layer).unbind(0)
    if softcap is None and sinks is None:
        grouped = queries.shape[1] != keys.shape[1]
        found = F.scaled_dot_product_attention(
            queries, keys, values, attn_mask=view.mask, scale=scale, enable_gqa=grouped
        )
    else:
        found = _by_hand(queries, keys, values, view.mask, scale, softcap, sinks)
    view.into.copy_(found)


def write_keys(layer: int, views: Sequence[View]) -> None:
    """What a layer leaves for later passes, where nobody reads its output."""
    for view in views:
        view.write(layer)


def _by_hand(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, cap: float | None, sinks: Tensor | None
) -> Tensor:
    """Attention whose scores are capped before the mask, or have a sink beside them: the fused kernels cannot."""
    q = q.view(1, k.shape[1], -1, *q.shape[2:])  # [1, Hkv, G, M_b, D]
    scores = (q @ k.unsqueeze(2).transpose(-1, -2)).mul_(scale)
    if cap is not None:
        softcap_(scores, cap)
    if mask is not None:
        scores += mask
    if sinks is not None:
        beside = sinks.to(scores.dtype).view(1, k.shape[1], -1, 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat((scores, beside), -1)
    weights = scores.softmax(-1, dtype=torch.float32).to(v.dtype)[..., : k.shape[2]]
    return (weights @ v.unsqueeze(2)).flatten(1, 2)


class SparseContext:
    """A few pages of a sequence's context, `tokens` in all, for draft passes that do not read all of it.

    It keeps the start of the text (attention sinks), its end (a window), and pages between them that say something
    about what comes next: those in which the last tokens stood before. Keys in the cache are rotated already, so a page
    table with fewer pages is all that a pass needs, and the number of positions that were left out, which rotations
    count. A context that has no more is read whole. All of a text is searched, so not for every draft: pages stay for
    some tokens, while the window grows.
    """

    def __init__(self, tokens: int) -> None:
        pages = max(SINKS + 2, pages_for(tokens))
        self.found = int(FOUND * (pages - SINKS))
        self.window = pages - SINKS - self.found
        self._texts: dict[int, Text] = {}
        # by sequence: the committed positions that they hold for, the pages before the window, and its first page
        self._chosen: dict[int, tuple[int, list[int], int]] = {}

    @property
    def pages(self) -> int:
        """That are read of a long context."""
        return SINKS + self.found + self.window

    @property
    def tokens(self) -> int:
        """On these pages."""
        return PAGE * self.pages

    @property
    def farthest(self) -> int:
        """Positions that a draft pass reaches at most."""
        return (self.pages + 1) * PAGE + TREE_MARGIN

    def narrow(self, seq: Seq, committed: int, span: Span) -> Span:
        """The same nodes over fewer pages; what is read stays the same until others than `committed` positions are."""
        pages, skipped = self.pages_of(seq, committed, span.pages, len(span.pages))
        if not skipped:
            return span
        return replace(span, pages=pages, length=span.length - skipped, skipped=skipped)

    def pages_of(self, seq: Seq, committed: int, pages: Sequence[int], end: int) -> tuple[Sequence[int], int]:
        """Of a sequence's pages up to `end`, those that are read; and how many positions that leaves out."""
        known = self._chosen.get(seq.id)
        if known is None or not 0 <= committed - known[0] < RENEWED:
            known = self._chosen[seq.id] = committed, *self._choose(seq, committed)
        _, before, low = known
        some = pages[low:end]
        return ([*(pages[i] for i in before), *some] if before else some), PAGE * (low - len(before))

    def forget(self, seq_id: int) -> None:
        self._texts.pop(seq_id, None)
        self._chosen.pop(seq_id, None)

    def _choose(self, seq: Seq, committed: int) -> tuple[list[int], int]:
        """Pages before the window, ascending, and the first page of the window."""
        low = committed // PAGE + 1 - self.window
        if low <= SINKS + self.found:
            return [], 0
        text = self._texts.setdefault(seq.id, Text())
        text.read(seq.tokens, committed + 1)
        return [*range(SINKS), *sorted(text.pages_alike(SINKS, low, self.found))], low


class Text:
    """The tokens of one sequence, and where in them the last ones stood before."""

    def __init__(self) -> None:
        self._tokens: Ints = np.zeros(4 * PAGE, dtype=np.int32)
        self._count = 0

    def read(self, tokens: Sequence[int], count: int) -> None:
        """The first `count` of them; those that were read before are not read again."""
        if count > len(self._tokens):
            self._tokens = np.concatenate((self._tokens[: self._count], np.zeros(2 * count, dtype=np.int32)))
        self._tokens[self._count : count] = tokens[self._count : count]
        self._count = count

    def pages_alike(self, first: int, end: int, count: int) -> list[int]:
        """`count` of the pages `first` to `end`: those behind the longest matches first, then the latest.

        What is written before pages are looked up again may lie on the next page.
        """
        tokens, last, low = self._tokens, self._count - 1, first * PAGE - 1
        alike = np.flatnonzero(tokens[low : end * PAGE - 1] == tokens[last]) + low
        found: dict[int, None] = {}
        matches = [alike]
        for back in range(1, min(LONGEST, last + 1)):
            alike = alike[alike >= back]
            alike = alike[tokens[alike - back] == tokens[last - back]]
            if not len(alike):
                break
            matches.append(alike)
        for some in reversed(matches):
            near = (some[: -LATEST - 1 : -1, None] + np.array((1, 1 + RENEWED))) // PAGE
            for page in dict.fromkeys(near.ravel().tolist()):
                if page < end:
                    found.setdefault(page)
                if len(found) == count:
                    return [*found]
        latest = (page for page in range(end - 1, first - 1, -1) if page not in found)
        return [*found, *islice(latest, count - len(found))]
