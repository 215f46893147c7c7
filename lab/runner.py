"""Runs a command of the lab: one command line, one result document, one way to report a user's error.

A command is a module. `add_flags(parser)` names its flags, most of them by `share`. One that measures has
`measure(run)`, which returns what it found, and may save it as it grows by `run.save`; `show(document, flags)` prints
tables for a person and draws plots. One that measures nothing, as a server, has `work(flags)`: the exit code.

Every document has the same frame: `benchmark`, `command`, `conditions` (machine, commit, date, load before) and `equal`
(are all texts those that they must be?). It is the last line of stdout, and `--json` writes it to a file.
Exit code 1: a text differs; 2: a user's error, which is one line.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from forerun.core.errors import ForerunError
from forerun.measure.machine import cores, is_busy, load_average, machine_facts

Document = dict[str, Any]

COMMANDS = {
    "cpu": ("lab.cpu", "ratios over transformers, llama.cpp and our plain loop; batches (make bench-cpu)"),
    "gpu": ("lab.gpu.command", "t(n), rounds and texts in batches of 1 to 128 (make bench-gpu)"),
    "spec": ("lab.spec.command", "every drafter on Spec-Bench's tasks, one table (make bench-spec)"),
    "serve": ("lab.serve.command", "a server under load, speculation off, fixed, adaptive (make bench-serve)"),
    "adapters": ("lab.gpu.adapters", "a batch of many LoRA adapters beside the same batch of the base, on a GPU"),
    "moe": ("lab.moe.command", "a mixture of experts beside its dense twin"),
    "translate": ("lab.translate", "an encoder-decoder against transformers"),
    "agents": ("lab.agents", "predicted outputs, structured output, thinking, and a server's overhead"),
    "host": ("lab.host", "the host's time per round over an emulated device"),
    "referee": ("lab.referee.command", "`forerun verify` against real engines"),
    "referee-clean": ("lab.referee.clean", "false alarms and misses of `forerun verify` (make referee)"),
    "inflate": ("lab.inflate.command", "write a checkpoint or head at the cost of a larger shape"),
    "serve-inflated": ("lab.serve.inflated", "serve a small model at the cost of a larger shape"),
    "serve-emulated": ("lab.serve.emulated", "serve known texts over an emulated device"),
}

SHARED: dict[str, dict[str, Any]] = {
    "model": {"help": "known name, GGUF file, folder or hub id"},
    "dtype": {"help": "auto, gguf, q8, bfloat16 or float32"},
    "device": {"help": "cpu or cuda"},
    "threads": {"type": int, "help": "CPU threads; default: one per core"},
    "draft_model": {"help": "a second model or a trained head to draft with"},
    "drafters": {"help": "by comma; eagle3=FOLDER brings a head"},
    "suite": {"help": "prompts: builtin, or a JSONL file such as Spec-Bench's"},
    "tasks": {"help": "only these tasks, by comma"},
    "limit": {"type": int, "help": "prompts per task"},
    "max_tokens": {"type": int, "help": "new tokens per text at most"},
    "repeats": {"type": int, "help": "how often everything is measured"},
    "batches": {"help": "sequences at once, by comma"},
    "clients": {"help": "numbers of clients, by comma, each of which asks again when it has its answer"},
    "seed": {"type": int, "help": "of what is drawn"},
    "plot": {"type": Path, "metavar": "PATH", "help": "draw it there, as PNG"},
}


def share(add: argparse.ArgumentParser | argparse._ArgumentGroup, **defaults: Any) -> None:
    """Add flags that several commands have, each with its default here."""
    for name, default in defaults.items():
        settings = SHARED[name]
        says = settings["help"] + ("" if default in (None, "") else "; default: %(default)s")
        add.add_argument(f"--{name.replace('_', '-')}", **settings | {"default": default, "help": says})


@dataclass(slots=True)
class Run:
    """One measurement: its flags, what is true of the machine, and its document as it grows."""

    name: str
    flags: argparse.Namespace
    words: Sequence[str]
    started: float = field(default_factory=perf_counter)
    facts: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        before = load_average()  # before our own loading adds to it
        self.facts = machine_facts() | {"load_before": before, "busy": is_busy(before, cores())}
        if torch.cuda.is_available():
            self.facts["gpu"] = torch.cuda.get_device_name()

    def document(self, found: Document) -> Document:
        """What was found, in the frame that all documents have."""
        spent = {"seconds": round(perf_counter() - self.started, 1), "load_after": load_average()}
        conditions = {**self.facts, **spent, **found.get("conditions", {})}
        frame = {"benchmark": self.name, "command": shlex.join(["python", "-m", "lab", self.name, *self.words])}
        return {**frame, "equal": True, **found, "conditions": conditions}

    def save(self, found: Document) -> Document:
        """Write the document where `--json` says, whole or not at all: what was there stays until it is."""
        document, file = self.document(found), self.flags.json
        if file is not None:
            file.parent.mkdir(parents=True, exist_ok=True)
            fresh = file.with_suffix(".part")
            fresh.write_text(json.dumps(document) + "\n", encoding="utf-8")
            fresh.replace(file)
        return document

    def say(self, line: str) -> None:
        print(f"{perf_counter() - self.started:6.1f} s  {line}", file=sys.stderr, flush=True)


def main(words: Sequence[str] | None = None) -> int:
    """Run a command; 1 when a text differs, 2 for a user's error."""
    words = sys.argv[1:] if words is None else words
    if not words or words[0] not in COMMANDS:
        return _list(words)
    name, words = words[0], words[1:]
    flags = parse(name, words)
    command = import_module(COMMANDS[name][0])
    try:
        if hasattr(command, "work"):
            return int(command.work(flags))
        run = Run(name, flags, words)
        document = run.save(command.measure(run))
        if hasattr(command, "show"):
            command.show(document, flags)
    except ForerunError as error:
        print(f"forerun: {error}", file=sys.stderr)
        return 2
    print(json.dumps(document))
    return 0 if document["equal"] else 1


def parse(name: str, words: Sequence[str]) -> argparse.Namespace:
    command = import_module(COMMANDS[name][0])
    summary = (command.__doc__ or "").split("\n")[0]
    parser = argparse.ArgumentParser(prog=f"python -m lab {name}", description=summary)
    command.add_flags(parser)
    if not hasattr(command, "work"):
        parser.add_argument("--json", type=Path, metavar="PATH", help="write the document there too")
    flags = parser.parse_args(words)
    if hasattr(command, "settle"):
        command.settle(flags)
    return flags


def picture(file: Path | None) -> Path | None:
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
    return file


def _list(words: Sequence[str]) -> int:
    asked = not words or words[0] in ("-h", "--help")
    if not asked:
        print(f"forerun: unknown command {words[0]!r}; `python -m lab` lists them", file=sys.stderr)
        return 2
    print("python -m lab COMMAND [--help]")
    for name, (_, says) in COMMANDS.items():
        print(f"  {name:16}{says}")
    return 0
