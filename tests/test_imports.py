"""Import budgets: help comes at once because nothing heavy is imported for it."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = ("torch", "transformers", "numpy", "tokenizers", "huggingface_hub", "gguf", "matplotlib", "jinja2")

HELP = """
import contextlib, io, sys
from forerun.cli.app import main
for words in ("--version", "--help", "generate --help", "chat --help", "models --help", "models pull --help",
              "models path --help", "quantize --help", "drafters --help", "doctor --help", "drafters", "models"):
    sys.argv = ["forerun", *words.split()]
    with contextlib.redirect_stdout(io.StringIO()) as out:
        try:
            main()
        except SystemExit as ended:
            assert not ended.code, words
    assert out.getvalue(), words
"""

NO_SUCH_MODEL = """
import contextlib, io, sys
from forerun.cli.app import main
flag = {"data": ["make", "--out", "x", "--target"], "train": ["medusa", "--data", "x", "--out", "y", "--target"]}
for command in ("generate", "chat", "bench", "advise", "diagnose", "quality", "data", "train"):
    for name in ("nosuch", "./no/folder", "nosuch.gguf"):
        sys.argv = ["forerun", command, *flag.get(command, ["--model"]), name]
        sys.stdin = io.StringIO("hi")
        with contextlib.redirect_stderr(io.StringIO()) as err:
            try:
                main()
            except SystemExit as ended:
                assert ended.code == 2, (command, ended.code)
        assert name.removeprefix("./") in err.getvalue(), (command, err.getvalue())
        assert err.getvalue().count(chr(10)) == 1, (command, err.getvalue())
for command in ("generate", "chat", "bench", "advise", "diagnose"):
    sys.argv = ["forerun", command, "--draft-model", "nosuch"]
    with contextlib.redirect_stderr(io.StringIO()) as err:
        try:
            main()
        except SystemExit as ended:
            assert ended.code == 2, (command, ended.code)
    assert "'nosuch'" in err.getvalue() or "models pull" in err.getvalue(), (command, err.getvalue())
"""


def imported_by(program: str) -> set[str]:
    """Top-level modules loaded once a program has run in a fresh interpreter."""
    listing = "import sys; print(' '.join({name.partition('.')[0] for name in sys.modules}))"
    command = [sys.executable, "-c", f"{program}\n{listing}"]
    ended = subprocess.run(command, capture_output=True, text=True, check=True)
    return set(ended.stdout.split())


def test_the_front_of_a_server_imports_no_torch() -> None:
    loaded = imported_by("import forerun.server.run, forerun.server.app, forerun.server.backends.process")
    assert loaded.isdisjoint({"torch", "transformers"}), sorted(loaded)


def test_a_start_on_a_gpu_imports_no_compiler_of_torch() -> None:
    """torch alone takes three seconds of a start: what a text does not need would come on top."""
    program = """
import sys
import forerun.api.llm, forerun.models.cuda.target, forerun.drafters.device.eagle
print(*{"transformers", "torch._dynamo", "torch._inductor", "sympy", "gguf", "fastapi"} & set(sys.modules))
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert not ended.stdout.split()


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize(
    ("program", "forbidden"),
    [
        ("import forerun", (*HEAVY, "typer", "rich")),
        ("from forerun import SamplingParams, SpeculativeConfig, EngineConfig, ForerunError", HEAVY),
        (HELP, HEAVY),
        (NO_SUCH_MODEL, ("torch", "transformers", "tokenizers", "huggingface_hub", "matplotlib", "jinja2")),
        ("from forerun import LLM", ("transformers", "typer", "rich", "matplotlib", "fastapi")),
    ],
    ids=["forerun", "settings", "help", "no such model", "LLM"],
)
def test_nothing_heavy_is_imported(program: str, forbidden: tuple[str, ...]) -> None:
    loaded = imported_by(program)
    assert "forerun" in loaded
    assert loaded.isdisjoint(forbidden), sorted(loaded & set(forbidden))
