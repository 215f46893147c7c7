"""Indexed texts: SuffixAutomaton of a text that grows, Corpus of one that was indexed before; and hit rates.

An automaton has every substring with how often it occurs. Tokens are added one at a time in amortised constant time
(Blumer et al. 1985). A state stands for all substrings that
end at the same places; its suffix link leads to the longest shorter suffix that ends at more places. So the link of the
last state is the longest suffix of the text that occurred earlier. A new token occurs in the suffixes of all states
along the links: the first CLIMB of them are counted, and the shortest suffixes need their counts least.

A drafter sees the request itself, past outputs and the corpus through one interface (`Place`). Rates are learnt at no
cost: the committed token shows whether a continuation would have been accepted, by the length of the match and by its
occurrences. Recent counts weigh more; what was learnt on all sequences is the prior of each.
"""

from __future__ import annotations

import json
import mmap
import struct
import sys
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from forerun.core.errors import DamagedFile, InvalidInput, brief

CLIMB = 8  # states along the suffix links whose counts follow each new token
LOOKED_AT = 48  # continuations of a state that are compared: those that came up last
BREAK = -1  # stands between two texts in one automaton; it never matches and is never drafted


class SuffixAutomaton:
    """Parallel lists, one entry per state; state 0 is the empty suffix."""

    __slots__ = ("counts", "last", "latest", "lengths", "links", "nexts", "size", "whole")

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        self.size = 0  # tokens
        self.lengths, self.links = [0], [-1]  # of the longest substring of a state; -1 = no link
        self.counts, self.latest = [0], [0]  # occurrences, and where the last one ended
        self.nexts: list[dict[int, int]] = [{}]
        self.last = 0
        self.whole = True  # False where an interrupt came between two steps of a change
        self.extend(tokens)

    def extend(self, tokens: Iterable[int]) -> None:
        self.whole = False
        lengths, links, counts, latest, nexts = self.lengths, self.links, self.counts, self.latest, self.nexts
        last, end = self.last, self.size
        for token in tokens:
            state, made, end = last, len(lengths), end + 1
            lengths.append(lengths[state] + 1)
            counts.append(1)
            latest.append(end)
            nexts.append({})
            while state >= 0:
                after = nexts[state]
                if token in after:
                    break
                after[token] = made
                state = links[state]
            links.append(0)
            if state >= 0:
                to = after[token]
                links[made] = state = to if lengths[to] == lengths[state] + 1 else self._split(state, token, to)
                climbed = 0
                while state > 0 and climbed < CLIMB:
                    counts[state] += 1
                    latest[state] = end
                    state = links[state]
                    climbed += 1
            last = made
            self.last, self.size = last, end
        self.whole = True

    def _split(self, state: int, token: int, target: int) -> int:
        """A new state for the longest substring of `state` and the token, which `target` stood for among others."""
        lengths, links, nexts = self.lengths, self.links, self.nexts
        clone = len(lengths)
        lengths.append(lengths[state] + 1)
        links.append(links[target])
        self.counts.append(self.counts[target])
        self.latest.append(self.latest[target])
        nexts.append(nexts[target].copy())
        links[target] = clone
        while state >= 0 and nexts[state].get(token) == target:
            nexts[state][token] = clone
            state = links[state]
        return clone

    def earlier(self) -> tuple[int, int]:
        """The state of the longest suffix of the text that occurred before its end, and the length of that suffix."""
        state = max(0, self.links[self.last])
        return state, self.lengths[state]

    def follow(self, state: int, length: int, token: int) -> tuple[int, int]:
        """The state of the longest suffix after one more token of *another* text, and the length of that suffix."""
        nexts = self.nexts
        while state > 0 and token not in nexts[state]:
            state = self.links[state]
            length = self.lengths[state]
        following = nexts[state].get(token)
        return (0, 0) if following is None else (following, length + 1)

    def shorten(self, state: int, length: int) -> tuple[int, int]:
        """The longest suffix of these that anything followed, and its length; state 0 where there is none."""
        nexts, links = self.nexts, self.links
        while state > 0 and (not nexts[state] or (BREAK in nexts[state] and len(nexts[state]) == 1)):
            state = links[state]
            length = self.lengths[state]
        return state, length

    def continuations(self, state: int) -> list[tuple[int, int]]:
        """(count, token) of what followed a state: the most frequent first, and of those the most recent."""
        counts, latest, nexts = self.counts, self.latest, self.nexts[state]
        if len(nexts) == 1:
            ((token, to),) = nexts.items()
            return [(counts[to], token)] if token != BREAK else []
        recent = islice(reversed(nexts.items()), LOOKED_AT)
        found = [(counts[to], latest[to], token) for token, to in recent if token != BREAK]
        found.sort(reverse=True)
        return [(count, token) for count, _, token in found]


class Place(Protocol):
    """Where the end of a sequence matches an indexed text."""

    @property
    def length(self) -> int:
        """Tokens that match; 0 = none."""

    def continuations(self) -> list[tuple[int, int]]:
        """(count, token) of what followed, the most frequent first; [] where nothing did."""

    def after(self, token: int) -> Place:
        """The place after one of them."""

    def shorter(self) -> Place:
        """Where a shorter end of the sequence matches, more often; a place of length 0 where there is none."""


class AutomatonPlace:
    """A state of a suffix automaton."""

    __slots__ = ("_text", "length", "state")

    def __init__(self, text: SuffixAutomaton, state: int, length: int) -> None:
        self._text = text
        self.state, self.length = text.shorten(state, length)

    def continuations(self) -> list[tuple[int, int]]:
        return self._text.continuations(self.state) if self.state else []

    def after(self, token: int) -> Place:
        return AutomatonPlace(self._text, self._text.nexts[self.state][token], self.length + 1)

    def shorter(self) -> Place:
        link = max(0, self._text.links[self.state])
        return AutomatonPlace(self._text, link, self._text.lengths[link])


ONCE, ALIKE, MOSTLY, DIVIDED, SECOND = range(5)
"""What earlier occurrences say: there was one | all agree | most agree | they do not. SECOND is the rate of the second
most frequent continuation where the first was wrong."""

_PRIOR = (  # measured on chats of the default model; the last entry holds for longer matches
    (0.28, 0.51, 0.66, 0.7, 0.72, 0.77, 0.77, 0.79, 0.8, 0.82, 0.83, 0.83, 0.84, 0.85, 0.87, 0.9),
    (0.49, 0.71, 0.77, 0.82, 0.85, 0.86, 0.87, 0.88, 0.9),
    (0.36, 0.45, 0.47, 0.49, 0.51, 0.53, 0.55, 0.56),
    (0.13, 0.24, 0.26, 0.28),
    (0.1, 0.2, 0.24, 0.28),
)
# of that where nodes are dear: those that are drafted promise most of all, and so are overrated
CAUTION = 0.85
PRIOR_TRIES, SHARED_TRIES = 24.0, 6.0  # what this is worth, and what all sequences are worth to one
OWN_MEMORY, SHARED_MEMORY = 0.985, 0.998  # per try


class HitRates:
    """Hits and tries by kind and by match length, from 1 to `longest`."""

    __slots__ = ("hits", "longest", "tries")

    def __init__(self, longest: int, prior: float = 0.0) -> None:
        """`prior`: what is presumed, times what was measured; 0 = nothing is."""
        self.longest = longest
        tries = PRIOR_TRIES if prior else 0.0
        # arrays, which the native library reads where they lie
        self.tries = array("d", [tries] * (longest * len(_PRIOR)))
        rates = [prior * kind[min(m, len(kind) - 1)] for kind in _PRIOR for m in range(longest)]
        self.hits = array("d", [tries * rate for rate in rates])

    def count(self, kind: int, match: int, hit: bool, memory: float) -> None:
        i = kind * self.longest + min(match, self.longest) - 1
        self.hits[i] = self.hits[i] * memory + hit
        self.tries[i] = self.tries[i] * memory + 1.0

    def rate(self, kind: int, match: int, prior: HitRates) -> float:
        i = kind * self.longest + min(match, self.longest) - 1
        shared = SHARED_TRIES * prior.hits[i] / prior.tries[i]
        return (self.hits[i] + shared) / (self.tries[i] + SHARED_TRIES)


def kind_of(count: int, total: int) -> int:
    """What a continuation is that `count` of `total` earlier occurrences had."""
    if count == total:
        return ONCE if total == 1 else ALIKE
    return MOSTLY if 2 * count > total else DIVIDED


MAGIC = b"FRCORPUS"
DOCUMENT_END = 0xFFFFFFFF  # stands between two documents
DEPTH = 16  # tokens by which places are ordered: no longer match is told apart
SAMPLED = 32  # places of a match that are read
_ALIGN, _VERSION = 64, 1


class Corpus:
    """A text that was indexed beforehand, opened with mmap, for retrieval of continuations (REST).

    The index lists every place of the text, ordered by the tokens *before* it, read backwards. So the places whose
    past ends as a sequence ends are neighbours, and each further token of the match narrows the range. Opening
    reads the header alone, whatever the size; `forerun corpus build` writes the file.

    Layout: eight bytes of magic, the length of a JSON header as a little-endian uint32, the header, padding to 64
    bytes, then tokens [N], places [N] and, per token id, where its places begin [V + 1], all little-endian uint32.
    """

    def __init__(self, tokens: memoryview, places: memoryview, begins: memoryview, about: str) -> None:
        self._tokens, self._places, self._begins, self.about = tokens, places, begins, about

    def __len__(self) -> int:
        return len(self._tokens)

    @property
    def vocab_size(self) -> int:
        return len(self._begins) - 1

    @classmethod
    def open(cls, path: Path, vocab_size: int | None = None) -> Corpus:
        """Map a file; only its header is read."""
        try:
            with path.open("rb") as file:
                raw = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        except (OSError, ValueError) as error:
            raise InvalidInput(f"no corpus at {str(path)!r}: {error}; `forerun corpus build` makes one") from None
        if bytes(raw[:8]) != MAGIC or sys.byteorder != "little":
            raise InvalidInput(f"{str(path)!r} is no corpus; `forerun corpus build` makes one")
        head, start = _header(raw, path)
        count, vocab = head["tokens"], head["vocab_size"]
        # a model may have padding ids beyond its tokenizer's
        if vocab_size is not None and vocab > vocab_size:
            made = f"made with a vocabulary of {vocab} tokens, and the model has {vocab_size}"
            raise InvalidInput(f"the corpus {str(path)!r} was {made}; build it with --model")
        if len(raw) != start + 4 * (2 * count + vocab + 1):
            raise DamagedFile(f"{str(path)!r} is cut short or damaged; build it again")
        body = raw[start:].cast("I")
        return cls(body[:count], body[count : 2 * count], body[2 * count :], str(head["about"]))

    def find(self, tokens: Sequence[int]) -> Place:
        """Where the end of a sequence matches longest."""
        text, places, begins = self._tokens, self._places, self._begins
        last = tokens[-1]
        if not 0 <= last < len(begins) - 1:
            return NOWHERE
        low, high, length = begins[last], begins[last + 1], 1
        if low >= high:
            return NOWHERE
        while length < min(DEPTH, len(tokens)):
            further = _narrow(text, places, low, high, length, tokens[-1 - length])
            if further is None:
                break
            low, high = further
            length += 1
        step = max(1, (high - low) // SAMPLED)
        # from the end, where the latest places are
        return CorpusPlace(text, [places[i] for i in range(high - 1, low - 1, -step)][:SAMPLED], length)


def _narrow(
    text: memoryview, places: memoryview, low: int, high: int, depth: int, token: int
) -> tuple[int, int] | None:
    """The part of a range of places that has this token so far back; the range is ordered by it."""

    def back(i: int) -> int:
        at = int(places[i]) - 1 - depth
        return int(text[at]) if at >= 0 else -1

    first, last = back(low), back(high - 1)
    if not first <= token <= last:
        return None
    if first == last:  # the usual case once a few tokens have matched
        return low, high
    bounds = [low, high]
    for side, wanted in enumerate((token, token + 1)):
        a, b = bounds[0], high
        while a < b:
            middle = (a + b) // 2
            if back(middle) < wanted:
                a = middle + 1
            else:
                b = middle
        bounds[side] = a
    return (bounds[0], bounds[1]) if bounds[0] < bounds[1] else None


class CorpusPlace:
    """Several places of the corpus that have the same past."""

    __slots__ = ("_at", "_text", "length")

    def __init__(self, text: memoryview, at: list[int], length: int) -> None:
        self._text, self._at, self.length = text, at, length

    def continuations(self) -> list[tuple[int, int]]:
        text, size = self._text, len(self._text)
        found = Counter(text[at] for at in self._at if at < size)
        return [(count, token) for token, count in found.most_common() if token != DOCUMENT_END]

    def after(self, token: int) -> Place:
        text, size = self._text, len(self._text)
        return CorpusPlace(text, [at + 1 for at in self._at if at < size and text[at] == token], self.length + 1)

    def shorter(self) -> Place:
        return NOWHERE


NOWHERE = CorpusPlace(memoryview(b"").cast("I"), [], 0)


def _header(raw: memoryview, path: Path) -> tuple[dict[str, Any], int]:
    try:
        (size,) = struct.unpack("<I", raw[8:12])
        head = json.loads(bytes(raw[12 : 12 + size]))
        fine = head["version"] == _VERSION and isinstance(head["about"], str)
        fine = fine and all(type(head[key]) is int and head[key] > 0 for key in ("tokens", "vocab_size"))
    except (ValueError, KeyError, TypeError, struct.error):
        fine = False
    if not fine:
        raise DamagedFile(f"the header of {str(path)!r} is damaged, or of another version; build it again")
    return head, -(-(12 + size) // _ALIGN) * _ALIGN


def write_corpus(path: Path, documents: Iterable[Sequence[int]], vocab_size: int, about: str) -> int:
    """Index token ids of several documents and write the file; says how many tokens it has."""
    parts = [np.asarray([*document, DOCUMENT_END], dtype=np.uint32) for document in documents if len(document)]
    if not parts:
        raise InvalidInput("the files hold no text to index")
    text = np.concatenate(parts)[:-1]
    if len(text) >= DOCUMENT_END:
        raise InvalidInput(f"{len(text)} tokens are too many for one corpus; make several")
    places, begins = order_places(text, vocab_size)
    head = {"version": _VERSION, "tokens": len(text), "vocab_size": vocab_size, "about": about}
    line = json.dumps(head).encode()
    opening = MAGIC + struct.pack("<I", len(line)) + line
    # beside it first: whoever has the former index open, such as a server, reads on in that
    written = path.with_name(f"{path.name}.part") if path.is_file() or not path.exists() else path
    try:
        with written.open("wb") as file:
            file.write(opening.ljust(-(-len(opening) // _ALIGN) * _ALIGN, b"\0"))
            for part in (text, places, begins):
                part.astype("<u4").tofile(file)
        if written != path:
            written.replace(path)
    except OSError as error:
        raise InvalidInput(f"cannot write {str(path)!r}: {error.strerror}; choose another -o") from None
    return len(text)


def order_places(text: Any, vocab_size: int) -> tuple[Any, Any]:
    """Places 1 to N by the DEPTH tokens before each, read backwards, and where those after each token id begin.

    Prefix doubling: ranks by the last k tokens, combined with the ranks k tokens earlier, are ranks by the last 2k.
    """
    known = text.astype(np.int64)
    known[text == DOCUMENT_END] = vocab_size
    if len(known) and int(known.max()) > vocab_size:
        raise InvalidInput(f"a token lies outside the vocabulary of {vocab_size}; check the tokenizer")
    begins = np.searchsorted(np.sort(known), np.arange(vocab_size + 1))
    rank = np.concatenate([[0], known + 1])  # [N + 1], of place p by the token before it; 0 = before the text
    order, depth = np.argsort(rank, kind="stable"), 1
    while depth < DEPTH:
        earlier = np.zeros_like(rank)
        earlier[depth:] = rank[:-depth]
        key = rank * (int(rank.max()) + 1) + earlier
        order = np.argsort(key, kind="stable")
        sorted_key = key[order]
        steps = np.concatenate([[0], sorted_key[1:] != sorted_key[:-1]])
        rank = np.empty_like(rank)
        rank[order] = np.cumsum(steps)
        depth *= 2
    return order[order > 0], begins


def read_documents(files: Iterable[Path]) -> Iterator[str]:
    """The texts of files: all of a file is one, but each line of a .jsonl, whose `text` or messages are read."""
    for path in files:
        try:
            content = path.read_text(encoding="utf-8")
        except OSError as error:
            raise InvalidInput(f"cannot read {str(path)!r}: {error.strerror}; give files of text") from None
        except UnicodeDecodeError as error:
            raise InvalidInput(f"cannot read {str(path)!r}: {error}; give files of UTF-8 text") from None
        if path.suffix != ".jsonl":
            yield content
            continue
        for number, line in enumerate(content.split("\n"), start=1):
            if line.strip():
                yield from _texts_of(line, f"{path}, line {number}")


def _texts_of(line: str, where: str) -> list[str]:
    """The texts of one line; a line with none is an error, or a misspelt key would leave everything out unseen."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"{where} is not JSON: {brief(error)}; fix or drop it") from None
    fields = row if isinstance(row, dict) else {"text": row}
    messages = fields.get("messages")
    turns = [each.get("content") for each in messages if isinstance(each, dict)] if isinstance(messages, list) else []
    texts = [each for each in (*turns, fields.get("text", fields.get("prompt"))) if isinstance(each, str)]
    if not texts:
        raise InvalidInput(f"{where} is no text and has none in 'text', 'prompt' or 'messages'; fix or drop it")
    return texts
