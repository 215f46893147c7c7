"""TranslatedTarget: a draft model with another tokenizer, as a Target in the target's own vocabulary.

`TokenMap` has the tokens that correspond: those that stand for the same bytes, however they are spelt; special tokens
where they are spelt alike, and the ends of text always. A target's token that the draft model lacks is read to it in
pieces, the longest first: a node becomes a chain of several nodes. Logits come back over the target's ids, impossible
where the vocabularies have no token in common (token-level intersection, Timor et al. 2025). That masked law is what
drafters draw from and hand on, so that sampled drafts are tested against exactly what they were drawn from.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache

import torch
from torch import Tensor

from forerun.core.errors import PromptTooLong, VocabularyMismatch
from forerun.core.types import Needs, PlainSeq, Prompts, Scores, Seq, TreeBatch, Verdict, first_rows
from forerun.models.base import Abilities, BaseTarget, Target
from forerun.models.load.tokenizer import SENTENCEPIECE_SPACE, from_byte_level, from_sentencepiece

LEAST_SHARED = 0.05  # of the draft model's tokens: below, the vocabularies have nothing to do with each other
_BYTE_LEVEL, _SENTENCEPIECE = "\u0120", SENTENCEPIECE_SPACE  # how vocabularies of the two kinds spell a space


@dataclass(frozen=True, slots=True)
class Spelling:
    """What the tokens of a vocabulary stand for."""

    pieces: Mapping[int, bytes]  # of ordinary tokens
    special: Mapping[str, int]
    ends: tuple[int, ...] = ()  # of text
    bos: int | None = None  # stands before every text

    @classmethod
    def of(
        cls, vocabulary: Mapping[str, int], special: Iterable[int], ends: Iterable[int] = (), bos: int | None = None
    ) -> Spelling:
        """From the vocabulary of a tokenizer, and the ids that it treats as special."""
        apart = {*special, *ends} | ({bos} if bos is not None else set())
        marks = {kind: sum(token.startswith(kind) for token in vocabulary) for kind in (_BYTE_LEVEL, _SENTENCEPIECE)}
        bytes_of = from_sentencepiece
        if marks[_BYTE_LEVEL] >= marks[_SENTENCEPIECE]:
            bytes_of = from_byte_level
        pieces = {index: bytes_of(token) for token, index in vocabulary.items() if index not in apart}
        named = {token: index for token, index in vocabulary.items() if index in apart}
        return cls(pieces, named, tuple(sorted(ends)), bos)


@dataclass(frozen=True, slots=True)
class TokenMap:
    """From the ids of a draft model to those of the target, and back."""

    vocab_size: int  # the target's, padding included
    draft_ids: Tensor  # [S] int64, of the shared tokens
    target_ids: Tensor  # [S] int64, the target's id of each; all different
    pieces: Sequence[tuple[int, ...]]  # by the target's id: what the draft model reads for it
    prefix: tuple[int, ...] = ()  # what it reads before every text
    target_bytes: Mapping[int, bytes] = field(default_factory=dict)
    draft_bytes: Mapping[int, bytes] = field(default_factory=dict)
    # ends of text: the draft model's id to the target's
    ends: Mapping[int, int] = field(default_factory=dict)
    encode: Callable[[str], list[int]] | None = None  # the target's tokenizer

    @classmethod
    def between(
        cls, target: Spelling, draft: Spelling, vocab_size: int, encode: Callable[[str], list[int]] | None = None
    ) -> TokenMap:
        """The map of two vocabularies; raises where they share next to nothing."""
        ids = dict[bytes, int]()
        for index, piece in sorted(draft.pieces.items(), reverse=True):
            if piece:
                ids[piece] = index  # of several that stand for the same, the lowest
        shared = {index: ids[piece] for index, piece in sorted(target.pieces.items(), reverse=True) if piece in ids}
        shared |= {index: draft.special[name] for name, index in target.special.items() if name in draft.special}
        if target.ends and draft.ends:
            ended = {shared[index] for index in target.ends if index in shared}
            if not ended & {*draft.ends}:
                shared[target.ends[0]] = draft.ends[0]
        # one target id for each
        pairs = {theirs: ours for ours, theirs in sorted(shared.items(), reverse=True)}
        if len(pairs) < LEAST_SHARED * len(draft.pieces):
            raise VocabularyMismatch(
                f"the draft model does not share the vocabulary: {len(pairs)} of its {len(draft.pieces)} tokens are "
                "the target's too, and too few to draft with; use another model, or the drafter 'suffix'"
            )
        names = {index: name.encode() for name, index in target.special.items()}
        longest = max(map(len, ids))
        fallback = draft.bos if draft.bos is not None else next(iter(draft.ends), 0)

        @cache
        def cut(piece: bytes) -> tuple[int, ...]:
            return _cut(piece, ids, longest) or (fallback,)

        pieces = [
            (shared[i],) if i in shared else cut(target.pieces.get(i) or names.get(i, b"")) for i in range(vocab_size)
        ]
        ends = {theirs: ours for theirs, ours in pairs.items() if theirs in draft.ends}
        return cls(
            vocab_size, torch.tensor([*pairs]), torch.tensor([*pairs.values()]), pieces,
            () if draft.bos is None else (draft.bos,), target.pieces, draft.pieces, ends, encode,
        )  # fmt: skip

    def padded(self, vocab_size: int) -> TokenMap:
        """The same for a target that has padding ids beyond its tokenizer's."""
        more = vocab_size - self.vocab_size
        return replace(self, vocab_size=vocab_size, pieces=[*self.pieces, *[self.pieces[0]] * more])

    def read(self, tokens: Iterable[int]) -> list[int]:
        """What the draft model reads for tokens of the target."""
        return [piece for token in tokens for piece in self.pieces[token]]

    def spread(self, logits: Tensor) -> Tensor:
        """The draft model's logits [N, Vd] over the target's ids [N, V]; what is not shared is impossible."""
        full = logits.new_full((len(logits), self.vocab_size), -torch.inf)
        full[:, self.target_ids.to(logits.device)] = logits[:, self.draft_ids.to(logits.device)]
        return full


def _cut(piece: bytes, ids: Mapping[bytes, int], longest: int) -> tuple[int, ...]:
    """A piece in the tokens of another vocabulary, the longest that fits first; bytes it lacks are left out."""
    found, at = list[int](), 0
    while at < len(piece):
        size = next((n for n in range(min(longest, len(piece) - at), 0, -1) if piece[at : at + n] in ids), 0)
        if size:
            found.append(ids[piece[at : at + size]])
        at += max(1, size)
    return tuple(found)


PIECES = 4  # of the draft model's tokens that one of the target's is thought to take at most


@dataclass(slots=True)
class _Reading:
    """A sequence in the draft model's tokens."""

    tokens: list[int]  # of the target
    read: list[int]  # of the draft model
    # how many of these the first token, the first two, ... of the target are; the prefix counts
    ends: list[int]
    nodes: list[list[int]] = field(default_factory=list)  # of the tree scored last: what each node became


class TranslatedTarget(BaseTarget):
    """The draft model behind a TokenMap."""

    def __init__(self, draft: Target, tokens: TokenMap) -> None:
        self.draft, self.map = draft, tokens
        self.vocab_size, self.max_length, self.device = tokens.vocab_size, draft.max_length, draft.device
        self.slots, self.pass_rows, self.source_rules = draft.slots, draft.pass_rows, draft.source_rules
        self._readings: dict[int, _Reading] = {}

    @property
    def can(self) -> Abilities:
        return self.draft.can

    @property
    def used_slots(self) -> int:
        return self.draft.used_slots

    @property
    def cached_slots(self) -> int:
        return self.draft.cached_slots

    def prefill(self, seqs: Sequence[Seq], needs: Needs, rows: int | None = None) -> tuple[TreeBatch, Scores]:
        known = [self.cached_tokens(seq) for seq in seqs]
        chains = [seq.tokens[have:-1] for seq, have in zip(seqs, known, strict=True)]
        chains = chains if rows is None else first_rows(chains, rows)
        read = [have + len(chain) for have, chain in zip(known, chains, strict=True)]
        self.draft.prefill([self._view(seq, length) for seq, length in zip(seqs, read, strict=True)], Needs())
        return TreeBatch.chains(chains, self.device), Scores(None)

    def score(self, seqs: Sequence[Seq], trees: TreeBatch, needs: Needs, prompts: Prompts | None = None) -> Scores:
        read = None if prompts is None else self.prefill(prompts.seqs, needs, prompts.rows)
        views = [self._view(seq) for seq in seqs]
        whole, last, done = [], list[int](), 0
        tokens, parents = trees.to_host()
        for b, seq in enumerate(seqs):
            span = slice(trees.starts[b], trees.starts[b + 1])
            tree, nodes = _expanded(tokens[span], parents[span], self.map)
            self._readings[seq.id].nodes = nodes
            whole.append(tree)
            last += [done + made[-1] for made in nodes]
            done += len(tree[0])
        batch = TreeBatch.trees(whole, device=self.device)
        logits = self.draft.score(views, batch, Needs()).required_logits[last]
        return Scores(self.map.spread(logits), read=read)

    def commit(self, seqs: Sequence[Seq], trees: TreeBatch, verdict: Verdict) -> None:
        tokens, parents = trees.to_host()
        whole, paths = [], []
        for b, seq in enumerate(seqs):
            span, nodes = slice(trees.starts[b], trees.starts[b + 1]), self._readings[seq.id].nodes
            whole.append(_expanded(tokens[span], parents[span], self.map)[0])
            paths.append([made for node in [0, *verdict.path(b)] for made in nodes[node]][1:])
        batch = TreeBatch.trees(whole, device=self.device)
        views = [self._view(seq) for seq in seqs]
        self.draft.commit(views, batch, Verdict.of(paths, [0] * len(paths), batch.device))
        for b, seq in enumerate(seqs):
            kept = [tokens[trees.starts[b] + node] for node in verdict.path(b)]
            self._update(self._readings[seq.id], [*seq.tokens, *kept])

    def truncate(self, seq: Seq, length: int) -> None:
        reading = self._readings.get(seq.id)
        if reading is not None:
            self.draft.truncate(self._view(seq), self._size(reading, min(length, len(reading.tokens))))

    def warm_up(self, needs: Needs, max_batch: int, max_length: int) -> None:
        self.draft.warm_up(needs, max_batch, max_length)

    def has_room(self, *lengths: int) -> bool:
        return self.draft.has_room(*(PIECES * length for length in lengths))

    def make_room(self, seqs: Sequence[Seq], rows: Sequence[int]) -> bool:
        return self.draft.make_room([self._view(seq) for seq in seqs], [PIECES * count for count in rows])

    def reused_tokens(self, seq: Seq) -> int:
        return 0  # its views have no salt

    def cached_tokens(self, seq: Seq) -> int:
        reading, cached = self._readings.get(seq.id), self.draft.cached_tokens(seq)
        return bisect_right(reading.ends, cached) if reading is not None and cached else 0

    def release(self, seq: Seq) -> None:
        self.draft.release(seq)
        self._readings.pop(seq.id, None)

    def _size(self, reading: _Reading, length: int) -> int:
        """How many tokens the draft model has for the first `length` of the target's."""
        return reading.ends[length - 1] if length else len(self.map.prefix)

    def _update(self, reading: _Reading, tokens: Sequence[int]) -> None:
        """Read what is new of a sequence, after what of it is still the same."""
        agreed = 0
        if reading.tokens == tokens[: len(reading.tokens)]:  # the usual case, compared in one go
            agreed = len(reading.tokens)
        else:
            while agreed < min(len(reading.tokens), len(tokens)) and reading.tokens[agreed] == tokens[agreed]:
                agreed += 1
        del reading.read[self._size(reading, agreed) :], reading.tokens[agreed:], reading.ends[agreed:]
        for token in tokens[agreed:]:
            reading.read += self.map.pieces[token]
            reading.ends.append(len(reading.read))
        reading.tokens = list(tokens)

    def _view(self, seq: Seq, length: int | None = None) -> PlainSeq:
        """The sequence as the draft model reads it: some tokens, or all but the last, and a first piece of the next."""
        reading = self._readings.get(seq.id)
        if reading is None:
            reading = self._readings[seq.id] = _Reading([], list(self.map.prefix), [])
        self._update(reading, seq.tokens)
        size = self._size(reading, len(seq.tokens) - 1 if length is None else length) + 1
        if size > self.draft.max_length:
            raise PromptTooLong(f"the draft model would read {size} tokens; it reads {self.draft.max_length} at most")
        limit = max(size, min(self.draft.max_length, PIECES * seq.max_length))
        return PlainSeq(seq.id, reading.read[:size], size, seq.params, seq.seed, limit, seq.stop_ids)


def _expanded(
    tokens: Sequence[int], parents: Sequence[int], tokens_of: TokenMap
) -> tuple[tuple[list[int], list[int]], list[list[int]]]:
    """A tree in the draft model's tokens, and which of its nodes each node became."""
    made: tuple[list[int], list[int]] = ([], [])
    nodes: list[list[int]] = []
    for token, parent in zip(tokens, parents, strict=True):
        above, chain = nodes[parent][-1] if parent >= 0 else -1, list[int]()
        for piece in tokens_of.pieces[token]:
            made[0].append(piece)
            made[1].append(above)
            above = len(made[0]) - 1
            chain.append(above)
        nodes.append(chain)
    return made, nodes
