"""What the documentation shows runs: every Python block of every page, and every example."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import pytest

from forerun.api.completion import AsyncStream, Stream
from forerun.api.llm import LLM
from forerun.core import registry
from tests.readme.pages import ALL, EXAMPLES, ROOT, blocks, name_of, needs_model, run_blocks

# what docs/serving.md shows needs a server: tests/server runs it
PAGES = [page for page in ALL if blocks(page, "python") and page.name != "serving.md"]
STREAMS = re.compile(r"(?<!driver)\.stream(_chat)?\(")
STREAMING = [
    path
    for path in (*PAGES, *EXAMPLES)
    if STREAMS.search(path.read_text() if path in EXAMPLES else "".join(blocks(path, "python")))
]


def marked(path: Path, program: str) -> object:
    return pytest.param(path, id=name_of(path), marks=[pytest.mark.model] if needs_model(program) else [])


@pytest.fixture(autouse=True)
def surroundings(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever needs the model shares one; what a snippet registers is gone after it."""
    if request.node.get_closest_marker("model"):
        request.getfixturevalue("one_load")
    monkeypatch.setattr(registry.drafters, "_specs", dict(registry.drafters._specs))


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Every stream that is made."""
    made = list[Any]()
    for kind in (Stream, AsyncStream):

        def watched(self: Any, *given: Any, begin: Any = kind.__init__) -> None:
            made.append(self)
            begin(self, *given)

        monkeypatch.setattr(kind, "__init__", watched)
    return made


def printed(said: str, streams: list[Any]) -> list[tuple[int, int]]:
    """Of every text that was streamed to its end: how often it was streamed, and how often it is in the output."""
    texts = [stream.completion.text for stream in streams if stream._completion is not None]
    return [(texts.count(text), _without_marks(said).count(_without_marks(text))) for text in texts]


def _without_marks(text: str) -> str:
    return text.translate({ord(mark): None for mark in "[]"})  # with which an example marks drafted tokens


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.parametrize("path", STREAMING, ids=name_of)
def test_a_text_that_is_streamed_is_printed_once(
    path: Path, streams: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """Whoever copies a streaming example gets the text, and not the text twice."""
    if path in EXAMPLES:
        runpy.run_path(str(path), run_name="__main__")
    else:
        run_blocks(path)
    counts = printed(capsys.readouterr().out, streams)
    assert counts, "no stream was read to its end"
    assert all(streamed == shown for streamed, shown in counts), counts


def test_streaming_is_shown_where_users_look_first() -> None:
    names = {path.name for path in STREAMING}
    assert {"README.md", "library.md", "threads-and-failures.md", "streaming.py"} <= names
    assert "batch_of_requests.py" not in names, "negative control: the driver's own"


@pytest.mark.model
def test_negative_control_a_text_that_is_printed_twice_is_found(
    streams: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """As every documented stream was while its last item was the Completion."""
    stream = LLM.load("smollm2").stream_chat("Name three rivers.", max_tokens=12)
    for item in [*stream, stream.completion]:
        print(item.text, end="")
    assert printed(capsys.readouterr().out, streams) == [(1, 2)]


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("page", [marked(page, "".join(blocks(page, "python"))) for page in PAGES])
def test_the_python_blocks_of_a_page_run(page: Path) -> None:
    run_blocks(page)


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("example", [marked(path, path.read_text()) for path in EXAMPLES if path.stem != "nano"])
def test_an_example_runs(example: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(example), run_name="__main__")
    said = capsys.readouterr().out
    assert said.strip()
    assert ": False" not in said  # examples print what they claim as "...: True"


@pytest.mark.slow
@pytest.mark.model
def test_nano_writes_what_the_engine_writes_on_the_real_model() -> None:
    from forerun.core.params import SamplingParams
    from forerun.models.load.checkpoint import open_checkpoint

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
