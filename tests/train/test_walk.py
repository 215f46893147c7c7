"""Rounds walked through greedy text: what decoding that text counts, logged by a run, never on prompts it learns."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from forerun.build.engine import make_engine
from forerun.core.errors import InvalidInput, ModelNotFound
from forerun.core.params import SamplingParams, SpeculativeConfig
from forerun.core.types import Request
from forerun.models.load.checkpoint import Checkpoint
from forerun.train.curves import main as draw_curves
from forerun.train.data.corpus import Corpus, Text, write_shard
from forerun.train.loop import CHAIN, RANKS, Progress, walk, walk_rows
from forerun.train.options import Method
from forerun.train.run import train
from forerun.train.teacher import load_teacher
from tests.train.test_recipes import lending, options_for
from tests.train.test_start import begun

PROMPTS = [(7, 5, i) for i in range(4, 28)]
LENGTH = 61  # of a text: as long as the tiny target can write


def decoded(
    tiny: Checkpoint, speculative: SpeculativeConfig, prompts: Sequence[Sequence[int]]
) -> tuple[list[list[int]], list[list[int]]]:
    """Greedy texts of the prompts, and how many tokens each step of the engine added to them."""
    engine = make_engine(lending(tiny), frozenset({0}), speculative)
    ends = len(PROMPTS[0]) + LENGTH
    tokens = {
        engine.submit(Request(tuple(prompt), SamplingParams(max_tokens=ends - len(prompt)))): list(prompt)
        for prompt in prompts
    }
    sizes: dict[int, list[int]] = {number: [] for number in tokens}
    while engine.busy:
        for event in engine.step():
            tokens[event.seq_id] += event.tokens
            sizes[event.seq_id].append(len(event.tokens))
    return list(tokens.values()), list(sizes.values())


@pytest.fixture(scope="module")
def others(tiny: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Greedy texts of prompts that no text to learn from begins with."""
    folder = tmp_path_factory.mktemp("others")
    texts, _ = decoded(tiny, SpeculativeConfig(drafter="none"), PROMPTS)
    write_shard(folder / "shard-00000.safetensors", [Text(tokens, 3, 0.0) for tokens in texts])
    return folder


def test_a_walk_goes_from_where_the_last_round_ended() -> None:
    """Rows 1 to 7 have ranks; the answer begins at token 3, so the first root is there and its row 2 (shift 1)."""
    learnt = torch.tensor([[False] * 3 + [True] * 7])
    usable = torch.tensor([[False, *[True] * 7, False, False]])
    right = torch.tensor([2, 1, 0, 2, 2, 0, 1])  # levels accepted of rows 1..7
    ranks = torch.where(torch.arange(2) < right[:, None], 0, RANKS)
    # row 2 accepts one: 2 tokens, on to row 4: 3 tokens, on to row 7: 2 tokens, and out
    assert walk_rows(learnt, usable, ranks, 1) == (7, 3)
    # a draft model predicts from the root itself: row 3 accepts none, then as before
    assert walk_rows(learnt, usable, ranks, 0) == (1 + 3 + 2, 3)
    assert walk_rows(torch.zeros_like(learnt), torch.zeros_like(usable), ranks[:0], 1) == (0, 0)


def test_no_more_is_accepted_in_a_round_than_a_chain_of_five_drafts() -> None:
    usable = torch.ones(1, 30, dtype=torch.bool)
    assert walk_rows(usable, usable, torch.zeros(30, 8, dtype=torch.long), 0) == (30, 5)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["eagle", "eagle3", "hydra", "dflash"])
def test_what_is_walked_is_what_decoding_counts(
    method: Method, tiny: Checkpoint, texts: Path, others: Path, tmp_path: Path
) -> None:
    """Round by round, up to where a text is too near its end to be walked.

    A walk begins with an answer's first token as the root. On a CPU the round before is drafted too, from the prompt's
    last token, so decoding begins here with prompts that end in the answer's first token.
    """
    options = options_for(method, tiny, texts, tmp_path, steps=40, max_length=64, levels=CHAIN)
    train(options)
    teacher = load_teacher(tiny, torch.device("cpu"))
    # with the weights as they were written
    recipe = begun(replace(options, init=str(tmp_path)), tiny, teacher)
    fixed = SpeculativeConfig(drafter=method, draft_model=str(tmp_path), budget=CHAIN, controller="fixed")
    corpus, all_rounds = Corpus(others, max_length=64, holdout=1.0), 0
    batches = [corpus.rectangle([[text]], 1, text[1] - text[0]) for text in corpus.held_back]
    starts = [batch.tokens[0, : len(PROMPTS[0]) + 1].tolist() for batch in batches]
    _, sizes = decoded(tiny, fixed, starts)
    for batch, steps in zip(batches, sizes, strict=True):
        walked = walk(recipe, [batch], torch.device("cpu"))
        assert walked is not None
        tokens, rounds = walked
        # a last round's own token may lie one behind a text's end
        assert sum(steps[:rounds]) == min(tokens, LENGTH - 1)
        all_rounds += rounds
    assert all_rounds < 0.95 * 55 * len(PROMPTS)  # some drafts were accepted


@pytest.mark.slow
def test_the_curve_of_a_run_is_written_as_json_and_survives_resumption(
    tiny: Checkpoint, texts: Path, others: Path, tmp_path: Path
) -> None:
    options = options_for(
        "hydra", tiny, texts, tmp_path / "a", measure_on=str(others), steps=4, eval_every=2, save_every=2
    )
    train(options)
    train(replace(options, steps=6))
    draw_curves([str(tmp_path / "a"), "--json", str(tmp_path / "curves.json")])
    (run,) = json.loads((tmp_path / "curves.json").read_text())["runs"]
    assert [row["step"] for row in run["curve"]] == [0, 2, 4, 6]
    assert all(row["walked_tokens_per_round"] >= 1 for row in run["curve"])
    assert run["arguments"]["method"] == "hydra"
    made = json.loads((tmp_path / "a" / "provenance.json").read_text())
    assert made["best"]["tokens_per_round"] == max(row["walked_tokens_per_round"] for row in run["curve"])


def test_prompts_that_are_learnt_from_cannot_be_measured_on(tiny: Checkpoint, texts: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="answer prompts that are learnt from"):
        train(options_for("hydra", tiny, texts, tmp_path / "a", measure_on=str(texts), steps=1))
    with pytest.raises(ModelNotFound, match="nowhere holds no shards"):
        train(options_for("hydra", tiny, texts, tmp_path / "a", measure_on="nowhere", steps=1))


def test_a_block_drafter_is_walked_by_whole_blocks_from_every_token(
    tiny: Checkpoint, texts: Path, others: Path, tmp_path: Path
) -> None:
    """It learns from some anchors only; a simulation starts at all of them."""
    seen: list[Progress] = []
    train(options_for("dspark", tiny, texts, tmp_path, measure_on=str(others), steps=1), seen.append)
    assert all(1 <= (progress.walked_tokens_per_round or 0) <= 9 for progress in seen)
    ones = torch.ones(1, 30, dtype=torch.bool)
    assert walk_rows(ones, ones, torch.zeros(30, 8, dtype=torch.long), 0, 8) == (36, 4)
