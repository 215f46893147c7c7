"""Do the tests notice? One-line faults are put into a copy of the source, and the tests of that area must fail.

    python tools/mutants.py [--area verify,control] [--only TEXT] [--list]

The faults are in tools/mutants.toml: the file, a fragment that is there exactly once, what it becomes, and the tests
that should notice. Only the fast tier runs, what `make test` runs: a fault that a slow test alone notices survives.
Selections of tests must pass on the source as it is, or their verdict on a fault says nothing; one that holds no test
notices nothing. Ends with 1 where a fault survives, or where a fragment is no longer found; tests/test_mutants.py
checks the fragments in `make test`.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import tempfile
import tomllib
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from time import monotonic, sleep

ROOT = Path(__file__).resolve().parent.parent
SECONDS = 120  # for one selection of tests; a fault may also make them hang


@dataclass(frozen=True, slots=True)
class Mutant:
    """One fault."""

    area: str
    file: str  # below src/forerun
    old: str
    new: str
    tests: str  # what pytest is given, with spaces between

    @property
    def label(self) -> str:
        """The fault as the table prints it."""
        return f"{self.file}: {' '.join(self.old.split())[:48]} -> {' '.join(self.new.split())[:48]}"

    def found(self, source: Path) -> int:
        """How often the fragment is there; a fault that is not there exactly once is stale."""
        file = source / "forerun" / self.file
        return file.read_text(encoding="utf-8").count(self.old) if file.is_file() else 0


def read_mutants(file: Path = ROOT / "tools" / "mutants.toml") -> list[Mutant]:
    """The list; an area names the tests of all its faults, and a fault may name others."""
    found = []
    for area, group in tomllib.loads(file.read_text(encoding="utf-8")).items():
        for entry in group["mutants"]:
            tests = entry.get("tests", group["tests"])
            found.append(Mutant(area, entry["file"], entry["old"], entry["new"], tests))
    return found


def preload() -> None:
    """Import what is slow and not ours, once: every run of tests is a fork of this process."""
    for name in ("pytest", "hypothesis", "scipy.stats", "fastapi", "uvicorn", "httpx", "gguf", "sentencepiece"):
        import_module(name)
    import torch
    import transformers

    torch.set_num_threads(1)
    _ = transformers.LlamaForCausalLM, transformers.Gemma2ForCausalLM, transformers.TopPLogitsWarper


def run_tests(tests: str, source: Path, seconds: int = SECONDS, compiles: bool = False) -> tuple[str, str]:
    """passed, failed, hung, or empty where no test was chosen; and the first test that failed.

    Where it `compiles`, it leaves bytecode to later runs: never of a fault.
    """
    said = source.parent / "said.txt"
    child = os.fork()
    if child == 0:
        sys.dont_write_bytecode = not compiles
        os._exit(_run_pytest(tests, source, said))
    end = monotonic() + seconds
    while monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            lines = said.read_text(encoding="utf-8", errors="replace").splitlines()
            first = next((line for line in lines if line.startswith(("FAILED", "ERROR"))), "")
            code = os.waitstatus_to_exitcode(status)
            return {0: "passed", 5: "empty"}.get(code, "failed"), first.split(" - ")[0]
        sleep(0.05)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return "hung", ""


def _run_pytest(tests: str, source: Path, said: Path) -> int:
    """In the child: pytest on a copy of the source, with a process group of its own and its words in a file."""
    os.setpgid(0, 0)
    with said.open("w") as out:
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
    os.environ["PYTHONPATH"] = str(source)
    sys.path[:0] = [str(source), str(ROOT)]
    os.chdir(ROOT)
    import pytest

    try:
        return int(pytest.main(["-x", "-q", "--tb=no", "-p", "no:cacheprovider", *tests.split()]))
    finally:
        sys.stdout.flush()


def try_mutant(mutant: Mutant, source: Path) -> tuple[str, str]:
    """killed, survived or stale; and what noticed."""
    if (found := mutant.found(source)) != 1:
        return "stale", f"the fragment is there {found} times"
    file = source / "forerun" / mutant.file
    whole, known = file.read_text(encoding="utf-8"), file.stat()
    file.write_text(whole.replace(mutant.old, mutant.new), encoding="utf-8")
    try:
        outcome, noticed = run_tests(mutant.tests, source)
    finally:
        file.write_text(whole, encoding="utf-8")
        os.utime(file, ns=(known.st_atime_ns, known.st_mtime_ns))  # its bytecode holds again
    return ("survived" if outcome in ("passed", "empty") else "killed"), noticed or outcome


def selections(mutants: list[Mutant]) -> list[str]:
    """What must pass without a fault: all files at once, but a selection with options by itself."""
    named = dict.fromkeys(mutant.tests for mutant in mutants)
    plain = dict.fromkeys(file for tests in named if " -" not in tests for file in tests.split())
    return [" ".join(plain)] * bool(plain) + [tests for tests in named if " -" in tests]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--area", default="", help="only these, with commas between")
    parser.add_argument("--only", default="", help="only faults whose line holds this text")
    parser.add_argument("--list", action="store_true", help="show the faults and stop")
    given = parser.parse_args()
    areas = [area for area in given.area.split(",") if area]
    mutants = [m for m in read_mutants() if (not areas or m.area in areas) and given.only in m.label]
    if not mutants:
        parser.error("no fault is chosen; --list shows them all")
    if given.list:
        print("\n".join(f"{m.area:<10} {m.label}" for m in mutants))
        return 0
    os.environ |= {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}  # before torch is imported
    started = monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        source = Path(scratch) / "src"
        shutil.copytree(ROOT / "src", source, ignore=shutil.ignore_patterns("__pycache__"))
        preload()
        for tests in selections(mutants):
            outcome, noticed = run_tests(tests, source, 10 * SECONDS, compiles=True)
            if outcome != "passed":
                print(f"{outcome} without any fault ({noticed or tests}); mend that first")
                return 2
        outcomes = []
        for mutant in mutants:
            outcome, noticed = try_mutant(mutant, source)
            outcomes.append(outcome)
            print(f"{outcome:<9}{mutant.area:<10}{mutant.label}  [{noticed}]", flush=True)
    killed, stale = outcomes.count("killed"), outcomes.count("stale")
    tried = len(outcomes) - stale
    spent = f"{(monotonic() - started) / 60:.1f} minutes"
    print(f"{killed} of {tried} killed, {tried - killed} survived, {stale} no longer fit the source; {spent}")
    return 0 if killed == len(outcomes) else 1


if __name__ == "__main__":
    raise SystemExit(main())
