"""Record greedy texts of a model, and what it tends to write after their tokens, for replays of look-ups.

The table of successors is read on a CPU here, so not of the whole vocabulary: of the tokens of these texts, and of
those that follow them often.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from forerun.bench.run import prompt_ids
from forerun.bench.suites import Item
from forerun.drafters.suffix.successors import READ, Row, Successors
from forerun.llm import LLM
from forerun.models.load.opening import tokens_before_an_answer
from forerun.params import SamplingParams
from forerun.types import Request

OFTEN = 0.1  # share of a successor whose own successors are read too
DIGITS = 4  # of shares, as they are kept


@dataclass(frozen=True, slots=True)
class RecordedText:
    """A prompt of a task, and what the model answers."""

    task: str
    prompt: list[int]
    answer: list[int]


@dataclass(frozen=True, slots=True)
class Recording:
    """Texts of one model, and its successors of single tokens."""

    model: str
    texts: list[RecordedText]
    rows: Mapping[int, Row]  # of the tokens that were read

    def successors(self, first: int = READ) -> Successors | None:
        """The table of the first so many tokens; those that were not read seem to have no successors."""
        rows = {token: row for token, row in self.rows.items() if token < first}
        if not rows:
            return None
        kept = max(map(len, rows.values()))
        tokens, shares = torch.zeros(max(rows) + 1, kept, dtype=torch.long), torch.zeros(max(rows) + 1, kept)
        for token, row in rows.items():
            shares[token, : len(row)] = torch.tensor([share for share, _ in row])
            tokens[token, : len(row)] = torch.tensor([one for _, one in row])
        return Successors(tokens, shares)


def record(
    model: str, items: Sequence[Item], max_tokens: int, say: Callable[[str], None] = print
) -> Recording:
    """Write each prompt's greedy text, and read the successors."""
    with LLM.load(model, drafter="ngram") as llm:
        texts = [_text(llm, item, max_tokens, say) for item in items]
        opening, rows = tokens_before_an_answer(llm.tokenizer), dict[int, Row]()
        wanted = {token for one in texts for token in (*one.prompt, *one.answer)}
        while opening and wanted:
            say(f"successors of {len(wanted)} tokens")
            found = Successors.of(llm.engine.target, opening, sorted(wanted))
            if found is None:
                break
            fresh = {
                token: [(round(share, DIGITS), one) for share, one in found.after(token)] for token in wanted
            }
            first, rows = not rows, rows | fresh
            often = (
                {one for row in fresh.values() for share, one in row if share >= OFTEN}
                if first
                else set[int]()
            )
            wanted = often - rows.keys()
    return Recording(model, texts, rows)


def _text(llm: LLM, item: Item, max_tokens: int, say: Callable[[str], None]) -> RecordedText:
    prompt = prompt_ids(llm, [dict(message) for message in item.messages])
    (written,) = llm.driver.write([Request(prompt, SamplingParams(max_tokens=max_tokens))])
    say(f"{item.task} {item.id}: {len(written.tokens) - len(prompt)} tokens")
    return RecordedText(item.task, list(prompt), written.tokens[len(prompt) :])


def save(recording: Recording, file: Path) -> None:
    said = {"model": recording.model, "texts": [asdict(one) for one in recording.texts]}
    rows = {token: [*zip(*row, strict=True)] for token, row in recording.rows.items()}
    file.write_text(json.dumps(said | {"rows": rows}, separators=(",", ":")) + "\n", encoding="utf-8")


def load(file: Path) -> Recording:
    kept = json.loads(file.read_text(encoding="utf-8"))
    rows = {int(token): [*zip(*row, strict=True)] for token, row in kept["rows"].items()}
    return Recording(kept["model"], [RecordedText(**one) for one in kept["texts"]], rows)
