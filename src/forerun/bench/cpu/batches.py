"""The batch sweep on a CPU: plain, each drafter under the controller, and the default, at every batch size."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from forerun.bench.batches.report import line
from forerun.bench.batches.sweep import PLAIN, Setup, Sweep, parse_batches
from forerun.bench.contenders import load
from forerun.bench.run import tokenise
from forerun.bench.settings import Settings
from forerun.bench.suites import load_suite

LEAST_TEXTS = 8


def measure_batches(settings: Settings, flags: argparse.Namespace) -> dict[str, Any]:
    """A row for every batch size and drafter; here a place in the batch is filled once, with eight texts at least."""
    sizes = parse_batches(flags.batches)
    llm, _ = load(settings)
    prompts = tokenise(llm, load_suite(settings.suite, settings.tasks, settings.limit), settings)
    setups = {PLAIN: Setup("none")}
    setups |= {
        one.name: Setup(one.name if one.head is not None else one.drafter or llm.engine.default_drafter)
        for one in settings.setups
        if one.budget is None
    }
    sweep = Sweep(
        llm.engine, [prompt.ids for prompt in prompts], settings.max_tokens, ignore_eos=settings.ignore_eos
    )
    rows = sweep.measure(setups, sizes, lambda batch: max(LEAST_TEXTS, batch), _say)
    return {"prompts": len(sweep.prompts), "default": llm.engine.default_drafter, "rows": rows}


def _say(row: dict[str, Any]) -> None:
    print(line(row), file=sys.stderr)
