"""LoRA adapters in the server: chosen by `model`, mixed in a batch, loaded and unloaded, kept over a restart."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from shutil import copytree, rmtree
from typing import Any

import httpx
import pytest
import torch

from forerun import LLM
from forerun.core.errors import InvalidInput
from forerun.models.adapters import Adapter
from forerun.models.config import DecoderConfig
from forerun.models.load.checkpoint import open_checkpoint
from forerun.server.backends.start import LOAD_LLM, Loader
from forerun.server.settings import ServerSettings
from tests.server.conftest import ENGINE, MODEL, Running, children_of, start, start_process

pytestmark = pytest.mark.model
OWN: list[int] = []  # the engine's process of this module's server
ADMIN = {"Authorization": "Bearer secret"}
CHAT = {"messages": [{"role": "user", "content": "Count from one to ten."}], "max_tokens": 16, "temperature": 0}


def write_adapter(folder: Path, seed: int) -> str:
    config = DecoderConfig.from_hf(open_checkpoint("smollm2").config)
    dice = torch.Generator().manual_seed(seed)
    pairs = {
        f"model.layers.{layer}.self_attn.{name}_proj.weight": (
            torch.randn(8, config.width, generator=dice) / config.width**0.5,
            0.3 * torch.randn(config.heads * config.head_dim if name == "q" else config.width, 8, generator=dice),
        )
        for layer in range(config.layers)
        for name in ("q", "o")
    }
    Adapter("smollm2", 8, 1.0, pairs).write(folder)
    return str(folder)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return {name: write_adapter(tmp_path_factory.mktemp(name), i) for i, name in enumerate(("one", "two"))}


@pytest.fixture(scope="module")
def adapted(llm: LLM, folders: dict[str, str]) -> Iterator[Running]:
    loaded = {"one": folders["one"]}
    settings = ServerSettings(("smollm2",), adapters=loaded, admin_key="secret", restart=True)
    given = {**MODEL, "engine": {**MODEL["engine"], "adapters": loaded}}  # type: ignore[dict-item]
    others = children_of(os.getpid(), ENGINE)
    server, thread, url = start_process(Loader(LOAD_LLM, given), settings)
    OWN[:] = [process for process in children_of(os.getpid(), ENGINE) if process not in others]
    yield Running(url, llm)
    server.should_exit = True
    thread.join(10)


@pytest.fixture
def administered(llm: LLM, folders: dict[str, str]) -> Iterator[Running]:
    """The same on a thread of this process, which needs no second model."""
    llm.load_adapter("one", folders["one"])
    settings = ServerSettings(("smollm2",), adapters={"one": folders["one"]}, admin_key="secret")
    server, thread, url = start(llm, settings)
    yield Running(url, llm)
    server.should_exit = True
    thread.join(10)
    llm.unload_adapter("one")


def ask(served: Running, model: str, **more: Any) -> httpx.Response:
    return httpx.post(f"{served.url}/v1/chat/completions", json={**CHAT, "model": model, **more}, timeout=60)


def text_of(served: Running, model: str, **more: Any) -> str:
    answer = ask(served, model, **more).json()
    assert answer["model"] == model
    return str(answer["choices"][0]["message"]["content"])


def admin(served: Running, what: str, body: dict[str, Any], **headers: str) -> httpx.Response:
    return httpx.post(f"{served.url}/v1/{what}_lora_adapter", json=body, headers=headers or ADMIN, timeout=60)


@pytest.mark.slow
def test_adapters_are_models_that_are_loaded_and_unloaded_while_others_write(
    adapted: Running, folders: dict[str, str]
) -> None:
    names = [model["id"] for model in httpx.get(f"{adapted.url}/v1/models", timeout=60).json()["data"]]
    assert names == ["smollm2", "one"]
    first = text_of(adapted, "one")
    assert ask(adapted, "two").status_code == 404
    assert admin(adapted, "load", {"lora_name": "two", "lora_path": folders["two"]}).json()["status"] == "loaded"
    alone = {name: text_of(adapted, name, speculative={"drafter": "none"}) for name in ("smollm2", "one", "two")}
    assert len(set(alone.values())) == 3, "each writes its own text"
    assert alone["one"] == first
    with ThreadPoolExecutor(6) as pool:
        mixed = list(pool.map(lambda name: (name, text_of(adapted, name)), ["smollm2", "one", "two"] * 2))
    assert all(alone[name] == text for name, text in mixed)
    llm = adapted.llm
    llm.load_adapter("one", folders["one"])
    own = llm.chat(CHAT["messages"], max_tokens=16, temperature=0, adapter="one").text  # type: ignore[arg-type]
    llm.unload_adapter("one")
    assert (own, llm.adapters) == (alone["one"], [])
    counted = httpx.get(f"{adapted.url}/metrics", timeout=60).text
    assert 'forerun:adapter_generation_tokens_total{adapter="two",model_name="smollm2"} 48.0' in counted
    assert admin(adapted, "unload", {"lora_name": "two"}).status_code == 200
    assert ask(adapted, "two").status_code == 404
    assert admin(adapted, "unload", {"lora_name": "two"}).status_code == 404


def test_an_adapter_is_loaded_and_writes_its_own_text(administered: Running, folders: dict[str, str]) -> None:
    assert admin(administered, "load", {"lora_name": "two", "lora_path": folders["two"]}).json()["status"] == "loaded"
    assert len({text_of(administered, name, max_tokens=4) for name in ("smollm2", "one", "two")}) == 3
    assert admin(administered, "unload", {"lora_name": "two"}).status_code == 200
    assert ask(administered, "two").status_code == 404


def test_acceptance_is_counted_by_adapter_in_stats_metrics_and_log(
    administered: Running, folders: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    """The answers' own figures are the reference; `two` is drafted well, for it is told what it will write."""
    caplog.set_level("INFO", "forerun.server.service")
    assert admin(administered, "load", {"lora_name": "two", "lora_path": folders["two"]}).status_code == 200
    first = httpx.get(f"{administered.url}/stats", timeout=60).json()["adapters"]
    known = text_of(administered, "two")
    asked = [("one", {"speculative": "off"}), ("two", {"prediction": {"type": "content", "content": known}})]
    answers = {name: ask(administered, name, **more).json() for name, more in asked}
    found = httpx.get(f"{administered.url}/stats", timeout=60).json()["adapters"]
    counted = httpx.get(f"{administered.url}/metrics", timeout=60).text
    lines = [json.loads(record.message) for record in caplog.records if record.message.startswith("{")]
    for name, answer in answers.items():
        said = answer["metrics"]["speculative_decoding"]
        wanted = {"drafted": said["num_draft_tokens"], "accepted": said["num_accepted_draft_tokens"], "tokens": 16}
        (line,) = [line for line in lines if line["answer"] == answer["id"]]
        assert (line["adapter"], wanted) == (name, {key: line[key] for key in wanted})
        if name not in first and name == "one":  # no other text of it has been written
            assert found[name] == {
                **wanted,
                "rounds": said["num_spec_steps"],
                "tokens_per_round": 16 / said["num_spec_steps"],
            }
        for metric, figure in (("sequence_rounds", "rounds"), ("generation_tokens", "tokens"),
                               ("draft_tokens", "drafted"), ("accepted_tokens", "accepted")):  # fmt: skip
            assert (
                f'forerun:adapter_{metric}_total{{adapter="{name}",model_name="smollm2"}} {float(found[name][figure])}'
                in counted
            )
    assert found["one"]["accepted"] - first.get("one", {}).get("accepted", 0) == 0
    assert found["two"]["accepted"] - first.get("two", {}).get("accepted", 0) > 4
    assert admin(administered, "unload", {"lora_name": "two"}).status_code == 200


def test_who_may_change_adapters_and_what_cannot_be_loaded(administered: Running, tmp_path: Path) -> None:
    body = {"lora_name": "x", "lora_path": str(tmp_path)}
    assert admin(administered, "load", body, Authorization="Bearer wrong").status_code == 401
    assert (
        httpx.post(
            f"{administered.url}/v1/load_lora_adapter", content=b"[" * 9999, headers=ADMIN, timeout=60
        ).status_code
        == 400
    )
    for wrong, said in (
        (body, "holds no adapter"),
        ({**body, "lora_name": "one"}, "served already"),
        ({**body, "lora_name": "smollm2"}, "served already"),
        ({"lora_name": "x"}, "lora_path"),
        ({**body, "lora_name": ""}, "lora_name"),
        ({**body, "load_inplace": True}, "load_inplace='True' is not supported"),
        ({**body, "load_inplace": False, "lora_int_id": None}, "holds no adapter"),  # what vLLM's clients send
    ):
        refused = admin(administered, "load", wrong)
        assert refused.status_code == 400
        assert said in refused.json()["error"]["message"]
    with pytest.raises(InvalidInput, match="has the model's name"):
        ServerSettings(("a",), adapters={"a": "b"})


def test_without_an_admin_key_nobody_may(served: Running, folders: dict[str, str]) -> None:
    refused = admin(served, "load", {"lora_name": "two", "lora_path": folders["two"]})
    assert refused.status_code == 403


@pytest.mark.slow
def test_an_engine_that_is_started_again_has_them_again(adapted: Running, folders: dict[str, str]) -> None:
    assert admin(adapted, "load", {"lora_name": "later", "lora_path": folders["two"]}).status_code == 200
    wanted = text_of(adapted, "later")
    (process,) = OWN
    os.kill(process, signal.SIGKILL)
    until = time.monotonic() + 120
    while time.monotonic() < until:
        time.sleep(0.5)
        answer = ask(adapted, "later")
        assert answer.status_code in (200, 500, 503), "an engine that serves has read it"
        if answer.status_code == 200:
            break
    assert answer.json()["choices"][0]["message"]["content"] == wanted


@pytest.mark.slow
def test_a_server_that_sleeps_changes_no_adapters_and_wakes_with_those_it_had(
    adapted: Running, folders: dict[str, str], tmp_path: Path
) -> None:
    gone = copytree(folders["two"], tmp_path / "gone")
    assert admin(adapted, "load", {"lora_name": "gone", "lora_path": str(gone)}).status_code == 200
    wanted, body = text_of(adapted, "one"), {"lora_name": "one", "lora_path": folders["one"]}
    assert httpx.post(f"{adapted.url}/sleep", headers=ADMIN, timeout=60).status_code == 200
    for what in ("load", "unload"):
        refused = admin(adapted, what, body if what == "load" else {"lora_name": "one"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "sleeping")
    rmtree(gone)
    assert httpx.post(f"{adapted.url}/wake_up", headers=ADMIN, timeout=120).status_code == 200
    assert text_of(adapted, "one") == wanted
    assert admin(adapted, "unload", {"lora_name": "gone"}).status_code == 200, "though the engine could not read it"
    for _ in range(2):
        assert admin(adapted, "unload", {"lora_name": "one"}).status_code == 200
        assert admin(adapted, "load", body).status_code == 200
    assert text_of(adapted, "one") == wanted
