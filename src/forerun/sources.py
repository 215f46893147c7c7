"""What an encoder-decoder asks of its requests: where decoding starts, how long a source may be, its laws' rules.

The prompt of an encoder-decoder is its source: the encoder reads it once, and the decoder starts from a token of its
own. The tokens of such a sequence are the decoder's alone, so penalties, limits and positions count these.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LawRules:
    """What a model's own generation settings add to every law of its sequences, as transformers does."""

    bad_words: tuple[tuple[int, ...], ...] = ()  # transformers' bad_words_ids
    first: int | None = None  # forced_bos_token_id: the first token written
    last: int | None = None  # forced_eos_token_id: the token at the last place; not where eos is ignored


@dataclass(frozen=True, slots=True)
class SourceRules:
    """How the sequences of an encoder-decoder begin, and what holds for all of them."""

    start: int  # the token that its decoder starts from
    longest: int  # tokens of a source at most
    laws: LawRules | None = None
