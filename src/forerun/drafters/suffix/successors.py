"""Successors: the tokens that a target finds likeliest after every single token, from a few passes at load.

Where nothing in a text matches its end, there is still what the target itself tends to write after the last token.
Where nodes are nearly free, on a GPU, these fill the places of a tree that matches leave empty. The law of a token is
read behind a short opening, the same for all: that of an answer by the chat template, where it is known. Nothing of
any request is in the table. Vocabularies begin with their most frequent tokens, and of these alone it is read: with
16,384 of 49,152 tokens suffix was 3% slower in replays than with all of them, and loading an 8B is 1 s shorter.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from forerun.drafters.draft_law import likeliest
from forerun.models.base import Target
from forerun.types import Needs, PlainSeq, TreeBatch

log = logging.getLogger(__name__)

READ, KEPT = 16_384, 8  # tokens that successors are read of, the first of a vocabulary; successors of a token
EACH, TOGETHER = 31, 16  # tokens below one root, and sequences of a pass
AT_ONCE = 64  # rows of logits that are read in full precision at once: memory is scarce behind a KV cache
_FIRST_ID = -2_000_000  # of sequences that no engine and no measurement gives

Row = list[tuple[float, int]]  # probability and token, the likeliest first


class Successors:
    """The likeliest successors of every token."""

    def __init__(self, tokens: Tensor, shares: Tensor) -> None:
        # [N, K] both, of the first N tokens, on the host
        self.tokens, self.shares = tokens.long().contiguous(), shares.float().contiguous()
        self._rows: dict[int, Row] = {}  # those that were asked for

    @classmethod
    def of(
        cls, target: Target, opening: Sequence[int], tokens: Sequence[int] | None = None
    ) -> Successors | None:
        """Those of a target, behind this opening; None where it has no room for the passes.

        `tokens`: of these alone instead of the first ones. All others seem to have none.
        """
        wanted = range(min(READ, target.vocab_size)) if tokens is None else tokens
        before, count = [*opening], TOGETHER
        while count and not target.has_room(*[len(before) + EACH + 1] * count):
            count //= 2
        if not count or len(before) + EACH + 1 > target.max_length:
            return None
        seqs = [
            PlainSeq(_FIRST_ID - i, before.copy(), max_length=len(before) + EACH + 1) for i in range(count)
        ]
        try:
            target.prefill(seqs, Needs())
            starts = range(0, len(wanted), count * EACH)
            found = [_pass(target, seqs, wanted[first : first + count * EACH]) for first in starts]
        except torch.OutOfMemoryError as error:
            log.warning("trees are drafted from matches alone: %s", error)
            return None
        finally:
            for seq in seqs:
                target.release(seq)
        shares, nexts = (torch.cat([pair[i] for pair in found]).cpu() for i in range(2))
        if tokens is None:
            return cls(nexts, shares)
        every, known = torch.zeros(target.vocab_size, nexts.shape[1]), torch.tensor(tokens)
        return cls(every.long().index_put((known,), nexts), every.index_put((known,), shares))

    @property
    def at(self) -> tuple[int, int, int, int]:
        """Rows, successors of each, and where tokens (int64) and shares (float32) lie."""
        rows, kept = self.tokens.shape
        return rows, kept, self.tokens.data_ptr(), self.shares.data_ptr()

    def after(self, token: int) -> Row:
        row = self._rows.get(token)
        if row is None:
            if token >= len(self.tokens):
                return []
            pairs = zip(self.shares[token].tolist(), self.tokens[token].tolist(), strict=True)
            row = self._rows[token] = list(pairs)
        return row


def _pass(target: Target, seqs: Sequence[PlainSeq], tokens: Sequence[int]) -> tuple[Tensor, Tensor]:
    """The likeliest successors of some tokens, [N, K], each a child of the root of one of these sequences."""
    trees = list[tuple[list[int], list[int]]]()
    for i in range(0, len(tokens), EACH):
        some = tokens[i : i + EACH]
        trees.append(([seqs[len(trees)].tokens[-1], *some], [-1, *[0] * len(some)]))
    batch = TreeBatch.trees(trees, device=target.device)
    logits = target.score(seqs[: len(trees)], batch, Needs()).required_logits
    roots = torch.zeros(len(logits), dtype=torch.bool)
    roots[list(batch.starts[:-1])] = True
    below, kept = (~roots).to(logits.device), min(KEPT, logits.shape[-1])
    starts = range(0, len(logits), AT_ONCE)
    read = [likeliest(logits[None, first : first + AT_ONCE].float(), kept) for first in starts]
    values, found = (torch.cat([pair[i][0] for pair in read]) for i in range(2))
    return values[below].exp(), found[below]
