"""The table of successors is read once: later starts have it from a file, unless that is damaged or another's."""

from __future__ import annotations

from pathlib import Path

import pytest

from forerun.core.types import Budget, Needs, PlainSeq, Scores, TreeBatch
from forerun.drafters.lookup import suffix_table as kept_table
from forerun.drafters.lookup import suffix_table as successors
from forerun.drafters.lookup.suffix import SuffixDrafter
from forerun.drafters.lookup.suffix_table import KEPT, Successors, load_or_read
from forerun.testing import FakeSeq, TableLM
from tests.drafters.rounds import as_lists

VOCAB, OPENING = 40, (3, 1)


class Counted(TableLM):
    """Counts its passes."""

    passes = 0

    def score(self, seqs: list[PlainSeq], trees: TreeBatch, needs: Needs, *more: object) -> Scores:  # type: ignore[override]
        self.passes += 1
        return super().score(seqs, trees, needs, *more)  # type: ignore[arg-type]


def start(costs: Path | None, vocab: int = VOCAB, opening: tuple[int, ...] = OPENING) -> tuple[Successors, int]:
    """The table of a start, and the passes that it took."""
    target = Counted(vocab_size=vocab, order=2)
    found = load_or_read(target, opening, costs)
    assert found is not None
    return found, target.passes


def rows(table: Successors, vocab: int = VOCAB) -> list[successors.Row]:
    return [table.after(token) for token in range(vocab)]


def test_a_second_start_runs_no_passes(tmp_path: Path) -> None:
    costs = tmp_path / "costs" / "0.json"
    first, passes = start(costs)
    assert passes > 0
    again, none = start(costs)
    assert none == 0
    assert rows(again) == rows(first)
    assert all(len(row) == KEPT for row in rows(again))
    assert start(None)[1] == passes, "the control: nowhere to keep it"


def test_another_target_or_opening_has_a_table_of_its_own(tmp_path: Path) -> None:
    costs = tmp_path / "0.json"
    start(costs)
    assert start(costs, opening=(3, 2))[1] > 0
    other, passes = start(costs, vocab=VOCAB + 1)
    assert passes > 0
    assert rows(other, VOCAB + 1) == rows(start(None, vocab=VOCAB + 1)[0], VOCAB + 1)
    assert start(tmp_path / "1.json")[1] > 0, "the name stands for the model and the machine"


def test_one_of_another_format_is_read_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start(tmp_path / "0.json")
    monkeypatch.setattr(kept_table, "FORMAT", kept_table.FORMAT + 1)
    assert start(tmp_path / "0.json")[1] > 0


def test_a_damaged_file_is_read_anew(tmp_path: Path) -> None:
    costs, file = tmp_path / "0.json", tmp_path / "0.successors"
    whole, _ = start(costs)
    content = file.read_bytes()
    for damaged in (b"", content[:20], content[:-1], content + b"x", content[:50] + b"\xff" + content[51:]):
        file.write_bytes(damaged)
        table, passes = start(costs)
        assert passes > 0
        assert rows(table) == rows(whole)
        assert file.read_bytes() == content


def test_a_place_that_cannot_be_written_costs_time_alone(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    assert rows(start(tmp_path / "file" / "0.json")[0]) == rows(start(None)[0])


@pytest.mark.parametrize("runs_native", [True, False])
def test_it_is_of_the_first_tokens_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runs_native: bool) -> None:
    """Behind any other token nothing is drafted that the text has not."""
    every, passes = start(None, vocab=1100)
    monkeypatch.setattr(successors, "READ", 8)
    monkeypatch.setattr(kept_table, "READ", 8)
    few, fewer = start(tmp_path / "0.json", vocab=1100)
    assert fewer < passes
    assert [few.after(token) for token in range(8)] == [every.after(token) for token in range(8)]
    assert [few.after(token) for token in (8, 1099)] == [[], []]
    assert all(every.after(token) for token in (8, 1099))
    drafter = SuffixDrafter(successors=start(tmp_path / "0.json", vocab=1100)[0])
    if not runs_native:
        drafter._runs_native = False
    known, unknown = (as_lists(drafter.propose([FakeSeq(i, [9, i])], [Budget(4, 1, 4)]))[0][0] for i in (7, 30))
    assert known == [7, *[token for _, token in every.after(7)[:4]]]
    assert unknown == [30]
    assert not drafter.offer(FakeSeq(31, [9, 31])).free
