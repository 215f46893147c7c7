"""Where answers repeat themselves, against a search by hand; a corpus that cuts them keeps everything else."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from forerun.core.errors import InvalidInput
from forerun.train.data.corpus import PERIODS, RUN, Corpus, Text, first_repeats, write_shard
from forerun.train.options import TrainOptions


def _by_hand(answer: list[int]) -> int:
    for close in range(RUN + 1, len(answer) + 1):
        for period in range(1, min(PERIODS, close - RUN) + 1):
            if answer[close - RUN : close] == answer[close - RUN - period : close - period]:
                return close
    return len(answer)


def _answers() -> list[list[int]]:
    random = np.random.default_rng(5)
    found = [random.integers(0, 50, size).tolist() for size in (0, 1, RUN, 40, 200)]
    for period in (1, 2, 7, 40, PERIODS, PERIODS + 1):
        start, turn = random.integers(0, 50, 23).tolist(), random.integers(0, 50, period).tolist()
        found.append(start + turn * (1 + (RUN + 30) // period) + turn[: RUN - 1])
    return found


def test_the_first_repeated_run_is_found() -> None:
    answers = _answers()
    flat = np.array([token for answer in answers for token in answer], dtype=np.int64)
    ends = np.cumsum([len(answer) for answer in answers])
    firsts = ends - [len(answer) for answer in answers]
    expected = [int(first) + _by_hand(answer) for first, answer in zip(firsts, answers, strict=True)]
    assert first_repeats(flat, firsts, ends).tolist() == expected
    looping = [_by_hand(answer) < len(answer) for answer in answers]
    assert set(looping) == {True, False}  # the oracle sees both kinds


def test_a_run_of_the_text_before_or_of_the_prompt_is_no_repetition() -> None:
    run = list(range(RUN))
    flat = np.array([*run, *run, *run], dtype=np.int64)
    # a prompt, and two answers that say the same
    two = (np.array([RUN, 2 * RUN]), np.array([2 * RUN, 3 * RUN]))
    assert first_repeats(flat, *two).tolist() == [2 * RUN, 3 * RUN]
    one = np.array([0]), np.array([3 * RUN])
    assert first_repeats(flat, *one).tolist() == [2 * RUN]


def test_a_corpus_cuts_loops_and_nothing_else(tmp_path: Path) -> None:
    texts = [Text([i, 7, *range(100 + i, 160 + i)], prompt_length=2) for i in range(40)]
    looping = [Text([i, 8, *[3, 4, 5] * 40], prompt_length=2) for i in range(40)]
    write_shard(tmp_path / "shard-00000.safetensors", [*texts, *looping])
    whole = Corpus(tmp_path, max_length=512, holdout=0.2)
    cut = Corpus(tmp_path, max_length=512, holdout=0.2, cut_loops=10)
    for before, after in ((whole.training, cut.training), (whole.held_back, cut.held_back)):
        for (first, end, answer), (at, close, begins) in zip(before, after, strict=True):
            assert (at, begins) == (first, answer)
            loops = whole.tokens[first + 1] == 8
            assert close == (answer + 3 + RUN + 10 if loops else end)


def test_a_negative_cut_is_refused() -> None:
    with pytest.raises(InvalidInput, match="cut_loops"):
        TrainOptions("eagle", "tiny", "texts", "out", cut_loops=-1)
