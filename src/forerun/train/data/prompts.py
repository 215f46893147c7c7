"""Prompts for training data: read from the user's files, or written by the target from an empty user turn.

A chat model that is asked to continue from the start of a user turn writes questions as its training data had
them, which is close to its domain without needing any data. Near-duplicates are dropped: a few min-hashes
over word triples, in bands; two prompts that agree in a band are taken for the same. A `Tally` counts them.
"""

from __future__ import annotations

import json
import re
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from forerun.core.errors import InvalidInput

_BANDS, _DEPTH = 4, 3
_ODD, _SALT = np.random.default_rng(0).integers(1, 1 << 62, (2, _BANDS * _DEPTH), dtype=np.uint64) | np.uint64(1)
_HIGH = np.uint64(32)  # the high half of a product
Prompt = str | list[dict[str, str]]  # one question, or the messages of a conversation
_MARK = "\x02forerun\x03"  # placeholder for the user's message while the template is split


class Chats(Protocol):
    """The part of a tokenizer that is used here."""

    eos_ids: frozenset[int]

    def chat_text(self, messages: Sequence[Mapping[str, Any]], /, add_generation_prompt: bool = True) -> str: ...
    def encode(self, text: str, add_special: bool = True) -> list[int]: ...
    def decode(self, ids: Iterable[int]) -> str: ...


class Novelty:
    def __init__(self) -> None:
        self._seen: set[tuple[int, ...]] = set()

    def is_new(self, text: str) -> bool:
        words = re.findall(r"\w+", text.lower())
        triples = {" ".join(words[i : i + 3]) for i in range(max(1, len(words) - 2))} if words else {text}
        marks = np.array([zlib.crc32(triple.encode()) for triple in triples], dtype=np.uint64)
        hashes = ((marks[:, None] * _ODD + _SALT) >> _HIGH).min(0).tolist()
        bands = [(band, *hashes[band * _DEPTH : (band + 1) * _DEPTH]) for band in range(_BANDS)]
        fresh = not any(band in self._seen for band in bands)
        self._seen.update(bands)
        return fresh


def around_user_turn(tokenizer: Chats) -> tuple[str, str]:
    """What the chat template writes before and after a user's words (the start of the answer included)."""
    text = tokenizer.chat_text([{"role": "user", "content": _MARK}])
    before, mark, after = text.partition(_MARK)
    if not mark:
        raise InvalidInput("the model's chat template does not show what the user said; give --prompts FILE")
    return before, after


def as_messages(prompt: Prompt) -> list[dict[str, str]]:
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt


class Renderer:
    """Prompts as the target reads them, up to where it begins to answer."""

    def __init__(self, tokenizer: Chats) -> None:
        self._tokenizer = tokenizer
        self._before, self._after = around_user_turn(tokenizer)
        self.frame = len(self(""))  # tokens of the chat template around one question

    def __call__(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            return self._tokenizer.encode(f"{self._before}{prompt}{self._after}", add_special=False)
        return self._tokenizer.encode(self._tokenizer.chat_text(prompt), add_special=False)


class Sources:
    """The tokenizer of an encoder-decoder, whose prompts are sources: no template is around them."""

    def __init__(self, tokenizer: Chats) -> None:
        self._tokenizer, self.eos_ids = tokenizer, tokenizer.eos_ids

    def chat_text(self, messages: Sequence[Mapping[str, Any]], /, add_generation_prompt: bool = True) -> str:
        return str(messages[-1]["content"])

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        """With the end token that every source has."""
        return self._tokenizer.encode(text)

    def decode(self, ids: Iterable[int]) -> str:
        return self._tokenizer.decode(ids)


def read_prompts(files: Iterable[Path]) -> Iterator[str]:
    """Prompts of the user's own: lines of text, or JSON lines with "prompt", "question" or "turns"."""
    for file in files:
        try:
            lines = file.read_text(encoding="utf-8").split("\n")  # a text may hold other separators
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidInput(f"cannot read the prompt file {str(file)!r} ({error}); check the path") from None
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            yield _from_json(line, file, number) if file.suffix == ".jsonl" else line


def _from_json(line: str, file: Path, number: int) -> str:
    try:
        row = json.loads(line)
        if isinstance(row, str):
            return row
        found = row.get("prompt") or row.get("question") or row["turns"][0]
    except (ValueError, KeyError, IndexError, AttributeError):
        raise InvalidInput(
            f'line {number} of {file} is no JSON object with "prompt", "question" or "turns"; fix or drop it'
        ) from None
    return str(found)


@dataclass(slots=True)
class Tally:
    seen: int = 0
    dropped: Counter[str] = field(default_factory=Counter)

    @property
    def used(self) -> int:
        return self.seen - self.dropped.total()

    def count(self, reason: str | None) -> bool:
        """One more prompt; None = it is used."""
        self.seen += 1
        if reason is not None:
            self.dropped[reason] += 1
        return reason is None

    @property
    def in_words(self) -> str:
        """12 of 20 prompts are used; dropped: 6 that ..., 2 that ..."""
        head = f"{self.used} of {self.seen} prompts are used"
        parts = [f"{count} that {reason}" for reason, count in self.dropped.most_common()]
        return f"{head}; dropped: {', '.join(parts)}" if parts else head
