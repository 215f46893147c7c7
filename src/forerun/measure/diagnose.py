"""Checks of `forerun diagnose`: why acceptance is low or the output differs; each names a cause and the next step.

Two settings write the same prompts: the plain loop, and the drafter asked about. Where their texts differ, the target
is asked how near a tie the first differing token was: a gap that rounding explains is numerics, any other is a bug.
Low acceptance is traced to what usually causes it: another template or vocabulary, temperature, a context beyond
what the drafter was trained for, or a drafter that does not fit the prompts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch

from forerun.api.llm import LLM
from forerun.core.errors import ForerunError, VocabularyMismatch
from forerun.core.types import Needs, PlainSeq, TreeBatch
from forerun.drafters.model.draft_model import ModelDrafter
from forerun.measure.bench.alternate import Group, Prompt, Run, alternate, first_difference
from forerun.measure.bench.contenders import is_comparable, load, own_contender
from forerun.measure.bench.figures import Figures
from forerun.measure.bench.run import tokenise
from forerun.measure.bench.settings import Cell, DrafterSetup, Settings
from forerun.measure.bench.suites import BUILT_IN, Item, load_suite, suite_size

Verdict = Literal["fine", "look", "bad"]
# logits; gaps that rounding can reverse
TIE = {torch.float32: 1e-3, torch.bfloat16: 0.25, torch.float16: 0.05}
LOW, USELESS = 0.3, 0.05  # acceptance at the first position
ENOUGH = 12  # trees, before a rate says anything
MARKS = ("<|im_start|>", "<|im_end|>", "<|start_header_id|>", "[INST]", "<start_of_turn>", "<|user|>")


@dataclass(frozen=True, slots=True)
class Finding:
    about: str
    verdict: Verdict
    found: str
    next_step: str | None = None


@dataclass(frozen=True, slots=True)
class Parting:
    """The first difference of two texts, and how near a tie it was."""

    prompt: str
    position: int
    tokens: tuple[int | None, int | None]  # None = that text had ended
    gap: float  # between the logits of the two tokens, or of the two likeliest
    context: int

    @property
    def in_words(self) -> str:
        return f"{self.prompt}, token {self.position}: {self.tokens[0]} against {self.tokens[1]}, gap {self.gap:.2g}"


@dataclass(frozen=True, slots=True)
class Asked:
    """What is compared: a drafter against another drafter, usually none."""

    setup: DrafterSetup
    against: DrafterSetup
    temperature: float
    verifier: str = "auto"


def diagnose(llm: LLM, prompts: Sequence[Prompt], settings: Settings, asked: Asked) -> dict[str, Any]:
    """Write every prompt with both and look for what is wrong."""
    cell = Cell(asked.verifier, asked.temperature)
    groups = [Group.of([prompt]) for prompt in prompts]
    pair = [own_contender(llm, settings, cell, setup) for setup in (asked.against, asked.setup)]
    figures = Figures(list(alternate(pair, groups, settings.max_tokens, 1)), groups)
    partings = find_partings(llm, figures, asked, prompts)
    findings = [
        *_texts(llm, partings, cell, len(prompts)),
        *_acceptance(figures, asked.setup.name),
        *_temperature(llm, figures, groups, settings, asked),
        *_templates(llm, prompts),
        *_contexts(llm, figures, prompts, asked),
    ]
    return {
        "model": llm.name,
        "drafter": asked.setup.name,
        "against": asked.against.name,
        "temperature": asked.temperature,
        "findings": [asdict(finding) for finding in findings],
        "partings": [asdict(parting) for parting in partings],
        "accepted_per_position": [round(share, 4) for share in figures.acceptance(asked.setup.name)],
        "by_context": figures.by_context(asked.setup.name),
        "tokens_per_round": figures.tokens_per_round(asked.setup.name),
        "ok": all(finding.verdict != "bad" for finding in findings),
    }


def find_partings(llm: LLM, figures: Figures, asked: Asked, prompts: Sequence[Prompt]) -> list[Parting]:
    """The first differing token of every prompt whose two texts differ."""
    ids = {prompt.id: prompt.ids for prompt in prompts}
    theirs = {run.prompt: run.texts[0] for run in figures.of(asked.against.name)}
    found = []
    for run in figures.of(asked.setup.name):
        mine, other = run.texts[0], theirs[run.prompt]
        if mine == other:
            continue
        at = first_difference(mine, other)
        tokens = (other[at] if at < len(other) else None, mine[at] if at < len(mine) else None)
        context = [*ids[run.prompt], *mine[:at]]
        found.append(Parting(run.prompt, at, tokens, logit_gap(llm, context, tokens), len(context)))
    return found


def logit_gap(llm: LLM, context: Sequence[int], tokens: tuple[int | None, int | None]) -> float:
    """How far apart the target sees two tokens after this context, in one plain pass."""
    target = llm.engine.target
    probe = PlainSeq(-2, [*context], max_length=len(context) + 1)
    try:
        target.prefill([probe], Needs())
        scores = target.score([probe], TreeBatch.chains([[context[-1]]], target.device), Needs())
        assert scores.logits is not None
        row = scores.logits[0].float()  # [V]
    finally:
        target.release(probe)
    if tokens[0] is None or tokens[1] is None:
        best, second = row.topk(2).values.tolist()
        return float(best - second)
    return float((row[tokens[0]] - row[tokens[1]]).abs())


def _texts(llm: LLM, partings: Sequence[Parting], cell: Cell, total: int) -> Iterator[Finding]:
    if not is_comparable(llm, cell):
        yield Finding(
            "texts", "fine", f"the verifier {cell.verifier} guarantees the law, not the text, at this temperature",
            "set a seed and the verifier coupled to compare texts",
        )  # fmt: skip
        return
    if not partings:
        yield Finding("texts", "fine", f"all {total} are equal, token for token")
        return
    shared = llm.engine.target.shared()
    limit = TIE.get(torch.float32 if shared is None else shared.dtype, TIE[torch.float32])
    far = [parting for parting in partings if parting.gap > limit]
    shown = (far or list(partings))[0].in_words
    if cell.temperature > 0.0:
        limit_words = "at this temperature a gap says little; run with temperature 0"
        yield Finding("texts", "look", f"{len(partings)} of {total} differ; {shown}", limit_words)
    elif far:
        step = "this is not rounding: report it, with this output"
        yield Finding("texts", "bad", f"{len(far)} of {total} differ by more than a tie; {shown}", step)
    else:
        words = f"{len(partings)} of {total} differ, each at a near-tie that rounding decides; {shown}"
        yield Finding("texts", "look", words, "use float32 where texts must be equal token for token")


def _trees(figures: Figures, name: str) -> int:
    return sum(depth > 0 for run in figures.of(name) for text in run.drafts for _, depth, _ in text)


def _acceptance(figures: Figures, name: str) -> Iterator[Finding]:
    shares = figures.acceptance(name)
    trees = _trees(figures, name)
    if trees < ENOUGH:
        step = "give more or longer prompts, or a fixed budget: --drafter NAME:4"
        yield Finding("acceptance", "look", f"only {trees} trees were drafted: too few to tell", step)
    elif shares[0] < USELESS:
        step = "check that the drafter was made for this target: template, layers, vocabulary"
        yield Finding("acceptance", "bad", f"{shares[0]:.2f} at the first position: nearly all is rejected", step)
    elif shares[0] < LOW:
        step = "run `forerun advise` to see whether it pays at all on these prompts"
        yield Finding("acceptance", "look", f"{shares[0]:.2f} at the first position", step)
    else:
        per_round = figures.tokens_per_round(name) or 1.0
        yield Finding("acceptance", "fine", f"{shares[0]:.2f} at the first position, {per_round:.2f} tokens per round")


def _temperature(
    llm: LLM, figures: Figures, groups: Sequence[Group], settings: Settings, asked: Asked
) -> Iterator[Finding]:
    """How much lower is acceptance at this temperature than at 0?"""
    if asked.temperature == 0.0:
        return
    greedy = own_contender(llm, settings, Cell(asked.verifier), asked.setup)
    cold = Figures(list(alternate([greedy], groups, settings.max_tokens, 1))).acceptance(asked.setup.name)
    warm = figures.acceptance(asked.setup.name)
    if not cold or not warm:
        return
    words = f"acceptance {warm[0]:.2f} at temperature {asked.temperature:g}, {cold[0]:.2f} at 0"
    if warm[0] < 0.7 * cold[0]:
        step = "give requests a seed: coupled verification drafts with the same noise"
        yield Finding("temperature", "look", words, step)
    else:
        yield Finding("temperature", "fine", words)


def _templates(llm: LLM, prompts: Sequence[Prompt]) -> Iterator[Finding]:
    """A first token that appears twice means that the template was applied twice."""
    start = llm.tokenizer.bos_id
    twice = [prompt.id for prompt in prompts if start is not None and prompt.ids[:2] == (start, start)]
    if twice:
        step = "give messages, or the raw text without the beginning-of-sequence token"
        yield Finding("template", "bad", f"{len(twice)} prompts hold the first token twice, such as {twice[0]}", step)
    elif not llm.tokenizer.has_chat_template:
        step = "a drafter made for chats will not fit raw text: use the model's own template"
        yield Finding("template", "look", "the model has no chat template: prompts are raw text", step)
    else:
        yield Finding("template", "fine", "the model's own, once")


def marks_in(items: Sequence[Item]) -> Iterator[Finding]:
    """Messages that already hold a template's marks get a second template around them."""
    marked = [item.id for item in items if any(mark in m["content"] for m in item.messages for mark in MARKS)]
    if marked:
        step = "give the messages without the marks: the model's template is put around them"
        yield Finding("template", "bad", f"{len(marked)} prompts hold a template's marks, such as {marked[0]}", step)


def _contexts(llm: LLM, figures: Figures, prompts: Sequence[Prompt], asked: Asked) -> Iterator[Finding]:
    """Does acceptance drop where the context is long? A drafter is trained up to some length."""
    drafter = llm.engine.drafters.get(asked.setup.drafter or llm.engine.default_drafter)
    limit = drafter.draft.max_length if isinstance(drafter, ModelDrafter) else None
    ids = {prompt.id: len(prompt.ids) for prompt in prompts}
    longest = max(ids.values()) + max((len(run.texts[0]) for run in figures.runs), default=0)
    if limit is not None and longest > limit:
        step = "sequences beyond it are decoded plainly: use a drafter with a longer context, or n-gram"
        yield Finding("context", "bad", f"{longest} tokens, and the drafter takes {limit}", step)
        return
    if _trees(figures, asked.setup.name) < ENOUGH:
        yield Finding("context", "fine", f"up to {longest} tokens; too few trees to compare short and long ones")
        return
    shares = {
        f"{name} tokens": cell["accepted_counts"][0] / max(1, cell["accepted_counts"][1])
        for name, cell in figures.by_context(asked.setup.name).items()
        if cell["accepted_counts"][1] >= ENOUGH
    }
    if len(shares) < 2:  # all contexts are alike, more or less
        shares = dict(
            zip(("the shorter half", "the longer"), _by_context(figures.of(asked.setup.name), ids), strict=True)
        )
    words = f"up to {longest} tokens; acceptance " + ", ".join(f"{one:.2f} in {name}" for name, one in shares.items())
    near, *_, far = shares.values()
    if far < 0.5 * near:
        step = "the drafter may not be trained for such lengths: try n-gram, or train on longer texts with a window"
        yield Finding("context", "look", words, step)
    else:
        yield Finding("context", "fine", words)


def _by_context(runs: Sequence[Run], lengths: Mapping[str, int]) -> tuple[float, float]:
    """Acceptance at the first position below and above the middle of all contexts drafted at."""
    points = []
    for run in runs:
        at = lengths[run.prompt]
        for _, depth, kept in run.drafts[0]:
            if depth:
                points.append((at, kept > 0))
            at += kept + 1
    points.sort()
    half = len(points) // 2
    halves = (points[:half], points[half:])
    near, far = (sum(accepted for _, accepted in part) / max(1, len(part)) for part in halves)
    return near, far


_SAMPLE = [{"role": "user", "content": "Name three rivers."}]


def run_diagnosis(settings: Settings, setup: DrafterSetup, against: DrafterSetup) -> dict[str, Any]:
    items = load_suite(settings.suite, settings.tasks, settings.limit, settings.model)
    total = suite_size(settings.suite, settings.tasks)
    known = [_read(len(items), total, settings), *_checkpoints(settings), *marks_in(items)]
    counts = {"prompts_read": len(items), "prompts_there": total}
    try:
        llm, _ = load(settings)
    except VocabularyMismatch as error:
        known.append(Finding("vocabulary", "bad", str(error)))
        return {"model": settings.model, **counts, "findings": [asdict(one) for one in known], "ok": False}
    asked = Asked(setup, against, settings.temperatures[0], settings.verifiers[0])
    found = diagnose(llm, tokenise(llm, items, settings), settings, asked)
    findings = [*(asdict(one) for one in known), *found["findings"]]
    return {**found, **counts, "findings": findings, "ok": all(one["verdict"] != "bad" for one in findings)}


def _read(read: int, total: int, settings: Settings) -> Finding:
    """How many of the prompts are looked at."""
    name = "our own" if str(settings.suite) == BUILT_IN else str(settings.suite)
    if read == total:
        return Finding("prompts", "fine", f"all {total} of {name}")
    return Finding("prompts", "fine", f"{read} of {total} of {name}, {settings.limit} per task", "--limit 0 reads all")


def _checkpoints(settings: Settings) -> Iterator[Finding]:
    """Do target and draft model have the same tokens and the same chat template?"""
    if settings.draft_model is None:
        return
    from forerun.models.load.checkpoint import open_checkpoint

    try:
        ours = open_checkpoint(settings.model).tokenizer()
        theirs = open_checkpoint(settings.draft_model).tokenizer()
    except ForerunError:
        return  # a trained head has no tokenizer of its own; a missing model is reported by loading it
    mine, other = ours.vocabulary(), theirs.vocabulary()
    differing = sum(mine.get(token) != index for token, index in other.items())
    if differing:
        step = "draft with a model of the same family, or with n-gram"
        yield Finding("vocabulary", "bad", f"{differing} of {len(other)} tokens differ or are missing", step)
    else:
        yield Finding("vocabulary", "fine", f"{len(other)} tokens, each the same as the target's")
    if not (ours.has_chat_template and theirs.has_chat_template):
        return
    if list(ours.chat_ids(_SAMPLE)) != list(theirs.chat_ids(_SAMPLE)):
        step = "drafts follow the target's template, which this draft model was not trained on: expect less"
        yield Finding("template", "look", "target and draft model have different chat templates", step)
