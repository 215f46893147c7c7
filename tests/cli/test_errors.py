"""What users do wrong: one line on stderr that says what to do next, exit code 2, no traceback."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from typer.main import get_command

from forerun.api.llm import LLM
from forerun.cli import loading
from forerun.cli.app import make_app
from forerun.cli.bench import print_document
from forerun.cli.flags import Settings, in_flags
from tests.cli.conftest import Ran, Run, plain, tiny_llm


def only_line(ran: Ran) -> str:
    """The one line a failed command printed."""
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.startswith("forerun: ")
    assert ran.err.count("\n") == 1
    return ran.err


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["hi", "--temperature", "-1"], "--temperature -1.0 is out of range"),
        (["hi", "--top-p", "0"], "--top-p 0.0 is out of range"),
        (["hi", "--budget", "9999"], "--budget 9999 is out of range: 0 to 256"),
        (["hi", "--drafter", "ngran"], "did you mean 'ngram'"),
        (["hi", "--drafter", "ngram:4"], "use --drafter ngram --budget 4"),
        (["hi", "--verifier", "exakt"], "did you mean 'exact'"),
        (["hi", "--drafter", "draft_model"], "pass --draft-model NAME"),
        (["hi", "--raw", "--system", "x"], "drop one of them"),
        (["--file", "no/such/file"], "cannot read the prompt file 'no/such/file'"),
        (["@no/such/file"], "cannot read the prompt file 'no/such/file'"),
        (["hi", "--file", "x"], "give one of them"),
        ([""], "the prompt is empty"),
        ([" \n"], "the prompt is empty"),
        ([], "the prompt is empty"),
    ],
)
def test_before_a_model_is_loaded(forerun: Run, monkeypatch: pytest.MonkeyPatch, flags: list[str], words: str) -> None:
    def never(settings: Settings) -> LLM:
        raise AssertionError("the mistake is plain before a model is loaded")

    monkeypatch.setattr(loading, "load_llm", never)
    assert words in only_line(forerun("generate", *flags))


def test_a_server_that_is_not_up_has_failed_no_check(forerun: Run) -> None:
    assert "does not answer" in only_line(forerun("verify", "http://127.0.0.1:9"))
    assert "does not answer" in only_line(forerun("verify", "http://127.0.0.1:9", "--model", "x"))


def test_two_models_to_serve_are_refused(forerun: Run) -> None:
    assert "two models were given" in only_line(forerun("serve", "smollm2", "--model", "qwen-1.5b"))


@pytest.mark.parametrize("flags", [["--no-such-flag"], ["--dtype", "int4"], ["--max-tokens", "many"]])
def test_a_misspelt_flag_exits_with_2(forerun: Run, flags: list[str]) -> None:
    ran = forerun("generate", "hi", *flags)
    assert (ran.code, ran.out) == (2, "")
    assert flags[0] in plain(ran.err)
    assert "Value error" not in ran.err


@pytest.mark.parametrize("command", ["generate", "serve"])
def test_two_formats_for_the_same_weights_are_refused(command: str, forerun: Run) -> None:
    said = only_line(forerun(command, "smollm2", "--dtype", "int8", "--quantization", "fp8"))
    assert "--dtype int8 and --quantization fp8 are two formats for the same weights; give one of them" in said
    said = only_line(forerun(command, "smollm2", "--quantization", "awq"))
    assert "--quantization awq is no format to load weights in: auto, float32" in said
    assert "leave it out for a checkpoint that is quantised already" in said


def test_quantization_is_dtype_by_another_name(forerun: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    assert Settings.of({"quantization": "w4"}).engine.dtype == "w4"
    seen = list[str]()
    monkeypatch.setattr("forerun.cli.serve._load_and_run", lambda given, *_: seen.append(given["engine"]["dtype"]))
    for flags in (["--quantization", "fp8"], ["--dtype", "int8"], []):
        assert forerun("serve", "smollm2", *flags).code == 0
    assert seen == ["fp8", "int8", "auto"]


def test_an_unknown_kv_cache_format_is_refused_before_anything_is_measured(forerun: Run) -> None:
    said = only_line(forerun("quality", "--kv-dtypes", "int8,int4"))
    assert "unknown KV cache format 'int4'; known: auto, int8, fp8" in said


def test_stdin_must_be_text(forerun: Run) -> None:
    assert "standard input is not UTF-8 text (byte 1 is 0xff)" in only_line(forerun("generate", typed=b"a\xff"))


@pytest.mark.usefixtures("tiny")
def test_a_prompt_longer_than_the_context(forerun: Run) -> None:
    line = only_line(forerun("generate", "a" * 500, "--max-length", "100"))
    assert "the context of 100" in line
    assert "shorten it" in line


def test_a_model_without_a_chat_template(forerun: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def plain(settings: Settings) -> LLM:
        llm = tiny_llm(settings)
        monkeypatch.setattr(type(llm.tokenizer), "has_chat_template", False)
        return llm

    monkeypatch.setattr(loading, "load_llm", plain)
    assert "generate --raw" in only_line(forerun("chat", typed="hi\n"))
    assert "drop --system" in only_line(forerun("generate", "hi", "--system", "x"))
    assert forerun("generate", "hi", "--max-tokens", "2").code == 0


def test_files_that_are_no_models(forerun: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORERUN_CACHE", str(tmp_path / "cache"))
    (tmp_path / "cut.gguf").write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 5, 5))
    (tmp_path / "junk.gguf").write_bytes(bytes(range(256)) * 40)
    (tmp_path / "folder").mkdir()
    for name, words in {
        "none.gguf": "there is no file",
        "cut.gguf": "is damaged",
        "junk.gguf": "is damaged",
        "folder": "has no config.json",
    }.items():
        assert words in only_line(forerun("generate", "hi", "--model", str(tmp_path / name)))
    assert "did you mean 'smollm2'" in only_line(forerun("generate", "hi", "--model", "smollm"))
    assert "forerun models pull smollm2" in only_line(forerun("generate", "hi"))


def test_a_draft_model_of_another_vocabulary(forerun: Run, tmp_path: Path) -> None:
    for folder, words in (("target", ["a", "b", "c"]), ("draft", ["x", "y", "z"])):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "config.json").write_text('{"model_type": "llama"}')
        save_file({"w": torch.zeros(1)}, tmp_path / folder / "model.safetensors")
        tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token=words[0]))
        tokenizer.save(str(tmp_path / folder / "tokenizer.json"))
    models = ("--model", str(tmp_path / "target"), "--draft-model", str(tmp_path / "draft"))
    assert "does not share the vocabulary" in only_line(forerun("generate", "hi", *models))


@pytest.mark.parametrize("words", ["models --json -", "drafters"])
def test_a_reader_that_went_away_is_no_error(words: str) -> None:
    reads, writes = os.pipe()
    os.close(reads)
    command = [sys.executable, "-m", "forerun", *words.split()]
    ended = subprocess.run(command, stdout=writes, stderr=subprocess.PIPE, check=False)
    os.close(writes)
    assert ended.returncode != 0
    assert ended.stderr == b""


@pytest.mark.parametrize(
    ("command", "library", "shown"),
    [
        ("generate", "max_tokens=0 is out of range: at least 1", "--max-tokens 0 is out of range: at least 1"),
        ("generate", "no GPU; use device='cpu'", "no GPU; use --device cpu"),
        (
            "generate",
            "needs a trained head; pass draft_model=FOLDER",
            "needs a trained head; pass --draft-model FOLDER",
        ),
        ("generate", "history needs shared=True", "history needs --shared"),
        ("generate", "kernels='torch' and f(max_tokens=0)", "kernels='torch' and f(--max-tokens 0)"),
        ("generate", "max_batch=0 is out of range", "max_batch=0 is out of range"),  # it has no such flag
        ("serve", "max_batch=0 is out of range", "--max-num-seqs 0 is out of range"),
        ("serve", "max_length=7 is out of range", "--max-length 7 is out of range"),
        ("data", "max_prompt=160 and max_length=96", "--max-prompt 160 and --max-length 96"),
    ],
)
def test_messages_name_flags_as_they_are_typed(command: str, library: str, shown: str) -> None:
    assert in_flags(library, get_command(make_app(command)).commands[command]) == shown  # type: ignore[attr-defined]


def test_a_draft_model_that_is_not_there_may_have_been_meant_as_a_head(forerun: Run) -> None:
    said = only_line(forerun("generate", "hi", "--draft-model", "my-head"))
    assert "unknown model 'my-head'" in said
    assert "no folder 'my-head' with a trained head" in said


def test_a_terminal_shows_tables_and_not_the_document(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    print_document({"speed": 1}, None)
    assert capsys.readouterr() == ('{"speed": 1}\n', "")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    print_document({"speed": 1}, None)
    assert capsys.readouterr() == ("", "All figures as JSON: --json FILE, or into a pipe.\n")
    print_document({"speed": 1}, tmp_path / "x.json")
    assert capsys.readouterr() == ("", "")
    assert (tmp_path / "x.json").read_text() == '{"speed": 1}\n'


def test_a_wrong_value_ends_with_one_full_stop(forerun: Run) -> None:
    said = only_line(forerun("generate", "hi", "--temperature", "hot"))
    assert ". Try `forerun generate --help`." in said
    assert ".." not in said


def test_a_question_ends_without_a_full_stop(forerun: Run) -> None:
    said = only_line(forerun("generat", "hi"))
    assert "did you mean 'generate'? Try `forerun --help`." in said.replace("Did", "did")
