"""Successors: the tokens that a target finds likeliest after every single token, from a few passes at load.

Where nothing in a text matches its end, there is still what the target itself tends to write after the last token.
Where nodes are nearly free, on a GPU, these fill the places of a tree that matches leave empty. The law of a token is
read behind a short opening, the same for all: that of an answer by the chat template, where it is known. Nothing of
any request is in the table. Vocabularies begin with their most frequent tokens, and of these alone it is read: with
16,384 of 49,152 tokens suffix was 3% slower in replays than with all of them, and loading an 8B is 1 s shorter.

The table is kept in a file beside t(n), named by the model, its number format and the machine; a checksum covers
everything else that it depends on, so that a damaged file, or one of another table, is made again.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from forerun.core.types import Budget, Needs, PlainSeq, TreeBatch
from forerun.drafters.base import AT_HAND
from forerun.drafters.heads.growth import TextTable, least_step
from forerun.drafters.model.draft_law import likeliest
from forerun.models.base import Target

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
    def of(cls, target: Target, opening: Sequence[int], tokens: Sequence[int] | None = None) -> Successors | None:
        """Those of a target, behind this opening; None where it has no room for the passes.

        `tokens`: of these alone instead of the first ones. All others seem to have none.
        """
        wanted = range(min(READ, target.vocab_size)) if tokens is None else tokens
        before, count = [*opening], TOGETHER
        while count and not target.has_room(*[len(before) + EACH + 1] * count):
            count //= 2
        if not count or len(before) + EACH + 1 > target.max_length:
            return None
        seqs = [PlainSeq(_FIRST_ID - i, before.copy(), max_length=len(before) + EACH + 1) for i in range(count)]
        try:
            target.prefill(seqs, Needs())
            starts = range(0, len(wanted), count * EACH)
            found = [_pass(target, seqs, wanted[first : first + count * EACH]) for first in starts]
        except torch.OutOfMemoryError as error:
            log.warning("no table of successors, so only matches are drafted: %s", error)
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


MEMORY, WORTH = 0.998, 8.0  # of how far the table is trusted: per try, and tokens that the prior is worth
OWN_MEMORY, OWN_WORTH = 0.97, 4.0  # the same in one text, beside what all texts have shown
OWN_LEAST, OWN_MOST = 0.4, 1.5
PRIOR = (1.0, 0.65)  # share of what the table promises that comes: where nothing matches, and behind a match
# the least survival in a tree, unless a budget is to be drafted whole: the host makes every node
LEAST = 0.015
FEW = 2  # sequences that get trees; more get chains
MANY = 8  # sequences; larger batches get matches alone: their doubtful tokens would fill the pass
TREE = Budget(16, AT_HAND, 8)  # what offers assume before a price list was seen
CHAIN = Budget(AT_HAND, AT_HAND)  # the same for many sequences
# tokens that offers promise behind a token that was not among them; weight of the last
AFTER_MISS, NEWEST = 0.3, 0.05
STALE = 16  # offers in a row that nothing was drafted of, after which the last price list is forgotten


def least_of(budget: Budget) -> float:
    """The least survival of a node that is worth looking up."""
    if budget.price is not None:
        return max(LEAST, least_step(budget.price))
    return LEAST if budget is TREE or budget is CHAIN else 0.0


@dataclass(slots=True)
class OwnTrust:
    """Tokens that came in one text by those that the table promised: texts differ in how far they follow it."""

    hits: float = OWN_WORTH
    expected: float = OWN_WORTH

    def count(self, hits: float, expected: float) -> None:
        self.hits = self.hits * OWN_MEMORY + (1.0 - OWN_MEMORY) * OWN_WORTH + hits
        self.expected = self.expected * OWN_MEMORY + (1.0 - OWN_MEMORY) * OWN_WORTH + expected

    @property
    def factor(self) -> float:
        return min(max(self.hits / self.expected, OWN_LEAST), OWN_MOST)


class Fill:
    """The table of successors, and how far it is trusted: that is learnt.

    What it is worth depends on the size of the trees that are asked for, so that offers are made for that size. But
    where offers are small, nothing is drafted, and no other size is asked for: so a budget that was cut short because
    its text ends says nothing of the next one, and a size for which nothing was drafted of late is forgotten.
    """

    def __init__(self, table: Successors) -> None:
        self._table, self.after = table, table.after
        self.factors = list(PRIOR)
        self.asked, self.is_used = TREE, True
        self.after_miss = AFTER_MISS
        self._undrafted = 0  # offers in a row
        self._hits, self._expected = [WORTH * prior for prior in PRIOR], [WORTH, WORTH]

    @property
    def at(self) -> tuple[int, int, int, int]:
        return self._table.at

    def of(self, own: OwnTrust) -> TextTable:
        """The table, as far as it is trusted in one text."""
        return TextTable([min(1.0, own.factor * factor) for factor in self.factors], self.after)

    def note_offer(self, promised: float, missed: bool) -> None:
        """An offer that promises this number of tokens is made; `missed`: the last one had not the token that came."""
        if missed:
            self.after_miss += NEWEST * (promised - self.after_miss)
        self._undrafted += 1
        if self._undrafted > STALE and self.asked is not CHAIN:
            self.asked = TREE

    def note_budgets(self, budgets: Sequence[Budget]) -> None:
        first = next((budget for budget in budgets if budget.nodes), None)
        if first is not None:
            self._undrafted = 0
        self.is_used = len(budgets) <= MANY
        if len(budgets) > FEW:
            self.asked = CHAIN
        elif first is not None and first.price is not None and first.width > 1:
            self.asked = replace(first, depth=max(first.depth, AT_HAND))
        elif self.asked is CHAIN:
            self.asked = TREE

    def count(self, token: int, matched: Sequence[int], came: int, own: OwnTrust) -> None:
        """After a root with this token, and these continuations of its match, one token came."""
        if came in matched:
            return
        i = 1 if matched else 0
        row = [pair for pair in self.after(token) if pair[1] not in matched] if i else self.after(token)
        hits, expected = came in [one for _, one in row], sum([share for share, _ in row])
        own.count(hits, expected * self.factors[i])
        self._hits[i] = self._hits[i] * MEMORY + hits
        self._expected[i] = self._expected[i] * MEMORY + expected
        self.factors[i] = min(1.0, self._hits[i] / self._expected[i])


FORMAT = 1
_DIGEST = hashlib.sha256().digest_size


def load_or_read(target: Target, opening: Sequence[int], cost_file: Path | None) -> Successors | None:
    """The table of this target behind this opening: kept at an earlier start, else read now and kept."""
    file = None if cost_file is None else cost_file.with_suffix(".successors")
    shape = min(READ, target.vocab_size), min(KEPT, target.vocab_size)
    facts = repr((FORMAT, target.vocab_size, tuple(opening), shape)).encode()
    found = None if file is None else _load(file, facts, shape)
    if found is None:
        found = Successors.of(target, opening)
        if file is not None and found is not None:
            with suppress(OSError):  # a cache that cannot be written costs time, nothing else
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(_content(facts, found))
    return found


def _content(facts: bytes, table: Successors) -> bytes:
    body = table.tokens.int().numpy().tobytes() + table.shares.numpy().tobytes()
    return hashlib.sha256(facts + body).digest() + body


def _load(file: Path, facts: bytes, shape: tuple[int, int]) -> Successors | None:
    try:
        content = file.read_bytes()
    except OSError:
        return None
    digest, body = content[:_DIGEST], bytearray(content[_DIGEST:])
    if hashlib.sha256(facts + body).digest() != digest:
        return None
    half = len(body) // 2
    tokens = torch.frombuffer(body, dtype=torch.int32, count=half // 4).view(shape)
    shares = torch.frombuffer(body, dtype=torch.float32, offset=half).view(shape)
    return Successors(tokens, shares)
