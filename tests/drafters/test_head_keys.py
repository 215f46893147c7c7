"""A native head drafts from the last new row of a text: of the others its last layer computes keys and values only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from forerun.core.types import Budget
from forerun.drafters.heads import eagle_native as native_runner
from forerun.drafters.heads.base import Calibration, ObservedRows
from forerun.drafters.heads.eagle_head import Kind
from forerun.drafters.heads.eagle_native import NativeHead
from forerun.models.native import head_library
from forerun.models.native import library as native_library
from forerun.models.native.library import Head, HeadPass
from forerun.testing import FakeSeq
from tests.drafters.tiny_heads import eagle_config, eagle_weights

pytestmark = pytest.mark.skipif(not native_library.available(), reason="no native kernels that draft")

WORDS, CHUNK = 64, 8
LENGTHS = (20, 1, 9, 8)  # of four texts, in rows: chunks that are ended by no text, by one and by two
KINDS: list[tuple[Kind, int]] = [("eagle", 1), ("eagle3", 1), ("eagle3", 2)]
Change = Callable[[HeadPass], None]


@pytest.fixture(params=KINDS, ids=str)
def head(request: pytest.FixtureRequest) -> NativeHead:
    kind, depth = request.param
    config = replace(eagle_config(kind, WORDS, width=64, depth=depth), heads=4, kv_heads=2, head_dim=16)
    config = replace(config, inner=1024)
    return NativeHead(config, eagle_weights(config, seed=2), None)


def _text(head: NativeHead, i: int) -> tuple[FakeSeq, ObservedRows]:
    made, rows = torch.Generator().manual_seed(i), ObservedRows()
    seq = FakeSeq(i, torch.randint(WORDS, (LENGTHS[i] + 1,), generator=made).tolist())
    rows.tokens, rows.seen = seq.tokens[1:], LENGTHS[i]
    rows.features = [torch.randn(LENGTHS[i], head.config.feature_width, generator=made)]
    return seq, rows


def _read(
    head: NativeHead, which: Sequence[int], change: Change, monkeypatch: pytest.MonkeyPatch
) -> tuple[list[Tensor], list[Tensor], list[tuple[int, int]]]:
    """What is said behind these texts and a level deeper; keys and values of all; rows, and those with keys only."""
    passes, runner = list[tuple[int, int]](), native_runner.NativeRunner(head)

    def run_rows(given: Head, one: HeadPass) -> None:
        change(one)
        passes.append((one.rows, one.keys_only))
        head_library.run_rows(given, one)

    monkeypatch.setattr(native_runner, "run_rows", run_rows)
    monkeypatch.setattr(native_runner, "CHUNK", CHUNK)
    seqs, rows = zip(*(_text(head, i) for i in which), strict=True)
    steps = runner.begin(seqs, rows, [Budget(4, 2, 2)] * len(seqs))
    found = [steps.first()]
    found.append(steps.after(torch.zeros(len(seqs), 1, dtype=torch.long), torch.full((len(seqs), 1), 5)))
    keys = [runner.cache.view([seq.id], LENGTHS[seq.id]).clone() for seq in seqs]
    return found, keys, passes


def _all_rows(one: HeadPass) -> None:
    one.keys_only = 0


@pytest.mark.parametrize("which", [(0,), (1,), (0, 1, 2, 3)])
def test_drafts_and_caches_have_the_same_bits(
    head: NativeHead, which: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    said, keys, passes = _read(head, which, lambda one: None, monkeypatch)
    wanted, wanted_keys, whole = _read(head, which, _all_rows, monkeypatch)
    assert all(map(torch.equal, said, wanted))
    assert all(map(torch.equal, keys, wanted_keys))
    few = {(0,): [8, 8, 3, 0], (1,): [0, 0], (0, 1, 2, 3): [8 + 0 + 8 + 7, 8, 3, 0]}[which]
    assert [rows for rows, _ in passes] == [rows for rows, _ in whole]
    assert ([count for _, count in passes], {count for _, count in whole}) == (few, {0})


def test_negative_control_outputs_that_are_left_out_are_missed(
    head: NativeHead, monkeypatch: pytest.MonkeyPatch
) -> None:
    def too_many(one: HeadPass) -> None:
        one.keys_only = one.rows if one.features else 0

    wanted, wanted_keys, _ = _read(head, (0,), _all_rows, monkeypatch)
    said, keys, _ = _read(head, (0,), too_many, monkeypatch)
    assert not any(map(torch.equal, said, wanted))
    assert all(map(torch.equal, keys, wanted_keys))


def test_a_draft_in_one_call_goes_the_same_way(head: NativeHead, monkeypatch: pytest.MonkeyPatch) -> None:
    """It reads 20 rows at once and drafts from the last of them, whose output it leaves for the next draft."""
    runner, (seq, rows) = native_runner.NativeRunner(head), _text(head, 0)
    whole = runner.draft(seq, rows, Budget(4, 2, 2), Calibration())
    assert whole is not None
    _, keys, _ = _read(head, (0,), _all_rows, monkeypatch)
    assert torch.equal(runner.cache.view([seq.id], LENGTHS[0]), keys[0])
    wanted, place = native_runner.NativeRunner(head), _text(head, 0)
    wanted.begin([seq], [place[1]], [Budget(4, 2, 2)])
    (out, row), (other, at), width = runner._last[0], wanted._last[0], head.config.width
    assert out[row * width : (row + 1) * width] == other[at * width : (at + 1) * width]
