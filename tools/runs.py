"""Training runs: pack them for another machine, or compare those that had as many minutes each.

    python tools/runs.py pack --out packed runs/dspark runs/eagle1
    python tools/runs.py race --out methods.json runs/dspark runs/eagle1

`pack` collects the head, its provenance and log, and its checkpoint with weights in bfloat16 and without the
optimiser's moments: a sixth of its size. `race` writes a result document of what `--measure-on` counted.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from safetensors.torch import load_file

from forerun.core.errors import ForerunError, ModelNotFound
from forerun.models.load.weights import write_tensors
from forerun.train.curves import evaluations, read_curve

_CHECKPOINT, _WEIGHTS = "checkpoint", ("weights.safetensors", "best.safetensors")


def pack_run(run: Path, out: Path, *, state: bool = True) -> int:
    """One run into a folder of its name, with its checkpoint or without; returns its size in bytes."""
    if not any((run / name).is_file() for name in ("config.json", f"{_CHECKPOINT}/run.json")):
        raise ModelNotFound(f"{run} holds neither a head nor a checkpoint; name the folder of a run")
    folder = out / run.name
    shutil.copytree(run, folder, ignore=shutil.ignore_patterns(f"{_CHECKPOINT}*"), dirs_exist_ok=True)
    if state and (kept := run / _CHECKPOINT).is_dir():
        narrow = folder / _CHECKPOINT
        narrow.mkdir(exist_ok=True)
        for file in [file for name in _WEIGHTS if (file := kept / name).is_file()]:
            write_tensors(narrow / file.name, {n: w.to(torch.bfloat16) for n, w in load_file(file).items()})
        write_tensors(narrow / "optimizer.safetensors", {})
        shutil.copy(kept / "run.json", narrow / "run.json")
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def minutes_at(rows: Sequence[dict[str, Any]]) -> dict[int, float]:
    """How long a run had learnt at each of its steps; one that was slow, as it compiled, counts as the median step."""
    seconds = [row["seconds"] for row in rows if row["step"]]
    usual, found, total = median(seconds or [0.0]), dict[int, float](), 0.0
    for row in rows:
        total += min(row["seconds"], 3.0 * usual) if row["step"] else 0.0
        found[row["step"]] = total / 60
    return found


def race(folders: Sequence[Path]) -> dict[str, Any]:
    """A result document with one row for every run."""
    runs, rows, most = [evaluations(folder) for folder in folders], list[dict[str, Any]](), 0
    for folder, run in zip(folders, runs, strict=True):
        made = json.loads((folder / "provenance.json").read_text(encoding="utf-8"))
        # a start may be there twice
        steps = {one["step"]: one for one in run["curve"] if one["walked_tokens_per_round"]}
        times, walked = minutes_at(read_curve(folder)), [*steps.values()]
        row = {"method": folder.name, "parameters": made["parameters"], "minutes": times[walked[-1]["step"]]}
        for i, one in enumerate(walked):
            row[f"at{i}"] = {"minutes": times[one["step"]], "tokens_per_round": one["walked_tokens_per_round"]}
        rows.append(row | {"steps": walked[-1]["step"], "tokens": walked[-1]["tokens"]})
        most = max(most, len(walked))
    columns = {"method": ["method"], "parameters": ["parameters", ",d"], "steps": ["steps", ",d"]}
    columns |= {"minutes": ["minutes", ".1f"], "tokens": ["answer tokens seen", ",d"]}
    columns |= {f"at{i}": [f"evaluation {i}", ".2f"] for i in range(most)}
    return {
        "question": "Which drafter writes most tokens a round after as many minutes of training?",
        "command": "bash tools/train_heads.sh data race",
        "commit": str(runs[0].get("commit", ""))[:7],
        "date": made["made"][:10],
        "machine": f"one {made['device']}, torch {made['versions']['torch']}",
        "conditions": "Every method has learnt from the same texts for as long. Counted: rounds through greedy "
        "texts of the suite, in chains of 5 or whole blocks.",
        "raw_samples": [{"run": run["run"], "curve": run["curve"], "arguments": run.get("arguments")} for run in runs],
        "tables": {"curve": {"columns": columns, "rows": rows}},
    }


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="tools/runs.py", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("what", choices=("pack", "race"))
    parser.add_argument("runs", nargs="+", type=Path, help="folders of training runs")
    parser.add_argument("--out", required=True, type=Path, help="the folder of copies, or the document")
    parser.add_argument("--heads-only", action="store_true", help="no checkpoints: nothing can be continued")
    given = parser.parse_args(words)
    if given.what == "race":
        given.out.write_text(json.dumps(race(given.runs), indent=1) + "\n", encoding="utf-8")
        return 0
    try:
        for run in given.runs:
            print(f"{run.name}: {pack_run(run, given.out, state=not given.heads_only) / 1e6:.1f} MB")
    except ForerunError as error:
        print(" ".join(str(error).split()), file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
