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
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from forerun.core.errors import ForerunError, InvalidInput
from lab.referee.document import framed, slim, tables
from lab.referee.engines import ENGINES, Engine

ROOT = Path(__file__).parents[2]
_FIRST_PORT = 8101
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
    command = shlex.join(["python", "-m", "lab", "referee", *flags.engines, "--seconds", f"{flags.seconds:g}"])
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
    ports, started = {line: _FIRST_PORT + i for i, line in enumerate(lines)}, []
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
