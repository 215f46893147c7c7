"""Results to report on: runs with known speeds, summed up by the real code, under conditions that are written here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from forerun.measure.bench.alternate import Contender, Drafts, Run, differences
from forerun.measure.bench.compare import SCHEMA
from forerun.measure.bench.figures import Figures, summarise

TOKENS = 40
PARTS = {"draft": 0.001, "pass": 0.02, "verdict": 0.001, "host": 0.002}
DRAFTS: Drafts = ((4, 4, 3), (2, 2, 0), (2, 2, 2), (0, 0, 0))


def run_of(name: str, prompt: str, repeat: int, seconds: float, drafts: Drafts = DRAFTS) -> Run:
    ours = not name.startswith(("transformers", "llama"))
    task, text = prompt.split("-")[0], (tuple(range(TOKENS)),)
    return Run(
        name, prompt, task, repeat, text, seconds, TOKENS // 2, 0.75 * seconds,
        (PARTS,) * 4 if ours else (), (drafts,) if ours and name != "plain" else (),
    )  # fmt: skip


def result_of(
    seconds: Mapping[str, Sequence[float]], tasks: Sequence[str] = ("qa", "rag"), **conditions: Any
) -> dict[str, Any]:
    """A whole document: what each contender took for each prompt, two repeats of it; prompts go round the tasks."""
    count = len(next(iter(seconds.values())))
    prompts = [f"{tasks[i % len(tasks)]}-{i}" for i in range(count)]
    runs = [
        run_of(name, prompt, repeat, spent)
        for name, times in seconds.items()
        for prompt, spent in zip(prompts, times, strict=True)
        for repeat in range(2)
    ]
    contenders = [Contender(name, lambda ids, most: None) for name in seconds]  # type: ignore[arg-type,return-value]
    figures = Figures(runs)
    found = summarise(figures, contenders, differences(runs, contenders))
    cell = {"verifier": "auto", "temperature": 0.0, "batch": 1}
    rates = {name: row["tokens_per_second"] for name, row in found["contenders"].items()}
    keys = ("equal", "compared", "differing", "speedup", "by_task")
    known = {
        "model": "tiny", "tasks": figures.tasks, "prompts": count, "repeats": 2, "max_tokens": TOKENS,
        "threads": 1, "cores": 2, "busy": False, "load_before": 0.25, "reference": next(iter(seconds)),
        "device": "cpu", "cpu": "a processor", "dtype": "gguf", "date": "2026-01-02T03:04:05", "commit": "abc",
    }  # fmt: skip
    return {
        "benchmark": "forerun",
        "schema": SCHEMA,
        "t": {"1": 0.01, "2": 0.011, "8": 0.02},
        **found,
        "cells": [{**cell, **{key: found[key] for key in keys}, "tokens_per_second": rates}],
        "samples": [
            {
                "prompt": prompts[0], "task": "qa", "drafter": "auto", "speedup": 1.5, "tokens_per_round": 2.0,
                "pieces": [["one <b>", True], [" two", False]],
            }
        ],
        "conditions": {**known, **conditions},
    }  # fmt: skip


def clear_gain(**conditions: Any) -> dict[str, Any]:
    """Six prompts, on all of which `auto` is about 1.5 times as fast and `ngram:8` about as fast as plain."""
    return result_of(
        {
            "plain": [3.0, 3.0, 3.0, 3.0, 3.0, 3.0],
            "auto": [2.0, 1.9, 2.1, 2.0, 2.05, 1.95],
            "ngram:8": [3.0, 2.6, 3.4, 3.1, 2.9, 3.0],
        },
        **conditions,
    )


def no_clear_gain(**conditions: Any) -> dict[str, Any]:
    """Gains on some prompts and losses on others."""
    return result_of({"plain": [3.0, 3.0, 3.0, 3.0], "auto": [2.0, 3.9, 2.5, 3.2]}, **conditions)


def one_prompt(**conditions: Any) -> dict[str, Any]:
    """Three times as fast, on one prompt."""
    return result_of({"plain": [3.0], "auto": [1.0]}, **conditions)
