"""CostModel: the seconds of a target pass over so many nodes on this machine, t(rows); and of a round beside its pass.

Whether drafting pays follows from this curve and from acceptance. The curve is measured in a second or two on the real
target, stored in a file, and corrected by every round, at every batch size. A curve that was measured while other
processes used the machine is measured again at the next start where they do not.

Passes are timed with any tokens where the model is dense. A pass over a mixture of experts costs what its active
experts cost, and which are active depends on the tokens: a repeated token activates the same experts again, and random
tokens activate fewer than text does (measured: docs/moe.md). So a model with experts first writes a text of its own:
short pieces, all at once, sampled from its likeliest tokens, as the nodes of a draft are.

`RoundOverhead`: drafting, verdict and the host's work, by form and batch size. An overlapping round hides the host's
work; a round that was read first shows it. The seconds of a form are those of overlapping rounds, once there were any;
what other rounds take on top of them is kept apart, as the gap. The first plain rounds of a process may be the slowest
it ever sees: forms that did not run yet can also be judged by drafted rounds that overlapped. A gap is only seen where
a round is read first, so that one slow round could keep it from ever being seen again: the gap is the median of the
last few, with a presumed one among them until there are enough, and old gaps are forgotten while none is seen.
"""

from __future__ import annotations

import json
import logging
import os
from bisect import bisect_left
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from math import inf, isfinite
from pathlib import Path
from statistics import median_low

import numpy as np
import torch

from forerun.core.types import PLAIN, Form, Needs, PlainSeq, TreeBatch, Verdict
from forerun.models.base import HoldsUnread, ServedByProcesses, Target

progress = logging.getLogger("forerun.progress")  # what the command line shows while a model is loaded

SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64)  # rows, for a benchmark
QUICK = (1, 2, 4, 8, 16, 24, 32, 64)  # at load: what a controller needs, in about a second
# a GPU: as its passes are
WIDE = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 160, 192, 224, 256, 384, 512, 768, 1024)
# nodes of one sequence while measuring, where a pass is over several; and the widest pass that one makes alone
NODES_OF_ONE, MOST_OF_ONE = 32, 64
REPEATS, REPEATS_AT_LOAD = 3, 2  # times that every size is timed, the first not counted: noise only adds
RUN_PASSES, RUN_ROWS = 3, 8  # passes of a run on a CPU, at least, and of how many rows at most; others come alone
RUN_SECONDS, LONGEST_RUN = 0.05, 12  # a run goes on for so long: passes of a small model settle after ten
METHOD = 5  # of measuring: curves kept by others are measured again
CONTEXT = 128  # tokens cached while measuring: of a short prompt, and quick to prefill
LEAST_CONTEXT = 512  # tokens beyond these that are priced: fewer are in what rounds correct
# tokens more, behind which passes are timed again, until they take so much longer; and how often, the first not counted
LONGER, SHOWS, LONGER_REPEATS = (512, 2048, 8192), 1.0, 4
NEWEST = 0.2  # weight of the last round in a mean of rows or nodes: about the last five rounds
# rounds: the corrections of the first 32 count at once, while much is new; later those of 4 rounds together
FIRST_ROUNDS, ROUNDS_TOGETHER = 32, 4
PRIOR = 3.0  # rounds, or tokens, that what is believed beforehand counts for: a few drafts outweigh it
MEMORY_ROUNDS = 30.0  # rounds that a ratio remembers: a machine that slows down is noticed within a text
MEMORY = 0.95  # per round, of what is accepted of a text: that changes within tens of tokens
MOST_TIMES = 2.0  # times what was expected: a round that took longer (a pause of the machine) counts for no more
LEAST_SHARE = 1e-3  # of a pass: no estimate is less, wherever a line through two sizes falls
CONTEXT_DIGITS = 3  # binary ones of a context: prices are kept until one of them changes
GROUP_TOKENS = 1024  # of context: passes up to that, and each time twice as much, are corrected apart


Group = tuple[int, int]


@dataclass(slots=True)
class Ratio:
    """A moving average of how many times longer rounds took than was measured."""

    mean: float = 1.0
    seen: float = 0.0

    def add(self, value: float, weight: float = 1.0) -> None:
        self.seen = min(self.seen + weight, MEMORY_ROUNDS)
        self.mean += weight * (value - self.mean) / self.seen

    def after(self, prior: float) -> float:
        """The average, with a prior that counts for a few rounds."""
        return (prior * PRIOR + self.mean * self.seen) / (PRIOR + self.seen)


@dataclass(slots=True)
class Factor:
    """Observed over expected, with a memory, starting from 1."""

    weight: float  # expected tokens that the start counts for
    observed: float = 0.0
    expected: float = 0.0

    def add(self, observed: float, expected: float, memory: float) -> None:
        self.observed = self.observed * memory + observed
        self.expected = self.expected * memory + expected

    def value(self, start: float = 1.0) -> float:
        return (self.observed + self.weight * start) / (self.expected + self.weight)


@dataclass(slots=True)
class Corrections:
    """Rounds against the measured curve: over all, by batch size and context, and by these and rows.

    A machine that has become slower is slower for every size; a large batch and a long context have more to attend to;
    a size may have kernels of its own. So each ratio starts from the less specific one, and rounds of its own soon
    outweigh that. A group is the order of magnitude of the batch size and that of the context.
    """

    overall: Ratio = field(default_factory=Ratio)
    by_batch: dict[Group, Ratio] = field(default_factory=dict)
    by_size: dict[tuple[Group, int], Ratio] = field(default_factory=dict)

    def ratio(self, batch: Group, size: int) -> float:
        found = self.overall.after(1.0)
        if (of_batch := self.by_batch.get(batch)) is not None:
            found = of_batch.after(found)
            if (of_size := self.by_size.get((batch, size))) is not None:
                found = of_size.after(found)
        return found

    def add(self, batch: Group, weights: Mapping[int, float], ratio: float) -> None:
        """A round took `ratio` times what was measured; its rows lie between sizes of these weights."""
        self.overall.add(ratio)
        self.by_batch.setdefault(batch, Ratio()).add(ratio)
        for size, weight in weights.items():
            known = self.by_size.get((batch, size))
            if known is None:
                known = self.by_size[batch, size] = Ratio()
            known.add(ratio, weight)


class CostModel:
    """t(rows, context): straight lines between measured sizes and along the context, corrected by what rounds took.

    `slopes`: what every token of context adds to a pass, for each sequence and for each of its rows. The context is
    that of the sequences that are planned for or observed (`note_context`), on average.
    """

    def __init__(self, seconds: dict[int, float], slopes: tuple[float, float] = (0.0, 0.0)) -> None:
        self.seconds, self.slopes = dict(sorted(seconds.items())), slopes
        self.context = 0  # tokens beyond those of the measured curve
        self._sizes = tuple(self.seconds)
        self._corrections = Corrections()
        self._curves: dict[int, list[float]] = {}  # corrected seconds of the sizes, by batch size
        self._found: dict[tuple[int, int], float] = {}  # of these curves: many ask
        self._observed = 0  # rounds
        self.beside = 0.0  # rows of prompts that passes have had beside their trees, of late

    def pass_seconds(self, rows: int, batch: int = 1) -> float:
        """Seconds of a pass over `rows` nodes of `batch` sequences, without what prompts in the same pass take.

        A node costs little where weights are what takes time, and more in a pass that prompts have filled: it is
        priced on top of recent prompt rows. What prompts take themselves is left out, because prompts must be read
        in any case: a token that is written sooner does not save their time, but that of a pass without them.
        """
        if not round(self.beside):
            return self.whole_seconds(rows, batch)
        found = self.whole_seconds(rows + round(self.beside), batch)
        return max(found - self._prompts_seconds(batch), LEAST_SHARE * found)

    def _prompts_seconds(self, batch: int) -> float:
        """What prompts add to a plain pass of such a batch."""
        rows = round(self.beside)
        return self.whole_seconds(rows + batch, batch) - self.whole_seconds(batch, batch) if rows else 0.0

    def whole_seconds(self, rows: int, batch: int) -> float:
        """Seconds of a pass over `rows` rows, prompts included."""
        found = self._found.get((rows, batch))
        if found is None:
            found = self._found[rows, batch] = self._alone(rows, batch)
        return found

    def _alone(self, rows: int, batch: int) -> float:
        known, (low, high, share) = self._curve(batch), self._between(rows)
        below = known[low]
        if share == 0.0:
            return below
        above = known[high]
        return max(below * (1 - share) + above * share, LEAST_SHARE * above)

    def _curve(self, batch: int) -> list[float]:
        """Corrected seconds of the measured sizes."""
        found = self._curves.get(batch)
        if found is None:
            ratio, group = self._corrections.ratio, self._group(batch)
            found = self._curves[batch] = [self._measured(size, batch) * ratio(group, size) for size in self._sizes]
        return found

    def _measured(self, size: int, batch: int) -> float:
        """Seconds of a pass over one of the measured sizes, behind the context."""
        of_sequence, of_row = self.slopes
        return self.seconds[size] + self.context * (of_sequence * batch + of_row * size)

    def _group(self, batch: int) -> Group:
        return (batch - 1).bit_length(), (self.context // GROUP_TOKENS).bit_length()

    def passes_seconds(self, rows: int, count: int, batch: int) -> list[float]:
        """The same for `count` numbers of rows from `rows` on, in one go."""
        sizes, known = self._sizes, self._curve(batch)
        prompts, rows = self._prompts_seconds(batch), rows + round(self.beside)
        last = rows + count
        if last > sizes[-1]:  # beyond what was measured the last line goes on
            sizes, known = (*sizes, last), [*known, self._alone(last, batch)]
        seconds = np.interp(np.arange(rows, last), sizes, known)
        found: list[float] = np.maximum(seconds - prompts, LEAST_SHARE * seconds).tolist()
        return found

    def note_prompts(self, rows: int) -> None:
        """The last pass had `rows` rows of prompts beside its trees."""
        self.beside += NEWEST * (rows - self.beside)

    def note_context(self, tokens: float) -> None:
        """The sequences of the coming round, or of the one that is observed, have so many tokens on average.

        Rounded, so that prices are kept for a while.
        """
        beyond = int(tokens) - CONTEXT
        cut = max(0, beyond.bit_length() - CONTEXT_DIGITS)
        context = beyond >> cut << cut if beyond >= LEAST_CONTEXT else 0
        if context != self.context:
            self.context = context
            self._curves.clear()
            self._found.clear()

    def observe(self, rows: int, seconds: float, batch: int = 1) -> None:
        """Learn from what a round without prompts took; outliers (a pause of the machine) count little."""
        known, sizes, (low, high, share) = self.whole_seconds(rows, batch), self._sizes, self._between(rows)
        seconds = min(max(seconds, known / MOST_TIMES), MOST_TIMES * known)
        below, above = self._measured(sizes[low], batch), self._measured(sizes[high], batch)
        measured = max((1 - share) * below + share * above, LEAST_SHARE * above)
        if share == 0.0 or share > 1.0:
            weights = {sizes[high]: 1.0}
        else:
            weights = {sizes[low]: 1 - share, sizes[high]: share}
        self._corrections.add(self._group(batch), weights, seconds / measured)
        self._observed += 1
        if self._observed <= FIRST_ROUNDS or self._observed % ROUNDS_TOGETHER == 0:
            self._curves.clear()
            self._found.clear()

    def _between(self, rows: int) -> tuple[int, int, float]:
        """The measured sizes below and above `rows`, and the share of the way between them; above 1 beyond the last."""
        sizes, last = self._sizes, len(self._sizes) - 1
        place = bisect_left(sizes, rows)
        if place > last:
            place = last
            if not last:
                return 0, 0, 0.0
        elif place == 0 or sizes[place] == rows:
            return place, place, 0.0
        low = sizes[place - 1]
        return place - 1, place, (rows - low) / (sizes[place] - low)

    def price(self, nodes: int, neighbours: int = 0, rate: float = 1.0, others: int = 0) -> tuple[float, ...]:
        """What a pass with 0..nodes more nodes of one sequence costs it, in tokens written in the same time.

        `rate` is how many tokens a sequence writes in the time of a plain pass. More nodes for one delay its
        neighbours too: it is charged for all of them, on top of the nodes that the others draft.
        """
        batch = neighbours + 1
        seconds = self.passes_seconds(batch + others, nodes + 1, batch)
        share = rate * batch / self.pass_seconds(batch, batch)
        return tuple([rate + share * max(0.0, one - seconds[0]) for one in seconds])

    def price_for_all(self, nodes: int, batch: int) -> tuple[float, ...]:
        """What 0..nodes more nodes of every sequence cost each, in tokens that plain rounds write in the same time.

        As measured: rounds whose trees were cut by these prices took less than their rows cost.
        """
        rows, sizes = batch * np.arange(1, nodes + 2), self._sizes
        known = [self._measured(size, batch) for size in sizes]
        if len(sizes) > 1 and rows[-1] > sizes[-1]:  # beyond what was measured the last line goes on
            slope = (known[-1] - known[-2]) / (sizes[-1] - sizes[-2])
            sizes, known = (*sizes, int(rows[-1])), [*known, known[-1] + slope * (rows[-1] - sizes[-1])]
        seconds = np.maximum.accumulate(np.interp(rows, sizes, known))
        return tuple((seconds / seconds[0] - 1.0).tolist())

    @classmethod
    def measure(cls, target: Target, sizes: Sequence[int] = SIZES, repeats: int = REPEATS) -> CostModel:
        """Time passes over chains of several sizes on scratch sequences; the best of a few, as noise only adds.

        On a CPU those over few rows come in runs of one size, as in a text, and the first of a run does not count:
        behind a pass over 64 rows one over a single row takes longer, and drafts seem cheap beside it. Where nodes wake
        experts, passes over other tokens cost something else: then the median of twice as many.
        """
        text, experts = probe_text(target, max(sizes)), has_experts(target)
        in_runs = not target.can.captures
        probes = scratch_sequences(target, max(sizes), text)
        sizes = [size for size in sizes if size <= NODES_OF_ONE * len(probes) or size <= MOST_OF_ONE]
        seconds: dict[int, list[float]] = {size: [] for size in sizes}
        try:
            target.prefill(probes, Needs())
            for repeat in range((2 * repeats if experts else repeats) + 1):
                for size in sizes:
                    at = repeat * size % len(text)
                    some, rows = (
                        probes[: max(1, size // NODES_OF_ONE if size > MOST_OF_ONE else 1)],
                        text[at:] + text[:at],
                    )
                    times = [time_pass(target, some, size, rows)]
                    while in_runs and size <= RUN_ROWS and goes_on(times):
                        times.append(time_pass(target, some, size, rows))
                    if repeat:  # the first round warms up
                        seconds[size] += times[len(times) > 1 :]
        finally:
            for probe in probes:
                target.release(probe)
        settle = median_low if experts else min
        curve = {size: settle(times) for size, times in seconds.items()}
        return cls(curve, context_slopes(target, curve, text))

    @classmethod
    def measure_or_load(cls, target: Target, file: Path | None) -> CostModel:
        """The curve kept in a file, else measured now and kept there."""
        sizes, busy = WIDE if target.can.captures else QUICK, is_busy(load_average(), cores())
        if file is not None and file.is_file():
            try:
                values = json.loads(file.read_text())
                kept = {int(n): float(t) for n, t in values["seconds"].items()}
                of_sequence, of_row = map(float, values.get("slopes", (0.0, 0.0)))
                was_busy = values.get("busy") is True
                kept = kept if values.get("method") == METHOD else {}
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
                kept, was_busy, of_sequence, of_row = {}, False, 0.0, 0.0
            whole = set(sizes) <= set(kept) and all(0.0 < t < inf and n > 0 for n, t in kept.items())
            if whole and (busy or not was_busy) and 0.0 <= of_sequence < 1.0 and 0.0 <= of_row < 1.0:
                return cls(kept, (of_sequence, of_row))
            file.unlink()  # not ours any more, or not what this machine can do: measure again
        progress.info("measuring what passes cost on this machine")  # seconds, of float32 more than of a GGUF file
        model = cls.measure(target, sizes, REPEATS_AT_LOAD)
        if file is not None:
            with suppress(OSError):  # a cache that cannot be written costs time, nothing else
                file.parent.mkdir(parents=True, exist_ok=True)
                kept_now = {"seconds": model.seconds, "slopes": model.slopes, "busy": busy, "method": METHOD}
                file.write_text(json.dumps(kept_now))
        return model


def goes_on(times: Sequence[float]) -> bool:
    """Is another pass timed in a run?"""
    return len(times) < RUN_PASSES or (len(times) < LONGEST_RUN and sum(times) < RUN_SECONDS)


def scratch_sequences(target: Target, rows: int, text: Sequence[int]) -> list[PlainSeq]:
    """Sequences to time passes of up to `rows` rows on, as many as there is room for; no engine gives their ids."""
    context = max(2, min(CONTEXT, target.max_length - min(rows, MOST_OF_ONE) - 1))
    while context > 2 and not target.has_room(context + 1):
        context //= 2  # a small KV cache: measure on a shorter sequence
    wanted = rows // NODES_OF_ONE if rows > MOST_OF_ONE else 1
    while wanted > 1 and not target.has_room(*[context + 1] * wanted):
        wanted //= 2
    before = [text[i % len(text)] for i in range(context)]
    return [PlainSeq(-1 - i, before.copy(), max_length=context + 1) for i in range(wanted)]


def context_slopes(target: Target, curve: Mapping[int, float], text: Sequence[int]) -> tuple[float, float]:
    """What a token of context adds to a pass, for a sequence and for each of its rows; 0 where that cannot be measured.

    Passes of two sizes are timed again behind a longer context, which nobody reads: it is as long as it takes to show.
    """
    small, large = min(curve), max(size for size in curve if size <= RUN_ROWS)
    slopes = 0.0, 0.0
    if small == large or not isinstance(target, HoldsUnread) or isinstance(target, ServedByProcesses):
        return slopes
    if (
        target.can.captures
    ):  # on an H200 this found 2.5 times the true slope of a row: there rounds alone correct prices
        return slopes
    for more in LONGER:
        length = CONTEXT + more
        if length + large >= target.max_length or not target.has_room(length + large):
            break
        probe = PlainSeq(-1, [text[i % len(text)] for i in range(length)], max_length=length + large)
        try:
            target.occupy(probe)
            took = {n: [time_pass(target, [probe], n, text) for _ in range(LONGER_REPEATS)] for n in (small, large)}
        finally:
            target.release(probe)
        one, many = (max(0.0, min(took[size][1:]) - curve[size]) / more for size in (small, large))
        of_row = max(0.0, many - one) / (large - small)
        slopes = max(0.0, one - of_row * small), of_row
        if many * more > SHOWS * curve[large]:
            break
    return slopes


def time_pass(target: Target, probes: Sequence[PlainSeq], rows: int, text: Sequence[int]) -> float:
    """Seconds of one pass over `rows` rows of a text, shared by these sequences."""
    each = rows // len(probes)
    chains = [[text[(i * each + j) % len(text)] for j in range(each)] for i in range(len(probes))]
    for probe, chain in zip(probes, chains, strict=True):
        probe.tokens[-1] = chain[0]  # the root: it is not cached
    trees = TreeBatch.chains(chains, target.device)
    now = target.can.clock
    started = now()
    scores = target.score(probes, trees, Needs())
    assert scores.logits is not None
    float(scores.logits[-1, -1])  # wait for the device
    return now() - started


BUSY_SHARE = 0.5  # of the cores: a load above this before we start comes from other processes


def cores() -> int:
    """CPU cores that this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on every system
        return os.cpu_count() or 1


def load_average() -> float | None:
    """The load of the last minute, where the system reports it."""
    try:
        return round(os.getloadavg()[0], 2)
    except (AttributeError, OSError):
        return None


def is_busy(load: float | None, available: int) -> bool:
    """Would another process' work show in the figures?"""
    return load is not None and load > BUSY_SHARE * available


STRIDE = 7919  # a prime, so that tokens differ
PIECES, PIECE_LENGTH = 8, 16  # of a text that the model writes: 8 pieces at once, of 16 tokens each
LIKELY = 8  # likeliest tokens that each token of such a text is drawn from
_SEED = 1  # of these draws: every start times the same text
_FIRST_ID = -1_000_000  # of sequences that no engine and no other measurement gives


def has_experts(target: Target) -> bool:
    """Does the cost of a pass depend on its tokens?"""
    shared = target.shared()
    return shared is not None and shared.config is not None and shared.config.moe is not None


def probe_text(target: Target, length: int) -> list[int]:
    """So many tokens, or for experts as many as it takes to write them in a moment; they may be used again."""
    if not has_experts(target):
        return [(1 + STRIDE * i) % target.vocab_size for i in range(length)]
    pieces = max(PIECES, length // PIECE_LENGTH)
    while pieces > 1 and not target.has_room(*[PIECE_LENGTH + 2] * pieces):
        pieces //= 2
    return own_text(target, pieces)


def own_text(target: Target, pieces: int) -> list[int]:
    """Pieces that the target writes behind one token each, laid end to end."""
    made = torch.Generator().manual_seed(_SEED)
    starts = [(1 + STRIDE * (i + 1)) % target.vocab_size for i in range(pieces)]
    seqs = [PlainSeq(_FIRST_ID - i, [token], max_length=PIECE_LENGTH + 2) for i, token in enumerate(starts)]
    try:
        target.prefill(seqs, Needs())
        for _ in range(PIECE_LENGTH - 1):
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


FORGIVEN_SHARE = 0.0005  # of what a form takes beyond another, per round in which it is not run for that
NEWEST_SECONDS = 0.1  # weight of the newest round in a moving average of seconds
GAPS_KEPT = 7  # gaps whose median counts: three slow rounds do not move it far
STALE_ROUNDS = 128  # rounds that were not read first for the gap, after which the oldest is forgotten
FIRST_PLAIN = 3  # plain rounds at the start that may be slow by chance: the quickest of them counts
PRESUMED_GAP = 5e-4  # seconds of the host that show in a round that drafts or is read first, before any were seen
MOST_TIMES_BESIDE = 3.0  # as MOST_TIMES, of what a round takes beside its pass: that varies more
MOST_PRESUMED = 0.25  # of a round: the most that is presumed of a gap


class RoundOverhead:
    """Drafting, verdict and the host's work."""

    def __init__(self) -> None:
        self._seconds: dict[tuple[Form, int], float] = {}
        self._rounds: dict[tuple[Form, int], int] = {}
        self._follow: set[tuple[Form, int]] = set()  # of which rounds followed
        self._gaps: dict[int, deque[float]] = {}  # the last ones
        self._avoided: dict[int, int] = {}  # rounds that were not read first for them, since the last
        self._beside: dict[int, float] = {}  # of drafted rounds that followed, without their drafts

    def seconds(self, form: Form, batch: int, drafting: float) -> float:
        """What rounds took, else what drafting is said to take on top of a plain round.

        Plain rounds that were all read first would follow now, if rounds with drafts do: then they take no more.
        """
        group = batch.bit_length()
        known = self._seconds.get((form, group))
        if form == PLAIN:
            known = known or 0.0
            return known if (PLAIN, group) in self._follow else min(known, self._beside.get(group, known))
        return drafting + self.seconds(PLAIN, batch, 0.0) if known is None else known

    def gap(self, batch: int, presumed: float | None = None) -> float:
        """Seconds that a round takes longer if the one before it is read first; 0 = that was not seen yet."""
        seen = self._gaps.get(batch.bit_length())
        if not seen:
            return 0.0
        return median_low(seen if presumed is None or len(seen) == GAPS_KEPT else [presumed, *seen])

    def follows(self, form: Form, batch: int) -> bool:
        """Were there rounds of this form that followed?"""
        return (form, batch.bit_length()) in self._follow

    def is_known(self, form: Form, batch: int) -> bool:
        return (form, batch.bit_length()) in self._seconds

    def knows_plain(self, batch: int, usual: float) -> bool:
        """Is it known what plain rounds take beside their pass? One round says so if it is no more than is usual."""
        key = PLAIN, batch.bit_length()
        if key not in self._seconds:
            return False
        return self._seconds[key] <= usual or key in self._follow or self._rounds[key] >= FIRST_PLAIN

    def observe(
        self, form: Form, batch: int, seconds: float, expected: float, followed: bool = False, drafting: float = 0.0
    ) -> None:
        """Learn from a round, of which `drafting` is what its draft is said to take.

        A pause of the machine counts little: MOST_TIMES_BESIDE at most.
        """
        key = form, batch.bit_length()
        if followed and key not in self._follow:
            self._follow.add(key)
            self._rounds[key] = 0  # those before it were read first
        elif not followed and key in self._follow:
            self._note_gap(batch.bit_length(), seconds, self._seconds[key])
            return
        elif not followed and form.nodes:
            seconds = max(0.0, seconds - self.gap(batch))
        rounds = self._rounds[key] = self._rounds.get(key, 0) + 1
        known = self._seconds.get(key, expected)
        if form.kind == "plain" and not followed and 1 < rounds <= FIRST_PLAIN:
            seconds = min(seconds, known)
        elif known and isfinite(known):  # a menu may say that a form is not ready
            seconds = known + (min(seconds, MOST_TIMES_BESIDE * known) - known) * max(NEWEST_SECONDS, 1.0 / rounds)
        self._seconds[key] = seconds
        if followed and form.nodes and isfinite(drafting):
            self._beside[batch.bit_length()] = max(0.0, seconds - drafting)

    def _note_gap(self, group: int, seconds: float, known: float) -> None:
        self._gaps.setdefault(group, deque(maxlen=GAPS_KEPT)).append(max(0.0, seconds - known))
        self._avoided[group] = 0

    def note_avoided_gap(self, batch: int) -> None:
        """A round was not read first because of what that took: in time it is tried again."""
        group = batch.bit_length()
        if not (seen := self._gaps.get(group)):
            return
        self._avoided[group] += 1
        if self._avoided[group] >= STALE_ROUNDS:
            seen.popleft()
            self._avoided[group] = 0

    def lower(self, form: Form, batch: int, least: float) -> None:
        """A form that is not run any more for what it once took: in time it may have become cheaper."""
        key = form, batch.bit_length()
        if key in self._seconds:
            self._seconds[key] += FORGIVEN_SHARE * (min(least, self._seconds[key]) - self._seconds[key])


def presumed_gap(seconds: float) -> float:
    """The gap before any was seen, for rounds of `seconds`: the host's work, which the device does not change."""
    return min(PRESUMED_GAP, MOST_PRESUMED * seconds)
