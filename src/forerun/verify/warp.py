"""Warping: from logits to laws by sampling parameters; the only code that knows what these mean.

Each node is warped with its own path as context, because penalties and bans depend on the sequence as it
would be if the node were accepted. The order and the semantics are transformers', ties included: bias,
repetition penalty, presence and frequency penalties, bad words, min tokens, tokens that the model's own settings
force, the caller's own processors, temperature, top-k, top-p, min-p. Greedy rows skip the last four. Rows that need
nothing are handed on as they are, without a copy. No number here overflows: parameters have limits (params.py),
processors are checked.

Top-p is defined by a sort of the whole vocabulary, which on a CPU costs more than the rest of a round. But
tokens of less than (1 - top_p) / V each have less than 1 - top_p together, so the others reach top_p without
them: only those few are sorted. Where a tie or rounding could make a difference the definition decides.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from forerun.core.errors import CannotSample
from forerun.core.params import Forces, SamplingParams
from forerun.core.request import LawRules
from forerun.core.types import CUT, Laws, Seq, TreeBatch
from forerun.verify.processors import process_block

_BANNED = -math.inf
NOTHING_LEFT = "no token can follow: logit_bias, bad_words, min_tokens and processors leave none; loosen one of them"
_AS_IS = (1.0, 0, 1.0, 0.0)  # temperature, top-k, top-p, min-p that change nothing


def warp(logits: Tensor, seqs: Sequence[Seq], trees: TreeBatch) -> Laws:
    """The law after every node [M, V] of every tree."""
    for seq in seqs:
        if not is_plain_greedy(seq):
            break
    else:
        return Laws(logits, (True,) * len(seqs), plain_greedy=True)
    if all(map(reads_largest_only, seqs)) and not _rules_choose(argmax_rows(logits), seqs, trees):
        # point masses on the largest, all the same
        return Laws(logits, (True,) * len(seqs), plain_greedy=True)
    greedy = tuple(seq.params.is_greedy for seq in seqs)
    owners = [seq for seq, size in zip(seqs, trees.sizes(), strict=True) for _ in range(size)]
    failures: dict[int, CannotSample] = {}
    rows = warp_rows(logits, owners, _paths(seqs, trees), failures)
    impossible = _impossible(rows, [row for row, seq in enumerate(owners) if _bans(seq)], failures)
    if impossible:
        rows = rows.clone()
        rows[list(impossible)] = 0.0  # any law: a sequence that reaches this node ends with an error
    return Laws(rows, greedy, impossible=impossible)


def warp_rows(
    logits: Tensor, seqs: Sequence[Seq], paths: Sequence[Sequence[int]], failures: dict[int, CannotSample] | None = None
) -> Tensor:
    """Log-weights [N, V] from logits [N, V]: row n is what follows the tokens of seqs[n] and then paths[n].

    Draft models warp their own logits with this, so that they draw as the target does. Rows at which a processor
    of the caller failed allow no token; `failures` names them.
    """
    logits = _adjust(logits, seqs, paths, {} if failures is None else failures)
    groups: dict[tuple[float, int, float, float], list[int]] = {}
    for row, seq in enumerate(seqs):
        key = truncation_key(seq.params)
        if key != _AS_IS:
            groups.setdefault(key, []).append(row)
    for key, rows in groups.items():
        if len(rows) == len(seqs):
            return _truncate(logits, *key)
    if groups:
        logits = logits.clone()
    for key, rows in groups.items():
        logits[rows] = _truncate(logits[rows], *key)
    return logits


def truncation_key(params: SamplingParams) -> tuple[float, int, float, float]:
    """Temperature, top-k, top-p and min-p: rows that agree in it are scaled and truncated alike."""
    return _AS_IS if params.is_greedy else (params.temperature, params.top_k, params.top_p, params.min_p)


def coupled_token(log_weights: Tensor, uniforms: Tensor) -> int:
    """argmin(E / p), E = -log(1 - u): the draw from a law [V], given as log-weights, under shared noise.

    E is never less than u. So with the likeliest token as the one to beat, only tokens whose u / p is no more than
    its E / p can win: a handful, and only theirs need a logarithm.
    """
    top = argmax_rows(log_weights[None])[0]
    weights = (log_weights - log_weights[top]).exp_()  # [V], 1 at the top
    bar = -torch.log1p(-uniforms[top])
    rivals = (uniforms <= weights * bar * 1.0001).nonzero()[:, 0]  # a little wider than rounding can shift
    noise = torch.log1p(-uniforms[rivals]).neg_()
    return int(rivals[(noise / weights[rivals]).argmin()])


def argmax_rows(rows: Tensor) -> list[int]:
    """The first argmax of each row [N, V]; by numpy on a CPU, where it is ten times faster than torch."""
    found: list[int] = (rows.numpy() if rows.device.type == "cpu" else rows).argmax(-1).tolist()
    return found


def _truncate(logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> Tensor:
    if temperature != 1.0:
        logits = logits / temperature
    return truncate(logits, top_k, top_p, min_p)


def is_plain_greedy(seq: Seq) -> bool:
    """Is the law the argmax of the logits as they are? Asked every round."""
    return keeps_argmax(seq.params, seq.rules)


def keeps_argmax(params: SamplingParams, rules: LawRules | None) -> bool:
    """Is the law under these parameters and rules the argmax of the logits as they are?"""
    if params.temperature != 0.0 or params.logit_bias or rules is not None:
        return False
    return not _params_read_path(params)


def reads_largest_only(seq: Seq) -> bool:
    """Does its law depend on the largest logit alone, and on what the model's own rules force or ban?"""
    params = seq.params
    return (
        params.temperature == 0.0
        and params.logprobs is None
        and not params.logit_bias
        and not _params_read_path(params)
    )


def chooser_of(seq: Seq) -> Forces | None:
    """What rules tokens out of a greedy law that is otherwise the argmax of the logits; None = its law is another."""
    params, laws = seq.params, seq.params.processors
    if len(laws) != 1 or not isinstance(laws[0], Forces) or seq.rules is not None or _params_penalise(params):
        return None
    return laws[0] if params.temperature == 0.0 and params.logprobs is None and not params.logit_bias else None


def adjusts(seq: Seq) -> bool:
    """Something besides temperature and truncation is set."""
    return bool(seq.params.logit_bias) or _reads_path(seq)


def _bans(seq: Seq) -> bool:
    params = seq.params
    given = params.bad_words or params.min_tokens or params.logit_bias or params.processors
    return bool(given) or seq.rules is not None


def _impossible(log_weights: Tensor, rows: list[int], failures: Mapping[int, CannotSample]) -> dict[int, CannotSample]:
    """Those of these rows that hold no possible token, and why."""
    if not rows:
        return {}
    if log_weights.device.type == "cpu":
        possible = [log_weights[row].numpy().max() > _BANNED for row in rows]  # False of NaN too
    else:
        possible = (log_weights[rows].amax(-1) > _BANNED).tolist()
    dead = [row for row, is_possible in zip(rows, possible, strict=True) if not is_possible]
    return {row: failures.get(row) or CannotSample(NOTHING_LEFT) for row in dead}


def _reads_path(seq: Seq) -> bool:
    return seq.rules is not None or _params_read_path(seq.params)


def _params_read_path(params: SamplingParams) -> bool:
    return bool(params.processors) or _params_penalise(params)


def _params_penalise(params: SamplingParams) -> bool:
    penalties = params.repetition_penalty != 1.0 or params.presence_penalty or params.frequency_penalty
    return bool(penalties or params.bad_words or params.min_tokens)


def _paths(seqs: Sequence[Seq], trees: TreeBatch) -> list[list[int]]:
    """[M] the tokens from below the root down to each node; left empty where nothing reads them."""
    if not any(_reads_path(seq) for seq in seqs):
        return [[]] * trees.nodes
    tokens = trees.to_host()[0]
    shapes = zip(trees.starts, trees.topology(), strict=False)
    found = [[tokens[first + node] for node in path[1:]] for first, shape in shapes for path in shape.paths]
    return [[token for token in path if token != CUT] for path in found] if CUT in tokens else found


def _adjust(
    logits: Tensor, seqs: Sequence[Seq], paths: Sequence[Sequence[int]], failures: dict[int, CannotSample]
) -> Tensor:
    """Everything before temperature; a copy only where something is set."""
    rows_of: dict[int, list[int]] = {}
    for row, seq in enumerate(seqs):
        if adjusts(seq):
            rows_of.setdefault(seq.id, []).append(row)
    if not rows_of:
        return logits
    logits = logits.clone()
    for rows in rows_of.values():
        seq, mine = seqs[rows[0]], [paths[row] for row in rows]
        together = rows[-1] - rows[0] == len(rows) - 1
        block = logits[rows[0] : rows[-1] + 1] if together else logits[rows]  # [m, V]; no copy where they lie together
        _add_bias(block, seq.params)
        _penalise(block, seq, mine)
        _ban(block, seq, mine)
        if seq.rules is not None:
            _force(block, seq, mine, seq.rules)
        if seq.params.processors:
            failed = process_block(block, seq, mine)
            failures |= {rows[row]: why for row, why in failed.items()}
        if not together:
            logits[rows] = block
    return logits


def _add_bias(block: Tensor, params: SamplingParams) -> None:
    bias = {token: value for token, value in params.logit_bias.items() if 0 <= token < block.shape[-1]}
    if bias:  # in one operation: a request may name every token
        block[:, list(bias)] += block.new_tensor(list(bias.values()))


def _penalise(block: Tensor, seq: Seq, paths: Sequence[Sequence[int]]) -> None:
    params = seq.params
    if params.repetition_penalty != 1.0:
        tokens, counts = _counts(block, seq.tokens, paths)
        row = block[:, tokens]
        harder = torch.where(row < 0, row * params.repetition_penalty, row / params.repetition_penalty)
        block[:, tokens] = torch.where(counts > 0, harder, row)
    if params.presence_penalty or params.frequency_penalty:
        tokens, counts = _counts(block, seq.tokens[seq.prompt_length :], paths)
        block[:, tokens] -= params.frequency_penalty * counts + params.presence_penalty * (counts > 0)


def _counts(block: Tensor, tokens: Sequence[int], paths: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """The k tokens that occur at all, and [m, k] how often: in `tokens` and in each node's own path."""
    size, known = block.shape[-1], Counter(tokens)
    tokens = sorted(t for t in {*known, *(t for path in paths for t in path)} if t < size)
    column = {token: i for i, token in enumerate(tokens)}
    counts = np.tile(np.array([known[t] for t in tokens], dtype=np.float32), (len(paths), 1))
    for row, path in enumerate(paths):
        for token in path:
            if token < size:
                counts[row, column[token]] += 1
    found = torch.tensor(tokens, dtype=torch.long, device=block.device)
    return found, torch.from_numpy(counts).to(block.device, block.dtype)


def _ban(block: Tensor, seq: Seq, paths: Sequence[Sequence[int]]) -> None:
    """Bad words where their beginning has just been written; stop tokens while the output is too short."""
    written = len(seq.tokens) - seq.prompt_length
    stops = [token for token in seq.stop_ids if token < block.shape[-1]]
    bad_words = [*seq.params.bad_words, *(() if seq.rules is None else seq.rules.bad_words)]
    longest = max((len(word) for word in bad_words), default=0)
    tail = seq.tokens[-longest:] if longest else []
    for row, path in enumerate(paths):
        if written + len(path) < seq.params.min_tokens:
            block[row, stops] = _BANNED
        for token in _ends_of(bad_words, [*tail, *path]):
            if token < block.shape[-1]:
                block[row, token] = _BANNED


def _ends_of(bad_words: Sequence[Sequence[int]], context: Sequence[int]) -> list[int]:
    """The last tokens of those bad words whose beginning has just been written."""
    return [last for *start, last in bad_words if context[len(context) - len(start) :] == start]


def _force(block: Tensor, seq: Seq, paths: Sequence[Sequence[int]], rules: LawRules) -> None:
    """The only token that may be written at the first place, or at the last, where the model's settings name one."""
    for row, path in enumerate(paths):
        token = _forced(seq, path, rules)
        if token is not None:
            block[row] = _BANNED
            block[row, token] = 0.0


def _forced(seq: Seq, path: Sequence[int], rules: LawRules) -> int | None:
    place, most = len(seq.tokens) - seq.prompt_length + len(path), seq.max_length - seq.prompt_length
    if place == most - 1 and rules.last is not None and not seq.params.ignore_eos:
        return rules.last
    return rules.first if place == 0 else None


def _rules_choose(tops: Sequence[int], seqs: Sequence[Seq], trees: TreeBatch) -> bool:
    """Do the model's own rules choose another token than the largest logit's, `tops` [M], at some node?"""
    owners = (seq for seq, size in zip(seqs, trees.sizes(), strict=True) for _ in range(size))
    for seq, path, top in zip(owners, _paths(seqs, trees), tops, strict=True):
        if seq.rules is None:
            continue
        longest = max(map(len, seq.rules.bad_words), default=0)
        context = [*seq.tokens[-longest:], *path] if longest else path
        if _forced(seq, path, seq.rules) is not None or top in _ends_of(seq.rules.bad_words, context):
            return True
    return False


_CLOSE = 4e-6  # masses nearer to the limit than this may round either way
_CUT = -math.inf


def truncate(log_weights: Tensor, top_k: int, top_p: float, min_p: float) -> Tensor:
    if top_k:
        log_weights = keep_top_k(log_weights, top_k)
    if top_p < 1.0:
        log_weights = keep_top_p(log_weights, top_p)
    if min_p > 0.0:
        log_weights = keep_within_min_p(log_weights, min_p)
    return log_weights


def keep_top_k(log_weights: Tensor, k: int) -> Tensor:
    """The k likeliest, and whatever ties with the last of them."""
    kth = log_weights.topk(min(k, log_weights.shape[-1])).values[..., -1:]
    return torch.where(log_weights < kth, _CUT, log_weights)


def keep_top_p(log_weights: Tensor, top_p: float) -> Tensor:
    """The smallest set of the likeliest tokens whose mass reaches top_p; at least one."""
    if log_weights.device.type != "cpu":  # sorting is cheap there, and reading sizes back is not
        return _keep_top_p_by_sorting(log_weights, top_p)
    floor = 0.99 * (1 - top_p) / log_weights.shape[-1]
    rows, probs = log_weights.numpy(), log_weights.softmax(-1).numpy()
    kept = np.full_like(rows, _CUT)
    for i, (row, of_row) in enumerate(zip(rows, probs, strict=True)):
        those = _kept_of_row(row, of_row, top_p, floor)
        if those is None:
            kept[i] = _keep_top_p_by_sorting(log_weights[i : i + 1], top_p)[0].numpy()
        else:
            kept[i, those] = row[those]
    return torch.from_numpy(kept)


def _kept_of_row(
    log_weights: NDArray[np.float32], probs: NDArray[np.float32], top_p: float, floor: float
) -> NDArray[np.intp] | None:
    """The tokens kept of one row [V]; those below the floor cannot be. None = the definition must decide.

    By numpy: of the few that are left each operation takes a fraction of what it takes in torch.
    """
    likely = np.flatnonzero(probs >= floor)
    likely = likely[log_weights[likely].argsort()]  # least likely first, as the definition has it
    values, masses = log_weights[likely], probs[likely].astype(np.float64)
    above = masses[::-1].cumsum()[::-1] - masses  # what the likelier tokens have
    kept = above < top_p
    first = len(kept) - int(kept.sum())
    tied = first > 0 and values[first - 1] == values[first]
    if tied or (np.abs(above - top_p) < _CLOSE).any():
        return None
    return likely[kept]


def _keep_top_p_by_sorting(log_weights: Tensor, top_p: float) -> Tensor:
    """The definition: least likely first, cut while the mass so far is at most 1 - top_p."""
    on_gpu = log_weights.device.type != "cpu"
    values, order = log_weights.sort(dim=-1, stable=on_gpu)
    masses = values.softmax(-1)
    if on_gpu:  # in how many parts it adds a row up depends on the number of rows
        masses = masses.double()
    cut = masses.cumsum(-1) <= 1 - top_p
    cut[..., -1] = False
    return torch.where(torch.zeros_like(cut).scatter(-1, order, cut), _CUT, log_weights)


def keep_within_min_p(log_weights: Tensor, min_p: float) -> Tensor:
    """Tokens at least min_p times as likely as the likeliest."""
    probs = log_weights.softmax(-1)
    return torch.where(probs < min_p * probs.amax(-1, keepdim=True), _CUT, log_weights)
