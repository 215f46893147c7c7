"""Text as it comes: no half characters, no halves of stop strings."""

from __future__ import annotations

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from forerun.engine.sequence import Detokenizer
from forerun.models.load.tokenizer import Tokenizer


class Bytes:
    """Every token is one byte: the worst case for characters that span tokens."""

    def decode(self, ids: list[int]) -> str:
        return bytes(ids).decode("utf-8", errors="replace")


# every length of UTF-8; Hypothesis' table of all characters takes seconds to make in a clean clone
@given(
    st.text("a\0\n\x7f\x80éß\u07ff\u0800€日\ud7ff\ue000\ufffd\uffff\U00010000👧\u200d\U0010ffff", max_size=30),
    st.integers(1, 5),
)
def test_pieces_add_up_to_the_text(text: str, every: int) -> None:
    stream, pieces = Detokenizer(Bytes()), []
    for i, byte in enumerate(text.encode()):
        stream.push(byte)
        if i % every == 0:
            pieces.append(stream.take(final=False))
    pieces.append(stream.take(final=True))
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces) or "\ufffd" in text


@given(st.text("abc", max_size=40), st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3))
def test_stop_strings_cut_at_the_first_place_and_are_never_shown(text: str, stops: list[str]) -> None:
    stream, shown, stopped = Detokenizer(Bytes(), stops), "", False
    for byte in text.encode():
        stopped = stream.push(byte)
        shown += stream.take(final=stopped)
        if stopped:
            break
    shown += stream.take(final=True)
    ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
    assert stopped == bool(ends)
    if ends:  # the text ends with the token that completes the first stop string to be complete
        cut = text[: min(ends)]
        assert shown == cut[: min(cut.find(stop) for stop in stops if stop in cut)]
    else:
        assert shown == text


def test_an_unfinished_character_at_the_end_is_shown_as_such() -> None:
    stream = Detokenizer(Bytes())
    for byte in "é".encode()[:1]:
        stream.push(byte)
    assert stream.take(final=False) == ""
    assert stream.take(final=True) == "\ufffd"


@pytest.mark.parametrize("stops", [(), ("x",)])
def test_without_a_tokenizer_there_is_no_text(stops: tuple[str, ...]) -> None:
    stream = Detokenizer(None, stops)
    assert not stream.push(3)
    assert stream.take(final=True) == ""


def byte_tokenizer() -> Tokenizer:
    """Bytes, a few of several bytes (some of them halves of characters), a special token and an added word."""
    letters = {byte: chr(byte) for byte in (*range(33, 127), *range(161, 173), *range(174, 256))}
    rest = [byte for byte in range(256) if byte not in letters]
    letters |= {byte: chr(256 + i) for i, byte in enumerate(rest)}  # how such vocabularies spell bytes
    spelled = [letters[byte] for byte in range(256)]
    spelled += ["".join(letters[byte] for byte in word) for word in ("é".encode(), b"ab", "€".encode()[:2])]
    backend = tokenizers.Tokenizer(tokenizers.models.BPE({word: i for i, word in enumerate(spelled)}, []))
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens(["<end>"])
    backend.add_tokens(["\u4e2d"])
    return Tokenizer(backend)


TOKENIZER = byte_tokenizer()
PARTS = [*b"a \xc3\xa9\xe2\x82\xac\xff", 256, 257, 258, 259, 260]


SOME = st.lists(st.one_of(st.sampled_from(PARTS), st.integers(0, 260)), min_size=1, max_size=4)


@given(st.lists(SOME, max_size=20))
def test_the_usual_case_in_few_steps_comes_to_the_same(rounds: list[list[int]]) -> None:
    slow = fast = Detokenizer(TOKENIZER)
    for tokens in rounds:
        slow = slow.fork()
        for token in tokens:
            slow.push(token)
        text = slow.take(final=False)
        found = fast.behind(tokens)
        if found is None:
            fast = fast.fork()
            for token in tokens:
                fast.push(token)
            found = fast, fast.take(final=False)
        assert found[1] == text
        fast = found[0]
        assert fast.text == slow.text
    assert slow.take(final=True) == fast.take(final=True)


def test_the_usual_case_is_taken_and_no_other() -> None:
    tokens = {token: Detokenizer(TOKENIZER).behind([token]) for token in range(261)}
    assert {token for token, found in tokens.items() if found is None} == {*range(128, 256), 258}
    assert Detokenizer(TOKENIZER, ["x"]).behind([97]) is None
    half = Detokenizer(TOKENIZER)
    half.push(0xC3)
    assert half.behind([97]) is None
    assert Detokenizer(Bytes()).behind([97]) is None, "it does not say what tokens add"
    assert Detokenizer(TOKENIZER).behind([97, 0xC3]) is None
    usual = Detokenizer(TOKENIZER).behind([97, 256, 98])
    assert usual is not None
    assert usual[1] == "a\u00e9b"
