"""The referee against real engines: starts each with the table model, runs `forerun verify`, writes a result document.

    python -m lab referee forerun-ngram serve-draft --json benchmarks/referee-forerun-cpu.json
    python -m lab referee vllm-ngram vllm-eagle3 --setup '. vllm_bundle/env.sh' --json referee-vllm.json

Servers of all engines are started together, then checked one after the other; `--setup` is run by the shell before a
server that is not Forerun's, whose python is `--python`.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from forerun.core.errors import ForerunError, InvalidInput
from forerun.measure.machine import machine_facts
from forerun.referee.evidence import FALSE_ALARMS, smallest_found
from forerun.referee.suite import chosen_checks
from lab.referee.engines import ENGINES, Engine

Report = Mapping[str, Any]


def framed(question: str, command: str, conditions: str, raw: Any, tables: Mapping[str, Any], commit: str) -> Report:
    facts = machine_facts()
    gpu = f"{torch.cuda.get_device_name()}, " if torch.cuda.is_available() else ""
    return {
        "question": question,
        "command": command,
        "commit": (commit or str(facts["commit"]))[:7],
        "date": datetime.now(UTC).date().isoformat(),
        "machine": f"{gpu}{facts['cores']} cores ({facts['cpu']}), python {facts['python']}, torch {facts['torch']}",
        "conditions": conditions,
        "raw_samples": raw,
        "tables": tables,
    }


def slim(report: Report) -> dict[str, Any]:
    """A report of `forerun verify --json` without its plots."""
    checks = [{key: value for key, value in each.items() if key not in ("trace", "bars")} for each in report["checks"]]
    return {**report, "checks": checks}


def tables(raw: Sequence[Report]) -> dict[str, Any]:
    """Of runs `{engine, version, started, report}`: one row each, and one row per check that did not pass."""
    found = {
        "runs": {
            "columns": {
                "engine": ["engine"], "passed": ["passed", "d"], "failed": ["failed"], "skipped": ["skipped", "d"],
                "tokens": ["tokens", ",d"], "bias": ["smallest bias found", ".1f%"], "started": ["started with"],
                "command": ["command"],
            },
            "rows": [_run(each) for each in raw],
        }
    }  # fmt: skip
    if rows := [row for each in raw for row in _findings(each)]:
        columns = {"engine": ["engine"], "check": ["check"], "result": ["result"], "found": ["found"]}
        found["findings"] = {"columns": columns, "rows": rows}
    return found


def _run(each: Report) -> dict[str, Any]:
    report = each["report"]
    checks = report["checks"]
    by = {status: [one["name"] for one in checks if one["status"] == status] for status in ("pass", "fail", "skip")}
    law = [one for one in checks if one["name"] == "law.temperature_1" and one["status"] == "pass"]
    alarms = FALSE_ALARMS / sum(one.bets for one in chosen_checks())
    row = {
        "engine": f"{each['engine']} ({each['version']})",
        "passed": len(by["pass"]),
        "failed": ", ".join(f"`{name}`" for name in by["fail"]) or "none",
        "skipped": len(by["skip"]),
        "tokens": report["tokens"],
        "started": f"`{each['started']}`" if each["started"] else "in process",
        "command": f"`{report['command']}`",
    }
    return row | ({"bias": round(100 * smallest_found(law[0]["tokens"], alarms, 18), 1)} if law else {})


def _findings(each: Report) -> list[dict[str, str]]:
    rows: dict[tuple[str, str], list[str]] = {}
    for one in each["report"]["checks"]:
        if one["status"] != "pass":
            rows.setdefault((one["status"], _told(one)), []).append(f"`{one['name']}`")
    results = {"fail": "failed", "skip": "skipped"}
    return [
        {"engine": each["engine"], "check": ", ".join(names), "result": results[status], "found": told}
        for (status, told), names in sorted(rows.items())
    ]


def _told(one: Report) -> str:
    said = " ".join(str(one["detail"]).split())
    if one["p_value"] is not None:
        said += f" (p-value {one['p_value']:.1g})"
    elif one["counterexample"]:
        got, due = (str(one["counterexample"].get(key))[:80] for key in ("got", "due"))
        said += f": `{got}` where `{due}` was due"
    return re.sub(r"127\.0\.0\.1:\d+", "127.0.0.1", said).replace("|", "\\|")


ROOT = Path(__file__).parents[2]
QUESTION = "Which checks of `forerun verify` does each engine pass with the table model?"


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("engines", nargs="+", metavar="ENGINE", help=", ".join(ENGINES))
    parser.add_argument("--json", type=Path, required=True, metavar="PATH", help="write the result document there")
    parser.add_argument("--seconds", type=float, default=180.0, help="of each run; default: %(default)s")
    parser.add_argument("--tokens", type=int, default=60_000, help="of each run; default: %(default)s")
    parser.add_argument("--only", action="append", default=[], help="checks, as of forerun verify; repeatable")
    parser.add_argument("--python", default=sys.executable, help="of other engines; default: this one")
    parser.add_argument("--setup", default="true", help="a shell command before other engines' servers")
    parser.add_argument("--device", default="cpu", help="of Forerun's server: cpu or cuda; default: %(default)s")
    parser.add_argument("--start-seconds", type=float, default=240.0, help="for servers to start; default: %(default)s")
    parser.add_argument("--conditions", default="", help="what else is true of the machine, in words")
    parser.add_argument("--commit", default="", help="where there is no git to ask")


def work(flags: argparse.Namespace) -> int:
    """Exit code 1 when a check failed, or a server did not start."""
    if unknown := [name for name in flags.engines if name not in ENGINES]:
        raise InvalidInput(f"no engine {unknown[0]!r}; there are {', '.join(ENGINES)}")
    raw: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shutil.copy(ROOT / "lab" / "peers" / "llama_server.py", folder)
        with_gguf = any(each.startswith("llama") for each in flags.engines)
        _forerun(folder, f"verify make-model table{' --gguf' if with_gguf else ''}")
        engines = {each: ENGINES[each] for each in flags.engines}
        with _servers(folder, engines, flags) as ports:
            for engine in engines.values():
                if all(line in ports for line in (engine.server, engine.plain) if line):
                    raw.append(_checked(folder, engine, ports, flags))
                    _save(raw, flags)
    return int(len(raw) < len(engines) or any(not run["report"]["passed"] for run in raw))


def _save(raw: Sequence[dict[str, Any]], flags: argparse.Namespace) -> None:
    """After each engine, so that a run that is cut off keeps what it has."""
    only = [word for each in flags.only for word in ("--only", each)]
    command = shlex.join(["python", "-m", "lab", "referee", *flags.engines, *only, "--seconds", f"{flags.seconds:g}"])
    said = f"{flags.tokens} tokens or {flags.seconds:g} seconds per run, whichever ends first. {flags.conditions}"
    document = framed(QUESTION, command, said.strip(), raw, tables(raw), flags.commit)
    flags.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def _checked(folder: Path, engine: Engine, ports: dict[str, int], flags: argparse.Namespace) -> dict[str, Any]:
    target = f"http://127.0.0.1:{ports[engine.server]}" if engine.server else "table/target"
    plain = f"--plain http://127.0.0.1:{ports[engine.plain]}" if engine.plain else ""
    only = " ".join(f"--only {each}" for each in flags.only)
    words = f"verify {target} --table table {plain} {engine.flags} {only}"
    words = f"{' '.join(words.split())} --tokens {flags.tokens} --seconds {flags.seconds:g}"
    print(f"forerun {words}", file=sys.stderr, flush=True)
    _forerun(folder, f"{words} --json report.json", fine=(0, 1))
    report = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    report["command"] = f"forerun {words}"
    version = _version(folder, engine, flags)
    started = _filled(engine.server, ports[engine.server], flags) if engine.server else ""
    return {"engine": engine.title, "version": version, "started": started, "report": slim(report)}


def _forerun(folder: Path, words: str, fine: Sequence[int] = (0,)) -> None:
    ended = subprocess.run([sys.executable, "-m", "forerun", *shlex.split(words)], cwd=folder, env=_ours(), check=False)
    if ended.returncode not in fine:
        raise ForerunError(f"`forerun {words}` ended with exit code {ended.returncode}")


def _ours() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": f"{ROOT / 'src'}"}


def _version(folder: Path, engine: Engine, flags: argparse.Namespace) -> str:
    if engine.package == "forerun":
        return "this commit"
    code = f"import importlib.metadata as m; print(m.version('{engine.package}'))"
    found = subprocess.run(
        _shell(f"python -c {shlex.quote(code)}", flags), cwd=folder, capture_output=True, text=True, check=False
    )
    return f"{engine.package} {found.stdout.strip() or '?'}"


def _filled(line: str, port: int, flags: argparse.Namespace) -> str:
    return line.replace("{port}", str(port)).replace("{device}", flags.device)


def _shell(words: str, flags: argparse.Namespace) -> list[str]:
    """A command line of another engine: its own environment, its own python."""
    program, _, rest = words.partition(" ")
    if program == "transformers":
        rest = f"-c 'from transformers.cli.transformers import main; main()' {rest}"
    return ["bash", "-c", f"unset PYTHONPATH; {flags.setup}; exec {shlex.quote(flags.python)} {rest}"]


@contextmanager
def _servers(folder: Path, engines: dict[str, Engine], flags: argparse.Namespace) -> Iterator[dict[str, int]]:
    """Every server that is needed, once; ports by command line."""
    lines = list(dict.fromkeys(line for each in engines.values() for line in (each.plain, each.server) if line))
    ports, started = dict(zip(lines, _free_ports(len(lines)), strict=True)), []
    try:
        for line, port in ports.items():
            words, log = _filled(line, port, flags), folder / f"{port}.log"
            ours = words.startswith("forerun ")
            shell = [sys.executable, "-m", *shlex.split(words)] if ours else _shell(words, flags)
            with log.open("w") as out:
                process = subprocess.Popen(
                    shell, cwd=folder, env=_ours() if ours else None, stdout=out, stderr=out, start_new_session=True
                )
            started.append((process, port, log))
        deadline = time.monotonic() + flags.start_seconds
        yield {line: port for line, (process, port, log) in zip(lines, started, strict=True)
               if _is_up(process, port, log, deadline, flags.json)}  # fmt: skip
    finally:
        for process, _, _ in started:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
        for process, _, _ in started:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)


def _free_ports(count: int) -> list[int]:
    """Of this machine: a server that another run has started must not be taken for ours."""
    with ExitStack() as stack:
        found = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in found:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in found]


def _is_up(process: subprocess.Popen[bytes], port: int, log: Path, deadline: float, beside: Path) -> bool:
    """Wait for a server; the log of one that does not start is kept beside the document."""
    while process.poll() is None and time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=5):
                return True
        except urllib.error.HTTPError as error:
            if error.code != 503:  # the model is being loaded
                return True
        except OSError:
            pass
        time.sleep(1)
    kept = shutil.copy(log, beside.with_suffix(f".{port}.log"))
    last = " | ".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-3:])
    print(f"the server on port {port} did not start, see {kept}: {last}", file=sys.stderr, flush=True)
    return False
