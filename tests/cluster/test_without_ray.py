"""Everything but several replicas works where Ray is not installed, and what needs it says so in one line."""

from __future__ import annotations

import subprocess
import sys

import pytest

NO_RAY = "import sys; sys.modules['ray'] = None\n"


def run(program: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", NO_RAY + program], capture_output=True, text=True, check=check, timeout=120
    )


@pytest.mark.slow
def test_the_package_and_the_server_are_imported_without_it() -> None:
    run(
        "import forerun, forerun.ray, forerun.api.llm, forerun.server.cluster.run\n"
        "import forerun.train.data.make, forerun.measure.plan.advice"
    )
    pytest.importorskip("fastapi")
    run("import forerun.server.app, forerun.server.run")


@pytest.mark.slow
@pytest.mark.parametrize(
    "words", ["serve --replicas 2", "data make --ray --out /nowhere/at/all --target smollm2 --own-prompts 1"]
)
def test_what_needs_it_says_so(words: str, smollm2_path: str) -> None:
    program = f"sys.argv = ['forerun', *{words.split()!r}]\nfrom forerun.cli.app import main\nmain()"
    ended = run(program, check=False)
    assert ended.returncode == 2, ended.stderr
    assert ended.stderr.strip().splitlines()[-1].endswith("pip install 'forerun[ray]'"), ended.stderr


@pytest.mark.slow
def test_help_needs_neither_ray_nor_torch() -> None:
    told = "print('torch' in sys.modules, 'ray' in sys.modules and sys.modules['ray'] is not None)"
    for words in ("serve --help", "plan --help", "data make --help"):
        program = (
            f"sys.argv = ['forerun', *{words.split()!r}]\nfrom forerun.cli.app import main\n"
            f"try:\n    main()\nexcept SystemExit:\n    pass\n{told}"
        )
        assert run(program).stdout.splitlines()[-1] == "False False", words
