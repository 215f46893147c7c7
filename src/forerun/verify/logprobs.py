"""Log-probabilities of the tokens of a round, under the law each was drawn from, and of the likeliest tokens there.

The host computes them from the laws when a round is read (`token_logprobs`). Where a device has decided, the next pass
may have overwritten the logits by then. So `send` computes them behind the pass itself, of the token that the device
has chosen after every node, and has them copied to the host, which waits for that copy and for no later pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from forerun.core.types import Laws, Seq, TokenLogprob, TreeBatch
from forerun.verify.warp import truncation_key, warp_rows

ROWS = 128  # at once: the logits of more take much memory


def token_logprobs(laws: Laws, nodes: Sequence[int], tokens: Sequence[int], top: int) -> tuple[TokenLogprob, ...]:
    """Of tokens[i] under the law after nodes[i] (of the M of the batch); and of the `top` likeliest there.

    Greedy rows were not truncated: theirs are plain log-probabilities after penalties and bans.
    """
    return row_logprobs(laws.log_weights[list(nodes)], tokens, top)


def row_logprobs(log_weights: Tensor, tokens: Sequence[int], top: int) -> tuple[TokenLogprob, ...]:
    """Of tokens[i] under row i of [n, V]; and of the `top` likeliest there."""
    known, values, places = _likeliest(log_weights, torch.tensor(tokens), top)
    rows = zip(tokens, known.tolist(), values.tolist(), places.tolist(), strict=True)
    return tuple(_entry(*row) for row in rows)


def _likeliest(log_weights: Tensor, tokens: Tensor, top: int) -> tuple[Tensor, Tensor, Tensor]:
    """Of rows [n, V]: the log-probability of each row's token, those of the likeliest, and which these are."""
    logprobs = log_weights.log_softmax(-1)
    found = logprobs.topk(min(top, logprobs.shape[-1]))
    return logprobs.gather(1, tokens.to(logprobs.device)[:, None])[:, 0], found.values, found.indices


def _entry(token: int, logprob: float, values: Sequence[float], places: Sequence[int]) -> TokenLogprob:
    pairs = zip(places, values, strict=True)
    return TokenLogprob(token, logprob, tuple(TokenLogprob(*pair) for pair in pairs if pair[1] > -math.inf))


class SentLogprobs:
    """Implements forerun.core.types.KnownLogprobs: of sequences that want them, on their way to the host."""

    def __init__(self) -> None:
        # by sequence: its rows, and how to read them; sequences of one law and one `top` are sent together
        self._places: dict[int, tuple[int, Callable[[], tuple[Tensor, Tensor, Tensor]]]] = {}

    def add(self, seqs: Sequence[Seq], sizes: Sequence[int], log_weights: Tensor, tokens: Tensor, top: int) -> None:
        """Rows [n, V] of these sequences, so many of each, and the tokens [n] after them."""
        parts = [
            _likeliest(log_weights[at : at + ROWS], tokens[at : at + ROWS], top) for at in range(0, len(tokens), ROWS)
        ]
        read, first = _sent(*(torch.cat(part) for part in zip(*parts, strict=True))), 0
        for seq, size in zip(seqs, sizes, strict=True):
            self._places[seq.id] = first, read
            first += size

    def of(self, seq_id: int, nodes: Sequence[int], tokens: Sequence[int]) -> tuple[TokenLogprob, ...]:
        """Of the tokens after these nodes of its tree."""
        first, read = self._places[seq_id]
        known, values, places = (part[[first + node for node in nodes]].tolist() for part in read())
        return tuple(_entry(*row) for row in zip(tokens, known, values, places, strict=True))


def send(seqs: Sequence[Seq], trees: TreeBatch, logits: Tensor, tokens: Tensor) -> SentLogprobs:
    """Start what `SentLogprobs.of` waits for: of logits [M, V] and the device's token after every node [M].

    No law here depends on the path: the device has decided.
    """
    sent, groups = SentLogprobs(), dict[object, list[int]]()
    for b, seq in enumerate(seqs):
        params = seq.params
        if params.logprobs is not None:
            groups.setdefault((params.logprobs, truncation_key(params)), []).append(b)
    for which in groups.values():
        some, sizes = [seqs[b] for b in which], [trees.starts[b + 1] - trees.starts[b] for b in which]
        rows = [slice(trees.starts[b], trees.starts[b + 1]) for b in which]  # row numbers would have to be sent
        owners = [seq for seq, size in zip(some, sizes, strict=True) for _ in range(size)]
        laws = warp_rows(torch.cat([logits[part] for part in rows]), owners, [()] * len(owners))
        sent.add(some, sizes, laws, torch.cat([tokens[part] for part in rows]), some[0].params.logprobs or 0)
    return sent


def _sent(*parts: Tensor) -> Callable[[], tuple[Tensor, Tensor, Tensor]]:
    """What waits for these on the host."""
    known, values, places = parts
    if known.device.type != "cuda":
        return lambda: (known, values, places)
    host = [torch.empty(part.shape, dtype=part.dtype, pin_memory=True) for part in parts]
    for into, part in zip(host, parts, strict=True):
        into.copy_(part, non_blocking=True)
    done = torch.cuda.Event()  # type: ignore[no-untyped-call]
    done.record()

    def read() -> tuple[Tensor, Tensor, Tensor]:
        done.synchronize()
        return host[0], host[1], host[2]

    return read
