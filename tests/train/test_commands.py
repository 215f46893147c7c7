"""The commands: flags become options, errors are one line, a head is held against its target."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models
from typer.testing import CliRunner

from forerun.build.engine import load_target
from forerun.build.fingerprint import Fingerprint
from forerun.cli.app import app
from forerun.core.errors import InvalidInput, VocabularyMismatch
from forerun.core.params import EngineConfig
from forerun.drafters.heads.eagle_head import write_head
from forerun.models.load.checkpoint import Checkpoint, open_checkpoint
from forerun.train.export import HeadReport, _compare, check_head, kind_of_head
from forerun.train.options import DataOptions
from forerun.train.run import train
from tests.drafters.tiny_heads import eagle_config, eagle_weights
from tests.models.tiny_checkpoints import VOCAB, make_reference, save
from tests.train.test_recipes import options_for

SMALL = "--steps 2 --batch-tokens 256 --max-length 48 --holdout 0.15 --device cpu"


def test_a_run_from_the_command_line(tiny: Checkpoint, texts: Path, tmp_path: Path) -> None:
    words = ["train", "medusa", "--target", str(tiny.path), "--data", str(texts), "--out", str(tmp_path)]
    ended = CliRunner().invoke(app, [*words, *SMALL.split(), "--eval-every", "1"])
    assert ended.exit_code == 0, ended.output
    assert "tokens per round on held-back text" in ended.stdout
    assert kind_of_head(tmp_path) == "medusa"
    assert re.search(r"^step 1: [\d.]+ tokens per round, as simulated; at most", ended.stderr, re.MULTILINE)
    # no terminal, so no bar: lines instead
    assert re.search(r"^\d\d:\d\d:\d\d medusa 2/2 · loss [\d.]+ · acceptance", ended.stderr, re.MULTILINE)


def test_a_flag_that_is_switched_off_and_a_folder_of_another_run(tiny: Checkpoint, texts: Path, tmp_path: Path) -> None:
    words = ["train", "eagle3", "--target", str(tiny.path), "--data", str(texts), "--out", str(tmp_path)]
    words += [*SMALL.split(), "--levels", "2", "--no-train-head"]
    assert CliRunner().invoke(app, words).exit_code == 0
    record = json.loads((tmp_path / "provenance.json").read_text())
    assert record["arguments"]["train_head"] is False
    assert CliRunner().invoke(app, [*words, "--seed", "5"]).exit_code == 2  # the folder holds another run


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["train", "eagle9", "--target", "TINY", "--data", "d", "--out", "o"], "eagle9"),
        (["data", "make", "--target", "TINY", "--out", "o", "--own-prompts", "0"], "--own-prompts 0"),
        (["drafters", "check", "nowhere"], "nowhere"),
        *(
            (["train", "eagle3", "--target", "TINY", "--data", "d", "--out", "o", flag, value], f"{flag} {value}")
            for flag, value in (
                ("--eval-every", "0"),
                ("--eval-batches", "0"),
                ("--save-every", "0"),
                ("--lr", "-1.0"),
                ("--lr", "nan"),
                ("--device", "tpu"),
                ("--vocab", "-5"),
                ("--inner", "-3"),
                ("--blocks", "0"),
                ("--clip", "0.0"),
                ("--decay", "nan"),
                ("--weight-decay", "-1.0"),
            )
        ),
        (["data", "make", "--target", "TINY", "--out", "o", "--device", "cuda:x"], "--device cuda:x"),
        (["data", "make", "--target", "TINY", "--out", "o", "--shard-tokens", "0"], "--shard-tokens 0"),
        (["data", "make", "--target", "TINY", "--out", "o", "--max-length", "9"], "--max-length 9 is out"),
        (["data", "make", "--target", "TINY", "--out", "o", "--temperatures", "0,hot"], "--temperatures 0,hot"),
    ],
)
def test_errors_are_one_line(words: list[str], said: str, tiny: Checkpoint) -> None:
    ended = CliRunner().invoke(app, [str(tiny.path) if word == "TINY" else word for word in words])
    assert ended.exit_code == 2
    assert said in ended.output
    assert "Traceback" not in ended.output


@pytest.mark.parametrize(
    ("flag", "value"), [("--features", "99"), ("--features", "-7"), ("--width", "4096"), ("--init", "nowhere")]
)
def test_a_head_that_does_not_fit_its_target_is_refused(
    tiny: Checkpoint, texts: Path, tmp_path: Path, flag: str, value: str
) -> None:
    words = ["train", "eagle3", "--target", str(tiny.path), "--data", str(texts), "--out", str(tmp_path / "o")]
    ended = CliRunner().invoke(app, [*words, "--holdout", "0.2", "--steps", "1", flag, value])
    assert ended.exit_code == 2, ended.output
    said = " ".join(ended.output.split())
    assert "give the folder of a trained head" in said if flag == "--init" else f"{flag} {value} is out of" in said


def test_lists_are_given_by_comma_and_by_repetition(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Numbers by comma, texts one flag each; a number flag given twice adds to the list, as it did."""
    seen = list[DataOptions]()
    monkeypatch.setattr("forerun.cli.train.check_model", lambda name: None)
    monkeypatch.setattr("forerun.train.data.make.make_data", lambda options, *more: seen.append(options))
    lists = ["--temperatures", "0,0.7", "--temperatures", "1", "--openings", "Write, then", "--openings", ""]
    words = ["--target", "t", "--out", str(tmp_path), *lists]
    assert CliRunner().invoke(app, ["data", "make", *words]).exit_code == 0
    assert [(one.temperatures, one.openings) for one in seen] == [((0.0, 0.7, 1.0), ("Write, then", ""))]


def test_missing_data_is_said_before_anything_is_loaded(tiny: Checkpoint, tmp_path: Path) -> None:
    """Torch need not be there: the data comes first."""
    words = ["eagle3", "--target", str(tiny.path), "--data", str(tmp_path), "--out", "o", "--steps", "500"]
    code = "import sys; sys.modules['torch'] = None; from forerun.cli.app import main; main()"
    ended = subprocess.run([sys.executable, "-c", code, "train", *words], capture_output=True, text=True)
    said = (ended.stdout + ended.stderr).strip()
    assert ended.returncode == 2, said
    assert "holds no texts; this run wants 8.2 million tokens (500 steps of 16384" in said
    assert f"forerun data make --target {tiny.path} --out {tmp_path}" in said
    assert "Traceback" not in said


def test_how_much_data_there_is_is_said(tiny: Checkpoint, texts: Path, tmp_path: Path) -> None:
    said: list[str] = []
    options = options_for("medusa", tiny, texts, tmp_path, steps=2, batch_tokens=256)
    train(options, say=said.append)
    counted = re.fullmatch(
        r"(\d+) texts to learn \((\d+) tokens\), (\d+) held back; this run reads them ([\d.]+) times", said[0]
    )
    assert counted is not None, said
    assert int(counted[1]) + int(counted[3]) == 160
    assert float(counted[4]) == pytest.approx(512 / int(counted[2]), abs=0.06)


def test_a_head_for_another_target_is_named(tiny: Checkpoint, tmp_path: Path) -> None:
    target = load_target(tiny, EngineConfig(device="cpu", dtype="float32"))
    wide = eagle_config("eagle3", 5000, width=32)
    write_head(tmp_path / "vocabulary", wide, eagle_weights(wide))
    with pytest.raises(VocabularyMismatch, match="another target"):
        _compare(tmp_path / "vocabulary", "eagle3", target)
    from dataclasses import replace

    deep = replace(eagle_config("eagle3", VOCAB, width=32), layers=(2, 20, 30), target="some/other")
    write_head(tmp_path / "layers", deep, eagle_weights(deep))
    with pytest.raises(InvalidInput, match=r"layer 20 .* another target \(some/other\)"):
        _compare(tmp_path / "layers", "eagle3", target)
    stranger = HeadReport("f", "eagle3", "", "some/other", 1.02, [0.02], fits=False)
    assert "another target" in stranger.verdict
    assert "some/other" in stranger.verdict


class Letters:
    eos_ids = frozenset({0})
    has_chat_template = False

    def encode(self, text: str) -> list[int]:
        return [1 + ord(letter) % (VOCAB - 1) for letter in text][:12]

    def decode(self, ids: list[int]) -> str:
        return "".join(chr(97 + i % 26) for i in ids)


def test_check_measures_acceptance(tiny: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A random head of the right shape is reported: almost nothing is accepted."""
    monkeypatch.setattr(Checkpoint, "tokenizer", lambda self: Letters())
    config = eagle_config("eagle3", VOCAB, width=32)
    write_head(tmp_path, config, eagle_weights(config))
    report = check_head(tmp_path, str(tiny.path), EngineConfig(device="cpu", dtype="float32"), tokens=12)
    assert report.kind == "eagle3"
    assert report.accepted_per_position[0] < 0.3
    assert 1.0 <= report.tokens_per_round < 1.3
    assert report.fits is (report.tokens_per_round >= 1.1)
    assert "EAGLE-3, 32 wide" in report.about


@pytest.mark.parametrize(
    "name", ["lfm2", *(pytest.param(name, marks=pytest.mark.slow) for name in ("gpt_oss", "deepseek_v3", "qwen3_next"))]
)
def test_targets_of_every_kind_are_trained_for_and_checked(
    name: str, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Recurrent states, sinks and experts, latent attention."""
    target, head = tmp_path / "target", tmp_path / "head"
    save(make_reference(name), target)
    words = ["train", "eagle3", "--target", str(target), "--data", str(texts), "--out", str(head)]
    ended = CliRunner().invoke(app, [*words, *SMALL.split()])
    assert ended.exit_code == 0, ended.output
    monkeypatch.setattr(Checkpoint, "tokenizer", lambda self: Letters())
    report = check_head(head, str(target), EngineConfig(device="cpu", dtype="float32"), tokens=12)
    assert report.kind == "eagle3"
    assert 1.0 <= report.tokens_per_round < 2.0


def test_the_fingerprint_of_the_target_lies_beside_its_head(tiny: Checkpoint, texts: Path, tmp_path: Path) -> None:
    target, out = tmp_path / "target", tmp_path / "out"
    shutil.copytree(tiny.path, target)
    words = {f"w{index}": index for index in range(VOCAB)}
    Tokenizer(models.WordLevel(words, unk_token="w0")).save(str(target / "tokenizer.json"))
    line = ["train", "medusa", "--target", str(target), "--data", str(texts), "--out", str(out), *SMALL.split()]
    assert CliRunner().invoke(app, line).exit_code == 0
    written = Fingerprint.read(out)
    assert written is not None
    assert written == Fingerprint.of(open_checkpoint(str(target)))
