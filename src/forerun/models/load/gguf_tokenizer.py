"""Builds a `tokenizers` tokenizer from a GGUF file's metadata.

The file carries the vocabulary, the merges (or the scores they follow from) and the name of a pre-tokenizer,
under llama.cpp's keys. What is built here behaves as the tokenizer.json of the model's authors, which is not
always what the file alone would suggest: SmolLM splits digits one by one before anything else, Llama 3 takes
a whole word that is in the vocabulary without merging, Qwen normalises to NFC.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE

from forerun.core.errors import DamagedFile, UnsupportedModel, brief
from forerun.models.load.gguf import Metadata

_FORMAT = 3  # of the cached tokenizer; raise it when what is built here changes
_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4
_SPACE = "\u2581"

_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_BY_THREES = _WORDS + r"\p{N}{1,3}" + _REST
_BY_ONES = _WORDS + r"\p{N}" + _REST
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = r"[^\r\n\p{L}\p{N}]?" + _UPPER
_CASED_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEKKEN = f"{_CASED}*{_LOWER}+|{_CASED}+{_LOWER}*|" + r"\p{N}" + _CASED_REST
_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_GPT_4O = f"{_CASED}*{_LOWER}+{_ENDINGS}|{_CASED}+{_LOWER}*{_ENDINGS}|" + r"\p{N}{1,3}" + _CASED_REST

_BY_ONES_WITH_MARKS = _BY_ONES.replace(r"?\p{L}+", r"?[\p{L}\p{M}]+").replace(
    r"[^\s\p{L}\p{N}]", r"[^\s\p{L}\p{M}\p{N}]"
)
_DEEPSEEK = (  # one after the other
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"[!-/:-@\[-`{-~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)

_PLAIN = {"default", "gpt-2", "gpt2", "olmo", "jais", "phi-2", "mpt", "roberta-bpe"}
_DIGITS = {"smollm", "starcoder", "refact", "command-r", "codeshell"}
_SPLITS: dict[str, str | tuple[str, ...]] = {
    "llama-bpe": _BY_THREES,
    "llama3": _BY_THREES,
    "llama-v3": _BY_THREES,
    "smaug-bpe": _BY_THREES,
    "dbrx": _BY_THREES,
    "lfm2": _BY_THREES,
    "glm4": _BY_THREES,
    "chatglm-bpe": _BY_THREES,
    "qwen35": _BY_ONES_WITH_MARKS,
    "deepseek-v3": _DEEPSEEK,
    "qwen2": _BY_ONES,
    "deepseek-r1-qwen": _BY_ONES,
    "tekken": _TEKKEN,
    "gpt-4o": _GPT_4O,
    "llama4": _GPT_4O,
}
_WHOLE_WORDS = {"llama-bpe", "llama3", "llama-v3", "smaug-bpe", "tekken", "lfm2"}  # a known word is not merged anew
_BEGINS = {"llama-bpe", "llama3", "llama-v3", "tekken", "lfm2"}  # begin with BOS unless the file says otherwise
_NFC = {"qwen2", "deepseek-r1-qwen", "qwen35"}


def cached_tokenizer(metadata: Metadata, cache: Path) -> Tokenizer:
    """The tokenizer of a file: from the cache when it was built before, else built and left there."""
    stat = metadata.path.stat()
    identity = f"{metadata.path.resolve()}:{stat.st_size}:{stat.st_mtime_ns}:{_FORMAT}"
    kept = cache / "tokenizers" / f"{sha256(identity.encode()).hexdigest()[:32]}.tokenizer"
    with suppress(Exception):  # tokenizers raises bare Exception; an unusable cache is rebuilt
        digest, _, content = kept.read_text(encoding="utf-8").partition("\n")
        if digest == _digest(content):  # a flipped byte would be another tokenizer, unnoticed
            return Tokenizer.from_str(content)
    built = build_tokenizer(metadata)
    with suppress(OSError):  # a cache that cannot be written costs time, nothing else
        kept.parent.mkdir(parents=True, exist_ok=True)
        partial = kept.with_suffix(f".{os.getpid()}.partial")
        content = built.to_str()
        partial.write_text(f"{_digest(content)}\n{content}", encoding="utf-8")
        partial.replace(kept)
    return built


def _digest(content: str) -> str:
    return sha256(content.encode()).hexdigest()


def build_tokenizer(metadata: Metadata) -> Tokenizer:
    model = metadata.text("tokenizer.ggml.model", "")
    try:
        if model == "gpt2":
            return _byte_level(metadata)
        if model in ("llama", "gemma4"):  # which has merges instead of scores
            return _sentencepiece(metadata)
    except (UnsupportedModel, DamagedFile):
        raise
    except Exception as error:  # tokenizers raises bare Exception, for instance for merges outside the vocabulary
        raise DamagedFile(
            f"{metadata.path} is damaged: its tokenizer is refused ({brief(error)}); pull it again"
        ) from None
    raise UnsupportedModel(
        f"{metadata.path} has a tokenizer of kind {model[:40]!r}; known in GGUF: gpt2, llama, gemma4"
    )


def _byte_level(metadata: Metadata) -> Tokenizer:
    pre = metadata.text("tokenizer.ggml.pre", "default")
    if pre not in _PLAIN | _DIGITS | set(_SPLITS):
        raise UnsupportedModel(
            f"{metadata.path} splits text by {pre[:40]!r}, unknown here; use its Hugging Face folder"
        )
    tokens = metadata.items("tokenizer.ggml.tokens", str, required=True)
    vocabulary = {token: i for i, token in enumerate(tokens)}
    merges = _merges(metadata)
    tokenizer = Tokenizer(BPE(vocabulary, merges, ignore_merges=pre in _WHOLE_WORDS))
    if pre in _SPLITS:
        patterns = _SPLITS[pre]
        told = (patterns,) if isinstance(patterns, str) else patterns
        splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in told]
        bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, bytes_only])
    else:
        words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        digits = [pre_tokenizers.Digits(individual_digits=True)] if pre in _DIGITS else []
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*digits, words])
    if pre in _NFC:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    _add_special(tokenizer, metadata, tokens)
    _add_template(tokenizer, metadata, tokens, begins=pre in _BEGINS)
    return tokenizer


def _sentencepiece(metadata: Metadata) -> Tokenizer:
    gemma = metadata.architecture.startswith("gemma")
    tokens = metadata.items("tokenizer.ggml.tokens", str, required=True)
    if gemma:  # runs of spaces are stored as they are, and looked up in their marked form
        tokens = [_SPACE * len(token) if token and not token.strip(" ") else token for token in tokens]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    merges = _merges(metadata) or list(_derive_merges(metadata, tokens, vocabulary, by_rank=gemma))
    unknown = metadata.integer("tokenizer.ggml.unknown_token_id", 0, least=0)
    tokenizer = Tokenizer(
        BPE(vocabulary, merges, fuse_unk=True, byte_fallback=True, unk_token=_token(metadata, tokens, unknown))
    )
    prefix = metadata.flag("tokenizer.ggml.add_space_prefix", not gemma)
    marks = [normalizers.Replace(" ", _SPACE)]
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), *marks] if prefix else marks)
    parts = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)] if prefix else parts)
    _add_special(tokenizer, metadata, tokens)
    _add_template(tokenizer, metadata, tokens, begins=True)
    return tokenizer


def _merges(metadata: Metadata) -> list[tuple[str, str]]:
    pairs = []
    for merge in metadata.items("tokenizer.ggml.merges", str):
        left, gap, right = merge.partition(" ")
        if not gap:
            metadata.wrong("tokenizer.ggml.merges", merge, "two tokens and a space")
        pairs.append((left, right))
    return pairs


def _derive_merges(
    metadata: Metadata, tokens: list[str], vocabulary: dict[str, int], by_rank: bool
) -> Iterator[tuple[str, str]]:
    """Sentencepiece merges the pair that makes the best piece: one merge per split of a piece, best first.

    Best is the highest score, except in Gemma, whose scores do not follow its merges and whose order does.
    """
    scores = metadata.items("tokenizer.ggml.scores", float, required=not by_rank)
    kinds = metadata.items("tokenizer.ggml.token_type", int)
    if not by_rank and len(scores) < len(tokens):
        metadata.wrong("tokenizer.ggml.scores", len(scores), f"a list of {len(tokens)}")
    ranked = []
    for i, piece in enumerate(tokens):
        if i < len(kinds) and kinds[i] not in (_NORMAL, _USER_DEFINED):
            continue
        rank = i if by_rank else -scores[i]
        for cut in range(len(piece) - 1, 0, -1):
            left, right = piece[:cut], piece[cut:]
            if left in vocabulary and right in vocabulary:
                ranked.append((rank, -cut, cut - len(piece), left, right))
    ranked.sort(key=lambda entry: entry[:3])
    return ((left, right) for *_, left, right in ranked)


def _add_special(tokenizer: Tokenizer, metadata: Metadata, tokens: list[str]) -> None:
    """Control tokens are matched whole and hidden from decoded text; user-defined ones are matched whole."""
    original = metadata.items("tokenizer.ggml.tokens", str)
    kinds = metadata.items("tokenizer.ggml.token_type", int)
    listed = [(token, kind) for token, kind in zip(original, kinds, strict=False) if token]
    known = set(tokens)
    tokenizer.add_special_tokens(
        [AddedToken(token, normalized=False, special=True) for token, kind in listed if kind == _CONTROL]
    )
    tokenizer.add_tokens(
        [
            AddedToken(token, normalized=False, special=False)
            for token, kind in listed
            if kind == _USER_DEFINED and token in known
        ]
    )


def _add_template(tokenizer: Tokenizer, metadata: Metadata, tokens: list[str], begins: bool) -> None:
    bos = metadata.integer("tokenizer.ggml.bos_token_id", -1, least=0)
    eos = metadata.integer("tokenizer.ggml.eos_token_id", -1, least=0)
    first = [bos] if bos >= 0 and metadata.flag("tokenizer.ggml.add_bos_token", begins) else []
    last = [eos] if eos >= 0 and metadata.flag("tokenizer.ggml.add_eos_token", False) else []
    if first or last:
        named = {_token(metadata, tokens, i): i for i in first + last}
        template = [_token(metadata, tokens, i) for i in first]
        template += ["$A", *(_token(metadata, tokens, i) for i in last)]
        tokenizer.post_processor = processors.TemplateProcessing(single=template, special_tokens=list(named.items()))


def _token(metadata: Metadata, tokens: list[str], index: int) -> str:
    if index >= len(tokens):
        metadata.wrong("tokenizer.ggml.tokens", f"{len(tokens)} long", f"long enough for token {index}")
    return tokens[index]
