"""Encoder-decoders from folders: weights in either format, Marian's tokenizer, and what users call."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.processors import TemplateProcessing

from forerun import LLM
from forerun.core.errors import DamagedFile, InvalidInput, UnsupportedModel
from forerun.models.load.checkpoint import open_checkpoint
from forerun.models.load.marian_tokenizer import MarianTokenizer
from tests.encoder_decoder.marian_folder import make_folder
from tests.encoder_decoder.tiny_models import VOCAB, make_model, reference

TEXTS = ["the cat sees a dog.", "The  bigger dogs ", "zebra", "", "a\u6f22 cat"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("marian"))


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return LLM(folder, drafter="ngram")


def test_a_folder_translates_as_transformers_does(llm: LLM, folder: Path, tmp_path: Path) -> None:
    done = llm.generate(TEXTS[:2], max_tokens=20)
    for text, one in zip(TEXTS, done, strict=False):
        source = tuple(llm.tokenizer.encode(text))
        assert one.token_ids == reference("marian", source, 20)
        assert one.prompt_tokens == len(source)
        assert one.text == llm.tokenizer.decode(one.token_ids)
    stream = llm.stream(TEXTS[0], max_tokens=20)
    assert "".join(event.text for event in stream) == stream.completion.text == done[0].text
    safe = LLM(make_folder(tmp_path, pickled=False), drafter="none")
    assert [one.text for one in safe.generate(TEXTS[:2], max_tokens=20)] == [one.text for one in done]


def test_a_t5_folder_with_a_tokenizer_of_its_own_writes_text(tmp_path: Path) -> None:
    make_model("t5").save_pretrained(tmp_path)
    words = {"<pad>": 0, "</s>": 1} | {f"w{i}": i for i in range(2, VOCAB)}
    backend = Tokenizer(WordLevel(words, unk_token="<pad>"))
    backend.pre_tokenizer = WhitespaceSplit()
    backend.post_processor = TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    backend.save(str(tmp_path / "tokenizer.json"))
    done = LLM(tmp_path).generate("w5 w6 w7", max_tokens=12)
    assert done.token_ids == reference("t5", (5, 6, 7, 1), 12)
    assert done.text.split()[0] == f"w{done.token_ids[0]}"


def test_q8_weights_load_and_drafting_changes_no_text(folder: Path) -> None:
    from forerun.models.native import library as native

    if not native.available():
        with pytest.raises(InvalidInput, match="native"):
            LLM(folder, dtype="q8")
        return
    plain, drafted = (LLM(folder, dtype="q8", drafter=name) for name in ("none", "ngram"))
    for text in TEXTS[:2]:
        asked = {"max_tokens": 20, "temperature": 0.7, "seed": 3}
        assert plain.generate(text, **asked).text == drafted.generate(text, **asked).text  # type: ignore[call-overload]


def test_pieces_are_cut_as_sentencepiece_cuts_them(folder: Path) -> None:
    ours = MarianTokenizer(folder, {})
    assert [ours.token(i) for i in ours.encode("the bigger dogs")] == [
        "\u2581the", "\u2581big", "ger", "\u2581dog", "s", "</s>",
    ]  # fmt: skip
    assert ours.encode("zebra") == [ours.vocabulary()["\u2581"], 1, 0], "a piece without an id is unknown"
    pytest.importorskip("sentencepiece")
    from transformers import MarianTokenizer as Theirs

    theirs = Theirs.from_pretrained(str(folder))
    for text in [*TEXTS, ">>fr<< a cat", "tabs\tand\nlines", "x" * 300]:
        assert ours.encode(text) == theirs(text).input_ids, text
        assert ours.decode(ours.encode(text)).strip() == theirs.decode(theirs(text).input_ids, skip_special_tokens=True)


def test_chats_are_refused_and_say_why(llm: LLM) -> None:
    with pytest.raises(InvalidInput, match="chat template"):
        llm.chat("Hello")


def test_a_pickle_that_would_run_code_is_not_opened(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    ran = tmp_path / "ran"

    class Evil:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return Path.touch, (ran,)  # type: ignore[return-value]

    for write in (lambda path: torch.save({"a": Evil()}, path), lambda path: path.write_bytes(pickle.dumps(Evil()))):
        write(folder / "pytorch_model.bin")
        with pytest.raises(DamagedFile):
            open_checkpoint(str(folder))
        assert not ran.exists()


def test_damaged_files_are_named(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    whole = (folder / "pytorch_model.bin").read_bytes()
    (folder / "pytorch_model.bin").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DamagedFile, match=r"pytorch_model\.bin"):
        open_checkpoint(str(folder))
    spm = (folder / "source.spm").read_bytes()
    for damaged in (spm[:-3], b"", b"\xff" * 40, spm[:40]):
        (folder / "source.spm").write_bytes(damaged)
        with pytest.raises((DamagedFile, UnsupportedModel), match=r"source\.spm"):
            MarianTokenizer(folder, {})


@pytest.mark.slow
def test_a_server_completes_and_refuses_chats(llm: LLM) -> None:
    pytest.importorskip("fastapi")
    from fastapi.testclient import TestClient

    from forerun.api.llm import AsyncLLM
    from forerun.server.app import create_app
    from forerun.server.backends.thread import LocalBackend
    from forerun.server.settings import ServerSettings

    wanted = llm.generate(TEXTS[0], max_tokens=20)
    with TestClient(create_app(LocalBackend(AsyncLLM(llm)), ServerSettings(("tiny",)))) as client:
        body = {"model": "tiny", "prompt": TEXTS[0], "max_tokens": 20, "temperature": 0}
        answer = client.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["text"] == wanted.text
        assert answer.json()["usage"]["prompt_tokens"] == wanted.prompt_tokens
        most = client.post("/v1/completions", json={**body, "max_tokens": 127})
        assert most.status_code == 200, "the prompt takes no room in the decoder's context"
        over = client.post("/v1/completions", json={**body, "max_tokens": 128})
        assert over.status_code == 400
        chat = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}]}
        refused = client.post("/v1/chat/completions", json=chat)
        assert refused.status_code == 400
        assert "chat template" in refused.text
