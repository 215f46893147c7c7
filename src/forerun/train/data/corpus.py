"""The training corpus: sequences in shards on disk, and the batch of each step.

A shard is a safetensors file: the token ids of its sequences end to end (two bytes each where they fit), where each
sequence starts, how many of its tokens are prompt and so not to be learnt, the temperature it was written at and its
number. Batches are rectangles of sequences of like length, or of rows that several sequences fill, end to end: long
contexts out of short texts. Which ones a step sees is a function of the seed and the step alone, so a run that was
killed resumes exactly. A share of the prompts is held back, one at least, with all of
their answers.

Small models that write greedily often end in a loop, from which a drafter learns nothing. A text loops where a run of
`RUN` tokens is the run of the same answer a few tokens (`PERIODS`) before; runs are compared by a hash of 64 bits.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from forerun.core.errors import DamagedFile, InvalidInput, brief
from forerun.models.load.weights import write_tensors
from forerun.train.data.folder import shards_of

Span = tuple[int, int, int]  # first token, end, first token of the answer
_WIDTHS = (32, 64, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 4096, 8192, 16384, 32768)


@dataclass(frozen=True, slots=True)
class Text:
    """One sequence: its tokens, and how many of them are prompt."""

    tokens: Sequence[int]
    prompt_length: int
    temperature: float = 1.0
    number: int = 0  # its index among the orders


@dataclass(frozen=True, slots=True)
class Batch:
    tokens: Tensor  # [B, T] int64
    learnt: Tensor  # [B, T] bool: answers, never padding; stays on the host, where shapes are decided

    def to(self, device: torch.device) -> Batch:
        return Batch(self.tokens.to(device, non_blocking=True), self.learnt)


def write_shard(file: Path, texts: Sequence[Text]) -> None:
    """One shard; it gets its name only when it is complete."""
    flat = [token for text in texts for token in text.tokens]
    small = max(flat, default=0) < 1 << 16
    starts = np.cumsum([0, *(len(text.tokens) for text in texts)])
    tensors = {
        "tokens": torch.tensor(flat, dtype=torch.uint16 if small else torch.int32),
        "starts": torch.from_numpy(starts.astype(np.int64)),
        "prompt_lengths": torch.tensor([text.prompt_length for text in texts], dtype=torch.int32),
        "temperatures": torch.tensor([text.temperature for text in texts], dtype=torch.float32),
        "numbers": torch.tensor([text.number for text in texts], dtype=torch.int64),
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_suffix(".part")
    write_tensors(part, tensors)
    part.replace(file)


def read_shard(file: Path) -> dict[str, Tensor]:
    """One shard as `write_shard` has written it; anything else about it is a damaged file."""
    try:
        tensors = load_file(file)
        tokens, starts, prompts = (tensors[name] for name in ("tokens", "starts", "prompt_lengths"))
        beside = [tensors[name] for name in ("prompt_lengths", "temperatures", "numbers")]
        texts = len(starts) - 1
        whole = not any(one.is_floating_point() for one in (tokens, starts, prompts, tensors["numbers"]))
        flat = all(one.dim() == 1 for one in (tokens, starts)) and all(one.shape == (texts,) for one in beside)
        if not (whole and flat and starts[0] == 0 and starts[-1] == len(tokens)):
            raise ValueError("its lists do not fit each other")
        lengths = starts.diff()
        if texts and not bool((lengths >= 0).all() and (prompts >= 0).all() and (prompts <= lengths).all()):
            raise ValueError("its texts overlap or end before their prompts")
        if len(tokens) and int(tokens.to(torch.int64).min()) < 0:
            raise ValueError("it holds negative token ids")
    except (OSError, ValueError, KeyError, IndexError, RuntimeError, SafetensorError) as error:
        raise DamagedFile(f"{file} is no shard of texts ({brief(error)}); make the data again") from None
    return tensors


def hash_of(data: str | Path) -> str:
    """Facts about the data, for provenance."""
    digest = hashlib.sha256()
    for file in shards_of(data):
        digest.update(file.read_bytes())
    return digest.hexdigest()


class Corpus:
    """All sequences of the data in memory, split into those to learn and those held back (with holdout=1 all)."""

    def __init__(
        self, data: str | Path, *, max_length: int, holdout: float, hottest: float | None = None, cut_loops: int = 0
    ) -> None:
        """`hottest`: texts that were written at a higher temperature are left out. `cut_loops`: an answer that
        repeats itself ends so many tokens behind the first repetition; 0 = none is cut."""
        parts = [read_shard(file) for file in shards_of(data)]
        self.tokens = torch.cat([part["tokens"].to(torch.int32) for part in parts])
        self.max_length = max_length
        placed = list[tuple[float, Span]]()  # texts, each with its prompt's place in [0, 1)
        ids, base = self.tokens.numpy(), 0
        for part in parts:
            starts, prompts = (part["starts"] + base).tolist(), part["prompt_lengths"].tolist()
            wanted = (part["temperatures"] <= (torch.inf if hottest is None else hottest + 1e-6)).tolist()
            for (first, end), prompt, one in zip(pairwise(starts), prompts, wanted, strict=True):
                if not one:
                    continue
                place = zlib.crc32(ids[first : first + prompt].tobytes()) / 2**32
                span = (first, min(end, first + max_length), first + prompt)
                if span[1] > span[2]:
                    placed.append((place, span))
            base += len(part["tokens"])
        least = min((place for place, _ in placed), default=0.0)  # this prompt is held back in any case
        self.training = [span for place, span in placed if place >= holdout and place > least]
        self.held_back = [span for place, span in placed if place < holdout or place == least]
        if cut_loops:
            self._cut(cut_loops)
        if not placed or (not self.training and holdout < 1):
            raise InvalidInput(
                f"{data} leaves nothing to learn: {len(self.held_back)} texts of {len({p for p, _ in placed})} prompts "
                f"have an answer within max_length={max_length}, and all of them are held back "
                f"(holdout={holdout:g}); make texts of more prompts"
            )

    def _cut(self, further: int) -> None:
        """Answers end so many tokens behind their first repetition."""
        spans = sorted([*self.training, *self.held_back])
        _, ends, answers = np.array(spans, dtype=np.int64).reshape(-1, 3).T
        found = first_repeats(self.tokens.numpy().astype(np.int64), answers, ends) + further
        cut = dict(zip(answers.tolist(), np.minimum(found, ends).tolist(), strict=True))
        self.training, self.held_back = (
            [(first, cut[answer], answer) for first, _, answer in some] for some in (self.training, self.held_back)
        )

    def in_words(self, read: int) -> str:
        """How much there is, and how often a run that reads so many tokens sees it."""
        tokens = sum(end - first for first, end, _ in self.training)
        counts = f"{len(self.training)} texts to learn ({tokens} tokens), {len(self.held_back)} held back"
        return f"{counts}; this run reads them {read / tokens:.1f} times"

    def must_not_hold(self, others: Corpus, name: str) -> None:
        """Raise where a prompt of the others' is among those to learn."""
        ours = {self.tokens[first:answer].numpy().tobytes() for first, _, answer in self.training}
        spans = [*others.training, *others.held_back]
        known = sum(others.tokens[first:answer].numpy().tobytes() in ours for first, _, answer in spans)
        if known:
            raise InvalidInput(
                f"{known} of {len(spans)} texts in {name} answer prompts that are learnt from; measure on others"
            )

    def must_fit(self, vocab_size: int) -> None:
        largest = int(self.tokens.max())
        if largest >= vocab_size:
            raise InvalidInput(
                f"the texts hold token {largest} and the target knows {vocab_size}; use texts that it wrote itself"
            )

    def count_tokens(self, vocab_size: int) -> Tensor:
        """[V] how often each id is to be learnt."""
        answers = [self.tokens[answer:end] for _, end, answer in self.training]
        return torch.bincount(torch.cat(answers).long(), minlength=vocab_size)

    def rectangle(self, spans: Sequence[Sequence[Span]], rows: int, width: int) -> Batch:
        """The sequences of each row end to end."""
        tokens = torch.zeros(rows, width, dtype=torch.long)
        learnt = torch.zeros(rows, width, dtype=torch.bool)
        for row, some in enumerate(spans):
            at = 0
            for first, end, answer in some:
                tokens[row, at : at + end - first] = self.tokens[first:end]
                learnt[row, at + answer - first : at + end - first] = True
                at += end - first
        return Batch(tokens, learnt)


class Batches:
    """An endless series of batches over some sequences, in an order fixed by the seed."""

    def __init__(
        self, corpus: Corpus, spans: Sequence[Span], batch_tokens: int, seed: int, *, packed: bool = False
    ) -> None:
        """`packed`: as many sequences to a row as the corpus's `max_length` holds."""
        self.corpus, self.spans, self.batch_tokens, self.seed, self.packed = corpus, spans, batch_tokens, seed, packed
        self._of_epoch = lru_cache(maxsize=2)(self._plan)

    def __len__(self) -> int:
        """Batches per epoch."""
        return len(self._of_epoch(0))

    def at(self, step: int) -> Batch:
        epoch, index = divmod(step, len(self))
        width, members = self._of_epoch(epoch)[index]
        spans = [[self.spans[i] for i in row] for row in members]
        return self.corpus.rectangle(spans, self._rows(width), width)

    def _rows(self, width: int) -> int:
        return max(1, self.batch_tokens // width)

    def _in_rows(self, order: Sequence[int]) -> list[list[int]]:
        if not self.packed:
            return [[i] for i in order]
        rows, room = list[list[int]](), 0
        for i, length in ((i, self.spans[i][1] - self.spans[i][0]) for i in order):
            if not rows or length > room:
                rows.append([])
                room = self.corpus.max_length
            rows[-1].append(i)
            room -= length
        return rows

    def _plan(self, epoch: int) -> list[tuple[int, list[list[int]]]]:
        """Sequences shuffled, put into rows, sorted by width, cut into batches, and these shuffled."""
        random = np.random.default_rng([self.seed, epoch])
        by_width: dict[int, list[list[int]]] = {}
        for row in self._in_rows(random.permutation(len(self.spans)).tolist()):
            length = sum(end - first for first, end, _ in (self.spans[i] for i in row))
            width = next((w for w in _WIDTHS if w >= length), length)
            by_width.setdefault(min(width, max(self.corpus.max_length, length)), []).append(row)
        batches = [
            (width, members[low : low + self._rows(width)])
            for width, members in sorted(by_width.items())
            for low in range(0, len(members), self._rows(width))
        ]
        return [batches[i] for i in random.permutation(len(batches)).tolist()]


RUN = 16  # tokens that must come again
PERIODS = 96  # a loop is at most so long

_FACTOR = np.uint64(0x9E3779B97F4A7C15)
Ints = NDArray[np.int64]


def first_repeats(tokens: Ints, firsts: Ints, ends: Ints) -> Ints:
    """Per answer, tokens[first:end], where the first repeated run ends; its own end where nothing repeats.

    Answers must not overlap, and come in their order.
    """
    found = ends.copy()
    if not len(firsts) or len(tokens) <= RUN:
        return found
    runs = _hashes(tokens)
    for period in range(1, min(PERIODS, len(runs) - 1) + 1):
        again = np.flatnonzero(runs[period:] == runs[:-period])  # the earlier of both runs
        answer = np.searchsorted(firsts, again, side="right") - 1
        close = again + period + RUN
        inside = (answer >= 0) & (close <= ends[answer])
        answer, close = answer[inside], close[inside]
        first = np.flatnonzero(np.diff(answer, prepend=-1))  # of each answer; they come in their order
        found[answer[first]] = np.minimum(found[answer[first]], close[first])
    return found


def _hashes(tokens: Ints) -> NDArray[np.uint64]:
    """Of the run that begins at each token."""
    words = tokens.astype(np.uint64) + np.uint64(1)
    count = len(words) - RUN + 1
    total = np.zeros(count, dtype=np.uint64)
    for shift in range(RUN):
        total = total * _FACTOR + words[shift : shift + count]
    return total
