"""Damaged files of every format end in one line for the user or in text, never in a crash or a huge allocation."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.damaged.formats import FORMATS

SAMPLE, ALL = 10, 300
Case = dict[str, Any]


@pytest.fixture(scope="session")
def material(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.damaged.material import make_material

    return make_material(tmp_path_factory.mktemp("material"))


@pytest.fixture(scope="session")
def sample(material: Path, request: pytest.FixtureRequest) -> dict[str, list[Case]]:
    """A few cases of every format that is asked for, all in one process: starting one costs more than the cases."""
    asked = {item.name.partition("[")[2][:-1] for item in request.session.items if item.path == Path(__file__)}
    names = [name for name in FORMATS if name in asked]
    cases = run_cases(material, 0, SAMPLE, names)
    return {name: [case for case in cases if case["format"] == name] for name in names}


def run_cases(material: Path, first: int, count: int, names: list[str]) -> list[Case]:
    """What the worker said of each case; the last word on one counts, so a case that killed it is wrong."""
    command = [sys.executable, "-m", "tests.damaged.worker", str(material), str(first), str(count), *names]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=900, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    said = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert said, f"the undamaged files do not load:\n{done.stderr[-2000:]}"
    return list({(case["format"], case["seed"]): case for case in said}.values())


def check(name: str, cases: list[Case], count: int) -> None:
    wrong = [case for case in cases if "wrong" in case]
    assert not wrong, f"{len(wrong)} of {len(cases)}: " + "\n".join(map(str, wrong[:20]))
    assert len(cases) == count
    refused = sum("refused" in case for case in cases)
    if FORMATS[name].heals:
        assert refused == 0
    else:
        assert refused > count // 8, "the damage is too mild to say anything"


@pytest.mark.slow(keep=4)
@pytest.mark.parametrize("name", FORMATS)
def test_a_sample_of_damage(name: str, sample: dict[str, list[Case]]) -> None:
    check(name, sample[name], SAMPLE)


@pytest.mark.fuzz
@pytest.mark.parametrize("name", FORMATS)
def test_damage_of_every_kind(name: str, material: Path) -> None:
    check(name, run_cases(material, 0, ALL, [name]), ALL)
