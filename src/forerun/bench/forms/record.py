"""Record what a head's trees would accept at every place of greedy texts, whatever their form.

The head drafts from the target's true rows at each token of a text, as in decoding, for every width; the growth of a
tree does not depend on how many nodes are kept, so that one draft tells of all sizes and depths. Kept is, for each
level of the path that the text takes through the tree, how many candidates are better: of a tree of n nodes and d
levels the path's nodes are accepted that have fewer than n better ones on the first d levels.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forerun.bench.run import prompt_ids
from forerun.bench.suites import Item
from forerun.drafters.eagle.drafter import EagleDrafter, runner_for
from forerun.drafters.head_drafter import Calibration, ObservedRows
from forerun.drafters.tree_growth import Ranks
from forerun.llm import LLM
from forerun.offers import Form
from forerun.params import SamplingParams
from forerun.types import Budget, PlainSeq, Request

WIDTHS = (1, 2, 3, 4, 5, 6, 8, 10)
TREES, CHAINS = 12, 16  # levels of trees that branch, and of chains
NEVER = 30_000  # better ones of a token that the tree has not

Ints = NDArray[np.int16]
Tokens = tuple[int, ...]  # tokens from the root's child on


@dataclass(frozen=True, slots=True)
class RecordedText:
    """A prompt, its answer, and the better candidates of the path behind each place: [places, widths, levels, levels].

    Place 0 is the last token of the prompt. The last index is the path's level, the one before it the tree's depth.
    """

    task: str
    prompt: list[int]
    answer: list[int]
    better: Ints

    def accepted(self, place: int, form: Form) -> int:
        """Tokens that a tree of this form has right at a place."""
        most = min(form.depth, len(self.answer) - place)
        path = self.better[place, WIDTHS.index(form.width), form.depth - 1, :most]
        return int((path < form.nodes).sum())


class _Growth:
    """The candidates of one width, level by level, and the path of the text among them."""

    def __init__(self, width: int) -> None:
        self.width, self.depth = width, CHAINS if width == 1 else TREES
        self.frontier: list[tuple[Tokens, float]] = [((), 0.0)]  # and their scores
        self.levels: list[NDArray[np.float32]] = []
        self.path: list[tuple[int, float, int]] = []  # level, score, place in the level

    def add(self, children: Mapping[Tokens, Sequence[tuple[int, float]]], truth: Tokens) -> None:
        """The next level: `children` are tokens and log-confidences below every node of the frontier."""
        level = len(self.levels)
        found = [
            ((*above, token), score + value)
            for above, score in self.frontier
            for token, value in children[above][: self.width]
        ]
        scores = np.array([score for _, score in found], dtype=np.float32)
        self.levels.append(scores)
        goal = truth[: level + 1]
        if len(goal) == level + 1 and len(self.path) == level:
            self.path += [(level, score, i) for i, (tokens, score) in enumerate(found) if tokens == goal]
        order = np.argsort(-scores, kind="stable")[: self.width]
        self.frontier = [found[i] for i in order] if level + 1 < self.depth else []

    def better(self) -> Ints:
        """[depths, path levels]."""
        counts = np.full((CHAINS, CHAINS), NEVER, dtype=np.int16)
        for level, score, place in self.path:
            of_level = [
                int((scores > np.float32(score)).sum())
                + (int((scores == np.float32(score)).sum()) if i < level else 0)
                + (int((scores[:place] == np.float32(score)).sum()) if i == level else 0)
                for i, scores in enumerate(self.levels)
            ]
            counts[level : len(self.levels), level] = np.cumsum(of_level)[level:]
        return counts


def record_place(ranks: Ranks, calibration: Calibration, truth: Tokens) -> Ints:
    """[widths, depths, path levels] of one place, behind which the text goes on like this.

    All widths grow side by side, so that every node goes through the head once.
    """
    growths, widest = [_Growth(width) for width in WIDTHS], WIDTHS[-1]
    nodes: list[Tokens] = [()]
    values, tokens = ranks.roots(widest)[0]
    for _ in range(CHAINS):
        scored = list(zip(tokens, calibration.log_confidences(values), strict=True))
        children = {one: scored[i * widest : (i + 1) * widest] for i, one in enumerate(nodes)}
        for growth in growths:
            if growth.frontier:
                growth.add(children, truth)
        above = {one: i for i, one in enumerate(nodes)}
        nodes = list(dict.fromkeys(one for growth in growths for one, _ in growth.frontier))
        if not nodes:
            break
        values, tokens = ranks.below([[(above[one[:-1]], one[-1]) for one in nodes]], widest)[0]
    return np.stack([growth.better() for growth in growths])


def record(
    model: str, items: Sequence[Item], max_tokens: int, say: Callable[[str], None] = print
) -> list[RecordedText]:
    """Write each prompt's greedy text, and draft along it with the head of the box."""
    with LLM.load(model, drafter="eagle3") as llm:
        return [_record_text(llm, item, max_tokens, say) for item in items]


def _record_text(llm: LLM, item: Item, max_tokens: int, say: Callable[[str], None]) -> RecordedText:
    prompt = list(prompt_ids(llm, [dict(message) for message in item.messages]))
    request = Request(tuple(prompt), SamplingParams(max_tokens=max_tokens), budget=Budget(0, 0))
    answer = llm.driver.write([request])[0].tokens[len(prompt) :]
    drafter = llm.engine.drafters.get("eagle3")
    assert isinstance(drafter, EagleDrafter)
    whole, target, config = [*prompt, *answer], llm.engine.target, drafter.head.config
    reader = PlainSeq(-1, whole, len(whole))
    hidden = target.prefill([reader], drafter.needs)[1].hidden
    rows = [hidden[layer].clone() for layer in config.layers]
    target.release(reader)
    runner, observed, text = runner_for(drafter.head), ObservedRows(), PlainSeq(-1, [], len(prompt))
    budget = Budget(len(WIDTHS) * WIDTHS[-1] * CHAINS, CHAINS, 2 * WIDTHS[-1])
    places = list[Ints]()
    for root in range(len(prompt) - 1, len(whole) - 1):
        text.tokens = whole[: root + 1]
        observed.note(rows, slice(observed.seen, root))
        observed.tokens += whole[observed.seen + 1 : root + 1]
        observed.seen = root
        ranks = runner.begin([text], [observed], [budget]).ranks([text])
        places.append(record_place(ranks, config.calibration, tuple(whole[root + 1 : root + 1 + CHAINS])))
    say(f"{item.task} {item.id}: {len(answer)} tokens")
    return RecordedText(item.task, prompt, answer, np.stack(places))


def save(texts: Sequence[RecordedText], file: Path) -> None:
    """One compressed file."""
    said = json.dumps([{"task": one.task, "prompt": one.prompt, "answer": one.answer} for one in texts])
    arrays: dict[str, Any] = {f"text{i}": one.better for i, one in enumerate(texts)}
    np.savez_compressed(file, said=np.frombuffer(said.encode(), dtype=np.uint8), **arrays)


def load(file: Path) -> list[RecordedText]:
    with np.load(file) as kept:
        said = json.loads(kept["said"].tobytes().decode())
        return [RecordedText(**one, better=kept[f"text{i}"]) for i, one in enumerate(said)]
