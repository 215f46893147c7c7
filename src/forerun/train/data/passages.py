"""Passages: answers that the target wrote in an earlier data run, with what had been asked.

Long prompts are made of them: text that makes sense, in the target's own domain, and already written.
An answer serves if it ended by itself, is long enough to ask something about, does not talk about the assistant
itself (small models evade half of their own questions), and resembles no other.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from forerun.core.errors import InvalidInput
from forerun.train.data.corpus import read_shard
from forerun.train.data.folder import shards_of
from forerun.train.data.prompts import Chats, Novelty, Prompt, as_messages

LEAST = 60  # tokens of a passage
_FENCED = re.compile(r"```[\w+#-]*\n.*?\n```", re.DOTALL)
_LEAST_LINES = 5  # of code that can be edited, with its fences
_SENTENCE_ENDS = re.compile(r"(?<=[^\d\s][.!?])\s+|\n\s*\n")  # "1." begins an item and ends nothing

_EVASIVE = re.compile(  # answers about the assistant itself hold nothing to ask about
    r"\b(?:I'm sorry|I apologi[sz]e|an AI|chatbot|language model|I'm (?:unable|not able|not equipped|here to))\b",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class Passage:
    """An answer, and the conversation that led to it."""

    text: str
    length: int  # tokens
    asked: tuple[dict[str, str], ...]  # messages; the last one is the user's

    @property
    def question(self) -> str | None:
        """What was asked, if that was one question and no long text."""
        words = self.asked[0]["content"]
        return words if len(self.asked) == 1 and len(words) <= 300 else None

    def shortened(self, room: int) -> Passage:
        """As many of its first sentences as fit into so many tokens; all of it where none can be left out."""
        if self.length <= room or "```" in self.text:
            return self
        scale = len(self.text) / self.length
        ends = [found.start() for found in _SENTENCE_ENDS.finditer(self.text)]
        fitting = [end for end in ends if LEAST * scale <= end <= room * scale]
        if not fitting:
            return self
        return Passage(self.text[: fitting[-1]], round(fitting[-1] / scale), self.asked)

    def code(self) -> str | None:
        """Its longest piece of code, between fences; None where there is none worth editing."""
        longest: str = max(_FENCED.findall(self.text), key=len, default="")
        return longest if longest.count("\n") + 1 >= _LEAST_LINES else None

    def sentences(self) -> list[str]:
        """Answers that make sense on their own."""
        found = [part.strip() for part in _SENTENCE_ENDS.split(self.text)]
        return [part for part in found if re.fullmatch(r"[A-Z][^\n*#`:]{40,240}[.!?]", part)]


def read_passages(
    folders: Sequence[str], tokenizer: Chats, *, most: int, count: int = 0, seed: int = 0
) -> list[Passage]:
    """Passages of at most so many tokens, drawn from all folders: the first `count` that serve, or all (0)."""
    texts = [text for folder in folders for text in _texts_of(Path(folder))]
    novelty, passages = Novelty(), list[Passage]()
    for text in random.Random(seed).sample(texts, len(texts)):
        length = len(text.answer) - 1
        if LEAST <= length <= most and int(text.answer[-1]) in tokenizer.eos_ids:
            messages, words = as_messages(text.asked), tokenizer.decode(text.answer[:-1].tolist()).strip()
            ours = messages[-1]["content"].strip() in tokenizer.decode(text.prompt.tolist())
            if ours and not _EVASIVE.search(words) and novelty.is_new(words):
                passages.append(Passage(words, length, tuple(messages)))
        if count and len(passages) == count:
            break
    if not passages:
        raise InvalidInput(
            f"none of the {len(texts)} texts in {', '.join(folders)} can be a passage (an answer of this target, "
            f"no excuse, ended by itself after {LEAST} to {most} tokens); give another folder or a larger --max-prompt"
        )
    return passages


@dataclass(frozen=True, slots=True)
class _Text:
    asked: Prompt
    prompt: npt.NDArray[np.integer]  # the tokens of what was asked
    answer: npt.NDArray[np.integer]


def _texts_of(folder: Path) -> list[_Text]:
    """Every text by its number: shards keep the order of completion, which may differ between runs."""
    shards = [read_shard(file) for file in shards_of(folder)]
    asked, heats = _asked_in(folder)
    heats = heats or len({heat for shard in shards for heat in shard["temperatures"].tolist()})
    texts: dict[int, _Text] = {}
    for shard in shards:
        tokens, starts, numbers = shard["tokens"].numpy(), shard["starts"].tolist(), shard["numbers"].tolist()
        for number, start, end, length in zip(
            numbers, starts[:-1], starts[1:], shard["prompt_lengths"].tolist(), strict=True
        ):
            if number < len(asked) * heats and end > start + length:
                prompt, answer = tokens[start : start + length], tokens[start + length : end]
                texts[number] = _Text(asked[number // heats], prompt, answer)
    return [texts[number] for number in sorted(texts)]


def _asked_in(folder: Path) -> tuple[list[Prompt], int]:
    """The prompts, and how many texts there are of each; 0 if the run did not finish."""
    file, record = folder / "prompts.jsonl", folder / "provenance.json"
    try:
        prompts = [json.loads(line) for line in file.read_text(encoding="utf-8").split("\n") if line]
        made = json.loads(record.read_text(encoding="utf-8")) if record.is_file() else None
        return prompts, len(made["arguments"]["temperatures"]) if made else 0
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InvalidInput(
            f"cannot read what was asked in {str(folder)!r} ({error}); give a folder of `forerun data make`"
        ) from None
