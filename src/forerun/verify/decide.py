"""VerifierPool: from scores to laws and verdict, by the verifier of each sequence; a batch may mix verifiers.

Log-probabilities are those of the tokens of a round, under the law each was drawn from, and of the likeliest there. The
host computes them from the laws when a round is read (`token_logprobs`). Where a device has decided, the next pass
may have overwritten the logits by then. So `send` computes them behind the pass itself, of the token that the device
has chosen after every node, and has them copied to the host, which waits for that copy and for no later pass.

Verdicts on greedy texts that a grammar holds: a mask is made only where the likeliest token is ruled out.

At temperature 0 a law is a point mass, and nodes beside the accepted path have no say. So the walk asks the grammar,
node by node, about one token: the argmax of the logits. Where it may follow it is the argmax of the masked logits too.
What is written is what `warp` and the greedy rule write, but for one thing: a mask that cannot be made matters only
where one is needed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor

from forerun.core.errors import CannotSample
from forerun.core.noise import Noise
from forerun.core.params import Forces, Prefix, SamplingParams
from forerun.core.request import LawRules
from forerun.core.types import (
    DecidedSeq,
    Greedy,
    Laws,
    Scores,
    Seq,
    TokenLogprob,
    Traits,
    TreeBatch,
    Verdict,
    traits_of,
)
from forerun.verify.base import Logprobs, Verifier
from forerun.verify.greedy import greedy_verdict, walk_argmax
from forerun.verify.processors import IMPOSSIBLE, process_block
from forerun.verify.sampled import decides_alike, kinds_of
from forerun.verify.warp import (
    NOTHING_LEFT,
    argmax_rows,
    chooser_of,
    is_plain_greedy,
    keeps_argmax,
    reads_largest_only,
    truncation_key,
    warp,
    warp_rows,
)

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


class VerifierPool:
    """Implements forerun.verify.base.Verifiers: verifiers by name, made on first use."""

    def __init__(self, make: Callable[[str], Verifier]) -> None:
        self._make = make
        self._made: dict[str, Verifier] = {}

    def get(self, name: str) -> Verifier:
        if name not in self._made:
            self._made[name] = self._make(name)
        return self._made[name]

    def decide(self, seqs: Sequence[DecidedSeq], trees: TreeBatch, scores: Scores) -> tuple[Laws, Verdict]:
        """Laws and verdict of a round; where the device has decided about samples, no laws are made."""
        known = scores.greedy
        if known is not None and known.sampled and trees.drawn_from is None and self.decide_alike(seqs):
            greedy = tuple(seq.params.is_greedy for seq in seqs)
            return Laws(scores.required_logits, greedy, known=scores.logprobs), greedy_verdict(trees, known)
        if known is not None and self._all_greedy(seqs):
            laws = Laws(scores.required_logits, (True,) * len(seqs), plain_greedy=True, known=scores.logprobs)
            return laws, greedy_verdict(trees, known)
        choosers = choosers_of(seqs)
        if choosers is not None and any(choosers) and all(self.is_exact(seq.verifier) for seq in seqs):
            return chosen(seqs, trees, scores, choosers)
        laws = warp(scores.required_logits, seqs, trees)
        return laws, self.verify(seqs, trees, laws, known)

    def _all_greedy(self, seqs: Sequence[DecidedSeq]) -> bool:
        """Is the law of all of these the argmax, and every verifier exact?"""
        # a list is quicker than a generator: every round asks
        return all([one.is_plain_greedy and self.is_exact(one.verifier) for one in traits_of(seqs)])  # noqa: C419

    def decide_alike(self, seqs: Sequence[DecidedSeq]) -> bool:
        """Do the verifiers of these sequences come to the device's verdict on samples?"""
        return all(decides_alike(self.get(name)) for name in {seq.verifier for seq in seqs})

    def device_decides(self, seqs: Sequence[DecidedSeq]) -> bool:
        """Does a device that samples decide about all of these, some of which are sampled?"""
        return kinds_of(seqs) is not None and self.decide_alike(seqs)

    def is_exact(self, name: str) -> bool:
        """Is this verifier exact? All that are come to one verdict where laws are point masses."""
        return (self._made.get(name) or self.get(name)).exact

    def verify(self, seqs: Sequence[DecidedSeq], trees: TreeBatch, laws: Laws, known: Greedy | None = None) -> Verdict:
        """By each sequence's own verifier; where all are greedy and exact, from what the pass already knows."""
        if known is not None and laws.plain_greedy and all(self.is_exact(seq.verifier) for seq in seqs):
            return greedy_verdict(trees, known)
        noise = Noise([seq.seed for seq in seqs], [len(seq.tokens) for seq in seqs])
        groups: dict[str, list[int]] = {}
        for b, seq in enumerate(seqs):
            groups.setdefault(seq.verifier, []).append(b)
        if len(groups) == 1:
            return self.get(seqs[0].verifier).verify(trees, laws, noise)
        paths: list[list[int]] = [[] for _ in seqs]
        bonus = [0] * len(seqs)
        for name, which in groups.items():
            part = laws.select(trees.nodes_of(which), which)
            verdict = self.get(name).verify(trees.select(which), part, noise.select(which))
            for b, path, token in zip(which, *verdict.to_host(), strict=True):
                paths[b], bonus[b] = path, token
        return Verdict.of(paths, bonus, trees.device)

    def traits(self, params: SamplingParams, rules: LawRules | None, verifier: str, has_budget: bool) -> Traits:
        return _traits(verifier, keeps_argmax(params, rules), params.logprobs is not None, has_budget)

    def reads_largest_only(self, seqs: Sequence[Seq]) -> bool:
        return all(map(reads_largest_only, seqs))

    def send_logprobs(self, seqs: Sequence[DecidedSeq], trees: TreeBatch, scores: Scores) -> Scores:
        known = scores.greedy
        if known is None or known.tokens is None or not any([one.wants_logprobs for one in traits_of(seqs)]):  # noqa: C419
            return scores
        if not (known.sampled and trees.drawn_from is None and self.decide_alike(seqs)) and not self._all_greedy(seqs):
            return scores  # the host decides, before another pass is launched
        return replace(scores, logprobs=send(seqs, trees, scores.required_logits, known.tokens()))

    def logprobs(self, laws: Laws, seq: Seq, first: int, nodes: Sequence[int], tokens: Sequence[int]) -> Logprobs:
        if laws.known is not None:
            return laws.known.of(seq.id, nodes, tokens)
        return token_logprobs(laws, [first + node for node in nodes], tokens, seq.params.logprobs or 0)

    def prompt_logprobs(self, scores: Scores, seq: Seq, tokens: Sequence[int]) -> Logprobs:
        return row_logprobs(scores.required_logits, tokens, seq.params.prompt_logprobs or 0)


_traits = lru_cache(maxsize=1024)(Traits)


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
