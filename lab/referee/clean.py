"""How often the referee is wrong: right engines that fail, simulated and real, and planted bugs that are missed.

    python -m lab referee-clean --simulated 1000 --real 20 --seeds 20 --json clean.json  # make referee

A simulated run samples all ten laws, up to 1,008 tokens each, and compares two samples of one law; the checks and their
bettors are those of a run of the whole suite. A real run is all checks but that of speed on our own engine, with
another drafter, other tables and other prompts each time. A bug is looked for by the check that must find it, with the
tokens and the false alarms that this check has at the default budget.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forerun.referee.ask import symbol_ids
from forerun.referee.checkpoint import make_model
from forerun.referee.evidence import FALSE_ALARMS, Drawn, Evidence, TwoSamples
from forerun.referee.law_checks import LAWS, LENGTH, bettors_of
from forerun.referee.planted import BUGS, Planted
from forerun.referee.report import as_document
from forerun.referee.suite import Budget, Court, chosen_checks, run_suite
from forerun.referee.tables import FAR, Contexts, Floats, Ints, Pair, Rules, make_pair
from forerun.referee.targets import ForerunTarget
from lab.referee.command import framed, slim

DRAFTERS = {"ngram": "", "draft_model": "draft", "eagle3": "eagle3", "suffix": "", "recycling": ""}
TEXTS, BATCHES, PAIRS, BLOCK = 42, 2, 300, 50  # of a simulated law; of two samples; runs with the same tables
_ARRAYS = ("laws", "draft", "tokens", "position", "before")
QUESTION = "How often does the referee fail a right engine, and how often does it miss a planted bug?"


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--simulated", type=int, default=1000, help="simulated clean runs; default: %(default)s")
    parser.add_argument("--real", type=int, default=20, help="clean runs of our own engine; default: %(default)s")
    parser.add_argument("--seeds", type=int, default=20, help="runs with each planted bug; default: %(default)s")
    parser.add_argument("--seconds", type=float, default=60.0, help="of each real run; default: %(default)s")
    parser.add_argument("--processes", type=int, help="for all but real runs; default: one per core")
    parser.add_argument("--json", type=Path, required=True, metavar="PATH", help="write the result document there")
    parser.add_argument("--conditions", default="", help="what else is true of the machine, in words")
    parser.add_argument("--commit", default="", help="where there is no git to ask")


def work(flags: argparse.Namespace) -> int:
    """Exit code 1 when a right engine failed or a bug was missed."""
    raw: dict[str, Any] = {"simulated": [], "planted": {}, "real": []}
    starts = range(0, flags.simulated, BLOCK)
    with ProcessPoolExecutor(flags.processes) as pool:
        for found in pool.map(simulated, starts, [min(BLOCK, flags.simulated - start) for start in starts]):
            raw["simulated"] += found
            _say(f"{len(raw['simulated'])} simulated runs, smallest p-value {min(raw['simulated']):.2g}")
        seeds = range(flags.seeds)
        tasks = {bug: [pool.submit(planted, bug, seed) for seed in seeds] for bug in BUGS if flags.seeds}
        for bug, some in tasks.items():
            raw["planted"][bug] = [each.result() for each in some]
            _say(f"{bug}: found in {sum(each['found'] for each in raw['planted'][bug])} of {flags.seeds}")
    for seed in range(flags.real):
        raw["real"].append(real(seed, flags.seconds))
        report = raw["real"][-1]["report"]
        _say(f"real run {seed}: {report['tokens']} tokens, passed: {report['passed']}")
        _save(raw, flags)
    rows = [row for table in _save(raw, flags).values() for row in table["rows"]]
    return int(any(row.get("failed") or row.get("missed") for row in rows))


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _save(raw: dict[str, Any], flags: argparse.Namespace) -> dict[str, Any]:
    words = ["--simulated", str(flags.simulated), "--real", str(flags.real), "--seeds", str(flags.seeds)]
    command = shlex.join(["python", "-m", "lab", "referee-clean", *words, "--seconds", f"{flags.seconds:g}"])
    document = framed(QUESTION, command, flags.conditions or "-", raw, tables(raw), flags.commit)
    flags.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return tables(raw)


def tables(raw: dict[str, Any]) -> dict[str, Any]:
    """Of the raw samples."""
    limit, rows = alarms(), []
    if raw["simulated"]:
        failed = sum(p <= limit for p in raw["simulated"])
        rows.append({"kind": "simulated: the laws, two samples of one law", "runs": len(raw["simulated"]),
                     "checks": len(LAWS) + 1,
                     "tokens": len(LAWS) * TEXTS * LENGTH, "failed": failed})  # fmt: skip
    for drafter in DRAFTERS:
        some = [each["report"] for each in raw["real"] if each["drafter"] == drafter]
        if some:
            tokens = round(sum(each["tokens"] for each in some) / len(some))
            failed = sum(any(one["status"] == "fail" for one in each["checks"]) for each in some)
            passed = sum(one["status"] == "pass" for each in some for one in each["checks"]) / len(some)
            rows.append({"kind": f"real: our engine, {drafter}", "runs": len(some), "checks": round(passed, 1),
                         "tokens": tokens, "failed": failed})  # fmt: skip
    columns = {"kind": ["correct engines"], "runs": ["runs", ",d"], "checks": ["checks per run", ".0f"],
               "tokens": ["tokens per run, about", ",d"],
               "failed": ["failed", "d"]}  # fmt: skip
    found = {"clean": {"columns": columns, "rows": rows}} if rows else {}
    return found | ({"planted": _bugs(raw)} if raw["planted"] else {})


def _bugs(raw: dict[str, Any]) -> dict[str, Any]:
    columns = {"bug": ["planted bug"], "check": ["check"], "runs": ["runs", "d"], "missed": ["missed", "d"],
               "most": ["most tokens needed", ",d"], "has": ["tokens of the check", ",d"]}  # fmt: skip
    rows = [
        {
            "bug": f"`{bug}`", "check": f"`{runs[0]['check']}`", "runs": len(runs),
            "missed": sum(not each["found"] for each in runs), "most": max(each["tokens"] for each in runs),
            "has": runs[0]["has"],
        }
        for bug, runs in raw["planted"].items()
    ]  # fmt: skip
    return {"columns": columns, "rows": rows}


def alarms() -> float:
    return FALSE_ALARMS / sum(each.bets for each in chosen_checks())


def simulated(block: int, runs: int) -> list[float]:
    """The smallest p-value of each clean run of a block, over all laws; a block has tables of its own."""
    rng, pair = np.random.default_rng(block), make_pair(block)
    court, found = Court(Planted(pair), pair), np.ones(runs)
    for law in LAWS.values():
        drawn, run = _texts(pair, law.rules, rng, runs)
        clear = pair.target.laws(drawn.contexts, law.rules)[1]
        for i in range(runs):
            evidence = Evidence(bettors_of(court, law.rules))
            for rows in np.array_split(np.flatnonzero(run == i), BATCHES):
                evidence.take(_taken(drawn, rows), clear[rows])
            assert evidence.impossible is None
            found[i] = min(found[i], evidence.p_value)
    for i in range(runs):
        test, first = TwoSamples(), _taken(drawn, np.array([i])).laws[0]
        for one, other in rng.choice(len(first), (PAIRS, 2), p=first):
            test.take(str(one), str(other))
        found[i] = min(found[i], test.p_value)
    return [float(each) for each in found]


def _taken(drawn: Drawn, rows: Ints) -> Drawn:
    return Drawn(drawn.contexts.take(rows), *(getattr(drawn, name)[rows] for name in _ARRAYS))


def _texts(pair: Pair, rules: Rules, rng: np.random.Generator, runs: int) -> tuple[Drawn, Ints]:
    """Tokens of texts drawn from the law itself, and the run that each is of, text by text."""
    table, steps, n = pair.target, [], TEXTS * runs
    tokens, ones = rng.integers(0, len(table.alphabet), (n, 1 + FAR)), np.eye(table.size)
    used = np.zeros((n, table.size))
    seen: NDArray[np.bool_] = np.asarray(ones[tokens].sum(1) > 0)
    going, before = np.ones(n, dtype=bool), np.full(n, 0.5)
    for step in range(LENGTH):
        contexts = Contexts(tokens[:, [-1, -2, -1 - FAR]], used, seen)
        laws: Floats = table.laws(contexts, rules)[0]
        sums = laws.cumsum(-1)
        drawn = np.minimum((sums <= rng.random((n, 1)) * sums[:, -1:]).sum(-1), table.end)
        steps.append((contexts.last, used, seen, laws, drawn, np.full(n, step), before, going))
        before = (sums - laws / 2)[np.arange(n), drawn]
        going = going & (drawn != table.end)
        tokens = np.concatenate([tokens[:, 1:], drawn[:, None]], axis=1)
        used, seen = used + ones[drawn], seen | (ones[drawn] > 0)
    last, used, seen, laws, taken, position, earlier, kept = (
        np.stack(each, axis=1).reshape(n * LENGTH, *each[0].shape[1:]) for each in zip(*steps, strict=True)
    )
    contexts = Contexts(last, used, seen).take(keep := np.flatnonzero(kept))
    draft = pair.draft.laws(contexts, rules)[0]
    return Drawn(contexts, laws[keep], draft, taken[keep], position[keep], earlier[keep]), keep // (LENGTH * TEXTS)


def planted(bug: str, seed: int) -> dict[str, Any]:
    """Is the bug found by its check, with what this check has in a run of all of them?"""
    whole = chosen_checks()
    name = BUGS[bug][0]
    share = next(each.share for each in whole if each.name == name)
    tokens = max(2000, int(54_000 * share / sum(each.share for each in whole)))
    pair = make_pair(0)
    engine, bets = Planted(pair, frozenset([bug]), seed=seed), sum(each.bets for each in whole)
    report = run_suite(engine, pair, Budget(tokens, 600), chosen_checks([name]), seed, false_alarms=1e-3 / bets)
    return {"found": bool(report.failed), "check": name, "tokens": report.tokens, "has": tokens}


def real(seed: int, seconds: float) -> dict[str, Any]:
    """All checks but that of speed on our own engine."""
    drafter = list(DRAFTERS)[seed % len(DRAFTERS)]
    pair = make_pair(seed)
    with tempfile.TemporaryDirectory() as name:
        made = make_model(Path(name), pair)
        settings = {"drafter": drafter, "controller": "fixed", "budget": 4}
        if DRAFTERS[drafter]:
            settings["draft_model"] = f"{name}/{DRAFTERS[drafter]}"
        target = ForerunTarget(str(made.target), {"speculative_config": settings}, symbol_ids(pair.target))
        checks = [each for each in chosen_checks() if each.name != "speed.load"]
        report = run_suite(target, pair, Budget(60_000, seconds), checks, seed)
        target.close()
    return {"drafter": drafter, "seed": seed, "report": slim(as_document(report))}
