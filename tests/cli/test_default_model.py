"""The command line with the real default model, end to end: few tests, each load costs seconds."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest

from forerun.models.load.catalog import known_models
from tests.cli.conftest import Run

PRESENT = any(model.name == "smollm2" and model.path for model in known_models())
pytestmark = [
    pytest.mark.model,
    pytest.mark.skipif(not PRESENT, reason="the default model is absent; run: forerun models pull smollm2"),
]


@pytest.mark.slow
def test_drafting_does_not_change_the_text(forerun: Run) -> None:
    def document(*flags: str) -> dict[str, object]:
        asked = ("generate", "Count: one two one two", "--max-tokens", "16", "--json", "-", "--budget", "4")
        ran = forerun(*asked, *flags)
        assert (ran.code, ran.err) == (0, "")
        found: dict[str, object] = json.loads(ran.out)
        return found

    plain, drafted = document("--drafter", "none"), document()
    assert plain["token_ids"] == drafted["token_ids"]
    assert plain["text"] == drafted["text"] != ""


@pytest.mark.slow
def test_doctor_finds_nothing_in_the_way(forerun: Run) -> None:
    ran = forerun("doctor", "--json", "-")
    assert ran.code == 0
    assert json.loads(ran.out)["ready"] is True
    (auto,) = [finding["found"] for finding in json.loads(ran.out)["findings"] if finding["about"] == "auto"]
    (batch,) = [finding["found"] for finding in json.loads(ran.out)["findings"] if finding["about"] == "batch"]
    assert re.search(r"writes up to \d+ sequences together: .* \(max_batch, --max-num-seqs\)", batch)
    assert re.search(r"drafts with ngram(\+eagle3)?: ngram\+eagle3 should gain [\d.]+x with \d drafted", auto)


GENERATE = """
import sys
from forerun.cli.app import main
sys.argv = ["forerun", "generate", "Hi", "--max-tokens", "2"]
try:
    main()
except SystemExit as ended:
    assert not ended.code
print(*sys.modules, sep=" ")
"""


@pytest.mark.slow
def test_a_start_imports_only_what_it_needs() -> None:
    ended = subprocess.run([sys.executable, "-c", GENERATE], capture_output=True, text=True, check=True)
    loaded = set(ended.stdout.split())
    assert {"torch", "tokenizers", "forerun.cli.generate"} <= loaded  # the control: these it does need
    dear = {"transformers", "scipy", "matplotlib", "huggingface_hub", "gguf", "prompt_toolkit", "sympy"}
    needless = {"torch._dynamo", "torch._inductor", "forerun.cli.chat", "forerun.cli.bench", "forerun.cli.train"}
    assert loaded.isdisjoint(dear | needless), sorted(loaded & (dear | needless))
