"""What the documentation shows runs: every Python block of every page, and every example."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from forerun import registry
from forerun.llm import LLM
from tests.readme.pages import ALL, EXAMPLES, ROOT, blocks, name_of, needs_model, run_blocks

# what docs/serving.md shows needs a server: tests/server runs it
PAGES = [page for page in ALL if blocks(page, "python") and page.name != "serving.md"]


def marked(path: Path, program: str) -> object:
    return pytest.param(path, id=name_of(path), marks=[pytest.mark.model] if needs_model(program) else [])


@pytest.fixture(autouse=True)
def surroundings(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever needs the model shares one; what a snippet registers is gone after it."""
    if request.node.get_closest_marker("model"):
        request.getfixturevalue("one_load")
    monkeypatch.setattr(registry.drafters, "_specs", dict(registry.drafters._specs))


@pytest.mark.parametrize("page", [marked(page, "".join(blocks(page, "python"))) for page in PAGES])
def test_the_python_blocks_of_a_page_run(page: Path) -> None:
    run_blocks(page)


@pytest.mark.parametrize(
    "example", [marked(path, path.read_text()) for path in EXAMPLES if path.stem != "nano"]
)
def test_an_example_runs(example: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(example), run_name="__main__")
    said = capsys.readouterr().out
    assert said.strip()
    assert ": False" not in said  # examples print what they claim as "...: True"


@pytest.mark.model
def test_nano_writes_what_the_engine_writes_on_the_real_model() -> None:
    from forerun.models.load.checkpoint import open_checkpoint
    from forerun.params import SamplingParams

    nano = runpy.run_path(str(ROOT / "examples" / "nano.py"))
    checkpoint, llm = open_checkpoint("smollm2"), LLM.load("smollm2")
    prompt = list(llm.encode("one two three one two three one two three one"))
    target = nano["Llama"](checkpoint.config, checkpoint.weights)
    tokens, rounds = nano["generate"](target, prompt, nano["lookup"], max_tokens=12)
    wanted = llm.generate(prompt, SamplingParams(max_tokens=12, ignore_eos=True), drafter="none")
    assert tokens == wanted.token_ids
    assert rounds < 12


def test_the_guide_shows_the_example() -> None:
    """docs/write-a-drafter.md and examples/own_drafter.py have one class between them."""

    shown = blocks(ROOT / "docs" / "write-a-drafter.md", "python")[0]
    assert shown[shown.index("class ") :].strip() in (ROOT / "examples" / "own_drafter.py").read_text()
    assert len(shown.splitlines()) < 60
