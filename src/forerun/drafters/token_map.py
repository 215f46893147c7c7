"""TokenMap: how the tokens of a target and of a draft model with another tokenizer correspond.

Two tokens correspond if they stand for the same bytes: spellings differ (a space is U+0120 in one vocabulary and U+2581
in another), bytes do not. Special tokens stand for no bytes: they correspond where they are spelt alike, and the ends
of text always do. A target's token that the draft model lacks is read to it in pieces, the longest first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache

import torch
from torch import Tensor

from forerun.errors import VocabularyMismatch
from forerun.models.load.token_bytes import SENTENCEPIECE_SPACE, from_byte_level, from_sentencepiece

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
        cls,
        vocabulary: Mapping[str, int],
        special: Iterable[int],
        ends: Iterable[int] = (),
        bos: int | None = None,
    ) -> Spelling:
        """From the vocabulary of a tokenizer, and the ids that it treats as special."""
        apart = {*special, *ends} | ({bos} if bos is not None else set())
        marks = {
            kind: sum(token.startswith(kind) for token in vocabulary)
            for kind in (_BYTE_LEVEL, _SENTENCEPIECE)
        }
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
        cls,
        target: Spelling,
        draft: Spelling,
        vocab_size: int,
        encode: Callable[[str], list[int]] | None = None,
    ) -> TokenMap:
        """The map of two vocabularies; raises where they share next to nothing."""
        ids = dict[bytes, int]()
        for index, piece in sorted(draft.pieces.items(), reverse=True):
            if piece:
                ids[piece] = index  # of several that stand for the same, the lowest
        shared = {
            index: ids[piece] for index, piece in sorted(target.pieces.items(), reverse=True) if piece in ids
        }
        shared |= {
            index: draft.special[name] for name, index in target.special.items() if name in draft.special
        }
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
            (shared[i],) if i in shared else cut(target.pieces.get(i) or names.get(i, b""))
            for i in range(vocab_size)
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
