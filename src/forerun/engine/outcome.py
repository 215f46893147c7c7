"""The outcome of a round, computed before anything is written: pure, so that a fault in here changes nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from forerun.core.errors import CannotSample
from forerun.core.types import Branch, Event, FinishReason, Laws, Round, TokenLogprob, TreeBatch, Verdict
from forerun.drafters.base import committed_tokens
from forerun.engine.detokenize import Detokenizer
from forerun.engine.sequence import Advance, SequenceState
from forerun.engine.stats import RoundCounts

# Verifiers.logprobs
LogprobsOf = Callable[[Laws, SequenceState, int, Sequence[int], Sequence[int]], tuple[TokenLogprob, ...]]


def outcome_of(
    seqs: Sequence[SequenceState],
    trees: TreeBatch,
    laws: Laws,
    verdict: Verdict,
    logprobs_of: LogprobsOf,
    clock: dict[str, float],
    seconds: float,
    prompt_rows: int = 0,
    followed: bool = False,
    ahead: int = 0,
    started: int = 0,
) -> tuple[list[Advance], Round]:
    """What each sequence gets, and what controllers observe: `clock` has the seconds of the round by part.

    The last `started` sequences start with this round: their trees were not drafted.
    """
    paths, bonus = verdict.to_host()
    if trees.is_plain() and not laws.impossible:
        nothing = (0,) * len(seqs)
        done = Round(tuple(seqs), nothing, nothing, nothing, clock, prompt_rows, followed, 0, ahead, started)
        return _plain_advances(seqs, laws, bonus, logprobs_of, seconds), done
    (tokens, parents), starts, sizes = trees.to_host(), trees.starts, trees.sizes()
    deepest = [shape.deepest for shape in trees.topology()]
    advances, accepted = list[Advance](), list[int]()
    counted: dict[tuple[int, int, int, int], RoundCounts] = {}  # in a large batch many are alike
    drafted_for = len(seqs) - started
    for b in range(drafted_for, len(seqs)):  # what was not accepted there was not drafted
        sizes[b], deepest[b] = 1 + len(paths[b]), len(paths[b])
    columns = zip(seqs, committed_tokens(trees, verdict), paths, starts, sizes, deepest, strict=False)
    for b, (seq, fresh, path, first, size, depth) in enumerate(columns):
        error = None
        if laws.impossible:
            fresh, error = _up_to_impossible(fresh, _nodes(first, path), laws.impossible)
        taken, detokenizer, text, finished = _extended(seq, fresh)
        if error is not None:
            finished, error = (finished, None) if finished else ("error", error)  # it may have ended before
            text += detokenizer.take(final=True)
        if taken < len(fresh):
            fresh = fresh[:taken]
        kept = min(len(path), taken)
        accepted.append(kept)
        alike = taken, size - 1, depth, kept
        if (counts := counted.get(alike)) is None:
            counts = counted[alike] = RoundCounts(*alike, seconds)
        logprobs: tuple[TokenLogprob, ...] = ()
        if seq.params.logprobs is not None:
            logprobs = logprobs_of(laws, seq, first, [0, *path][: len(fresh)], fresh) if fresh else ()
        event = Event(seq.id, tuple(fresh), kept, text, logprobs, finished, error)
        if seq.request.shows_rejected and size > 1 and b < drafted_for:
            own = slice(first, first + size)
            branches = rejected_branches(tokens[own], parents[own], path, kept)
            event = replace(event, rejected=branches)
        places = len(seq.rounds), counts, len(seq.events)
        advances.append(Advance(seq, len(seq.tokens), fresh, detokenizer, *places, event, finished, error))
    trees_of = tuple([size - 1 for size in sizes]), tuple(deepest), tuple(accepted)
    rows = 0 if trees.form is None else trees.form.rows
    return advances, Round(tuple(seqs), *trees_of, clock, prompt_rows, followed, rows, ahead, started)


def _nodes(first: int, path: Sequence[int]) -> list[int]:
    """Root and path among the nodes of all trees."""
    return [first, *[first + node for node in path]]


def _plain_advances(
    seqs: Sequence[SequenceState], laws: Laws, bonus: Sequence[int], logprobs_of: LogprobsOf, seconds: float
) -> list[Advance]:
    """One token for each, in few steps: with many sequences, most rounds are plain."""
    counts, advances = RoundCounts(1, 0, 0, 0, seconds), list[Advance]()
    for b, (seq, token) in enumerate(zip(seqs, bonus, strict=True)):
        length, fresh, finished, usual = len(seq.tokens), [token], None, None
        if length + 1 < seq.max_length and token not in seq.stop_ids:
            usual = seq.detokenizer.behind(fresh)
        if usual is not None:
            detokenizer, text = usual
        else:
            _, detokenizer, text, finished = _extended(seq, fresh)
        logprobs = logprobs_of(laws, seq, b, (0,), fresh) if seq.params.logprobs is not None else ()
        event = Event(seq.id, (token,), 0, text, logprobs, finished)
        places = len(seq.rounds), counts, len(seq.events)
        advances.append(Advance(seq, length, fresh, detokenizer, *places, event, finished))
    return advances


def _extended(seq: SequenceState, fresh: list[int]) -> tuple[int, Detokenizer, str, FinishReason | None]:
    """How many of these tokens it takes, the detokenizer then, the text that they add, and why it ends."""
    if len(seq.tokens) + len(fresh) < seq.max_length and seq.stop_ids.isdisjoint(fresh):
        usual = seq.detokenizer.behind(fresh)
        if usual is not None:
            return len(fresh), *usual, None
    taken, detokenizer, finished = seq.extended(fresh)
    return taken, detokenizer, detokenizer.take(finished is not None), finished


def _up_to_impossible(
    fresh: list[int], nodes: list[int], impossible: Mapping[int, CannotSample]
) -> tuple[list[int], Exception | None]:
    """The tokens before the first node that no token can follow; token i was drawn after nodes[i]."""
    for i, node in enumerate(nodes):
        if node in impossible:
            return fresh[:i], impossible[node]
    return fresh, None


def rejected_branches(
    tokens: Sequence[int], parents: Sequence[int], path: Sequence[int], accepted: int
) -> tuple[Branch, ...]:
    """What of one tree was not accepted: a branch for each leaf, from where it leaves the accepted path."""
    kept = {0: 0} | {node: depth for depth, node in enumerate(path[:accepted], start=1)}
    inner = set(parents)
    branches = []
    for leaf in range(1, len(tokens)):
        if leaf in inner or leaf in kept:
            continue
        node, found = leaf, list[int]()
        while node not in kept:
            found.append(tokens[node])
            node = parents[node]
        branches.append(Branch(kept[node], tuple(reversed(found))))
    return tuple(branches)
