"""The corpus of the suffix drafter: its order, what is found in it, its file, and the command that builds it."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from forerun.core.errors import DamagedFile, InvalidInput
from forerun.core.types import Budget
from forerun.drafters.lookup.suffix import SuffixDrafter
from forerun.drafters.lookup.suffix_index import DEPTH, DOCUMENT_END, Corpus, order_places, read_documents, write_corpus
from forerun.testing import FakeSeq, check_drafter

VOCAB = 6


def made(folder: Path, documents: list[list[int]], vocab: int = VOCAB) -> Corpus:
    write_corpus(folder / "c.corpus", documents, vocab, "letters")
    return Corpus.open(folder / "c.corpus", vocab)


def test_places_are_ordered_by_what_precedes_them() -> None:
    rng = random.Random(1)
    text = [rng.randrange(3) for _ in range(200)]
    places, begins = order_places(np.asarray(text, dtype=np.uint32), VOCAB)
    pasts = [text[max(0, p - DEPTH) : p][::-1] for p in places]
    assert pasts == sorted(pasts)
    assert sorted(places) == list(range(1, 201))
    for token in range(VOCAB):
        assert {text[p - 1] for p in places[begins[token] : begins[token + 1]]} <= {token}


def test_the_longest_match_is_found_with_all_its_continuations(tmp_path: Path) -> None:
    rng = random.Random(2)
    documents = [[rng.randrange(4) for _ in range(rng.randint(1, 30))] for _ in range(8)]
    corpus = made(tmp_path, documents)
    for _ in range(300):
        end = [rng.randrange(5) for _ in range(rng.randint(1, 9))]
        found = {
            n: [d[i + n : i + n + 1] for d in documents for i in range(len(d) - n + 1) if d[i : i + n] == end[-n:]]
            for n in range(1, len(end) + 1)
        }
        longest = max((n for n in found if found[n]), default=0)
        place = corpus.find(end)
        assert place.length == longest
        wanted = sorted(one[0] for one in found.get(longest, []) if one)
        got = sorted(token for count, token in place.continuations() for _ in range(count))
        assert got == wanted if len(wanted) < 32 else set(got) <= set(wanted)


def test_drafts_come_from_the_corpus_where_the_request_has_none(tmp_path: Path) -> None:
    corpus = made(tmp_path, [[1, 2, 3, 4, 5], [5, 1, 2, 3, 0]])
    drafter = SuffixDrafter(corpus=corpus)
    assert drafter.propose([FakeSeq(0, [1, 2])], [Budget(1, 1)]).tokens.tolist() == [2, 3]
    wide = drafter.propose([FakeSeq(0, [1, 2])], [Budget(4, 3, width=3)])
    assert sorted(wide.tokens.tolist()) == [0, 2, 3, 4, 5]
    assert SuffixDrafter().propose([FakeSeq(0, [1, 2])], [Budget(1, 1)]).tokens.tolist() == [2]
    check_drafter(lambda: SuffixDrafter(corpus=corpus), vocab_size=VOCAB)


def test_documents_do_not_run_into_each_other(tmp_path: Path) -> None:
    place = made(tmp_path, [[1, 2], [3, 4]]).find([1, 2])
    assert (place.length, place.continuations()) == (2, [])


def test_a_large_corpus_is_opened_without_being_read(tmp_path: Path) -> None:
    """The file is sparse: reading it all would take half a gigabyte."""
    corpus = made(tmp_path, [[1, 2, 3]])
    path, count = tmp_path / "c.corpus", 60_000_000
    head = path.read_bytes()[:128].replace(b'"tokens": 3,', b'"tokens": %d,' % count).rstrip(b"\0")
    line = head[12:]
    with path.open("wb") as file:
        file.write(head[:8] + len(line).to_bytes(4, "little") + line)
        file.truncate(128 + 4 * (2 * count + VOCAB + 1))
    assert len(Corpus.open(path)) == count > len(corpus)


def test_files_that_are_no_corpus_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "c.corpus"
    with pytest.raises(InvalidInput, match="no corpus at"):
        Corpus.open(path)
    path.write_bytes(b"something else entirely")
    with pytest.raises(InvalidInput, match="is no corpus"):
        Corpus.open(path)
    made(tmp_path, [[1, 2, 3]])
    with pytest.raises(InvalidInput, match="made with a vocabulary of 6 tokens, and the model has 5"):
        Corpus.open(path, 5)
    whole = path.read_bytes()
    path.write_bytes(whole[:-4])
    with pytest.raises(DamagedFile, match="cut short"):
        Corpus.open(path)
    path.write_bytes(whole.replace(b'"version": 1', b'"version": 9'))
    with pytest.raises(DamagedFile, match="another version"):
        Corpus.open(path)
    with pytest.raises(InvalidInput, match="outside the vocabulary"):
        write_corpus(path, [[1, 99]], VOCAB, "")
    with pytest.raises(InvalidInput, match="no text"):
        write_corpus(path, [[]], VOCAB, "")
    assert DOCUMENT_END > 1 << 31


def test_documents_of_files(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\ntwo")
    rows = '{"text": "three"}\n\n"four"\n{"messages": [{"role": "user", "content": "five"}]}\n'
    (tmp_path / "b.jsonl").write_text(rows)
    found = list(read_documents([tmp_path / "a.txt", tmp_path / "b.jsonl"]))
    assert found == ["one\ntwo", "three", "four", "five"]
    (tmp_path / "b.jsonl").write_text("{")
    with pytest.raises(InvalidInput, match=r"b.jsonl, line 1 is not JSON"):
        list(read_documents([tmp_path / "b.jsonl"]))
    with pytest.raises(InvalidInput, match=r"none\.txt': No such file or directory; give files of text"):
        list(read_documents([tmp_path / "none.txt"]))


@pytest.mark.parametrize(
    "line",
    ['{"txt": "misspelt"}', "[1]", "7", "null", '{"messages": 5}', '{"messages": [{"content": 3}]}', '{"text": 1}'],
)
def test_a_line_without_a_text_is_named(tmp_path: Path, line: str) -> None:
    (tmp_path / "b.jsonl").write_text(f'"fine"\n{line}\n')
    with pytest.raises(InvalidInput, match=r"b.jsonl, line 2 is no text and has none in 'text'"):
        list(read_documents([tmp_path / "b.jsonl"]))


def test_a_separator_inside_a_text_is_no_end_of_line(tmp_path: Path) -> None:
    (tmp_path / "b.jsonl").write_text('{"text": "one\u2028two"}\n', encoding="utf-8")
    assert list(read_documents([tmp_path / "b.jsonl"])) == ["one\u2028two"]


def test_an_index_that_is_open_is_not_written_over(tmp_path: Path) -> None:
    """A server reads it where it lies: cutting the file short under it would end the process."""
    path = tmp_path / "a.corpus"
    write_corpus(path, [[1, 2, 3] * 2000], VOCAB, "")
    with path.open("rb") as reading:
        before = path.read_bytes()
        write_corpus(path, [[4, 5]], VOCAB, "")
        assert reading.read() == before
    assert path.stat().st_size < len(before)
    assert [file.name for file in tmp_path.iterdir()] == ["a.corpus"]
