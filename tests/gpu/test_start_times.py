"""The table of a start: every part is where the script looks for it, and none is told twice."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from time import sleep, time

import pytest

from tests.gpu.start_times import PARTS, Parts
from tests.models.tiny_folder import make_tiny_folder


@pytest.mark.parametrize("place", [place for places in PARTS.values() for place in places])
def test_a_part_is_where_it_is_looked_for(place: str) -> None:
    """A table that lost a part would show its seconds under another name."""
    module, _, path = place.partition(":")
    if find_spec("triton") is None and ("triton" in module or "steps.wide" in module):
        pytest.skip("no Triton here")
    *outer, last = path.split(".")
    owner = import_module(module)
    for each in outer:
        owner = getattr(owner, each)
    assert callable(getattr(owner, last))
    assert last in vars(owner), "and not in a class or module that it came from"


def test_parts_are_told_without_the_parts_within() -> None:
    parts = Parts(time())
    inner = parts.timed("inner", lambda: sleep(0.05))
    parts.timed("outer", lambda: [inner(), inner()])()
    assert parts.calls == {"inner": 2, "outer": 1}
    assert parts.seconds["inner"] >= 0.1
    assert parts.seconds["outer"] < 0.05


@pytest.mark.slow
def test_a_start_on_a_cpu_is_told_by_part(tmp_path: Path) -> None:
    settings = Path(make_tiny_folder(tmp_path)) / "tokenizer_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"chat_template": "{{ messages[0].content }}"}))
    command = [sys.executable, "-m", "tests.gpu.start_times", str(tmp_path), str(time())]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([os.getcwd(), *filter(None, sys.path)])}
    ran = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr
    lines = ran.stdout.splitlines()
    table = {line.split("  ")[-1].partition(",")[0]: float(line.split()[0]) for line in lines if " s  " in line}
    assert {"import torch", "import forerun", "weights", "tokenizer", "first token", "in all"} <= {*table}
    assert sum(seconds for name, seconds in table.items() if name != "in all") == pytest.approx(
        table["in all"], abs=0.05
    )
    assert "1 different texts (1 is right)" in lines
