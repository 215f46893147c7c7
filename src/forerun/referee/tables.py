"""Table: a language model whose law is known in closed form, and what sampling parameters make of it. Numpy only.

The logits after a context are the sum of three rows of tables: one for the last token, one for the token before it,
one for the token `far` places before the last. The same sum is what the checkpoint of `forerun.referee.checkpoint`
computes with ordinary attention, so that any engine that loads the checkpoint can be held to these numbers. Each
symbol of the alphabet is one token and one character: text and tokens are the same thing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

ALPHABET = 'abcdefghijkl012{}":,'
FAR = 7  # places between the last token and the third token that the law depends on
DEAD = -40.0  # logit of every token outside the alphabet
_STEP = 1 / 128  # logits are multiples of it, so that float16 and float32 hold them exactly


@dataclass(frozen=True)
class Rules:
    """Sampling parameters that change the law; the defaults change nothing. Temperature 0 is greedy."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    bias: Mapping[str, float] = field(default_factory=dict)  # symbol -> what is added to its logit

    @property
    def counts(self) -> bool:
        """Does the law depend on how often symbols were used?"""
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0)


@dataclass(frozen=True)
class Contexts:
    """What the laws of n next tokens depend on."""

    last: Ints  # [n, 3] symbols: the last, the one before it, the far one
    used: Floats  # [n, A] how often each symbol was generated before
    seen: NDArray[np.bool_]  # [n, A] is it in prompt or output?

    def take(self, rows: slice | Ints) -> Contexts:
        return Contexts(self.last[rows], self.used[rows], self.seen[rows])


@dataclass(frozen=True)
class Table:
    """Rows of logits over the symbols: the alphabet, then the end-of-text token. `other` stands for any other token."""

    alphabet: str
    rows: Floats  # [3, S, A] by place (last, before, far), by symbol there; S = A + 1 with `other`
    offset: Floats  # [A] keeps logits apart: no context has two equally likely symbols

    @property
    def size(self) -> int:
        return len(self.alphabet) + 1

    @property
    def end(self) -> int:
        """The end-of-text symbol."""
        return len(self.alphabet)

    @property
    def other(self) -> int:
        return len(self.alphabet) + 1

    @cached_property
    def _symbols(self) -> dict[str, int]:
        return {letter: i for i, letter in enumerate(self.alphabet)}

    def encode(self, text: str) -> list[int]:
        return [self._symbols.get(letter, self.other) for letter in text]

    def decode(self, symbols: Sequence[int]) -> str:
        return "".join(self.alphabet[s] if s < len(self.alphabet) else "\ufffd" for s in symbols)

    def logits(self, last: Ints) -> Floats:
        """[n, A] of contexts [n, 3]."""
        parts = [self.rows[place][last[:, place]] for place in range(3)]
        return np.asarray(parts[0] + parts[1] + parts[2] + self.offset)

    def contexts(self, prompt: Sequence[int], output: Sequence[int]) -> Contexts:
        """Of every position of an output, and of the one behind it: n = len(output) + 1."""
        tokens, start, n = [*prompt, *output], len(prompt), len(output) + 1
        places = np.arange(start - 1, start - 1 + n)[:, None] - np.array([0, 1, FAR])
        last = np.asarray(tokens, dtype=np.int64)[np.maximum(places, 0)]
        ones = np.eye(self.other + 1)[:, : self.size]
        used = np.zeros((n, self.size))
        if output:
            np.cumsum(ones[np.asarray(output)], axis=0, out=used[1:])
        seen = (used > 0) | (ones[np.asarray(prompt)].sum(0) > 0)
        return Contexts(last, used, seen)

    def laws(self, contexts: Contexts, rules: Rules) -> tuple[Floats, NDArray[np.bool_]]:
        """[n, A] the laws, and [n] which of them do not hang on rounding at a truncation's border."""
        return warped(self.adjusted(contexts, rules), rules)

    def adjusted(self, contexts: Contexts, rules: Rules) -> Floats:
        """[n, A] logits with bias and penalties, in the order of transformers and vLLM."""
        logits = self.logits(contexts.last)
        for symbol, value in rules.bias.items():
            logits[:, self._symbols[symbol]] += value
        if rules.repetition_penalty != 1.0:
            rate = rules.repetition_penalty
            logits = np.where(contexts.seen, np.where(logits > 0, logits / rate, logits * rate), logits)
        if rules.presence_penalty or rules.frequency_penalty:
            logits = logits - rules.presence_penalty * (contexts.used > 0)
            logits = logits - rules.frequency_penalty * contexts.used
        return logits

    def greedy(self, prompt: Sequence[int], most: int) -> list[int]:
        """The likeliest symbols, up to `most` or through the end-of-text symbol."""
        tokens = list(prompt)
        for _ in range(most):
            last = np.array([[tokens[-1], tokens[-2], tokens[-1 - FAR]]])
            tokens.append(int(self.logits(last)[0].argmax()))
            if tokens[-1] == self.end:
                break
        return tokens[len(prompt) :]

    def prompts(self, count: int, seed: int, shortest: int = 12, longest: int = 40) -> list[str]:
        """Texts of random symbols; the same for the same seed."""
        rng = np.random.default_rng(seed)
        lengths = rng.integers(shortest, longest + 1, count)
        return ["".join(self.alphabet[i] for i in rng.integers(0, len(self.alphabet), n)) for n in lengths]

    def to_json(self) -> dict[str, Any]:
        return {
            "alphabet": self.alphabet, "far": FAR, "rows": self.rows.tolist(), "offset": self.offset.tolist(),
        }  # fmt: skip

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Table:
        return cls(values["alphabet"], np.array(values["rows"]), np.array(values["offset"]))


def warped(logits: Floats, rules: Rules) -> tuple[Floats, NDArray[np.bool_]]:
    """Temperature, then top-k, top-p and min-p: laws [n, A], and which are clear of a border."""
    clear = np.ones(len(logits), dtype=bool)
    if rules.temperature == 0:
        best = logits.argmax(-1)
        return np.eye(logits.shape[-1])[best], clear
    p = _softmax(logits / rules.temperature)
    if rules.top_k and rules.top_k < p.shape[-1]:
        ordered = np.sort(p, -1)
        clear &= ordered[:, -rules.top_k] > 1.002 * ordered[:, -rules.top_k - 1]
        p = np.where(p >= ordered[:, [-rules.top_k]], p, 0.0)
        p /= p.sum(-1, keepdims=True)
    if rules.top_p < 1:
        order = (-p).argsort(-1)
        sums = np.take_along_axis(p, order, -1).cumsum(-1)
        clear &= (np.abs(sums - rules.top_p) > 0.004).all(-1)
        kept = np.zeros(p.shape, dtype=bool)
        np.put_along_axis(kept, order, sums - np.take_along_axis(p, order, -1) < rules.top_p, -1)
        p = np.where(kept, p, 0.0)
        p /= p.sum(-1, keepdims=True)
    if rules.min_p > 0:
        relative = p / p.max(-1, keepdims=True)
        clear &= (np.abs(relative - rules.min_p) > 0.02 * rules.min_p).all(-1)
        p = np.where(relative >= rules.min_p, p, 0.0)
        p /= p.sum(-1, keepdims=True)
    return p, clear


def _softmax(logits: Floats) -> Floats:
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return np.asarray(weights / weights.sum(-1, keepdims=True))


@dataclass(frozen=True)
class Pair:
    """A target's table, and that of its drafter, which reads the last token only: acceptance is known too."""

    target: Table
    draft: Table
    seed: int = 0

    def agreement(self, contexts: Contexts, rules: Rules | None = None) -> Floats:
        """[n] the chance that a drawn draft is accepted after each context: the sum of min(p, q)."""
        rules = rules or Rules()
        p, q = self.target.laws(contexts, rules)[0], self.draft.laws(contexts, rules)[0]
        return np.asarray(np.minimum(p, q).sum(-1))

    def save(self, file: Path) -> None:
        values = {"target": self.target.to_json(), "draft": self.draft.to_json(), "seed": self.seed}
        file.write_text(json.dumps(values) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, file: Path) -> Pair:
        values = json.loads(file.read_text(encoding="utf-8"))
        return cls(Table.from_json(values["target"]), Table.from_json(values["draft"]), values.get("seed", 0))


def make_pair(seed: int = 0, alphabet: str = ALPHABET) -> Pair:
    """Random tables. Texts end after some fifty symbols, mostly behind a `}`; two of three drawn drafts fit."""
    rng = np.random.default_rng(seed)
    size = len(alphabet) + 1

    def grid(spread: float, *shape: int) -> Floats:
        return np.round((rng.random(shape) * 2 - 1) * spread * 4) / 4

    rows = np.stack([grid(2.25, size + 1, size), grid(1.25, size + 1, size), grid(0.75, size + 1, size)])
    rows[1:, :, -1] = 0.0
    rows[0, :, -1] = -1.75
    rows[0, alphabet.index("}"), -1] = 3.0
    target = Table(alphabet, rows, np.arange(size, dtype=np.float64) * _STEP)
    near = np.zeros_like(rows)
    near[0] = rows[0] + grid(0.5, size + 1, size)
    return Pair(target, Table(alphabet, near, target.offset), seed)
