"""Run `forerun diagnose`: checks of the checkpoints first, then checks that need a run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from forerun.bench.contenders import load
from forerun.bench.run import tokenise
from forerun.bench.settings import DrafterSetup, Settings
from forerun.bench.suites import BUILT_IN, load_suite
from forerun.diagnose.checks import Asked, Finding, diagnose, marks_in
from forerun.errors import ForerunError, VocabularyMismatch

_SAMPLE = [{"role": "user", "content": "Name three rivers."}]


def run_diagnosis(settings: Settings, setup: DrafterSetup, against: DrafterSetup) -> dict[str, Any]:
    """Everything that was found, as one document."""
    items = load_suite(settings.suite, settings.tasks, settings.limit)
    total = len(load_suite(settings.suite, settings.tasks))
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
    return Finding(
        "prompts", "fine", f"{read} of {total} of {name}, {settings.limit} per task", "--limit 0 reads all"
    )


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
