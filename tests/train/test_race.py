"""tools/train_heads.sh race: what a call leaves undone the next one does, and no more; failures hold nothing up."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.readme.pages import ROOT

# stands in for Python: makes the files that training makes; a run named in STOPS ends as one that `timeout` stopped
STAND_IN = f"""#!{sys.executable}
import json, os, sys
from pathlib import Path

words = sys.argv[1:]
with open(os.environ["CALLS"], "a") as calls:
    calls.write(" ".join(words) + "\\n")
if words[0] == "-c":
    os.execv({sys.executable!r}, [{sys.executable!r}, *words])
out = Path(words[words.index("--out") + 1])
if words[0].endswith("runs.py"):
    out.write_text(" ".join(words[2 : words.index("--out")]))
    sys.exit()
if out.as_posix() in os.environ.get("FAILS", ""):
    sys.exit("out of memory")
out.mkdir(parents=True, exist_ok=True)
if "train" in words:
    (out / "log.jsonl").write_text("".join(json.dumps({{"step": i, "seconds": 0.5}}) + "\\n" for i in range(1, 7)))
    (out / "config.json").write_text("the head of the last checkpoint")
    sys.exit(124 if out.as_posix() in os.environ.get("STOPS", "").split() else 0)
(out / "provenance.json").write_text("{{}}")
"""


@pytest.mark.skipif(not shutil.which("timeout"), reason="the stages are stopped by coreutils' timeout")
def test_a_race_goes_on_where_its_call_ended(tmp_path: Path) -> None:
    python, calls = tmp_path / "bin" / "python", tmp_path / "calls"
    python.parent.mkdir()
    python.write_text(STAND_IN)
    python.chmod(0o755)
    for name in ("model.gguf", "suite.jsonl"):
        (tmp_path / name).touch()
    given = {
        "PATH": f"{python.parent}:{os.environ['PATH']}", "CALLS": str(calls), "M": str(tmp_path / "model.gguf"),
        "S": str(tmp_path / "suite.jsonl"), "R": str(tmp_path / "runs"), "OUT": str(tmp_path / "out"),
        "METHODS": "eagle3 medusa hydra causal", "MINUTES": "1.5", "COMPILE": "", "DEVICE": "cpu", "GREEDY": "0",
    }  # fmt: skip

    def call(**more: str) -> tuple[int, str, list[str]]:
        calls.write_text("")
        script = ["bash", str(ROOT / "tools" / "train_heads.sh"), "data", "race"]
        ended = subprocess.run(script, env={**given, **more}, capture_output=True, text=True, check=False)
        made = [line for line in calls.read_text().splitlines() if "--out" in line]
        return ended.returncode, ended.stdout, made

    code, said, made = call(FAILS="race/medusa-trial", STOPS="race/hydra")
    assert code == 3, said
    assert "medusa failed: " in said
    assert "out of memory" in said
    assert "call race again for hydra and those behind it" in said
    assert [line.split(" --out ")[1].split()[0] for line in made if "data make" in line] == [
        "first",
        "suite",
        "long",
        "own",
    ]
    assert (tmp_path / "out" / "methods.json").read_text() == "race/eagle3"
    (trial,) = (line for line in made if "--out race/eagle3-trial" in line)
    assert "--measure-on  --steps 24" in trial
    (run,) = (line for line in made if "--out race/eagle3 " in line)
    assert "--steps 180 " in run, "at half a second a step these are the minutes"
    assert not (tmp_path / "runs" / "race" / "eagle3-trial").exists()

    code, said, made = call(CALL="50")
    assert (code, [line for line in made if "train" in line and "runs.py" not in line]) == (3, []), "too little is left"
    code, said, made = call()
    assert code == 0, said
    outs = [line.split(" --out ")[1].split()[0] for line in made]
    assert outs == [
        "race/medusa-trial",
        "race/medusa",
        "race/hydra",
        "race/causal-trial",
        "race/causal",
        "methods.json",
    ]
    assert (tmp_path / "out" / "methods.json").read_text() == "race/eagle3 race/medusa race/hydra race/causal"
    (causal,) = (line for line in made if "--out race/causal " in line)
    assert "train dflash" in causal
    assert " --causal " in causal
