"""Prompts to measure with: the built-in suites, Spec-Bench's question file, SPEED-Bench's, or a user's own chats.

The built-in suite was written for this project: eight prompts for each of Spec-Bench's six tasks, and for five
common tasks that Spec-Bench lacks: editing a file, extracting JSON from a text, open chat, long answers and answers of
one line. Real prompts matter: random tokens or one prompt repeated flatter every lookup drafter. `long:4k,16k` are
prompts of these lengths made from files of this machine (forerun.measure.bench.long).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forerun.core.errors import InvalidInput
from forerun.measure.bench.long import PER_TASK, lengths_in, long_row, long_tasks

if TYPE_CHECKING:
    from forerun.models.load.tokenizer import Tokenizer

TASKS = (
    "multi_turn", "translation", "summarization", "qa", "math_reasoning", "rag", "code_edit", "structured",
    "open_chat", "long_answer", "short_answer",
)  # fmt: skip
_CHAT_CATEGORIES = frozenset(  # Spec-Bench files these under one task
    ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
)
BUILT_IN = "builtin"
OWN_TASK = "own"  # what a user's prompts are filed under when they name no task

Message = dict[str, str]


@dataclass(frozen=True, slots=True)
class Item:
    """One prompt of a suite: the messages to answer, and what the user would say after the answer."""

    id: str
    task: str
    messages: tuple[Message, ...]
    later_turns: tuple[str, ...] = ()


def load_suite(
    path: str | Path | None = None,
    tasks: Sequence[str] | None = None,
    limit: int | None = None,
    model: str | None = None,
) -> list[Item]:
    """The built-in suite, long prompts for a model, or a JSONL file's; some tasks, the first `limit` of each."""
    if limit is not None and limit < 1:
        raise InvalidInput(f"limit={limit} leaves no prompts; use 1 or more per task")
    lengths = lengths_in(str(path))
    if lengths is not None:
        chosen = _chosen(long_tasks(lengths), tasks)
        return [_long(task, number, lengths, model) for task in chosen for number in range(PER_TASK)[:limit]]
    items = list(_parse(_read(path), str(path or "prompts.jsonl")))
    if not items:
        raise InvalidInput(f"{str(path)!r} holds no prompts; write one JSON object per line")
    chosen = _chosen(dict.fromkeys(item.task for item in items), tasks)
    return [item for task in chosen for item in [i for i in items if i.task == task][:limit]]


def suite_size(path: str | Path | None = None, tasks: Sequence[str] | None = None) -> int:
    """How many prompts of these tasks a suite has."""
    lengths = lengths_in(str(path))
    return len(load_suite(path, tasks)) if lengths is None else PER_TASK * len(_chosen(long_tasks(lengths), tasks))


def _chosen(known: Iterable[str], tasks: Sequence[str] | None) -> list[str]:
    """Those of a suite's tasks that are asked for."""
    known = list(known)
    for task in tasks or ():
        if task not in known:
            raise InvalidInput(f"unknown task {task!r}; this suite has: {', '.join(known)}")
    return [task for task in known if not tasks or task in tasks]


def _read(path: str | Path | None) -> str:
    built_in = path is None or str(path) == BUILT_IN
    source = files("forerun.measure.bench").joinpath("prompts.jsonl") if built_in else Path(str(path))
    if isinstance(source, Path) and not source.is_file():
        raise InvalidInput(f"no prompts at {str(source)!r}; give a JSONL file, or none for the built-in suite")
    return source.read_text(encoding="utf-8")


@cache
def _long(task: str, number: int, lengths: tuple[int, ...], model: str | None) -> Item:
    """A prompt of some length by the model's own tokenizer."""
    return _item(long_row(task, number, lengths, _tokenizer(model)), "long", number + 1)


@cache
def _tokenizer(model: str | None) -> Tokenizer:
    from forerun.models.load.checkpoint import open_checkpoint

    if model is None:
        raise InvalidInput("long prompts are counted by a model's tokenizer, and no model is named here; use a file")
    return open_checkpoint(model).tokenizer()


def _parse(text: str, name: str) -> Iterator[Item]:
    seen: set[str] = set()
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise InvalidInput(f"{name}, line {number} is not JSON: {error}; fix or remove it") from error
        item = _item(row, name, number)
        if item.id in seen:
            raise InvalidInput(f"{name}, line {number}: the id {item.id!r} was used before; make it unique")
        seen.add(item.id)
        yield item


def _item(row: Any, name: str, number: int) -> Item:
    """One line in any of the three layouts."""
    where = f"{name}, line {number}"
    if not isinstance(row, dict):
        raise InvalidInput(f"{where} is not a JSON object; write {{'prompt': ...}} or {{'messages': [...]}}")
    identity = str(row.get("id", row.get("question_id", number)))
    task = _task(row)
    if "turns" in row:
        turns = row["turns"]
        if not _are_texts(turns):
            raise InvalidInput(f"{where}: 'turns' must be a list of strings that are not empty")
        return Item(identity, task, ({"role": "user", "content": turns[0]},), tuple(turns[1:]))
    if "messages" in row:
        return Item(identity, task, _messages(row["messages"], where))
    if not _are_texts([row.get("prompt")]):
        raise InvalidInput(f"{where} has none of 'turns', 'messages' and 'prompt'; give it one of them")
    return Item(identity, task, ({"role": "user", "content": row["prompt"]},))


def _task(row: dict[str, Any]) -> str:
    """The task a line names, or the one that its Spec-Bench category belongs to; SPEED-Bench's are tasks themselves."""
    name = str(row.get("task") or row.get("category") or OWN_TASK)
    is_spec_bench = "task" not in row and "sub_category" not in row
    return "multi_turn" if is_spec_bench and name in _CHAT_CATEGORIES else name


def _messages(given: Any, where: str) -> tuple[Message, ...]:
    """The messages up to the last that asks for an answer; recorded answers at the end are not prompts."""
    fine = isinstance(given, list) and all(
        isinstance(message, dict) and _are_texts([message.get("role"), message.get("content")]) for message in given
    )
    if not fine:
        raise InvalidInput(f"{where}: each of 'messages' needs a 'role' and a 'content' that are strings")
    messages = [{"role": message["role"], "content": message["content"]} for message in given]
    while messages and messages[-1]["role"] == "assistant":
        messages.pop()
    if not messages:
        raise InvalidInput(f"{where}: 'messages' asks for no answer; end it with a user's message")
    return tuple(messages)


def _are_texts(values: Any) -> bool:
    return isinstance(values, list) and bool(values) and all(isinstance(v, str) and v.strip() for v in values)
