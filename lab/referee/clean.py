"""How often the referee is wrong: right engines that fail, simulated and real, and planted bugs that are missed.

    python -m lab referee-clean --simulated 1000 --real 20 --seeds 20 --json benchmarks/referee-clean.json

A simulated run samples all ten laws, 2,000 tokens each, from tables of its own, and compares two samples of one law;
the checks and their bettors are those of a run of the whole suite. A real run is all checks but that of speed on our
own engine, with another drafter, other tables and other prompts each time. A bug is looked for by the check that must
find it, with the tokens and the false alarms that this check has at the default budget.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forerun.referee.ask import symbol_ids
from forerun.referee.checkpoint import make_model
from forerun.referee.evidence import FALSE_ALARMS, Drawn, Evidence, TwoSamples
from forerun.referee.law_checks import LAWS, LENGTH, bettors_of
from forerun.referee.planted import BUGS, FOUND_BY, Planted
from forerun.referee.report import as_document
from forerun.referee.suite import Budget, Court, chosen_checks, run_suite
from forerun.referee.tables import FAR, Contexts, Floats, Ints, Pair, Rules, make_pair
from forerun.referee.targets import ForerunTarget
from lab.referee.document import framed, slim

DRAFTERS = {"ngram": "", "draft_model": "draft", "eagle3": "eagle3", "suffix": "", "recycling": ""}
TEXTS, BATCHES, PAIRS = 84, 2, 400  # of a simulated law; of two samples
QUESTION = "How often does the referee fail a right engine, and how often does it miss a planted bug?"


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--simulated", type=int, default=1000, help="simulated clean runs; default: %(default)s")
    parser.add_argument("--real", type=int, default=20, help="clean runs of our own engine; default: %(default)s")
    parser.add_argument("--seeds", type=int, default=20, help="runs with each planted bug; default: %(default)s")
    parser.add_argument("--seconds", type=float, default=60.0, help="of each real run; default: %(default)s")
    parser.add_argument("--json", type=Path, required=True, metavar="PATH", help="write the result document there")
    parser.add_argument("--conditions", default="", help="what else is true of the machine, in words")
    parser.add_argument("--commit", default="", help="where there is no git to ask")


def work(flags: argparse.Namespace) -> int:
    """Exit code 1 when a right engine failed or a bug was missed."""
    raw: dict[str, Any] = {"simulated": [], "planted": {}, "real": []}
    raw["simulated"] = [simulated(seed) for seed in range(flags.simulated)]
    _say(f"{flags.simulated} simulated runs, smallest p-value {min(raw['simulated'], default=1.0):.2g}")
    for bug in BUGS if flags.seeds else ():
        raw["planted"][bug] = [planted(bug, seed) for seed in range(flags.seeds)]
        _say(f"{bug}: found in {sum(each['found'] for each in raw['planted'][bug])} of {flags.seeds}")
    for seed in range(flags.real):
        raw["real"].append(real(seed, flags.seconds))
        report = raw["real"][-1]["report"]
        _say(f"real run {seed}: {report['tokens']} tokens, passed: {report['passed']}")
        _save(raw, flags)
    found = _save(raw, flags)
    return int(any(row["failed"] for row in found["clean"]["rows"]) or any(r["missed"] for r in _bugs(raw)["rows"]))


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
        rows.append({"kind": "simulated: the laws, and two samples of one law", "runs": len(raw["simulated"]),
                     "tokens": len(LAWS) * TEXTS * LENGTH, "failed": failed})  # fmt: skip
    for drafter in DRAFTERS:
        some = [each["report"] for each in raw["real"] if each["drafter"] == drafter]
        if some:
            tokens = round(sum(each["tokens"] for each in some) / len(some))
            failed = sum(any(one["status"] == "fail" for one in each["checks"]) for each in some)
            rows.append({"kind": f"real: our engine, {drafter}", "runs": len(some), "tokens": tokens, "failed": failed})
    columns = {"kind": ["clean runs"], "runs": ["runs", ",d"], "tokens": ["tokens a run, about", ",d"],
               "failed": ["failed", "d"]}  # fmt: skip
    found = {"clean": {"columns": columns, "rows": rows}}
    return found | ({"planted": _bugs(raw)} if raw["planted"] else {})


def _bugs(raw: dict[str, Any]) -> dict[str, Any]:
    columns = {"bug": ["planted bug"], "check": ["check"], "runs": ["runs", "d"], "missed": ["missed", "d"],
               "most": ["most tokens it took", ",d"], "has": ["tokens the check has", ",d"]}  # fmt: skip
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
    """The false alarms that one check may give."""
    return FALSE_ALARMS / sum(each.bets for each in chosen_checks())


def simulated(seed: int) -> float:
    """The smallest p-value of one clean run, over its laws."""
    rng, pair = np.random.default_rng(seed), make_pair(seed)
    court, found = Court(Planted(pair), pair), []
    for law in LAWS.values():
        evidence = Evidence(bettors_of(court, law.rules))
        for drawn in _texts(pair, law.rules, rng):
            evidence.take(drawn, pair.target.laws(drawn.contexts, law.rules)[1])
        assert evidence.impossible is None
        found.append(evidence.p_value)
    none = np.zeros((1, pair.target.size))
    test, first = (
        TwoSamples(),
        pair.target.laws(_contexts(pair, rng.integers(0, 20, (1, 9)), none, none > 0), Rules())[0][0],
    )
    for one, other in rng.choice(len(first), (PAIRS, 2), p=first):
        test.take(str(one), str(other))
    return float(min(*found, test.p_value))


def _contexts(pair: Pair, tokens: Ints, used: Floats, seen: NDArray[np.bool_]) -> Contexts:
    """Of the next token of n texts, tokens [n, length]."""
    return Contexts(np.stack([tokens[:, -1], tokens[:, -2], tokens[:, -1 - FAR]], axis=1), used, seen)


def _texts(pair: Pair, rules: Rules, rng: np.random.Generator) -> Iterator[Drawn]:
    """Texts drawn from the law itself, in batches."""
    table, steps, rows = pair.target, [], np.arange(TEXTS)
    tokens, ones = rng.integers(0, len(table.alphabet), (TEXTS, 20)), np.eye(table.size)
    used, seen = np.zeros((TEXTS, table.size)), ones[tokens].any(1)
    going, before = np.ones(TEXTS, dtype=bool), np.full(TEXTS, 0.5)
    for step in range(LENGTH):
        contexts = _contexts(pair, tokens[:, -1 - FAR :], used, seen)
        laws: Floats = table.laws(contexts, rules)[0]
        sums = laws.cumsum(-1)
        drawn = np.minimum((sums <= rng.random((TEXTS, 1)) * sums[:, -1:]).sum(-1), table.end)
        steps.append((contexts, laws, drawn, np.full(TEXTS, step), before, going))
        before = (sums - laws / 2)[rows, drawn]
        going = going & (drawn != table.end)
        tokens = np.concatenate([tokens, drawn[:, None]], axis=1)
        used, seen = used + ones[drawn], seen | (ones[drawn] > 0)
    for part in np.array_split(np.arange(TEXTS), BATCHES):
        keeps = [part[step[-1][part]] for step in steps]

        def joined(name: int, keeps: Any = keeps) -> Any:
            return np.concatenate([step[name][keep] for step, keep in zip(steps, keeps, strict=True)])

        kept = [step[0].take(keep) for step, keep in zip(steps, keeps, strict=True)]
        contexts = Contexts(*(np.concatenate([getattr(c, n) for c in kept]) for n in ("last", "used", "seen")))
        yield Drawn(contexts, joined(1), pair.draft.laws(contexts, rules)[0], joined(2), joined(3), joined(4))


def planted(bug: str, seed: int) -> dict[str, Any]:
    """Is the bug found by its check, with what this check has in a run of all of them?"""
    whole = chosen_checks()
    name = FOUND_BY[bug]
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
