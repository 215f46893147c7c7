"""Record what a head's trees would accept at every place of greedy texts, whatever their form.

The head drafts from the target's true rows at each token of a text, as in decoding, for every width; the growth of a
tree does not depend on how many nodes are kept, so that one draft tells of all sizes and depths. Kept is, for each
level of the path that the text takes through the tree, how many candidates are better: of a tree of n nodes and d
levels the path's nodes are accepted that have fewer than n better ones on the first d levels.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from forerun.bench.run import prompt_ids
from forerun.bench.suites import Item
from forerun.drafters.eagle.drafter import EagleDrafter
from forerun.drafters.head_drafter import Calibration
from forerun.drafters.tree_growth import Ranks
from forerun.llm import LLM
from forerun.offers import Form
from forerun.params import SamplingParams
from forerun.types import Budget, PlainSeq, Request

WIDTHS = (1, 2, 3, 4, 5, 6, 8, 10)
TREES, CHAINS = 12, 16  # levels of trees that branch, and of chains
NEVER = 30_000  # better ones of a token that the tree has not

Ints = NDArray[np.int16]


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
        self.frontier: list[tuple[tuple[int, ...], float]] = [((), 0.0)]  # tokens from the root, score
        self.levels: list[NDArray[np.float32]] = []
        self.path: list[tuple[int, float, int]] = []  # level, score, place in the level

    def add(self, children: dict[tuple[int, ...], tuple[list[float], list[int]]], truth: tuple[int, ...]) -> None:
        """The next level: `children` are values and tokens of every frontier node."""
        level = len(self.levels)
        found = [
            ((*above, token), score + value)
            for above, score in self.frontier
            for value, token in zip(*(column[: self.width] for column in children[above]), strict=True)
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


def record_place(ranks: Ranks, calibration: Calibration, truth: tuple[int, ...]) -> Ints:
    """[widths, depths, path levels] of one place, behind which the text goes on like this."""
    growths = [_Growth(width) for width in WIDTHS]
    values, tokens = ranks.roots(WIDTHS[-1])[0]
    children = {(): (calibration.log_confidences(values), tokens)}
    for level in range(CHAINS):
        for one in growths:
            if one.frontier:
                one.add(children, truth)
        union = list(dict.fromkeys(tokens for one in growths for tokens, _ in one.frontier))
        if not union or level + 1 == CHAINS:
            break
        above = {tokens: i for i, tokens in enumerate(children)}
        nodes = [(above[tokens[:-1]], tokens[-1]) for tokens in union]
        values, tokens = ranks.below([nodes], WIDTHS[-1])[0]
        columns = calibration.log_confidences(values), tokens
        width = WIDTHS[-1]
        children = {
            one: (columns[0][i * width : (i + 1) * width], columns[1][i * width : (i + 1) * width])
            for i, one in enumerate(union)
        }
    return np.stack([one.better() for one in growths])


def record(
    model: str, items: Sequence[Item], max_tokens: int, say: Callable[[str], None] = print
) -> list[RecordedText]:
    """Write each prompt's greedy text, and draft along it with the head of the box."""
    with LLM.load(model, drafter="eagle3") as llm:
        return [_record_text(llm, item, max_tokens, say) for item in items]


def _record_text(llm: LLM, item: Item, max_tokens: int, say: Callable[[str], None]) -> RecordedText:
    prompt = list(prompt_ids(llm, [dict(message) for message in item.messages]))
    params = SamplingParams(max_tokens=max_tokens)
    (seq,) = llm.driver.write([Request(tuple(prompt), params, budget=Budget(0, 0))])
    answer, drafter = seq.tokens[len(prompt) :], llm.engine.drafters.get("eagle3")
    assert isinstance(drafter, EagleDrafter)
    places = list[Ints]()
    whole, target, text = [*prompt, *answer], llm.engine.target, PlainSeq(-1, prompt[:-1])
    text.tokens = [*prompt]
    read = PlainSeq(-7, whole, len(whole))
    trees, scores = target.prefill([read], drafter.needs)
    hidden = [scores.hidden[layer].clone() for layer in drafter.head.config.layers]
    target.release(read)
    first = len(prompt) - 1
    budget = Budget(64 * CHAINS, CHAINS, 2 * WIDTHS[-1] + 8)
    from forerun.drafters.head_drafter import ObservedRows

    observed, done = ObservedRows(), 0
    for place in range(len(answer)):
        root = first + place
        text.tokens = whole[: root + 1]
        observed.note(hidden, slice(done, root))
        observed.tokens += whole[done + 1 : root + 1]
        observed.seen, done = root, root
        steps = drafter._runner.begin([text], [observed], [budget])
        observed.tokens = []
        truth = tuple(whole[root + 1 : root + 1 + CHAINS])
        places.append(record_place(steps.ranks([text]), drafter.head.config.calibration, truth))
    drafter._runner.forget(text.id)
    say(f"{item.task} {item.id}: {len(answer)} tokens")
    return RecordedText(item.task, prompt, answer, np.stack(places))


def save(texts: Sequence[RecordedText], file: Path) -> None:
    """One compressed file."""
    said = json.dumps([{"task": one.task, "prompt": one.prompt, "answer": one.answer} for one in texts])
    arrays = {f"text{i}": one.better for i, one in enumerate(texts)}
    np.savez_compressed(file, said=np.frombuffer(said.encode(), dtype=np.uint8), **arrays)  # type: ignore[arg-type]


def load(file: Path) -> list[RecordedText]:
    with np.load(file) as kept:
        said = json.loads(kept["said"].tobytes().decode())
        return [RecordedText(**one, better=kept[f"text{i}"]) for i, one in enumerate(said)]
