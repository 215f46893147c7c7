"""Recording only of those who say so, and heads that are swapped in, and out again, while texts are written."""

from __future__ import annotations

import asyncio
import json
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter

import httpx
import pytest
import torch
from safetensors.torch import load_file, save_file

from forerun import LLM
from forerun.api.completion import Completion
from forerun.api.llm import AsyncLLM
from forerun.core.errors import ForerunError, InvalidInput
from forerun.heads import BOX, HeadVersions
from forerun.server.backends.base import Backend
from forerun.server.backends.process import ProcessBackend
from forerun.server.backends.start import LOAD_LLM, EngineProcess, Loader
from forerun.server.backends.thread import LocalBackend
from forerun.server.service import HeadWatch, Recorder
from forerun.server.settings import ServerSettings
from tests.server.conftest import start

PROMPT = "Write a product description for a red wooden chair in our shop."


@pytest.fixture(scope="module")
def drafting() -> LLM:
    always = {"drafter": "eagle3", "controller": "fixed", "budget": 5}  # on a CPU it may not pay
    return LLM("smollm2", speculative_config=always, max_batch=4, max_length=512)


@pytest.fixture
def heads(tmp_path: Path) -> HeadVersions:
    """Version 1 is the package's head; 2 has another's numbers, and drafts what is never accepted; 3 is damaged."""
    versions = HeadVersions(tmp_path / "heads")
    for name in ("v0001", "v0002", "v0003"):
        shutil.copytree(BOX / "smollm2-135m-eagle3", versions.folder / name)
    file = versions.folder / "v0002" / "model.safetensors"
    weights = load_file(file)
    weights["fc.weight"] = torch.randn(weights["fc.weight"].shape).to(weights["fc.weight"].dtype)
    save_file(weights, file)
    (versions.folder / "v0003" / "model.safetensors").write_bytes(b"nothing")
    versions.publish("v0001")
    return versions


@pytest.fixture
def recording(drafting: LLM, tmp_path: Path) -> Iterator[tuple[str, Path]]:
    folder = tmp_path / "traffic"
    server, thread, url = start(drafting, ServerSettings(("m",), record=folder))
    yield url, folder
    server.should_exit = True
    thread.join(10)


@pytest.mark.slow
def test_only_what_says_so_is_recorded(recording: tuple[str, Path], drafting: LLM) -> None:
    url, folder = recording
    body = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 6, "temperature": 0}
    for more in ({}, {"record": False}, {"record": None}, {"record": True, "stream": True}, {"record": True}):
        assert httpx.post(f"{url}/v1/chat/completions", json=body | more, timeout=60).status_code == 200
    (file,) = folder.iterdir()
    first, second = (json.loads(line) for line in file.read_text().splitlines())  # two of five
    assert first["tokens"] == second["tokens"]
    assert tuple(first["prompt"]) == drafting.encode([{"role": "user", "content": PROMPT}])
    assert (len(first["tokens"]), first["drafter"], first["rounds"] > 0) == (6, "eagle3", True)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_a_full_file_or_a_bad_folder(tmp_path: Path, drafting: LLM, caplog: pytest.LogCaptureFixture) -> None:
    done = drafting.generate("abc", max_tokens=3, temperature=0)
    recorder = Recorder(tmp_path, most_bytes=300)
    for _ in range(9):
        recorder.write([1, 2], done, 0.0)
    recorder.close()
    assert 0 < recorder.file.stat().st_size <= 300
    assert caplog.text.count("is full") == 1
    (tmp_path / "file").touch()
    with pytest.raises(InvalidInput, match="name another --record"):
        Recorder(tmp_path / "file")


async def write(backend: Backend, watch: HeadWatch, tokens: int = 24) -> Completion:
    started = perf_counter()
    text: Completion | None = None
    async for item in backend.stream(_ids(backend), max_tokens=tokens, temperature=0, ignore_eos=True):
        if isinstance(item, Completion):
            text = item
    assert text is not None
    watch.observe(text, started)
    return text


def _ids(backend: Backend) -> tuple[int, ...]:
    return tuple(backend.tokenizer.chat_ids([{"role": "user", "content": PROMPT}]))


@pytest.mark.slow
def test_a_head_that_drafts_worse_is_taken_out_again(
    drafting: LLM, heads: HeadVersions, caplog: pytest.LogCaptureFixture
) -> None:
    async def run() -> None:
        async with AsyncLLM(drafting) as llm:
            backend = LocalBackend(llm)
            watch = HeadWatch(heads.folder, backend.drafter, backend.swap_head, enough=12)
            before = [await write(backend, watch) for _ in range(2)]
            heads.publish("v0003")
            await watch.check()  # damaged: the link goes back, and nothing has changed
            assert (watch.running.name, heads.current()) == ("v0001", heads.folder / "v0001")
            assert (await write(backend, watch)).rounds == before[0].rounds
            heads.publish("v0002")
            await watch.check()
            assert watch.running.name == "v0002"
            await watch.check()
            assert watch.running.name == "v0002"  # too early to judge
            after = [await write(backend, watch) for _ in range(2)]
            assert [text.token_ids for text in after] == [text.token_ids for text in before]
            assert after[0].rounds > before[0].rounds
            await watch.check()
            assert (watch.running.name, heads.current()) == ("v0001", heads.folder / "v0001")
            assert (await write(backend, watch)).rounds == before[0].rounds
            await watch.check()
            assert watch.running.name == "v0001"

    asyncio.run(run())
    assert "rolled back" in caplog.text
    assert (heads.folder / "v0002" / "rolled_back.json").is_file()
    assert not (heads.folder / "v0001" / "rolled_back.json").exists()


@pytest.mark.slow
def test_a_text_under_way_keeps_its_head(drafting: LLM, heads: HeadVersions) -> None:
    """The one that began before the swap drafts as well as ever; the one that began after it does not."""

    async def run() -> None:
        async with AsyncLLM(drafting) as llm:
            backend = LocalBackend(llm)
            ids, options = _ids(backend), {"max_tokens": 40, "temperature": 0, "ignore_eos": True}
            await backend.swap_head(heads.folder / "v0001")
            alone = [item async for item in backend.stream(ids, **options)][-1]
            stream = backend.stream(ids, **options)
            await anext(stream)
            await backend.swap_head(heads.folder / "v0002")
            assert "eagle3@1" in drafting.engine.drafters._made
            later = [item async for item in backend.stream(ids, **options)][-1]
            first = [item async for item in stream][-1]
            assert isinstance(first, Completion)
            assert isinstance(later, Completion)
            assert isinstance(alone, Completion)
            assert first.token_ids == later.token_ids == alone.token_ids
            assert first.rounds == alone.rounds < later.rounds
            assert "eagle3@1" not in drafting.engine.drafters._made, "the former head is kept for nobody"
            with pytest.raises(ForerunError):
                await backend.swap_head(heads.folder / "v0003")
            await backend.swap_head(heads.folder / "v0001")

    asyncio.run(run())


@pytest.mark.slow
def test_a_head_is_swapped_in_another_process(heads: HeadVersions) -> None:
    """And a new process, in place of one that died, drafts with the version that the link is at."""
    always = {"speculative_config": {"drafter": "eagle3", "controller": "fixed", "budget": 5}}
    given = {"model": "smollm2", "engine": {"max_batch": 4, "max_length": 512}, "drafting": always}
    options = {"max_tokens": 24, "temperature": 0, "ignore_eos": True}

    async def run() -> None:
        engine = EngineProcess(Loader(LOAD_LLM, {**given, "heads": str(heads.folder)}))
        facts = await asyncio.to_thread(engine.wait_until_ready)
        backend = ProcessBackend(engine, facts, facts.tokenizer.tokenizer())

        async def write() -> Completion:
            done = [item async for item in backend.stream(_ids(backend), **options)][-1]
            assert isinstance(done, Completion)
            return done

        before = await write()
        await backend.swap_head(heads.folder / "v0002")
        after = await write()
        assert after.token_ids == before.token_ids
        assert after.rounds > before.rounds
        with pytest.raises(ForerunError):
            await backend.swap_head(heads.folder / "v0003")
        assert (await write()).rounds == after.rounds, "nothing has changed"
        heads.publish("v0002")
        engine.process.kill()
        while backend.failure is None:
            await asyncio.sleep(0.01)
        with pytest.raises(ForerunError, match="SIGKILL"):
            await backend.swap_head(heads.folder / "v0001")
        assert await backend.restart() == "yes"
        assert (await write()).rounds == after.rounds
        await backend.close()

    asyncio.run(run())


def test_a_server_follows_the_link(drafting: LLM, heads: HeadVersions) -> None:
    server, thread, url = start(drafting, ServerSettings(("m",), heads=heads.folder))
    assert httpx.get(f"{url}/stats", timeout=60).json()["head"] == "v0001"
    heads.publish("v0002")
    for _ in range(1200):
        if (found := httpx.get(f"{url}/stats", timeout=60).json()["head"]) == "v0002":
            break
        asyncio.run(asyncio.sleep(0.05))
    assert found == "v0002"
    server.should_exit = True
    thread.join(10)
