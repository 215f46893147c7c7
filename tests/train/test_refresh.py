"""`forerun train refresh`: recorded texts become data, and a head is published where it is better."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from forerun import LLM
from forerun.cli.app import app
from forerun.core.errors import InvalidInput, ModelNotFound
from forerun.drafters.heads.medusa import read_heads
from forerun.heads import HeadVersions
from forerun.models.load.checkpoint import Checkpoint
from forerun.server.service import Recorder
from forerun.train.options import Method
from forerun.train.refresh import _weigh, read_recordings, refresh
from forerun.train.run import train
from tests.models.tiny_checkpoints import VOCAB
from tests.models.tiny_folder import LETTERS, add_tokenizer
from tests.train.test_recipes import options_for


@pytest.fixture(scope="module")
def target(tiny: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The tiny target with a tokenizer; its language has no end."""
    folder = tmp_path_factory.mktemp("with-tokenizer")
    shutil.copytree(tiny.path, folder, dirs_exist_ok=True)
    add_tokenizer(folder, json.loads((folder / "config.json").read_text()), LETTERS[0])
    return str(folder)


@pytest.fixture(scope="module")
def traffic(target: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Texts that the target wrote for prompts of one kind, recorded as a server does."""
    folder = tmp_path_factory.mktemp("traffic")
    llm, recorder = LLM(target, drafter="ngram", dtype="float32"), Recorder(folder)
    prompts = [[1 + i % (VOCAB - 1), 1 + i // 3 % 5] for i in range(120)]
    for prompt, done in zip(prompts, llm.generate(prompts, max_tokens=24, temperature=0), strict=True):
        recorder.write(prompt, done, 0.0)
    recorder.close()
    return folder


def first_head(tiny: Checkpoint, texts: Path, folder: Path, method: Method) -> Path:
    """A head that has hardly learnt anything."""
    train(options_for(method, tiny, texts, folder, steps=3))
    return folder


@pytest.mark.slow
def test_a_better_head_is_published_and_one_that_is_not_is_not(
    tiny: Checkpoint, texts: Path, target: str, traffic: Path, tmp_path: Path
) -> None:
    head, out = first_head(tiny, texts, tmp_path / "first", "eagle3"), tmp_path / "versions"
    given: dict[str, Any] = {
        "target": target, "data": str(traffic), "out": str(out), "batch_tokens": 512, "max_length": 48,
        "device": "cpu",
    }  # fmt: skip
    found = refresh({**given, "init": str(head), "steps": 40, "lr": 5e-3})
    versions = HeadVersions(out)
    assert (found.former, found.version, found.published) == ("v0001", "v0002", True)
    assert found.after > 1.1 * found.before
    assert found.low > 1.0
    assert versions.current() == out / "v0002"
    same = refresh({**given, "steps": 1, "lr": 1e-12})  # nothing is learnt: as good as the one before
    assert (same.former, same.published) == ("v0002", False)
    assert same.before == pytest.approx(found.after, rel=0.05)
    assert versions.current() == out / "v0002"
    assert versions.names() == ["v0001", "v0002", "v0003"]
    kept = [path.relative_to(out).as_posix() for path in out.rglob("*")]
    assert not any("data" in name or "shard" in name or ".part" in name for name in kept), "texts were kept"


def test_one_text_does_not_decide() -> None:
    before, after = [(12, 6)] * 2, [(12, 4)] * 2
    assert _weigh("v2", "v1", before, after).published
    assert not _weigh("v2", "v1", before[:1], after[:1]).published


@pytest.mark.slow
def test_medusa_heads_keep_their_shape(
    tiny: Checkpoint, texts: Path, target: str, traffic: Path, tmp_path: Path
) -> None:
    head = first_head(tiny, texts, tmp_path / "first", "medusa")
    given = {"target": target, "data": str(traffic), "out": str(tmp_path / "out"), "init": str(head)}
    found = refresh({**given, "steps": 2, "batch_tokens": 256, "max_length": 48, "device": "cpu"})
    ours, theirs = (read_heads(folder, "medusa") for folder in (tmp_path / "out" / found.version, head))
    assert replace(ours[0], target="", rates=()) == replace(theirs[0], target="", rates=())
    assert {name: weight.shape for name, weight in ours[1].items()} == {
        name: weight.shape for name, weight in theirs[1].items()
    }


def test_unreadable_lines_and_repeats_are_left_out(tmp_path: Path) -> None:
    good = {"prompt": [1, 2], "tokens": [3, 4, 5], "temperature": 0.5, "rounds": 2}
    lines = [
        json.dumps(good), json.dumps(good), "{", "[1]", json.dumps({"prompt": [1], "tokens": []}),
        json.dumps({"prompt": [1], "tokens": [-4]}), json.dumps({"prompt": "abc", "tokens": [1]}),
        json.dumps({**good, "prompt": [1, True]}), json.dumps({**good, "temperature": None, "tokens": [9, 9]}),
    ]  # fmt: skip
    (tmp_path / "traffic-a.jsonl").write_text("\n".join(lines))
    found = read_recordings(tmp_path, 4)
    assert [(list(text.tokens), text.prompt_length, text.temperature) for text in found.texts] == [
        ([1, 2, 3, 4], 2, 0.5),
        ([1, 2, 9, 9], 2, 1.0),
    ]
    assert (found.repeats, found.unreadable) == (1, 6)
    assert found.tokens_per_round == pytest.approx(8 / 6)


def test_what_is_missing_is_said(target: str, tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match='"record": true'):
        read_recordings(tmp_path, 64)
    given = ["train", "refresh", "--target", target, "--data", str(tmp_path), "--out", str(tmp_path / "out")]
    ended = CliRunner().invoke(app, given)
    assert (ended.exit_code, "holds no recorded texts" in ended.output) == (2, True)
    (tmp_path / "traffic-a.jsonl").touch()
    ended = CliRunner().invoke(app, given)
    assert (ended.exit_code, "no head comes with the package" in ended.output) == (2, True)


def test_the_link_moves_in_one_step_and_only_to_versions(tmp_path: Path) -> None:
    versions = HeadVersions(tmp_path / "heads")
    assert versions.next_name() == "v0001"
    assert versions.current() is None
    for name in ("v0001", "v0002", "notes"):
        (versions.folder / name).mkdir(parents=True)
    with pytest.raises(InvalidInput, match="no link `current`"):
        versions.must_have_current()
    versions.publish("v0002")
    assert versions.current() == versions.folder / "v0002"
    versions.publish("v0001")
    assert versions.current() == versions.folder / "v0001"
    with pytest.raises(InvalidInput, match="no version 'notes'"):
        versions.publish("notes")
    (versions.folder / "current").unlink()
    (versions.folder / "current").symlink_to("../elsewhere")
    assert versions.current() is None
    assert versions.next_name() == "v0003"
