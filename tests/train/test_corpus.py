"""Batches are a function of seed and step; texts are held back by prompt; simulation counts as rounds would."""

from __future__ import annotations

import os
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from forerun.core.errors import InvalidInput, ModelNotFound
from forerun.drafters.heads.base import Calibration
from forerun.drafters.heads.formats import write_shards
from forerun.train.data.corpus import Batches, Corpus, Text, hash_of, write_shard
from forerun.train.data.prompts import Novelty, read_prompts
from forerun.train.loop import RANKS, fit_calibration, summarise


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    texts = [Text([i, 1, 2, *range(10, 14 + i % 40)], prompt_length=3) for i in range(60) for _ in range(2)]
    write_shard(tmp_path / "shard-00000.safetensors", texts[:50])
    write_shard(tmp_path / "shard-00001.safetensors", texts[50:])
    return tmp_path


def test_an_epoch_shows_every_text_once_and_the_next_in_another_order(folder: Path) -> None:
    corpus = Corpus(folder, max_length=64, holdout=0.1)
    batches = Batches(corpus, corpus.training, batch_tokens=256, seed=4)
    orders = []
    for epoch in range(2):
        rows = []
        for i in range(len(batches)):
            batch = batches.at(epoch * len(batches) + i)
            rows += [row[:1].tolist() for row, learnt in zip(batch.tokens, batch.learnt, strict=True) if learnt.any()]
            assert batch.tokens.numel() <= 256 or len(batch.tokens) == 1
        orders.append(rows)
    assert sorted(orders[0]) == sorted(orders[1])
    assert len(orders[0]) == len(corpus.training)
    assert orders[0] != orders[1]
    again = Batches(corpus, corpus.training, batch_tokens=256, seed=4)
    assert all(torch.equal(again.at(i).tokens, batches.at(i).tokens) for i in (0, 3, 11))


def test_packed_rows_hold_every_text_once_and_learn_answers_alone(folder: Path) -> None:
    corpus = Corpus(folder, max_length=100, holdout=0.1)
    batches = Batches(corpus, corpus.training, batch_tokens=256, seed=4, packed=True)
    seen, full = list[list[int]](), list[int]()
    for i in range(len(batches)):
        batch = batches.at(i)
        assert batch.tokens.shape[1] <= 100
        for row, learnt in zip(batch.tokens.tolist(), batch.learnt.tolist(), strict=True):
            ends = [at for at in range(1, len(row)) if learnt[at - 1] and not learnt[at]] + [len(row)] * learnt[-1]
            firsts = [0, *ends]
            seen += [row[a:b] for a, b in pairwise(firsts) if any(learnt[a:b])]
            full.append(ends[-1] if ends else 0)
            assert all(learnt[a:b] == [False] * 3 + [True] * (b - a - 3) for a, b in pairwise(firsts))
    wanted = [corpus.tokens[first:end].tolist() for first, end, _ in corpus.training]
    assert sorted(seen) == sorted(wanted)
    assert sum(full) / len(full) > 70, "rows are nearly full"


def test_texts_are_held_back_by_their_prompt(folder: Path) -> None:
    corpus = Corpus(folder, max_length=64, holdout=0.2)
    prompts = [
        {tuple(corpus.tokens[a : a + 3].tolist()) for a, *_ in spans} for spans in (corpus.training, corpus.held_back)
    ]
    assert prompts[0].isdisjoint(prompts[1])
    assert len(corpus.training) + len(corpus.held_back) == 120
    assert 0 < len(corpus.held_back) < 60


def test_prompts_are_not_learnt_and_padding_neither(folder: Path) -> None:
    corpus = Corpus(folder, max_length=20, holdout=0.1)
    batch = Batches(corpus, corpus.training, 128, seed=0).at(0)
    assert not batch.learnt[:, :3].any()
    assert not batch.learnt[batch.tokens == 0].any()
    assert batch.tokens.shape[1] <= 20 or batch.tokens.shape[1] == 32


def test_texts_of_a_larger_vocabulary_are_refused(folder: Path) -> None:
    """Ids count from 0: a vocabulary as large as the largest id lacks it."""
    corpus = Corpus(folder, max_length=32, holdout=0.2)
    largest = int(corpus.tokens.max())
    corpus.must_fit(largest + 1)
    with pytest.raises(InvalidInput, match=f"hold token {largest} and the target knows {largest};"):
        corpus.must_fit(largest)


def test_one_prompt_is_held_back_however_few_there_are(tmp_path: Path) -> None:
    texts = [Text([i, 7, 8, answer, 9], prompt_length=3) for i in range(4) for answer in (1, 2)]
    write_shard(tmp_path / "shard-00000.safetensors", texts)
    corpus = Corpus(tmp_path, max_length=16, holdout=0.001)
    assert (len(corpus.training), len(corpus.held_back)) == (6, 2)
    (held,) = {int(corpus.tokens[first]) for first, *_ in corpus.held_back}
    assert held not in {int(corpus.tokens[first]) for first, *_ in corpus.training}


def test_nothing_to_learn_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="forerun data make"):
        Corpus(tmp_path, max_length=16, holdout=0.1)
    write_shard(tmp_path / "shard-00000.safetensors", [Text([1, 2, 3, 4, 5], 2)])
    with pytest.raises(InvalidInput, match=r"1 texts of 1 prompts .* make texts of more prompts"):
        Corpus(tmp_path, max_length=16, holdout=0.1)
    with pytest.raises(InvalidInput, match="0 texts of 0 prompts have an answer within max_length=2"):
        Corpus(tmp_path, max_length=2, holdout=0.1)
    assert len(hash_of(tmp_path)) == 64


@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_files_of_tensors_have_the_mode_of_any_other_file(tmp_path: Path, umask: int) -> None:
    """safetensors' own are 0600, whatever the umask."""
    former = os.umask(umask)
    try:
        write_shard(tmp_path / "shard-00000.safetensors", [Text([1, 2, 3], 2)])
        write_shards(tmp_path, {"a": torch.zeros(2)})
    finally:
        os.umask(former)
    modes = {file.name: file.stat().st_mode & 0o777 for file in tmp_path.iterdir()}
    assert modes == dict.fromkeys(("shard-00000.safetensors", "model.safetensors"), 0o666 & ~umask)


def test_simulated_rounds_are_counted_by_hand() -> None:
    """Three rows, two levels: (right, right), (right, third), (wrong, right)."""
    ranks = torch.tensor([[0, 0], [0, 2], [RANKS, 0]])
    measured = summarise(ranks, torch.full((3, 2), 0.5))
    assert measured.tokens_per_round == pytest.approx(1 + 2 / 3 + 1 / 3)
    assert measured.tree_tokens_per_round == pytest.approx(1 + 2 / 3 + 2 / 3)
    assert measured.rates[0][0] == pytest.approx(2 / 3)
    assert measured.rates[1][:3] == pytest.approx((0.5, 0.0, 0.5))


def test_calibration_finds_the_power() -> None:
    q = torch.rand(20000, generator=torch.Generator().manual_seed(0))
    stood = torch.rand(20000, generator=torch.Generator().manual_seed(1)) < q**0.5
    assert fit_calibration(q, stood).power == pytest.approx(0.5, abs=0.11)
    confident = Calibration(1.3, 0.5).log_confidences([-0.01, -4.0])
    assert confident[0] == 0.0
    assert confident[1] < confident[0]


def test_near_duplicates_are_noticed() -> None:
    novelty = Novelty()
    long = "Please write a short story about a cat that learns to fly over the city at night"
    assert novelty.is_new(long)
    assert not novelty.is_new(long.upper() + "!")
    assert novelty.is_new("How many moons does Jupiter have, and who found the first four of them?")


def test_prompts_are_read_from_text_and_json(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\n\ntwo\n")
    (tmp_path / "b.jsonl").write_text('{"prompt": "three"}\n{"turns": ["four", "x"]}\n{"question": "five"}\n')
    assert list(read_prompts([tmp_path / "a.txt", tmp_path / "b.jsonl"])) == ["one", "two", "three", "four", "five"]
    (tmp_path / "c.jsonl").write_text('{"no": 1}\n')
    with pytest.raises(InvalidInput, match="line 1"):
        list(read_prompts([tmp_path / "c.jsonl"]))
