"""Prompts for training data: read from the user's files, or written by the target from an empty user turn.

A chat model that is asked to continue from the start of a user turn writes questions as its training data had
them, which is close to its domain without needing any data. Near-duplicates are dropped: a few min-hashes
over word triples, in bands; two prompts that agree in a band are taken for the same. A `Tally` counts them.

`Wrapper` makes long prompts from passages: a text to summarise or to search, code to edit, a conversation to continue.
Beside these come calls of tools and maths, out of requests.json: functions, requests and problems that we made up.
Summaries, translations and answers from documents follow long prompts, which a target seldom writes well and which
cost a step per token to write. Here the passages exist already, and only the wording is added. Kinds come in
fixed shares, lengths vary, and all is a function of the passages and the seed.

A passage is an answer that the target wrote in an earlier data run, with what had been asked. An answer serves if it
ended by itself, is long enough to ask something about, does not talk about the assistant itself (small models evade
half of their own questions), and resembles no other.
"""

from __future__ import annotations

import json
import random
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import cycle, islice
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from forerun.core.errors import InvalidInput
from forerun.train.data.corpus import read_shard
from forerun.train.data.folder import shards_of

_BANDS, _DEPTH = 4, 3
_ODD, _SALT = np.random.default_rng(0).integers(1, 1 << 62, (2, _BANDS * _DEPTH), dtype=np.uint64) | np.uint64(1)
_HIGH = np.uint64(32)  # the high half of a product
# one question, the messages of a conversation, or {"messages": ..., "tools": the functions that may be called}
Prompt = str | list[dict[str, str]] | dict[str, list[dict[str, Any]]]
_MARK = "\x02forerun\x03"  # placeholder for the user's message while the template is split


class Chats(Protocol):
    """The part of a tokenizer that is used here."""

    eos_ids: frozenset[int]

    def chat_text(
        self, messages: Sequence[Mapping[str, Any]], /, add_generation_prompt: bool = True, *, tools: Any = None
    ) -> str: ...
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


def as_messages(prompt: Prompt) -> list[dict[str, Any]]:
    if isinstance(prompt, dict):
        return prompt["messages"]
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
        tools = prompt["tools"] if isinstance(prompt, dict) else None
        return self._tokenizer.encode(self._tokenizer.chat_text(as_messages(prompt), tools=tools), add_special=False)


class Sources:
    """The tokenizer of a model without a chat template, whose prompts are sources or texts to continue."""

    def __init__(self, tokenizer: Chats) -> None:
        self._tokenizer, self.eos_ids = tokenizer, tokenizer.eos_ids

    def chat_text(
        self, messages: Sequence[Mapping[str, Any]], /, add_generation_prompt: bool = True, *, tools: Any = None
    ) -> str:
        said = str(messages[-1]["content"])
        functions = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools or ())
        return TOOLS.format(functions=functions, request=said) if tools else said

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        """With the tokens that begin or end every text."""
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


# A drafter sees every wording many times, so they differ in length, place (before or after the text) and manner.
SHARES: Mapping[str, float] = {  # of the prompts that are made from passages of prose
    "summarise": 0.20,
    "retrieve": 0.20,
    "turns": 0.14,
    "translate": 0.10,
    "sentence": 0.05,
    "rework": 0.06,
    "point": 0.04,
    "extract": 0.07,
    "tools": 0.08,
    "maths": 0.06,
}
CODE_SHARES: Mapping[str, float] = {  # of those made from passages that hold code
    "edit": 0.60,
    "turns": 0.20,
    "retrieve": 0.08,
    "rework": 0.06,
    "point": 0.06,
}
LANGUAGES: Sequence[str] = ("German", "French", "Spanish", "Chinese")

SUMMARISE: Sequence[str] = (
    "Summarize the following article in three sentences:\n\n{text}",
    "{text}\n\nSummarize the text above in a few sentences.",
    "Please write a short summary of this text.\n\n{text}",
    "Summarize: {text}",
    "Here is a text:\n\n{text}\n\nWhat does it say, in at most fifty words?",
    "Read this and give me the key facts as a bulleted list.\n\n{text}",
    "{text}\n\nTL;DR",
    "Article:\n{text}\n\nSummary:",
    "I have no time to read all of this. Can you condense it into one paragraph?\n\n{text}",
    "Write a headline and a two-sentence abstract for the text below.\n\n{text}",
)
SUMMARISE_SEVERAL: Sequence[str] = (
    "Summarize each of the following texts in one or two sentences.\n\n{text}",
    "{text}\n\nGive a short summary of every text above, in the same order.",
    "Below are some notes from my reading. Write a summary of them that I can use for revision.\n\n{text}",
    "Here are several short articles:\n\n{text}\n\nWrite a digest: a title and one sentence for each.",
)
RETRIEVE: Sequence[str] = (
    "Answer the question using the passages below.\n\n{text}\n\nQuestion: {question}",
    "Question: {question}\n\nUse these documents to answer it:\n\n{text}",
    "{text}\n\nWith the help of what is written above, answer this: {question}",
    "You are given some search results. Some may not help.\n\n{text}\n\nNow reply to the user: {question}",
    "Context:\n{text}\n\nUser: {question}\n\nReply briefly and rely on the context only.",
    "{question}\n\nHere is some background for your reply:\n\n{text}",
    "Find the part of the text that deals with the request, then answer.\n\n{text}\n\nRequest: {question}",
)
LABELS: Sequence[str] = ("Passage {n}: {text}", "[{n}] {text}", "Document {n}\n{text}", "({n}) {text}")
TRANSLATE: Sequence[str] = (
    "Translate the following text into {language}:\n\n{text}",
    "{text}\n\nTranslate this into {language}.",
    "Please give me a {language} version of this text. Keep the layout.\n\n{text}",
    "How would you say this in {language}?\n\n{text}",
    "English text:\n{text}\n\n{language} translation:",
    "You are a translator. Put this into natural {language}, and add nothing of your own.\n\n{text}",
)
SENTENCE: Sequence[str] = (
    "Translate this sentence into {language}: {text}",
    "Translate English to {language}: {text}",
    "What is the {language} for: {text}",
    '"{text}" How do I say that in {language}?',
    "{text}\n\nTranslate the sentence above to {language}.",
    "Give the {language} translation, nothing else.\n{text}",
)
REWORK: Sequence[str] = (
    "Rewrite the text below in simpler words.\n\n{text}",
    "{text}\n\nContinue this text with one more paragraph.",
    "Explain the following to somebody who knows nothing about it:\n\n{text}",
    "Improve the style of this text, but keep its meaning:\n\n{text}",
    "Rewrite this as a friendly e-mail to a colleague.\n\n{text}",
    "{text}\n\nCorrect any mistakes in the text above and print it again.",
    "Turn the following into a dialogue between a teacher and a student.\n\n{text}",
    "Make this half as long without losing anything important:\n\n{text}",
)
POINT: Sequence[str] = (
    "What is the main point of this text?\n\n{text}",
    "{text}\n\nWhat is this about? Answer in one sentence.",
    "Write three questions that this text answers, each with its answer.\n\n{text}",
    "Which words of this text matter most, and why?\n\n{text}",
    "Do you agree with what is said here? Give your reasons.\n\n{text}",
    "Read the text and suggest a good title for it.\n\n{text}",
)
FOLLOW_UPS: Sequence[str] = (
    "Can you make it shorter?",
    "Give an example.",
    "Explain it to a child.",
    "Thanks. Now put it in a bulleted list.",
    "Why is that?",
    "Can you say that again in other words?",
    "Please go into more detail on the last part.",
    "What are the arguments against this?",
    "Could you write it in a more formal tone?",
    "Translate your answer into {language}.",
    "Summarize what you just said in one sentence.",
    "Are you sure? Check your answer step by step.",
    "What should I read or try next?",
    "Now write it as a short poem.",
)
EXTRACT: Sequence[str] = (
    "List what this text says as a JSON object. Reply with JSON alone.\n\n{text}",
    "{text}\n\nConvert the information above to JSON.",
    "Turn this into a JSON array with one object per item, each with a name and a description.\n\n{text}",
    "Which names, numbers and dates are in the text? Answer as JSON with three lists.\n\n{text}",
    "{text}\n\nMake a Markdown table of this.",
    "Write the content of this text as YAML:\n\n{text}",
)
EDIT: Sequence[str] = (  # {name} is a function or class of the code
    "Add a comment or docstring to every function. Print the complete code again.\n\n{code}",
    "{code}\n\nPut in type hints where they are missing and show me the full result.",
    "I do not like the name `{name}`. Call it `run_{name}` and give me the new version of everything.\n\n{code}",
    "{code}\n\nWhat if an argument is empty or missing? Handle that in `{name}`, leave the rest alone, print it all.",
    "Find the mistake in this code, if there is one, and reply with the corrected program.\n\n{code}",
    "Can you clean this up? Same behaviour, same names, whole program please.\n\n{code}",
    "{code}\n\nLog one line at the beginning of `{name}`. Code only, no explanation.",
    "Give `{name}` one more optional parameter, `verbose`, which prints what happens. Show the entire code.\n\n{code}",
    "{code}\n\nRepeat this code without its comments and blank lines.",
    "Write unit tests for this code.\n\n{code}",
    "Explain this code step by step, quoting the lines that you talk about.\n\n{code}",
    "{code}\n\nMake it faster if that is possible, and say what you changed.",
    "Rewrite the code below as a class with methods. Keep the logic.\n\n{code}",
    "Port this to another programming language of your choice:\n\n{code}",
)

TOOLS = (  # for a model without a chat template
    "You can call these functions:\n{functions}\n\nTo call one, reply with nothing but "
    '{{"name": <function>, "arguments": {{...}}}}. If none fits, answer in words.\n\n{request}'
)
_INVENTED = frozenset(("tools", "maths"))  # kinds whose wording repeats: no two are the same, but they may be alike

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


FRAME = 40  # tokens kept free for the wording
_SHORT, _SHORT_SHARE = 250, 1 / 3  # this share of the prompts is meant to stay below so many tokens
_LABEL = 8  # tokens that a further passage costs beside its text
_LOOKS = 12  # other passages to try, for some that fit beside the first
_NAMED = re.compile(r"\b(?:def|function|class|func|fn)\s+([A-Za-z_]\w*)")


@dataclass(frozen=True, slots=True)
class Wrapped:
    kind: str
    prompt: Prompt
    length: int  # tokens, chat template included


class Wrapper:
    """Wraps passages, each about as often as the others."""

    def __init__(self, tokenizer: Chats, passages: Sequence[Passage], limit: int, seed: int) -> None:
        self.passages, self.limit = passages, limit
        self._render = Renderer(tokenizer)
        self._random = random.Random(seed)
        self._others = cycle(self._random.sample(passages, len(passages)))
        self._makers: Mapping[str, Callable[[Passage, int], Prompt | None]] = {
            "summarise": self._summarise,
            "retrieve": self._retrieve,
            "turns": self._turns,
            "translate": lambda passage, room: self._about(TRANSLATE, passage, room),
            "sentence": self._sentence,
            "rework": lambda passage, room: self._about(REWORK, passage, room),
            "point": lambda passage, room: self._about(POINT, passage, room),
            "extract": lambda passage, room: self._about(EXTRACT, passage, room),
            "edit": self._edit,
            "tools": self._tools,
            "maths": lambda passage, room: self._maths(),
        }

    def wrap(self, count: int) -> Iterator[Wrapped]:
        """At most `count` prompts; a passage comes back once all have been used, and in one kind only once."""
        return islice(self._series(), count)

    def _series(self) -> Iterator[Wrapped]:
        prose, code = Counter[str](), Counter[str]()  # how many were made of either
        novelty, invented = {kind: Novelty() for kind in self._makers}, set[str]()
        short = 0
        for _ in SHARES:
            for passage in self._random.sample(self.passages, len(self.passages)):
                made, shares = (prose, SHARES) if passage.code() is None else (code, CODE_SHARES)
                total = made.total() + 1
                lacking = {kind: made[kind] - share * total for kind, share in shares.items()}
                goal = self._goal(short < _SHORT_SHARE * (prose.total() + code.total() + 1))
                for kind in sorted(lacking, key=lacking.__getitem__):
                    wrapped = self._try(kind, passage, goal)
                    words = _words(wrapped.prompt) if wrapped else ""
                    if wrapped and (words not in invented if kind in _INVENTED else novelty[kind].is_new(words)):
                        invented.add(words)
                        made[wrapped.kind] += 1
                        short += wrapped.length < _SHORT
                        yield wrapped
                        break

    def _goal(self, short: bool) -> int:
        if short or self.limit <= _SHORT:
            return min(self._random.randint(_SHORT // 3, _SHORT), self.limit)
        return self._random.randint(min(_SHORT + FRAME, self.limit), self.limit)

    def _try(self, kind: str, passage: Passage, goal: int) -> Wrapped | None:
        """A prompt of that kind within the limit, about as long as the goal says."""
        prompt = self._makers[kind](passage, goal - self._render.frame - FRAME)
        length = len(self._render(prompt)) if prompt else 0
        return Wrapped(kind, prompt, length) if prompt and length <= self.limit else None

    def _gather(self, first: Passage, room: int, most: int, whole: bool = False) -> list[Passage]:
        """The passage, and others, about other questions, while there is room; shortened unless `whole`."""
        found = [first if whole else first.shortened(room)]
        left = room - found[0].length
        for other in islice(self._others, _LOOKS):
            if len(found) == most or left < LEAST + _LABEL:
                break
            other = other if whole else other.shortened(left - _LABEL)
            if other.length + _LABEL <= left and all(other.asked != one.asked for one in found):
                found.append(other)
                left -= other.length + _LABEL
        return found

    def _summarise(self, passage: Passage, room: int) -> Prompt | None:
        found = self._gather(passage, room, most=3)
        if len(found) == 1:
            return self._about(SUMMARISE, passage, room)
        return self._random.choice(SUMMARISE_SEVERAL).format(text=self._numbered(found))

    def _retrieve(self, passage: Passage, room: int) -> Prompt | None:
        if passage.question is None:
            return None
        found = self._gather(passage, room, most=4)
        text = self._numbered(self._random.sample(found, len(found)))
        return self._random.choice(RETRIEVE).format(text=text, question=passage.question)

    def _numbered(self, found: Sequence[Passage]) -> str:
        label = self._random.choice(LABELS)
        return "\n\n".join(label.format(n=n, text=one.text) for n, one in enumerate(found, start=1))

    def _turns(self, passage: Passage, room: int) -> Prompt | None:
        """Earlier questions with their answers, the passage as the last answer, and a follow-up on that."""
        earlier = [other for other in self._gather(passage, room, most=3, whole=True)[1:] if other.question]
        messages = list[dict[str, str]]()
        for said in (*earlier, passage):
            messages += [*said.asked, {"role": "assistant", "content": said.text}]
        words = self._random.choice(FOLLOW_UPS).format(language=self._language())
        return [*messages, {"role": "user", "content": words}]

    def _sentence(self, passage: Passage, room: int) -> Prompt | None:
        sentences = passage.sentences()
        if not sentences:
            return None
        words, text = self._random.choice(SENTENCE), self._random.choice(sentences)
        return words.format(text=text, language=self._language())

    def _edit(self, passage: Passage, room: int) -> Prompt | None:
        """Code alone and what to change in it: most of the answer is in the prompt."""
        code = passage.code()
        if code is None:
            return None
        names = _NAMED.findall(code)
        fitting = [words for words in EDIT if names or "{name}" not in words]
        name = self._random.choice(names) if names else ""
        return self._random.choice(fitting).replace("{name}", name).replace("{code}", code)

    def _tools(self, passage: Passage, room: int) -> Prompt:
        """A request among the functions that may answer it; one time in eight none of them does."""
        most = 2 if room < _SHORT else 5
        some = self._random.sample(made_up()["functions"], self._random.randint(2, most))
        wanted, offered = some[0], some[1:] if self._random.random() < 1 / 8 else self._random.sample(some, len(some))
        asked = self._filled(self._random.choice(wanted["asks"])).replace("{text}", passage.shortened(room // 2).text)
        return {"messages": [{"role": "user", "content": asked}], "tools": tools_of(offered)}

    def _maths(self) -> Prompt:
        """A sum, or a story of one to three steps."""
        words, pick = made_up()["maths"], self._random.choice
        if self._random.random() < 1 / 3:
            return self._filled(pick(words["short"]))
        steps = self._random.sample(words["steps"], self._random.randint(1, 3))
        story = " ".join([pick(words["starts"]), *steps, pick(words["ends"])])
        return self._filled(pick(words["manners"]).replace("{problem}", story))

    def _filled(self, words: str) -> str:
        """Slots of one name hold the same text, but for numbers."""
        drawn = {name: self._random.choice(texts) for name, texts in made_up()["slots"].items()}
        sizes = {"small": (2, 9), "n": (11, 99), "big": (120, 980)}

        def one(slot: re.Match[str]) -> str:
            name = slot[1]
            return str(self._random.randint(*sizes[name])) if name in sizes else drawn.get(name, slot[0])

        return re.sub(r"\{(\w+)\}", one, words)

    def _about(self, words: Sequence[str], passage: Passage, room: int) -> Prompt:
        text = passage.shortened(room).text
        return self._random.choice(words).format(text=text, language=self._language())

    def _language(self) -> str:
        return self._random.choice(LANGUAGES)


@cache
def made_up() -> Any:
    """Functions, requests for them, problems of maths, and what fills their {slots}."""
    return json.loads(Path(__file__).with_name("requests.json").read_text(encoding="utf-8"))


def tools_of(functions: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    keys = ("name", "description", "parameters")
    return [{"type": "function", "function": {key: function[key] for key in keys}} for function in functions]


def _words(prompt: Prompt) -> str:
    return "\n".join(message["content"] for message in as_messages(prompt))
