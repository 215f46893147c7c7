"""Verdicts on greedy texts that a grammar holds: a mask is made only where the likeliest token is ruled out.

At temperature 0 a law is a point mass, and nodes beside the accepted path have no say. So the walk asks the grammar,
node by node, about one token: the argmax of the logits. Where it may follow it is the argmax of the masked logits too.
What is written is what `warp` and the greedy rule write, but for one thing: a mask that cannot be made matters only
where one is needed.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from forerun.core.errors import CannotSample
from forerun.core.params import Forces, Prefix
from forerun.core.types import Laws, Scores, Seq, TreeBatch, Verdict
from forerun.verify.greedy import walk_argmax
from forerun.verify.processors import IMPOSSIBLE, process_block
from forerun.verify.warp import NOTHING_LEFT, argmax_rows, chooser_of, is_plain_greedy


def choosers_of(seqs: Sequence[Seq]) -> list[Forces | None] | None:
    """What holds each of these greedy texts, None = nothing; None where one has another law."""
    found = [chooser_of(seq) for seq in seqs]
    alike = all(law is not None or is_plain_greedy(seq) for seq, law in zip(seqs, found, strict=True))
    return found if alike else None


def chosen(
    seqs: Sequence[Seq], trees: TreeBatch, scores: Scores, choosers: Sequence[Forces | None]
) -> tuple[Laws, Verdict]:
    logits, known = scores.required_logits, scores.greedy
    tops = argmax_rows(logits) if known is None or known.argmax is None else known.argmax
    tokens, impossible = trees.to_host()[0], dict[int, CannotSample]()
    paths, bonus = list[list[int]](), list[int]()
    for seq, law, first, shape in zip(seqs, choosers, trees.starts, trees.topology(), strict=False):
        rows = slice(first, first + len(shape))
        own = tokens[rows], shape.children, tops[rows]
        if law is None:
            path, token = walk_argmax(*own)
        else:
            path, token, why = _walk(seq, law, logits[rows], *own)
            if why is not None:
                impossible[first + (path[-1] if path else 0)] = why
        paths.append(path)
        bonus.append(token)
    laws = Laws(logits, (True,) * len(seqs), plain_greedy=True, impossible=impossible)
    return laws, Verdict.of(paths, bonus, trees.device)


def _walk(
    seq: Seq, law: Forces, logits: Tensor, tokens: Sequence[int], children: Sequence[Sequence[int]], tops: Sequence[int]
) -> tuple[list[int], int, CannotSample | None]:
    """The accepted nodes of one tree, the bonus, and why none can follow, if so; then the bonus means nothing."""
    path, written, node = list[int](), tuple[int, ...](), 0
    while True:
        token = law.choice(Prefix(seq.tokens, seq.prompt_length, written), tops[node])
        if token is None:
            block = logits[node : node + 1].clone()
            failures = process_block(block, seq, [written])
            [token] = argmax_rows(block)
            if not block[0, token] > IMPOSSIBLE:
                return path, 0, failures.get(0) or CannotSample(NOTHING_LEFT)
        for child in children[node]:
            if tokens[child] == token:
                break
        else:
            return path, token, None
        path.append(child)
        written, node = (*written, token), child
