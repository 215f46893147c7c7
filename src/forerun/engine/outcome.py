"""The outcome of a round, computed before anything is written: pure, so that a fault in here changes nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from forerun.engine.metrics import RoundCounts
from forerun.engine.sequence import Advance, SequenceState
from forerun.errors import CannotSample
from forerun.types import Branch, Event, FinishReason, Laws, Round, TokenLogprob, TreeBatch, Verdict
from forerun.verify.warp import token_logprobs


def outcome_of(
    seqs: Sequence[SequenceState],
    trees: TreeBatch,
    laws: Laws,
    verdict: Verdict,
    clock: dict[str, float],
    seconds: float,
    prompt_rows: int = 0,
    followed: bool = False,
) -> tuple[list[Advance], Round]:
    """What each sequence gets, and what controllers observe: `clock` has the seconds of the round by part."""
    paths, bonus = verdict.to_host()
    (tokens, parents), starts = trees.to_host(), trees.starts
    advances: list[Advance] = []
    drafted: list[int] = []
    deepest: list[int] = []
    accepted: list[int] = []
    for b, seq in enumerate(seqs):
        first, path, error = starts[b], paths[b], None
        nodes, fresh, depth = [first], [bonus[b]], 0
        if path:
            nodes += [first + node for node in path]
            fresh = [*[tokens[node] for node in nodes[1:]], bonus[b]]
        if laws.impossible:
            fresh, error = _up_to_impossible(fresh, nodes, laws.impossible)
        taken, detokenizer, finished = seq.extended(fresh)
        if error is not None:
            finished, error = (finished, None) if finished else ("error", error)  # it may have ended before
        if taken < len(fresh):
            fresh = fresh[:taken]
        size = starts[b + 1] - first
        if size > 1:
            depth = trees.topology()[b].deepest
        drafted.append(size - 1)
        deepest.append(depth)
        accepted.append(min(len(path), taken))
        counts = RoundCounts(taken, size - 1, depth, accepted[b], seconds)
        text = detokenizer.take(finished is not None)
        event = _event(seq, fresh, nodes, accepted[b], text, laws, finished, error)
        if seq.request.shows_rejected and size > 1:
            own = slice(first, starts[b + 1])
            branches = rejected_branches(tokens[own], parents[own], path, accepted[b])
            event = replace(event, rejected=branches)
        places = len(seq.rounds), counts, len(seq.events)
        advances.append(Advance(seq, len(seq.tokens), fresh, detokenizer, *places, event, finished, error))
    trees_of = tuple(drafted), tuple(deepest), tuple(accepted)
    rows = 0 if trees.form is None else trees.form.rows
    return advances, Round(tuple(seqs), *trees_of, clock, prompt_rows, followed, rows)


def _up_to_impossible(
    fresh: list[int], nodes: list[int], impossible: Mapping[int, str]
) -> tuple[list[int], Exception | None]:
    """The tokens before the first node that no token can follow; token i was drawn after nodes[i]."""
    for i, node in enumerate(nodes):
        if node in impossible:
            return fresh[:i], CannotSample(impossible[node])
    return fresh, None


def _event(
    seq: SequenceState,
    fresh: list[int],
    nodes: list[int],
    accepted: int,
    text: str,
    laws: Laws,
    finished: FinishReason | None,
    error: Exception | None,
) -> Event:
    """What the round added to a sequence; nodes[i] is the node whose law token i was drawn from."""
    logprobs: tuple[TokenLogprob, ...] = ()
    wanted = seq.request.params.logprobs
    if wanted is not None and fresh:
        logprobs = token_logprobs(laws, nodes[: len(fresh)], fresh, wanted)
    return Event(seq.id, tuple(fresh), accepted, text, logprobs, finished, error)


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
