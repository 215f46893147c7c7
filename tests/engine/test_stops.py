"""Stop strings by their definition: an oracle that works on the bytes of whole texts, and the rounds of an engine.

A stop string counts if the token that completes it is the `min_tokens`-th or a later one, wherever it began. The text
ends with that token and is cut where the string began; of several that one token completes, the one that began first.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from forerun.core.params import SamplingParams
from forerun.core.types import Request, Traits
from forerun.engine.sequence import Detokenizer, SequenceState, Tokens
from tests.exactness.harness import Letters, engine_for, run


@dataclass(frozen=True)
class Pieces:
    """A tokenizer whose token i is the i-th of these pieces, which may begin and end inside a character."""

    pieces: tuple[bytes, ...]

    def decode(self, ids: list[int]) -> str:
        return b"".join(self.pieces[i] for i in ids).decode("utf-8", errors="replace")


def oracle(pieces: tuple[bytes, ...], stops: tuple[str, ...], least: int) -> tuple[int, str, str]:
    """How many tokens are written, the text, and why it ended: from every occurrence in the whole text."""
    whole = b"".join(pieces).decode("utf-8", errors="replace")
    lengths = [sum(map(len, pieces[:k])) for k in range(len(pieces) + 1)]
    ends: dict[int, int] = {}  # token that completes a stop string -> where the first of these begins
    for stop in stops:
        for start in range(len(whole) - len(stop) + 1):
            if whole[start : start + len(stop)] == stop:
                needs = len(whole[: start + len(stop)].encode())
                by = next(k for k, length in enumerate(lengths) if length >= needs)
                ends[by] = min(start, ends.get(by, start))
    counted = [k for k in ends if k >= least]
    if counted:
        return min(counted), whole[: ends[min(counted)]], "stop"
    return len(pieces), whole, "length"


def written(pieces: tuple[bytes, ...], stops: tuple[str, ...], least: int, rounds: int) -> tuple[int, str, str | None]:
    """The same of a sequence that takes so many tokens a round, with its text as it was streamed."""
    params = SamplingParams(max_tokens=len(pieces), min_tokens=least, stop=stops)
    seq = SequenceState(
        id=0,
        request=Request((0,), params),
        seed=0,
        max_length=1 + len(pieces),
        stop_ids=frozenset(),
        drafter="none",
        verifier="exact",
        shares_noise=False,
        detokenizer=Detokenizer(Pieces(pieces), stops),
        traits=Traits("exact", True, False, False),
        tokens=Tokens([0]),
        prompt_length=1,
        drafting="none",
    )
    text, ids = "", list(range(len(pieces)))
    for start in range(0, len(ids), rounds):
        taken, detokenizer, why = seq.extended(ids[start : start + rounds])
        text += detokenizer.take(why is not None)
        seq = replace(seq, detokenizer=detokenizer, tokens=Tokens([*seq.tokens, *ids[start : start + taken]]))
        if why is not None:
            return start + taken, text, why
    return len(ids), text, None


@st.composite
def texts(draw: st.DrawFn) -> tuple[bytes, ...]:
    """Pieces of one to four bytes of a text whose characters have one to four bytes."""
    data = draw(st.text("abé€😀", min_size=1, max_size=16)).encode()
    pieces = []
    while data:
        size = draw(st.integers(1, 4))
        pieces.append(data[:size])
        data = data[size:]
    return tuple(pieces)


STOPS = st.lists(st.text("abé€😀", min_size=1, max_size=4), min_size=1, max_size=3).map(tuple)


@settings(max_examples=400, deadline=None)
@given(texts(), STOPS, st.integers(0, 8), st.integers(1, 5))
@example((b"a", b"b", b"c"), ("ab",), 2, 1)  # begun before stopping is allowed, completed by the first that may
@example((b"a", b"b", b"c"), ("ab",), 3, 1)  # completed one token too early
@example((b"xab", b"c"), ("b", "xab"), 1, 1)  # one token completes two
@example((b"a", b"a", b"bb", b"bbbb"), ("a", "abbbbb"), 3, 1)  # a long one must not find the short one again
@example((b"ab\xe2", b"\x82\xac"), ("ab",), 1, 1)  # completed by a token that also begins a character
@example((b"ab\xe2", b"\x82\xacab"), ("ab",), 2, 1)  # and that one does not count, but the next does
def test_stops_are_those_of_the_definition(
    pieces: tuple[bytes, ...], stops: tuple[str, ...], least: int, rounds: int
) -> None:
    least = min(least, len(pieces))
    assert written(pieces, stops, least, rounds) == oracle(pieces, stops, least)


@pytest.mark.parametrize("rounds", [1, 3])
@pytest.mark.parametrize(
    ("pieces", "stop", "least", "wanted"),
    [
        ((b"x", b"ab\xe2"), "ab", 0, (2, "x", "stop")),
        ((b"x", b"ab\xe2"), "ab", 2, (2, "x", "stop")),
        ((b"x", b"a\xe2"), "a\ufffd", 0, (2, "x", "stop")),  # as the end of the text shows it
        ((b"x", b"ab\xe2"), "b\ufffd", 0, (2, "xa", "stop")),
        ((b"x", b"ab\xe2"), "ba", 0, (2, "xab\ufffd", "length")),
    ],
)
def test_the_end_of_a_text_is_searched_too(
    pieces: tuple[bytes, ...], stop: str, least: int, wanted: tuple[int, str, str], rounds: int
) -> None:
    """The last character is incomplete when the tokens run out."""
    assert written(pieces, (stop,), least, rounds) == wanted


@pytest.mark.parametrize("least", [0, 4, 9])
@pytest.mark.parametrize("drafter", ["none", "draft_model"])
def test_an_engine_ends_its_texts_where_the_definition_does(drafter: str, least: int) -> None:
    """Whole texts first, then the same with stop strings: greedy tokens are the same up to the end."""
    prompts, stops = [(5, 6, 7, 8, 5, 6, 7), (1, 2, 3, 1, 2, 3, 1, 2), (9,), (4, 4, 4, 4)], ("f ", "c d", "e")
    free = SamplingParams(max_tokens=24, temperature=1.0, seed=3, ignore_eos=True)
    engine = engine_for(drafter, "coupled", "tree", 16)
    whole, _ = run(engine, [Request(prompt, free) for prompt in prompts])
    with_stops = replace(free, stop=stops, min_tokens=least)
    tokens, cut = run(engine, [Request(prompt, with_stops) for prompt in prompts])
    ended = 0
    for ids, found, text in zip(whole, tokens, cut, strict=True):
        pieces = tuple(Letters().decode([token]).encode() for token in ids)
        length, wanted, why = oracle(pieces, stops, least)
        assert (found, text) == (ids[:length], wanted)
        ended += why == "stop"
    assert ended
