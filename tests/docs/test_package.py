"""The package of docs/write-a-drafter.md, installed into an empty folder by pip, brings its drafter along."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "write-a-drafter.md").read_text(encoding="utf-8")
WRITE = """
import sys
from forerun.build.engine import make_engine
from forerun.core.params import SamplingParams, SpeculativeConfig
from forerun.testing import TableLM
from forerun.core.types import Request

assert "forerun_follower" not in sys.modules
texts = []
for drafter in ("none", "follower", "follower+ngram"):
    speculative = SpeculativeConfig(drafter, budget=3, controller="fixed")
    engine = make_engine(TableLM(8, order=1, seed=5, sharpness=3.0), frozenset(), speculative)
    seq = engine.find(engine.submit(Request((1, 2, 3), SamplingParams(60))))
    while engine.busy:
        engine.step()
    texts.append(seq.tokens)
    print(drafter, seq.stats.accepted)
assert texts[0] == texts[1] == texts[2]
assert "forerun_follower.follower" in sys.modules
"""


def block(language: str) -> str:
    """The first block of code of this language."""
    found = re.search(rf"^```{language}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    assert found is not None
    return found[1]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder into which pip has installed the package of the page."""
    source, folder = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("installed")
    package = source / "forerun_follower"
    package.mkdir()
    (source / "pyproject.toml").write_text(block("toml"), encoding="utf-8")
    (package / "__init__.py").write_text("")
    (package / "follower.py").write_text(block("python"), encoding="utf-8")
    if find_spec("pip") is None or find_spec("setuptools") is None:
        pytest.skip("pip or setuptools is not here")
    words = ["--quiet", "--no-index", "--no-deps", "--no-build-isolation", "--disable-pip-version-check"]
    command = [sys.executable, "-m", "pip", "install", *words, "--target", str(folder), str(source)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    return folder


def run(code: list[str], *folders: Path) -> str:
    path = os.pathsep.join(str(folder) for folder in (*folders, ROOT / "src"))
    ran = subprocess.run(
        [sys.executable, *code], capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": path}
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


@pytest.mark.slow
def test_an_installed_package_brings_its_drafter_along(installed: Path) -> None:
    listed = json.loads(run(["-m", "forerun", "drafters", "--json", "-"], installed))["drafters"]
    assert [row["where"] for row in listed if row["name"] == "follower"] == [
        "forerun_follower.follower:FollowerDrafter"
    ]
    accepted = dict(line.split() for line in run(["-c", WRITE], installed).splitlines())
    assert int(accepted["follower"]) > 5
    assert accepted["none"] == "0"


def test_negative_control_without_the_folder_there_is_no_such_drafter() -> None:
    listed = json.loads(run(["-m", "forerun", "drafters", "--json", "-"]))["drafters"]
    assert "follower" not in {row["name"] for row in listed}
