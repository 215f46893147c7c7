"""Tokenizer: text to token ids and back, over the `tokenizers` library (importing transformers would take seconds).

A tokenizer comes from a Hugging Face folder or from a GGUF file's metadata; which ids end a sequence and how a
conversation is written come with it, as do the bytes that a token stands for.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard

import tokenizers

from forerun.core.errors import DamagedFile, InvalidInput, ModelNotFound, UnsupportedModel, brief
from forerun.core.thinking import HARMONY, marks_of
from forerun.models.load.chat import render_chat

if TYPE_CHECKING:
    from forerun.models.base import Target
    from forerun.models.load.gguf import Metadata


# What chat models end a turn with; one counts as an end of text when the model's chat template uses it.
_TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<|end|>", "<end_of_turn>", "<|eom_id|>", "<|end_of_turn|>")

# Special tokens that tell parts of an answer apart: calls of tools, and channels. Texts are written with them.
_MARKS = ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]", "<|python_tag|>", "<think>", "</think>",
          "<tool_call>", "</tool_call>", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>",
          "<｜tool▁call▁end｜>", "<｜tool▁sep｜>", "<arg_key>", "</arg_key>", "<arg_value>",
          "</arg_value>")  # fmt: skip
_CHANNELS = ("<|start|>", "<|end|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|call|>")  # harmony's

# how vocabularies spell single bytes
_BYTE_FALLBACK = {f"<0x{byte:02X}>" for byte in range(256)}
_BYTE_LEVEL = tokenizers.pre_tokenizers.ByteLevel.alphabet()


class TokenizerParts(NamedTuple):
    """A tokenizer in plain values, for another process."""

    json: str
    eos_ids: tuple[int, ...]
    bos_id: int | None
    chat_template: str | None
    special: dict[str, str]

    def tokenizer(self) -> Tokenizer:
        backend = tokenizers.Tokenizer.from_str(self.json)
        return Tokenizer(backend, self.eos_ids, self.bos_id, self.chat_template, self.special)


class Tokenizer:
    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        eos_ids: Iterable[int] = (),
        bos_id: int | None = None,
        chat_template: str | None = None,
        special: Mapping[str, str] | None = None,  # "bos_token" and so on, as templates want them
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._alone: dict[int, str] = {}  # the text of single tokens
        self._pieces: dict[int, str | None] = {}  # the same, where it is that behind any others
        # tokens are bytes and nothing else: texts of whole characters, one behind the other, are the whole text
        self._joins = type(backend.decoder) is tokenizers.decoders.ByteLevel
        self._template = chat_template
        self.thinking = marks_of(chat_template)
        self._left_out = self._without_marks()  # special tokens that texts lack; None = all of them
        self._special = dict(special or {})
        self.bos_id = bos_id
        self.eos_ids = frozenset(eos_ids) | self._turn_ends()

    @property
    def vocab_size(self) -> int:
        return self._backend.get_vocab_size(with_added_tokens=True)

    @property
    def has_chat_template(self) -> bool:
        return self._template is not None

    @property
    def chat_template(self) -> str | None:
        return self._template

    def save(self, folder: Path) -> None:
        """Write it as a Hugging Face folder has it: tokenizer.json and tokenizer_config.json."""
        self._backend.save(str(folder / "tokenizer.json"))
        settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", **self._special}
        if self._template is not None:
            settings["chat_template"] = self._template
        (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2), encoding="utf-8")

    def to_json(self) -> str:
        """The whole of it as `tokenizer.json` has it, for other libraries."""
        return self._backend.to_str()

    def parts(self) -> TokenizerParts:
        ends = tuple(sorted(self.eos_ids))
        return TokenizerParts(self.to_json(), ends, self.bos_id, self._template, self._special)

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        """The ids of a text; `add_special` adds the model's special tokens (BOS, where it uses one)."""
        ids: list[int] = self._backend.encode(text, add_special_tokens=add_special).ids
        return ids

    def fewest_tokens(self, text: str) -> int:
        """What a text has at least, by its bytes; 0 where a token may stand for any number of them."""
        if self._bound is None:
            return 0
        longest, left_out = self._bound
        if self._backend.normalizer is not None:
            text = self._backend.normalizer.normalize_str(text)
        return -(-len(text.encode().translate(None, left_out)) // longest)

    @cached_property
    def _bound(self) -> tuple[int, bytes] | None:
        """The most bytes that one token stands for, and the bytes that are in no token.

        None where that says nothing: where parts of a text are stripped, or all that is unknown is one token.
        """
        model, alike = self._backend.model, self._joins
        added = self._backend.get_added_tokens_decoder().values()
        parts = _parts(self._backend.normalizer) + _parts(self._backend.pre_tokenizer)
        if type(model) is not tokenizers.models.BPE or not all(map(_keeps_bytes, parts)):
            return None
        if any(token.lstrip or token.rstrip for token in added):
            return None
        vocabulary = self._backend.get_vocab(False)
        if not alike and not (model.byte_fallback and vocabulary.keys() >= _BYTE_FALLBACK):
            return None
        # a byte-level vocabulary has a character for each byte; what it has none for is left out
        own = max(len(token if alike else token.encode()) for token in vocabulary)
        missing = [letter for letter in _BYTE_LEVEL if letter not in vocabulary] if alike else []
        longest = max([own, *(len(token.content.encode()) for token in added)])
        return longest, b"".join(map(from_byte_level, missing))

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        ids, known = ids if type(ids) is list else list(ids), self._alone
        if skip_special and self._left_out is not None:
            return self._backend.decode([i for i in ids if i not in self._left_out], skip_special_tokens=False)
        if skip_special and len(ids) == 1:  # of streamed tokens: the same ones recur
            return known.get(ids[0]) or self._text_of(ids[0])
        if skip_special and len(ids) == 2 and self._joins:
            first, second = ids
            both = (known.get(first) or self._text_of(first)) + (known.get(second) or self._text_of(second))
            if "\ufffd" not in both:
                return both
        return self._backend.decode(ids, skip_special_tokens=skip_special)

    def piece(self, index: int) -> str | None:
        """What a token adds to any text of whole characters; None where only `decode` of several can tell."""
        try:
            return self._pieces[index]
        except KeyError:
            text = self._text_of(index)
            piece = self._pieces[index] = text if self._joins and "\ufffd" not in text else None
            return piece

    def _text_of(self, index: int) -> str:
        text = self._alone.get(index)
        if text is None:
            skips = self._left_out is None or index in self._left_out
            text = self._alone[index] = self._backend.decode([index], skip_special_tokens=skips)
        return text

    def vocabulary(self) -> dict[str, int]:
        return self._backend.get_vocab(with_added_tokens=True)

    def special_ids(self) -> set[int]:
        """The ids that stand for no text: what was added to the vocabulary as special."""
        return {index for index, token in self._backend.get_added_tokens_decoder().items() if token.special}

    def token(self, index: int) -> str | None:
        """How the vocabulary spells an id; None if there is no such id."""
        return self._backend.id_to_token(index)

    def token_text(self, index: int) -> str:
        """What a token adds to a text behind other tokens; U+FFFD stands for a part of a character."""
        spelt = self.token(index)
        if spelt is not None and spelt.startswith(SENTENCEPIECE_SPACE):  # `decode` drops it in front of a text
            return from_sentencepiece(spelt).decode()
        return self.decode([index], skip_special=False)

    def token_bytes(self, index: int) -> bytes:
        """What a token adds to a text; its bytes may be part of a character, which `token_text` cannot show."""
        text, spelt = self.token_text(index), self.token(index)
        if "\ufffd" not in text or spelt is None:
            return text.encode()
        return from_sentencepiece(spelt) if is_one_byte(spelt) else from_byte_level(spelt)

    def chat_text(
        self, messages: Sequence[Mapping[str, Any]], /, add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """A conversation as the model's template writes it; `variables` reach the template (tools, say)."""
        if self._template is None:
            raise InvalidInput("this model has no chat template; put the conversation into a plain prompt instead")
        settings = {"tools": None, "documents": None, **self._special, **variables}
        return render_chat(self._template, messages, add_generation_prompt=add_generation_prompt, **settings)

    def chat_ids(
        self, messages: Sequence[Mapping[str, Any]], /, add_generation_prompt: bool = True, **variables: Any
    ) -> list[int]:
        """The ids of a conversation. Templates write BOS themselves, so none is added."""
        return self.encode(self.chat_text(messages, add_generation_prompt, **variables), add_special=False)

    def _without_marks(self) -> set[int] | None:
        """The special tokens but for those that mark parts of an answer; None where there are no such."""
        if self._template is None:
            return None
        known, special = _CHANNELS if self.thinking is HARMONY else _MARKS, self.special_ids()
        marks = {self._backend.token_to_id(mark) for mark in known if mark in self._template} & special
        return special - marks if marks else None

    def _turn_ends(self) -> set[int]:
        used = [token for token in _TURN_ENDS if self._template is not None and token in self._template]
        if self.thinking is HARMONY:  # one answer has several messages: <|end|> ends one of them alone
            used = ["<|return|>", "<|call|>"]
        return {index for token in used if (index := self._backend.token_to_id(token)) is not None}


def _parts(component: Any) -> list[dict[str, Any]]:
    """A normaliser or pre-tokeniser as its settings, those of a sequence one by one."""
    if component is None:
        return []
    settings = json.loads(component.__getstate__())
    return [*settings.get("normalizers", ()), *settings.get("pretokenizers", ())] or [settings]


def _keeps_bytes(part: Mapping[str, Any]) -> bool:
    """Does a pre-tokeniser leave a text whole, and a normaliser do the same to a text as to its pieces?"""
    if part["type"] in ("Split", "Punctuation"):
        return bool(part["behavior"] != "Removed")
    return part["type"] in ("ByteLevel", "Digits", "Metaspace", "NFC", "Prepend", "Replace")


def tokenizer_from_gguf(metadata: Metadata, cache: Path) -> Tokenizer:
    """The tokenizer that a GGUF file describes; built ones are kept under `cache`."""
    # imports torch, which a process that gets its tokenizer as `TokenizerParts` does without
    from forerun.models.load.gguf_tokenizer import cached_tokenizer

    backend = cached_tokenizer(metadata, cache)
    named = {
        role: metadata.integer(f"tokenizer.ggml.{key}_token_id", -1, least=0)
        for role, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"), ("eot", "eot"))
    }
    special = {
        f"{role}_token": token for role, index in named.items() if index >= 0 and (token := backend.id_to_token(index))
    }
    ends = {named["eos"], named["eot"]} - {-1}
    if metadata.architecture.startswith("qwen"):  # Qwen ends a turn by one token and a sequence by another
        ends |= {index for token in ("<|endoftext|>",) if (index := backend.token_to_id(token)) is not None}
    template = metadata.text("tokenizer.chat_template", "")
    bos = named["bos"] if named["bos"] >= 0 else None
    return Tokenizer(backend, ends, bos, template or None, special)


def tokenizer_from_folder(folder: Path, config: Mapping[str, Any]) -> Tokenizer:
    settings = read_json(folder / "tokenizer_config.json")
    generation = read_json(folder / "generation_config.json")
    backend = _folder_backend(folder)
    special = {
        role: token
        for role in ("bos_token", "eos_token", "unk_token", "pad_token")
        if (token := _spelling(settings, role))
    }
    ends = set(_ids(generation.get("eos_token_id"))) or set(_ids(config.get("eos_token_id")))
    ends |= {index for index in [_index(backend, special.get("eos_token"))] if index is not None}
    bos = _index(backend, special.get("bos_token"))
    if bos is None:
        bos = next(iter(_ids(config.get("bos_token_id"))), None)
    return Tokenizer(backend, ends, bos, _folder_template(folder, settings), special)


def read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (ValueError, OSError, RecursionError) as error:
        raise DamagedFile(f"{path} cannot be read as JSON ({brief(error)}); fetch it again") from None
    if not isinstance(found, dict):
        raise DamagedFile(f"{path} does not hold a JSON object; fetch it again")
    return found


def _folder_backend(folder: Path) -> tokenizers.Tokenizer:
    file = folder / "tokenizer.json"
    if file.is_file():
        try:
            return tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # tokenizers raises bare Exception
            raise DamagedFile(f"{file} is not a tokenizer ({brief(error)}); fetch it again") from None
    if not any(folder.glob("*.model")) and not (folder / "vocab.json").is_file():
        if (folder / "tekken.json").is_file():
            raise UnsupportedModel(
                f"{folder} has its tokenizer as tekken.json alone, which cannot be read; put the tokenizer.json of the "
                "model's repository for transformers beside it, or use a GGUF file of the model"
            )
        raise ModelNotFound(f"{folder} has no tokenizer.json; fetch the model's tokenizer files into it")
    from transformers import AutoTokenizer

    try:
        converted = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
        backend: tokenizers.Tokenizer = converted.backend_tokenizer
    except Exception as error:  # a converter may raise anything; the user can only fetch tokenizer.json
        raise UnsupportedModel(
            f"the tokenizer of {folder} cannot be converted ({brief(error)}); add a tokenizer.json"
        ) from None
    return backend


def _folder_template(folder: Path, settings: Mapping[str, Any]) -> str | None:
    file = folder / "chat_template.jinja"
    if file.is_file():
        try:
            return file.read_text(encoding="utf-8")
        except (ValueError, OSError) as error:
            raise DamagedFile(f"{file} is no text ({brief(error)}); fetch it again") from None
    template = settings.get("chat_template") or read_json(folder / "chat_template.json").get("chat_template")
    if isinstance(template, list):  # several, each under a name
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    return template if _is_text(template) else None


def _spelling(settings: Mapping[str, Any], role: str) -> str | None:
    token = settings.get(role)
    if isinstance(token, dict):  # an added token with its options
        token = token.get("content")
    return token if _is_text(token) else None


def _is_text(value: Any) -> TypeGuard[str]:
    """A string that can be encoded; JSON can spell half of a character (a lone surrogate), which cannot."""
    return isinstance(value, str) and not any("\ud800" <= letter <= "\udfff" for letter in value)


def _index(backend: tokenizers.Tokenizer, token: str | None) -> int | None:
    return None if token is None else backend.token_to_id(token)


def _ids(value: Any) -> list[int]:
    if isinstance(value, list):
        return [index for one in value for index in _ids(one) if not isinstance(one, list)]
    return [value] if type(value) is int and 0 <= value < 1 << 31 else []


SENTENCEPIECE_SPACE = "\u2581"


def from_byte_level(token: str) -> bytes:
    """In vocabularies that have a character for each byte."""
    known = _byte_of()
    return bytes(known[c] for c in token) if all(c in known for c in token) else token.encode()


def from_sentencepiece(token: str) -> bytes:
    """In vocabularies of text, where bytes that no token has are spelt <0xE2>."""
    if is_one_byte(token):
        return bytes([int(token[3:5], 16)])
    return token.replace(SENTENCEPIECE_SPACE, " ").encode()


def is_one_byte(token: str) -> bool:
    """Is it spelt <0xE2>?"""
    return len(token) == 6 and token.startswith("<0x") and token.endswith(">")


@cache
def _byte_of() -> dict[str, int]:
    """The characters by which byte-level vocabularies spell bytes: themselves if printable, else from U+0100 on."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_CHAT = ({"role": "user", "content": "Hi"},)


def opening_of(target: Target, tokenizer: object) -> tuple[int, ...]:
    """What the template writes before an answer, else the token that texts begin with; () = not known.

    On a CPU it is not asked for: drafters read the target's habits behind it, and passes for that take a minute there.
    """
    if not target.can.captures or target.source_rules is not None:
        return ()
    return tokens_before_an_answer(tokenizer) if isinstance(tokenizer, Tokenizer) else ()


def tokens_before_an_answer(tokenizer: Tokenizer) -> tuple[int, ...]:
    with suppress(InvalidInput):  # there is no template, or it refuses so short a chat
        asked = tokenizer.chat_ids(_CHAT, add_generation_prompt=False)
        if opening := tokenizer.chat_ids(_CHAT)[len(asked) :]:
            return tuple(opening)
    return () if tokenizer.bos_id is None else (tokenizer.bos_id,)
