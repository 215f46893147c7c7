"""Prompts to measure with: the built-in suites, Spec-Bench's question file, SPEED-Bench's, or a user's own chats.

The built-in suite was written for this project: eight prompts for each of Spec-Bench's six tasks, and for five
common tasks that Spec-Bench lacks: editing a file, extracting JSON from a text, open chat, long answers and answers of
one line. Real prompts matter: random tokens or one prompt repeated flatter every lookup drafter.

`long:4k,16k` are prompts of these lengths, or up to 2% less, the model's chat template included, made from files that
every machine has: code is that of Python's standard library and of torch; documents are Python's language reference
(pydoc's topics) and, where these do not suffice, the descriptions of installed packages. Four prompts of each task:

    code_edit        files of a repository; write one function out of their middle again, changed
    code_completion  the same, broken off inside a function; continue
    needle           a document; find a planted sentence, or write out a paragraph of which the first words are given
    summary          a document; sum it up

The same Python, packages and tokenizer give the same prompts. Nothing is taken from any benchmark.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import distributions
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from forerun.api.calls import check_text
from forerun.core.errors import InvalidInput
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
    answers: tuple[Message, ...] = ()  # that were recorded behind the messages


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


def prompt_ids(tokenizer: Tokenizer, messages: Sequence[Message]) -> tuple[int, ...]:
    """Messages through the model's template, or one after the other where it has none.

    The template opens an answer, unless the last message is one.
    """
    if tokenizer.has_chat_template:
        return tuple(tokenizer.chat_ids(messages, messages[-1]["role"] != "assistant"))
    return tuple(tokenizer.encode("\n\n".join(message["content"] for message in messages)))


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
        raise InvalidInput(f"no prompts at {str(source)!r}; give the path of a JSONL file with them")
    try:
        return source.read_text(encoding="utf-8-sig")  # some editors begin a file with a byte order mark
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInput(f"cannot read {str(path)!r}: {error}; give a JSONL file in UTF-8") from None


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
        except (ValueError, RecursionError) as error:
            raise InvalidInput(f"{name}, line {number} is not JSON: {error}; fix or remove it") from error
        item = _item(row, name, number)
        try:
            for said in (*(message["content"] for message in (*item.messages, *item.answers)), *item.later_turns):
                check_text(said)
        except InvalidInput as error:
            raise InvalidInput(f"{name}, line {number}: {error}") from None
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
        messages, answers = _messages(row["messages"], where)
        return Item(identity, task, messages, answers=answers)
    if not _are_texts([row.get("prompt")]):
        raise InvalidInput(f"{where} has none of 'turns', 'messages' and 'prompt'; give it one of them")
    return Item(identity, task, ({"role": "user", "content": row["prompt"]},))


def _task(row: dict[str, Any]) -> str:
    """The task a line names, or the one that its Spec-Bench category belongs to; SPEED-Bench's are tasks themselves."""
    name = str(row.get("task") or row.get("category") or OWN_TASK)
    is_spec_bench = "task" not in row and "sub_category" not in row
    return "multi_turn" if is_spec_bench and name in _CHAT_CATEGORIES else name


def _messages(given: Any, where: str) -> tuple[tuple[Message, ...], tuple[Message, ...]]:
    """The messages up to the last that asks for an answer, and the recorded answers behind it."""
    fine = isinstance(given, list) and all(
        isinstance(message, dict) and _are_texts([message.get("role"), message.get("content")]) for message in given
    )
    if not fine:
        raise InvalidInput(f"{where}: each of 'messages' needs a 'role' and a 'content' that are strings")
    messages = tuple({"role": message["role"], "content": message["content"]} for message in given)
    end = len(messages)
    while end and messages[end - 1]["role"] == "assistant":
        end -= 1
    if not end:
        raise InvalidInput(f"{where}: 'messages' asks for no answer; end it with a user's message")
    return messages[:end], messages[end:]


def _are_texts(values: Any) -> bool:
    return isinstance(values, list) and bool(values) and all(isinstance(v, str) and v.strip() for v in values)


NAME = "long"
LENGTHS = (4000, 8000, 16000, 30000)
LONG_TASKS = ("code_edit", "code_completion", "needle", "summary")
PER_TASK = 4
SHORTEST, LONGEST = 1000, 1_000_000
_SHORT_BY = 0.02  # what a prompt may lack of its length
_PACKAGES = (  # a prompt begins with every third one of these
    "email", "json", "http", "asyncio", "urllib", "logging", "torch.optim", "unittest", "concurrent", "multiprocessing",
    "xml", "importlib", "torch.nn.modules", "ctypes", "html", "wsgiref", "collections", "sqlite3", "torch.utils.data",
    "torch.distributions", "torch.nn.utils", "torch.ao", "torch.distributed", "torch._dynamo", "torch._inductor",
)  # fmt: skip
_FUNCTION = (12, 60)  # lines of a function that is written again
_EDITS = (
    "Rename its local variables to longer, more telling names",
    "Add type annotations to all of its parameters and to what it returns, and a docstring if it has none",
    "Add a call of `logging.debug` as its first statement, with the values of its parameters",
    "Put a comment of one line in front of each of its loops and branches that says what happens there",
)
_THINGS = ("the tide gauge in Bergen", "the reading room in Coimbra", "the seed vault in Brno", "the old mill in Ghent")
_SUMMARIES = (
    "Sum up the document above in ten sentences, each about another part of it.",
    "List the twelve most important rules that the document above states, each with the name of its section.",
    "Write a summary of the document above for somebody who has never programmed, in four paragraphs.",
    "For each section of the document above write its name and one sentence on what it says.",
)


def lengths_in(name: str) -> tuple[int, ...] | None:
    """`long` or `long:4k,16000` as lengths in tokens; None where a name is that of a file."""
    if name == NAME:
        return LENGTHS
    if not name.startswith(f"{NAME}:"):
        return None
    found = []
    for word in name.removeprefix(f"{NAME}:").split(","):
        match = re.fullmatch(r"(\d{1,7})(k?)", word.strip().lower())
        length = int(match[1]) * (1000 if match[2] else 1) if match else 0
        if not SHORTEST <= length <= LONGEST:
            raise InvalidInput(
                f"the length {word!r} in {name!r} is not {SHORTEST} to {LONGEST} tokens; write {NAME}:4k,16k"
            )
        found.append(length)
    return tuple(dict.fromkeys(found))


def task_name(task: str, length: int) -> str:
    """Tasks are told apart by length, so that figures by task are figures by length."""
    return f"{task}_{length // 1000}k" if length % 1000 == 0 else f"{task}_{length}"


def long_tasks(lengths: Sequence[int]) -> dict[str, tuple[str, int]]:
    """The task and length that each name stands for."""
    return {task_name(task, length): (task, length) for task in LONG_TASKS for length in lengths}


def long_row(name: str, number: int, lengths: Sequence[int], tokenizer: Tokenizer) -> dict[str, str]:
    """One prompt as a line of a suite: `id`, `task` and `prompt`."""
    makers = {"code_edit": _edit, "code_completion": _completion, "needle": _needle, "summary": _summary}
    task, length = long_tasks(lengths)[name]
    return {"id": f"{name}-{number + 1}", "task": name, "prompt": makers[task](number, _Fit(length, tokenizer))}


@dataclass(frozen=True, slots=True)
class _Fit:
    """Finds how many lines fill a prompt."""

    length: int
    tokenizer: Tokenizer

    def lines(self, most: int, write: Callable[[int], str]) -> int:
        """So many lines that `write` of them has the length, or a little less."""
        low, high, small, large = 0, most + 1, 0, 0  # `low` lines fit, `high` do not
        guess = min(most, self.length // 10)
        while True:
            size = self._tokens(write(guess))
            if size <= self.length:
                low, small = guess, size
                if size >= (1 - _SHORT_BY) * self.length:
                    return low
            else:
                high, large = guess, size
            if high - low <= 1:
                break
            if large:
                share = (self.length * (1 - _SHORT_BY / 2) - small) / (large - small)
                guess = min(max(low + round(share * (high - low)), low + 1), high - 1)
            else:
                guess = min(most, max(low + 1, 2 * low))
        if low == most:
            raise InvalidInput(
                f"this machine's own texts end before {self.length} tokens (at {small}); ask for a shorter length"
            )
        return low

    def _tokens(self, text: str) -> int:
        return len(prompt_ids(self.tokenizer, [{"role": "user", "content": text}]))


def _edit(number: int, fit: _Fit) -> str:
    lines, functions = _code(number, _code_size(fit.length))

    def write(count: int) -> str:
        function = _function_at(functions, (number + 1) * count // (PER_TASK + 1), count)
        return _repository(lines[:count]) + (
            f"\n\n{_EDITS[number]}: the function `{function.name}` in `{function.file}`, and nothing else. "
            "Write the whole function again, without explanation."
        )

    return write(fit.lines(len(lines), write))


def _completion(number: int, fit: _Fit) -> str:
    """The lines in front of a function's middle, as many as fit."""
    lines, functions = _code(number, 2 * _code_size(fit.length))
    stop = _function_at(functions, len(lines) // 2, len(lines))
    end = next(at for at in range((stop.start + stop.end) // 2, 0, -1) if lines[at - 1].strip())

    def write(count: int) -> str:
        asked = (
            f"The last file, `{stop.file}`, breaks off. Continue it from the line after "
            f"`{lines[end - 1].strip()}`. Write code only."
        )
        return f"{_repository(lines[end - count : end])}\n\n{asked}"

    return write(fit.lines(end, write))


def _needle(number: int, fit: _Fit) -> str:
    lines = _document(number, fit.length)

    def write(count: int) -> str:
        text, at = lines[:count], (number + 1) * count // (PER_TASK + 1)
        if number % 2:
            words = " ".join(_paragraph(text, at).split()[:7])
            asked = f"Find the paragraph that begins with {words!r}. Write it out in full, word for word."
        else:
            while at < count and text[at].strip():
                at += 1
            thing, serial = _THINGS[number], 7919 * (number + 2) + fit.length
            text = [*text[:at], "", f"The inventory number of {thing} is {serial}.", *text[at:]]
            asked = (
                f"What is the inventory number of {thing}? Quote the sentence that says so and the paragraph after it."
            )
        return _described(text, asked)

    return write(fit.lines(len(lines), write))


def _summary(number: int, fit: _Fit) -> str:
    lines = _document(PER_TASK + number, fit.length)

    def write(count: int) -> str:
        return _described(lines[:count], _SUMMARIES[number])

    return write(fit.lines(len(lines), write))


def _described(lines: Iterable[str], asked: str) -> str:
    return "Here is a document.\n\n" + "\n".join(lines) + f"\n\nThe document ends here. {asked}"


def _repository(lines: Iterable[str]) -> str:
    return "Here are files of a repository.\n\n" + "\n".join(lines)


def _paragraph(lines: Sequence[str], at: int) -> str:
    """The first paragraph of several lines behind a line, or in front of it."""
    paragraphs, start = [], 0
    for place, line in enumerate([*lines, ""]):
        if not line.strip():
            if place - start >= 3:
                paragraphs.append((abs(start - at), start, place))
            start = place + 1
    _, start, end = min(paragraphs, default=(0, 0, len(lines)))
    return "\n".join(lines[start:end])


@dataclass(frozen=True, slots=True)
class _Function:
    name: str
    file: str
    start: int  # the line of its `def` among all lines
    end: int


def _function_at(functions: Sequence[_Function], at: int, count: int) -> _Function:
    """The function nearest to a line that is whole within the first `count` lines."""
    whole = [one for one in functions if one.end <= count] or functions[:1]
    if not whole:
        raise InvalidInput("the sources of Python's standard library are not on this machine; use --prompts builtin")
    return min(whole, key=lambda one: (abs(one.start - at), one.start))


def _code_size(length: int) -> int:
    """Characters of code that surely have so many tokens."""
    return 8 * length


@cache
def _code(number: int, size: int) -> tuple[list[str], list[_Function]]:
    """Lines of files of some packages, and the functions in them."""
    lines: list[str] = []
    functions: list[_Function] = []
    written = 0
    first = 3 * number % len(_PACKAGES)
    for name in (*_PACKAGES[first:], *_PACKAGES[:first]):
        for file, text in _sources(name):
            if written >= size:
                return lines, functions
            lines += ["", f"===== {file} =====", ""]
            functions += _functions(text, file, len(lines))
            lines += text.splitlines()
            written += len(text)
    return lines, functions


def _functions(text: str, file: str, above: int) -> list[_Function]:
    try:
        nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)]
    except (SyntaxError, ValueError):
        return []
    found = [_Function(node.name, file, above + node.lineno - 1, above + (node.end_lineno or 0)) for node in nodes]
    return [one for one in found if _FUNCTION[0] <= one.end - one.start <= _FUNCTION[1]]


@cache
def _sources(package: str) -> list[tuple[str, str]]:
    """The Python files of a package with their texts; none where it is not installed."""
    top, *below = package.split(".")
    spec = find_spec(top)
    if spec is None or not spec.submodule_search_locations:
        return []
    root = Path(next(iter(spec.submodule_search_locations)))
    folder = root.joinpath(*below)
    files = sorted(path for path in folder.rglob("*.py") if "test" not in path.as_posix().removeprefix(str(root)))
    texts = ((f.relative_to(root.parent).as_posix(), f.read_text(encoding="utf-8", errors="replace")) for f in files)
    return [(name, text) for name, text in texts if text.strip()]


def _document(number: int, length: int) -> list[str]:
    """Lines of the reference from one of its topics on, and of packages' descriptions where these do not suffice."""
    topics = _topics()
    first = number * len(topics) // (2 * PER_TASK)
    sections = [*topics[first:], *topics[:first]]
    written = sum(len(text) for _, text in sections)
    if written < 8 * length:
        sections += _descriptions()
    return [line for name, text in sections for line in ("", f"===== {name} =====", "", *text.splitlines())]


@cache
def _topics() -> list[tuple[str, str]]:
    from pydoc_data.topics import topics

    return sorted(topics.items())


@cache
def _descriptions() -> list[tuple[str, str]]:
    """What installed packages say of themselves, by name."""
    found = {str(one.metadata["Name"]): str(one.metadata.json.get("description", "")) for one in distributions()}
    return sorted((name, text) for name, text in found.items() if len(text) > 500)
