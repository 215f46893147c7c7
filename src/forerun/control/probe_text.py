"""The tokens that passes are timed with while t(rows) is measured: any for a dense model, real text for experts.

A pass over a mixture of experts costs what the experts cost that its nodes wake, and which those are depends on the
tokens. A token repeated wakes the same ones again, and random tokens behind a context that makes no sense wake fewer
than text does (measured: docs/moe.md). So a model with experts first writes a text of its own: short pieces, all at
once, sampled from what it finds likely, as the nodes of a draft are.
"""

from __future__ import annotations

import torch

from forerun.core.types import Needs, PlainSeq, TreeBatch, Verdict
from forerun.models.base import Target

STRIDE = 7919  # a prime, so that tokens differ
PIECES, LENGTH = 8, 16  # of a text of its own: so many rows in so many passes
LIKELY = 8  # tokens that each token of it is drawn from
_SEED = 1
_FIRST_ID = -1_000_000  # of sequences that no engine and no other measurement gives


def has_experts(target: Target) -> bool:
    """Does the cost of a pass depend on its tokens?"""
    shared = target.shared()
    return shared is not None and shared.config is not None and shared.config.moe is not None


def probe_text(target: Target, length: int) -> list[int]:
    """So many tokens, or for experts as many as it takes to write them in a moment; they may be used again."""
    if not has_experts(target):
        return [(1 + STRIDE * i) % target.vocab_size for i in range(length)]
    pieces = max(PIECES, length // LENGTH)
    while pieces > 1 and not target.has_room(*[LENGTH + 2] * pieces):
        pieces //= 2
    return own_text(target, pieces)


def own_text(target: Target, pieces: int) -> list[int]:
    """Pieces that the target writes behind one token each, laid end to end."""
    made = torch.Generator().manual_seed(_SEED)
    starts = [(1 + STRIDE * (i + 1)) % target.vocab_size for i in range(pieces)]
    seqs = [PlainSeq(_FIRST_ID - i, [token], max_length=LENGTH + 2) for i, token in enumerate(starts)]
    try:
        target.prefill(seqs, Needs())
        for _ in range(LENGTH - 1):
            roots = TreeBatch.chains([seq.tokens[-1:] for seq in seqs], target.device)
            logits = target.score(seqs, roots, Needs()).required_logits
            values, ids = logits.topk(min(LIKELY, target.vocab_size))
            drawn = torch.multinomial(values.cpu().softmax(-1), 1, generator=made)
            tokens = ids.cpu().gather(1, drawn).flatten().tolist()
            target.commit(seqs, roots, Verdict.of([[] for _ in seqs], tokens, target.device))
            for seq, token in zip(seqs, tokens, strict=True):
                seq.tokens.append(token)
    finally:
        for seq in seqs:
            target.release(seq)
    return [token for seq in seqs for token in seq.tokens]
