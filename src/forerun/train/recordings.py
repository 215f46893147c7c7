"""Texts that a server recorded (`forerun serve --record`), as training data: read, freed of repeats, in shards."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forerun.core.errors import InvalidInput
from forerun.train.data.corpus import Text, write_shard
from forerun.train.data.folder import require_recordings


@dataclass(frozen=True, slots=True)
class Recorded:
    """What was recorded: texts without repeats, and how well drafting went when they were written."""

    texts: list[Text]
    unreadable: int  # lines
    repeats: int
    tokens_per_round: float  # of all texts, as served; 0.0 where no rounds were noted


def read_recordings(folder: Path, max_length: int) -> Recorded:
    """All texts of a folder; a prompt and its answer that occur again count once."""
    files = require_recordings(folder)
    texts, seen = list[Text](), set[tuple[int, ...]]()
    unreadable = repeats = tokens = rounds = 0
    for line in _lines(files):
        text = _text_of(line, len(texts), max_length)
        if text is None:
            unreadable += 1
            continue
        tokens, rounds = tokens + len(line["tokens"]), rounds + _whole(line.get("rounds"))
        if tuple(text.tokens) in seen:
            repeats += 1
        else:
            seen.add(tuple(text.tokens))
            texts.append(text)
    if not texts:
        raise InvalidInput(f"{folder} holds {unreadable} lines and no text that can be read; record again")
    return Recorded(texts, unreadable, repeats, tokens / rounds if rounds else 0.0)


def write_shards(recorded: Recorded, folder: Path) -> None:
    """The texts as `forerun train` reads them."""
    write_shard(folder / "shard-00000.safetensors", recorded.texts)


def _lines(files: list[Path]) -> Iterator[Any]:
    """Every line, parsed; None where it cannot be: a server may have been killed while it wrote."""
    for file in files:
        with file.open(encoding="utf-8", errors="replace") as opened:
            for line in opened:
                try:
                    yield json.loads(line)
                except (ValueError, RecursionError):
                    yield None


def _text_of(line: Any, number: int, max_length: int) -> Text | None:
    """A line as a text, cut to the length that is trained on; None where it is none."""
    if not isinstance(line, dict):
        return None
    names = "prompt", "tokens", "temperature"
    prompt, tokens, temperature = (line.get(name, 0) for name in names)
    if not (_are_ids(prompt) and _are_ids(tokens) and tokens) or len(prompt) >= max_length:
        return None
    is_number = isinstance(temperature, int | float) and not isinstance(temperature, bool)
    return Text(
        [*prompt, *tokens][:max_length], len(prompt), float(temperature) if is_number else 1.0, number
    )


def _are_ids(value: Any) -> bool:
    return isinstance(value, list) and all(type(token) is int and token >= 0 for token in value)


def _whole(value: Any) -> int:
    return value if type(value) is int and value > 0 else 0
