"""Tokenizers from GGUF metadata and from folders, equal to transformers' for the default; chat templates."""

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from forerun.core.errors import DamagedFile, InvalidInput, ModelNotFound, UnsupportedModel
from forerun.models.load.catalog import known_models
from forerun.models.load.checkpoint import open_checkpoint
from forerun.models.load.gguf import Metadata
from forerun.models.load.gguf_tokenizer import build_tokenizer
from forerun.models.load.tokenizer import Tokenizer, tokenizer_from_folder, tokenizer_from_gguf

CHAT = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
CHAT += "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"

# Ids that transformers 5.22 gives for the default model's GGUF file.
REFERENCE = {
    "": "",
    "Hello, world!": "19556 28 905 17",
    "The year 2024 had 366 days; 3.14": "504 713 216 34 32 34 36 761 216 35 38 38 2009 43 216 35 30 33 36",
    "emoji 🙂👩\u200d👩\u200d👧": "391 33777 47526 10813 235 119 321 231 10813 235 119 321 231 10813 235 117",
    "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n": "1 4093 198 26843 2 198 1 520 9531 198",
    "it's we'll I'D don't '' 'S": "269 506 392 3060 339 23 52 1326 982 10922 637 67",
}
VARIED = [
    *REFERENCE,
    " leading and trailing  ",
    "tabs\tand\t\tmore\n\nnew lines\r\n  indented\n    deeper\n",
    "def f(x: int) -> list[str]:\n    return [str(i) for i in range(x)]  # comment\n",
    "naïve café — “quotes” …",
    "日本語のテキスト 中文字符 한국어",
    "Привет мир, Ελληνικά, עברית, العربية",
    "🏳️\u200d🌈 done, \x00\x01 control \x7f",
    "<|endoftext|> inside <|im_end|>text<repo_name>x<file_sep>",
    "a" * 50 + " " * 20 + "b",
    "zero\u200bwidth \u00a0nbsp \u3000ideographic e\u0301 नमस्ते",
    "path?q=1&r=%20 #tag @user $100 €5",
]


def byte_level(path: Path, pre: str = "smollm", **more: Any) -> Metadata:
    letters = ["<|im_start|>", "<|im_end|>", "<think>", *"abcd0123", "Ġ", "ab", "ĠĠ", "01", "Ċ"]
    values = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": letters,
        "tokenizer.ggml.token_type": [3, 3, 4] + [1] * (len(letters) - 3),
        "tokenizer.ggml.merges": ["a b", "Ġ Ġ", "0 1"],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
    }
    path.write_bytes(b"stands for the file that the metadata came from")
    return Metadata(path, values | {f"tokenizer.{key}": value for key, value in more.items()}, "llama")


def sentencepiece(path: Path, **more: Any) -> Metadata:
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    words = ["▁", "h", "e", "l", "o", "he", "ll", "▁he", "llo", "▁hello"]
    values = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": pieces + words,
        "tokenizer.ggml.scores": [0.0] * len(pieces) + [-100.0] * 5 + [-1.0, -2.0, -3.0, -4.0, -5.0],
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * len(words),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }
    return Metadata(path, values | {f"tokenizer.{key}": value for key, value in more.items()}, "llama")


def pieces(tokenizer: tokenizers.Tokenizer, text: str) -> list[str]:
    return tokenizer.encode(text, add_special_tokens=False).tokens


def test_smollm_splits_digits_before_anything_else(tmp_path: Path) -> None:
    tokenizer = build_tokenizer(byte_level(tmp_path / "m.gguf"))
    assert pieces(tokenizer, "ab  01") == ["ab", "ĠĠ", "0", "1"]
    plain = build_tokenizer(byte_level(tmp_path / "m.gguf", pre="default"))
    assert pieces(plain, "ab  01") == ["ab", "Ġ", "Ġ", "01"]


@pytest.mark.parametrize(
    "pre", ["default", "smollm", "llama-bpe", "qwen2", "qwen35", "deepseek-v3", "tekken", "gpt-4o"]
)
def test_special_tokens_stay_whole(pre: str, tmp_path: Path) -> None:
    tokenizer = Tokenizer(build_tokenizer(byte_level(tmp_path / "m.gguf", pre=pre)))
    ids = tokenizer.encode("<|im_start|>ab<think>cd<|im_end|>", add_special=False)
    assert [tokenizer.token(i) for i in ids] == ["<|im_start|>", "ab", "<think>", "c", "d", "<|im_end|>"]
    assert tokenizer.decode(ids) == "ab<think>cd"
    assert tokenizer.decode(ids, skip_special=False) == "<|im_start|>ab<think>cd<|im_end|>"


@pytest.mark.parametrize(
    ("pre", "text", "words"),
    [
        ("qwen2", "e\u0301te\u0301 \u093f12", ["\u00e9t\u00e9", " \u093f", "1", "2"]),
        ("qwen35", "\u0928\u093f\u0928 \u093f1", ["\u0928\u093f\u0928", " \u093f", "1"]),
        ("qwen2", "\u0928\u093f\u0928", ["\u0928", "\u093f\u0928"]),
        ("glm4", "12345 it's", ["123", "45", " it", "'s"]),
        (
            "deepseek-v3",
            "x=12345\u6f22\u304b\u5b57 it's (a)",
            ["x", "=", "123", "45", "\u6f22\u304b\u5b57", " it", "'s", " (", "a", ")"],
        ),
        ("glm4", "\u6f22a", ["\u6f22a"]),
        ("deepseek-v3", "\u6f22a", ["\u6f22", "a"]),
    ],
)
def test_words_of_newer_families(pre: str, text: str, words: list[str], tmp_path: Path) -> None:
    built = build_tokenizer(byte_level(tmp_path / "m.gguf", pre=pre))
    normal = built.normalizer.normalize_str(text) if built.normalizer else text
    split = built.pre_tokenizer.pre_tokenize_str(normal)
    assert [normal[first:end] for _, (first, end) in split] == words


def test_gemma4_has_merges_and_no_scores(tmp_path: Path) -> None:
    more = {"ggml.model": "gemma4", "ggml.scores": [], "ggml.merges": ["l l", "h e", "he ll", "▁ hell"]}
    metadata = sentencepiece(tmp_path / "m.gguf", **more)
    metadata.values["tokenizer.ggml.tokens"] += ["hell", "▁hell"]
    metadata.values["tokenizer.ggml.token_type"] += [1, 1]
    tokenizer = Tokenizer(build_tokenizer(Metadata(metadata.path, metadata.values, "gemma4")))
    ids = tokenizer.encode("hello hello", add_special=False)
    assert [tokenizer.token(i) for i in ids] == ["hell", "o", "▁hell", "o"]
    assert tokenizer.decode(ids) == "hello hello"


def test_bos_is_added_where_the_file_says(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    without = Tokenizer(build_tokenizer(byte_level(path)))
    within = Tokenizer(build_tokenizer(byte_level(path, **{"ggml.add_bos_token": True})))
    assert within.encode("ab") == [0, *without.encode("ab")]
    assert within.encode("ab", add_special=False) == without.encode("ab")


def test_sentencepiece_merges_follow_the_scores(tmp_path: Path) -> None:
    tokenizer = Tokenizer(build_tokenizer(sentencepiece(tmp_path / "m.gguf")))
    ids = tokenizer.encode("hello hé")
    assert [tokenizer.token(i) for i in ids] == ["<s>", "▁hello", "▁", "h", "<0xC3>", "<0xA9>"]
    assert tokenizer.decode(ids) == "hello hé"


def test_single_tokens_are_spelt_as_they_stand_in_a_text(tmp_path: Path) -> None:
    """With the space in front that `decode` drops, and bytes that are part of a character."""
    tokenizer = Tokenizer(build_tokenizer(sentencepiece(tmp_path / "m.gguf")))
    ids = tokenizer.encode("hello hé hello", add_special=False)
    assert tokenizer.decode(ids[-1:]) == "hello", "negative control"
    assert tokenizer.token_text(ids[-1]) == " hello"
    assert b"".join(map(tokenizer.token_bytes, ids)).decode() == " hello hé hello"
    assert tokenizer.token_text(tokenizer.encode("é", add_special=False)[-1]) == "\ufffd"
    special = Tokenizer(build_tokenizer(byte_level(tmp_path / "m.gguf")))
    assert (special.token_text(1), special.token_bytes(1)) == ("<|im_end|>", b"<|im_end|>")


def test_two_tokens_have_the_text_that_the_backend_gives_them(tmp_path: Path) -> None:
    """Streaming decodes pairs; where tokens are bytes their own texts are joined, unless a character is cut in two."""
    # Ã©: é
    words = ["<|im_start|>", "<|im_end|>", "<think>", "a", "Ġ", "Ġb", "Ã", "©", "Ã©", "Ċ", "aÃ", "©b"]
    more = {"ggml.tokens": words, "ggml.token_type": [3, 3, 4] + [1] * 9, "ggml.merges": []}
    for metadata in (byte_level(tmp_path / "m.gguf", **more), sentencepiece(tmp_path / "m.gguf")):
        backend = build_tokenizer(metadata)
        tokenizer, size = Tokenizer(backend), backend.get_vocab_size()
        pairs = [(a, b) for a in range(size) for b in range(a % 5, size, 5 if size > 50 else 1)]
        assert any("\ufffd" in tokenizer.decode([a]) for a in range(size))
        assert [tokenizer.decode(pair) for pair in pairs] == [backend.decode(pair) for pair in pairs]


def test_what_cannot_be_built_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    with pytest.raises(UnsupportedModel, match="martian"):
        build_tokenizer(byte_level(path, pre="martian"))
    with pytest.raises(UnsupportedModel, match="wordpiece"):
        build_tokenizer(byte_level(path, **{"ggml.model": "wordpiece"}))
    for key, value in {
        "ggml.merges": ["a z"],
        "ggml.tokens": [1, 2],
        "ggml.token_type": "x",
        "ggml.bos_token_id": -4,
    }.items():
        with pytest.raises(DamagedFile):
            build_tokenizer(byte_level(path, **{key: value}))
    with pytest.raises(DamagedFile, match="scores"):
        build_tokenizer(sentencepiece(path, **{"ggml.scores": [1.0]}))


def test_the_cache_is_used_and_a_bad_one_is_made_anew(tmp_path: Path) -> None:
    metadata, cache = byte_level(tmp_path / "m.gguf", chat_template=CHAT), tmp_path / "cache"
    first = tokenizer_from_gguf(metadata, cache)
    (kept,) = (cache / "tokenizers").iterdir()
    bare = Metadata(metadata.path, metadata.values | {"tokenizer.ggml.merges": ["broken"]}, "llama")
    assert tokenizer_from_gguf(bare, cache).vocabulary() == first.vocabulary()
    kept.write_text("{")
    assert tokenizer_from_gguf(metadata, cache).encode("ab 01") == first.encode("ab 01")
    assert kept.read_text() != "{"


def test_chat(tmp_path: Path) -> None:
    tokenizer = tokenizer_from_gguf(byte_level(tmp_path / "m.gguf", chat_template=CHAT), tmp_path)
    messages = [{"role": "a", "content": "ab"}]
    assert tokenizer.chat_text(messages) == "<|im_start|>a\nab<|im_end|>\n<|im_start|>assistant\n"
    ids = tokenizer.chat_ids(messages, add_generation_prompt=False)
    assert [tokenizer.token(i) for i in ids] == ["<|im_start|>", "a", "Ċ", "ab", "<|im_end|>", "Ċ"]
    assert tokenizer.eos_ids == {1}
    assert tokenizer.bos_id == 0


def test_the_last_message_can_be_continued() -> None:
    """Also where its text occurs in the template's own marks, and where the template strips contents."""
    template = CHAT.replace("content", "content.strip()")
    tokenizer = chatting(template)
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "im_"}]
    text = tokenizer.chat_text(messages, continue_final_message=True)
    assert text == "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nim_"
    for last in ({"role": "tool", "content": "7"}, {"role": "assistant", "content": None}):
        with pytest.raises(InvalidInput, match="continue_final_message"):
            tokenizer.chat_text([*messages, last], continue_final_message=True)
    with pytest.raises(InvalidInput, match="leaves out the last message"):
        chatting("{{ messages[0].content }}").chat_text(messages, continue_final_message=True)


def chatting(template: str | None) -> Tokenizer:
    backend = tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0, "<|eot_id|>": 1}, []))
    return Tokenizer(backend, [0], None, template, {"bos_token": "<s>"})


def test_templates_have_the_usual_helpers() -> None:
    template = (
        "{{ bos_token }}{% for m in messages %}{% if loop.index == 2 %}{% break %}{% endif %}"
        "{% generation %}{{ m | tojson }}{% endgeneration %}{% endfor %}{{ strftime_now('%Y') | length }}"
    )
    text = chatting(template).chat_text([{"role": "u", "content": "é<"}, {"role": "user", "content": ""}])
    assert text == '<s>{"role": "u", "content": "é<"}4'
    assert chatting("{{ tools }} {{ x }}").chat_text([{}], x=3) == "None 3"


def test_a_turn_end_in_the_template_ends_the_text() -> None:
    assert chatting("{{ messages }}<|eot_id|>").eos_ids == {0, 1}
    assert chatting(None).eos_ids == {0}


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[5].content }}", "refuses"),
        ("{% for %}", "refuses"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "unsafe|refuses"),
        ("{{ messages.append(1) }}", "refuses"),
    ],
)
def test_templates_fail_in_one_line(template: str, says: str) -> None:
    with pytest.raises(InvalidInput, match=says) as raised:
        chatting(template).chat_text([{"role": "user", "content": "x"}])
    assert "\n" not in str(raised.value)


DROPS = (
    "{% for m in messages %}{% if m.role in ('system', 'user', 'assistant') %}{{ m.role }}: {{ m.content }};"
    "{% elif m.role == 'tool' %}{{ m.content | tojson }}{% elif m.role == 'strict' and m.content != 'x' %}"
    "{{ raise_exception('x alone') }}{% endif %}{% endfor %}"
)


@pytest.mark.parametrize(
    ("role", "text"), [("tool", 'user: Hi;"x"'), ("user", "user: Hi;user: x;"), ("strict", "user: Hi;")]
)
def test_roles_that_a_template_writes_or_looks_into(role: str, text: str) -> None:
    messages = [{"role": "user", "content": "Hi"}, {"role": role, "content": "x"}]
    assert chatting(DROPS).chat_text(messages) == text


@pytest.mark.parametrize("content", ["x", "", "user", "Hi"])
def test_a_message_that_a_template_would_leave_out_is_refused(content: str) -> None:
    messages = [{"role": "user", "content": "Hi"}, {"role": "developer", "content": content}]
    with pytest.raises(InvalidInput, match="role='developer' of message 1 is unknown to the model's chat template"):
        chatting(DROPS).chat_text(messages)


@pytest.mark.parametrize(
    "message", [{"role": "\ud800", "content": "x"}, {"role": "user", "content": "x", "name": "\udfff"}]
)
def test_half_a_character_anywhere_in_a_chat_is_refused(message: dict[str, str]) -> None:
    with pytest.raises(InvalidInput, match="surrogates not allowed"):
        chatting("{{ messages[0].role }}{{ messages[0].name }}").chat_ids([message])


def bounded(**parts: Any) -> Tokenizer:
    """A byte-level tokenizer whose longest token has three bytes, and some parts of others."""
    alphabet = {letter: i for i, letter in enumerate(sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()))}
    model = tokenizers.models.BPE({**alphabet, "aa": 256, "aaa": 257}, [("a", "a"), ("aa", "a")])
    backend = tokenizers.Tokenizer(parts.pop("model", model))
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.add_special_tokens(parts.pop("added", []))
    for name, part in parts.items():
        setattr(backend, name, part)
    return Tokenizer(backend)


BYTES = {f"<0x{byte:02X}>": byte for byte in range(256)}


def fallback(vocabulary: dict[str, int]) -> dict[str, Any]:
    model = tokenizers.models.BPE(vocabulary, [], byte_fallback=True)
    return {"model": model, "decoder": tokenizers.decoders.ByteFallback(), "pre_tokenizer": None}


@pytest.mark.parametrize(
    ("parts", "fewest"),
    [
        ({}, 300),  # of 900 bytes: the longest token has three
        ({"added": ["<|éé|>"]}, 113),  # eight
        ({"normalizer": tokenizers.normalizers.NFC()}, 300),
        ({"normalizer": tokenizers.normalizers.Replace("a", "▁")}, 900),  # three bytes for one
        ({"normalizer": tokenizers.normalizers.Replace("aa", "a")}, 150),
        ({"normalizer": tokenizers.normalizers.Strip()}, 0),
        ({"normalizer": tokenizers.normalizers.Sequence([tokenizers.normalizers.Lowercase()])}, 0),
        ({"pre_tokenizer": tokenizers.pre_tokenizers.Whitespace()}, 0),
        ({"pre_tokenizer": tokenizers.pre_tokenizers.Split(" ", "removed")}, 0),
        ({"added": [tokenizers.AddedToken("<mask>", lstrip=True)]}, 0),
        ({"model": tokenizers.models.Unigram([("a", 0.0)], unk_id=0)}, 0),
        ({"model": tokenizers.models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]")}, 0),
        ({"decoder": tokenizers.decoders.Metaspace()}, 0),
        ({"model": tokenizers.models.BPE({"b": 0, "bb": 1}, [("b", "b")])}, 0),  # all else is left out
        (fallback({"<0x41>": 0, "▁é": 1}), 0),
        (fallback({**BYTES, "▁ééé": 256}), 100),
    ],
)  # fmt: skip
def test_the_fewest_tokens_that_a_text_can_be(parts: dict[str, Any], fewest: int) -> None:
    tokenizer = bounded(**parts)
    assert tokenizer.fewest_tokens("a" * 900) == fewest
    for text in ("a   b " * 9, "é<|éé|> " * 9, "\u1fbe\u0308\u0301" * 9, "\u1100\u1161\u11a8" * 9, "ab\n" * 9):
        assert tokenizer.fewest_tokens(text) <= len(tokenizer.encode(text)), text


@pytest.mark.model
def test_the_fewest_tokens_of_the_default_model(smollm2: Tokenizer) -> None:
    """Its longest token is a line's end and eighty spaces; some bytes are in none of its tokens."""
    longest = "\n" + " " * 80
    assert smollm2.fewest_tokens(longest * 100) == len(smollm2.encode(longest * 100)) == 100
    for text in [*VARIED, *(chr(code) * 100 for code in range(0x800)), "\U00040000" * 100, "\x7f\x80é" * 100]:
        assert smollm2.fewest_tokens(text) <= len(smollm2.encode(text)), text


def test_no_template_or_no_messages() -> None:
    with pytest.raises(InvalidInput, match="no chat template"):
        chatting(None).chat_ids([{"role": "user", "content": "x"}])
    with pytest.raises(InvalidInput, match="empty"):
        chatting("x").chat_ids([])


def test_a_folder(tmp_path: Path) -> None:
    build_tokenizer(byte_level(tmp_path / "m.gguf")).save(str(tmp_path / "tokenizer.json"))
    settings = {"bos_token": {"content": "<|im_start|>"}, "eos_token": "<|im_end|>", "chat_template": CHAT}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 4]}))
    tokenizer = tokenizer_from_folder(tmp_path, {"eos_token_id": 9})
    assert tokenizer.eos_ids == {1, 3, 4}
    assert tokenizer.bos_id == 0
    assert tokenizer.has_chat_template
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}!")
    assert tokenizer_from_folder(tmp_path, {}).chat_text([{}]) == "<|im_start|>!"
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(DamagedFile, match=r"tokenizer\.json"):
        tokenizer_from_folder(tmp_path, {})
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(ModelNotFound, match=r"tokenizer\.json"):
        tokenizer_from_folder(tmp_path, {})
    (tmp_path / "tekken.json").write_text("{}")  # as folders of Mistral's own library have it
    with pytest.raises(UnsupportedModel, match=r"tekken\.json alone.*put the tokenizer\.json .* GGUF file"):
        tokenizer_from_folder(tmp_path, {})


@pytest.fixture(scope="module")
def smollm2() -> Tokenizer:
    if known_models()[0].path is None:
        pytest.skip("the default model has not been pulled")
    return open_checkpoint("smollm2").tokenizer()


@pytest.mark.model
def test_the_default_model_gives_known_ids(smollm2: Tokenizer) -> None:
    for text, listed in REFERENCE.items():
        ids = [int(index) for index in listed.split()]
        assert smollm2.encode(text) == ids
        assert smollm2.decode(ids, skip_special=False) == text
    assert (smollm2.vocab_size, smollm2.bos_id, smollm2.eos_ids) == (49152, 1, {2})
    assert smollm2.chat_text([{"role": "user", "content": "Hi"}]).startswith("<|im_start|>system\nYou are")


@pytest.mark.model
@pytest.mark.slow
def test_the_default_model_agrees_with_transformers(smollm2: Tokenizer) -> None:
    # Left out: spaces in runs, or signs such as ½, before a number. There transformers' reading of GGUF drops
    # the splitting of digits that the model was trained with, and differs from the model's own tokenizer.
    transformers = pytest.importorskip("transformers")
    path = known_models()[0].path
    assert path is not None
    theirs = transformers.AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
    for text in VARIED:
        assert smollm2.encode(text) == theirs.encode(text), text
    messages = [{"role": "user", "content": "What is 6 times 7?"}]
    expected = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert smollm2.chat_ids(messages) == expected
