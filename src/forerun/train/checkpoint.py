"""Checkpoints of a training run: weights, the optimiser's moments, the step and the run's options.

A checkpoint is written whole or not at all. Reading one checks all of it: a file that is damaged, or of another run, is
reported in one line before any of it reaches the module in training. One without the optimiser's moments (tools/runs.py
makes such) gathers them anew; its step and its learning rate go on.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from math import inf
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from forerun.core.errors import DamagedFile, InvalidInput, brief
from forerun.models.load.weights import write_tensors
from forerun.train.options import DataOptions, TrainOptions

# may change between resumptions
_FREE = ("steps", "eval_every", "eval_batches", "measure_on", "patience", "save_every", "device", "compile", "out")
_MOMENTS = ("step", "exp_avg", "exp_avg_sq")  # of AdamW
_BEST = {"texts": str, "step": int, "tokens_per_round": float, "since": int}  # facts about the best weights
MOMENT = "momentum_buffer"  # what Muon keeps of a matrix
_BEFORE = "checkpoint.before"  # the folder of the checkpoint before, while the next one takes its place


@dataclass(frozen=True, slots=True)
class Saved:
    step: int
    weights: dict[str, Tensor]
    # parameter -> what the optimiser keeps of it; none before its first step
    moments: dict[str, dict[str, Tensor]]
    best: Best | None = None
    tokens: int = 0  # seen so far
    seconds: float = 0.0  # of all steps


@dataclass(frozen=True, slots=True)
class Best:
    """The weights that wrote most tokens per round through the texts of --measure-on."""

    texts: str  # the hash of these texts
    step: int
    tokens_per_round: float
    weights: dict[str, Tensor]
    since: int = 0  # evaluations in a row that were no better

    def facts(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in _BEST}


def write_checkpoint(
    folder: Path, step: int, options: TrainOptions, named: Mapping[str, nn.Parameter],
    optimizer: torch.optim.Optimizer, best: Best | None = None, tokens: int = 0, seconds: float = 0.0,
) -> None:  # fmt: skip
    """Into `checkpoint` of a run's folder, in place of the one before."""
    part, kept, before = folder / "checkpoint.part", _kept(folder), folder / _BEFORE
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    write_tensors(part / "weights.safetensors", {n: p.detach().contiguous() for n, p in named.items()})
    state = optimizer.state_dict()["state"]
    moments: dict[str, Tensor] = {}
    for i, name in enumerate(named):
        for key, value in state.get(i, {}).items():
            moments[f"{name}|{key}"] = torch.as_tensor(value).detach().clone()
    write_tensors(part / "optimizer.safetensors", moments)
    known: dict[str, Any] = {"step": step, "tokens": tokens, "seconds": seconds, "options": asdict(options)}
    if best is not None:
        write_tensors(part / "best.safetensors", best.weights)
        known["best"] = best.facts()
    (part / "run.json").write_text(json.dumps(known, indent=1))
    shutil.rmtree(before, ignore_errors=True)
    if kept.exists():
        kept.replace(before)
    part.replace(kept)
    shutil.rmtree(before, ignore_errors=True)


def _kept(folder: Path) -> Path:
    """Where a run's checkpoint is. A process that was killed between two renames has left the one before aside."""
    kept, before = folder / "checkpoint", folder / _BEFORE
    if before.is_dir() and not kept.exists():
        before.replace(kept)
    return kept


def refuse_another_run(folder: Path, options: TrainOptions) -> None:
    """Raise where the folder holds a checkpoint of other settings: asked before a target is loaded for minutes."""
    if (_kept(folder) / "run.json").is_file():
        _read_run(folder, options)


def _read_run(folder: Path, options: TrainOptions) -> Any:
    """What the file says; the settings are those of the run."""
    kept = _kept(folder)
    try:
        known = json.loads((kept / "run.json").read_text(encoding="utf-8"))
        _, theirs = known["step"], dict(known["options"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise _damaged(kept, brief(error)) from None
    _must_be_ours(folder, theirs, options)
    return known


def read_checkpoint(folder: Path, options: TrainOptions, named: Mapping[str, nn.Parameter]) -> Saved | None:
    """The checkpoint in a run's folder, if there is one; it must be of a run with these options and parameters."""
    kept = _kept(folder)
    if not (kept / "run.json").is_file():
        return None
    known = _read_run(folder, options)
    step = known["step"]
    try:
        weights, flat = load_file(kept / "weights.safetensors"), load_file(kept / "optimizer.safetensors")
    except (OSError, ValueError, SafetensorError) as error:
        raise _damaged(kept, brief(error)) from None
    tokens, seconds = known.get("tokens", 0), known.get("seconds", 0.0)  # none in older files
    if type(step) is not int or step < 0:
        raise _damaged(kept, f"it was saved at step {step!r:.40}")
    if type(tokens) is not int or type(seconds) is not float or not (tokens >= 0 and 0 <= seconds < inf):
        raise _damaged(kept, f"it was saved after {tokens!r:.40} tokens and {seconds!r:.40} seconds")
    moments: dict[str, dict[str, Tensor]] = {}
    for key, tensor in flat.items():
        name, _, kind = key.partition("|")
        moments.setdefault(name, {})[kind] = tensor
    for name, parameter in named.items():
        found = moments.get(name, {})
        if name not in weights or weights[name].shape != parameter.shape:
            raise _damaged(kept, f"{name!r} is missing or not {tuple(parameter.shape)}")
        shapes = {kind: tuple(found[kind].shape) for kind in found}
        adam = dict.fromkeys(_MOMENTS[1:], tuple(parameter.shape)) | {"step": ()}
        if found and shapes not in (adam, {MOMENT: tuple(parameter.shape), "step": ()}):
            raise _damaged(kept, f"what the optimiser kept of {name!r} does not fit it")
    return Saved(step, weights, moments, _read_best(kept, known, named), tokens, seconds)


def _read_best(kept: Path, known: Mapping[str, Any], named: Mapping[str, nn.Parameter]) -> Best | None:
    if not (facts := known.get("best")):
        return None
    try:
        weights = load_file(kept / "best.safetensors")
        kinds = {name: type(facts[name]) for name in _BEST}
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise _damaged(kept, brief(error)) from None
    if kinds != _BEST or any(n not in weights or weights[n].shape != p.shape for n, p in named.items()):
        raise _damaged(kept, "the best weights are not those of this run")
    return Best(weights=weights, **{name: facts[name] for name in _BEST})


def _must_be_ours(folder: Path, theirs: Mapping[str, Any], options: TrainOptions) -> None:
    ours = json.loads(json.dumps(asdict(options)))
    for name, value in theirs.items():
        if name not in _FREE and ours.get(name) != value:
            raise InvalidInput(
                f"{folder} holds a run with {name[:40]}={value!r:.80}, not {ours.get(name)!r:.80}; "
                "resume with the same settings or give another --out"
            )


def _damaged(kept: Path, why: str) -> DamagedFile:
    return DamagedFile(f"the checkpoint in {kept} is damaged ({why}); remove that folder to begin the run again")


def write_provenance(folder: Path, options: TrainOptions | DataOptions, **facts: Any) -> None:
    """Write provenance.json beside the output; FORERUN_COMMIT names the commit where git is not available."""
    named = {name: Path(given).name for name in ("data", "init") if (given := getattr(options, name, ""))}
    record = {
        "made": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": _commit(),
        "arguments": {**asdict(options), **named, "out": folder.name},
        "versions": {name: _version(name) for name in ("forerun", "torch", "transformers", "safetensors")},
        "python": platform.python_version(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine(),
        **facts,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "provenance.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def _commit() -> str:
    here = Path(__file__).parent
    if named := os.environ.get("FORERUN_COMMIT"):
        return named
    try:
        asked = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=here, capture_output=True, text=True, timeout=10, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return asked.stdout.strip() or "unknown"


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"
