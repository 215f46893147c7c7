"""Generated JSON schemas, and a small model that writes by them.

`schema_of` draws every keyword that llguidance implements, nested, with names, constants and limits of every kind that
JSON has: quotes, control characters, other scripts, numbers of every size. A seed is the same schema everywhere.
Keywords that are not implemented are refused: see test_grammar.py.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from copy import copy
from datetime import time
from fractions import Fraction
from pathlib import Path
from typing import Any

import jsonschema
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, LlamaConfig

from forerun.core.params import SamplingParams

Schema = dict[str, Any]
WORDS = [
    "name",
    "zeta",
    "id",
    "a b",
    "Größe",
    'quote"d',
    "tags",
    "x",
    "",
    "back\\slash",
    "日本",
    "😀",
    "\t\x01",
    "</s>",
    "a.b/c",
]
FORMATS = ["date", "time", "date-time", "duration", "uuid", "ipv4", "ipv6", "email", "hostname", "uri"]
PATTERNS = [
    "^(yes|no|maybe)$",
    "^[0-9]{3}-[A-F]+x?$",
    "^\\d{1,3}%$",
    "^a|b$",
    "^[A-Z]\\.",
    "^(\\w+ )*\\w+$",
    '^[^"\\\\]*$',
    "é",
]


def schema_of(seed: int) -> Schema:
    numbers = random.Random(seed)
    pick, below = numbers.choice, numbers.randrange
    return _Drawn(numbers).whole() if below(8) else {**_Drawn(numbers).one(pick([0, 1])), "$defs": {"shared": {}}}


class _Drawn:
    """One schema as it is drawn."""

    def __init__(self, numbers: random.Random) -> None:
        self.pick, self.below, self.sample = numbers.choice, numbers.randrange, numbers.sample

    def whole(self) -> Schema:
        """An object; what it refers to may refer to itself, where it need not."""
        properties = {"more": {"$ref": "#/$defs/shared"}, "is": self.string()}
        deeper = {"type": "object", "properties": properties, "required": ["is"], "additionalProperties": False}
        return {**self.record(0), "$defs": {"shared": self.pick([self.string(), self.number(), deeper])}}

    def one(self, depth: int) -> Schema:
        flat = [self.string, self.number, self.choice, self.other]
        deep = [self.array, self.record, self.record, self.union]
        found = self.below(len(flat) + len(deep) * (depth < 3))
        return flat[found]() if found < len(flat) else deep[found - len(flat)](depth + 1)

    def string(self) -> Schema:
        least = self.below(5)
        most = least + self.below(12)
        letters = self.pick(["a-z", "0-9", "A-Za-z_", "é-ü", "\\u0430-\\u044f"])
        kinds: list[Schema] = [
            {}, {"minLength": least}, {"maxLength": most}, {"minLength": least, "maxLength": most},
            {"pattern": f"^[{letters}]{{{least},{most}}}$"}, {"pattern": self.pick(PATTERNS)},
            {"format": self.pick(FORMATS)}, {"format": self.pick(FORMATS)},
        ]  # fmt: skip
        return {"type": "string", **self.pick(kinds)}

    def number(self) -> Schema:
        kind = self.pick(["integer", "number"])
        low: float = self.pick([0, -1, self.below(-50, 50), self.below(-(10**6), 10**6), 10**15, -(10**15)])
        high: float = low + self.pick([0, 1, self.below(100), 10**5])
        if kind == "number" and abs(low) < 10**6:
            low, high = low / 8, high / 8
        kinds: list[Schema] = [
            {}, {"minimum": low}, {"maximum": high}, {"minimum": low, "maximum": high}, {"exclusiveMinimum": low},
            {"exclusiveMaximum": high}, {"exclusiveMinimum": low - 1, "exclusiveMaximum": high + 1},
            {"multipleOf": self.pick([1, 3, 7, 10] if kind == "integer" else [1, 0.5, 0.25])},
            {"type": "integer", "multipleOf": 7, "minimum": -50, "maximum": 50},
        ]  # fmt: skip
        return {"type": kind, **self.pick(kinds)}

    def value(self, depth: int = 0) -> Any:
        flat = [
            None,
            True,
            self.below(-100, 100),
            self.below(-(10**6), 10**6) / 64,
            6.5e15,
            2**63 - 1,
            *self.sample(WORDS, 2),
        ]
        if depth < 2 and not self.below(3):
            return self.pick(
                [[self.value(depth + 1) for _ in range(self.below(3))], {self.pick(WORDS): self.value(depth + 1)}]
            )
        return self.pick(flat)

    def choice(self) -> Schema:
        return {"enum": [*{json.dumps(value): value for value in (self.value() for _ in range(4))}.values()]}

    def other(self) -> Schema:
        types: list[Schema] = [
            {"type": "boolean"},
            {"type": "null"},
            {"type": ["string", "null"]},
            {"type": ["integer", "boolean"]},
        ]
        return self.pick([*types, {"const": self.value()}, {"$ref": "#/$defs/shared"}])

    def array(self, depth: int) -> Schema:
        least = self.below(3)
        limits: list[Schema] = [
            {},
            {"minItems": least},
            {"maxItems": least + 2},
            {"minItems": least, "maxItems": least},
        ]
        if self.below(3):
            return {"type": "array", "items": self.one(depth), **self.pick(limits)}
        first = [self.one(depth) for _ in range(1 + self.below(2))]
        return {"type": "array", "prefixItems": first, "items": self.pick([False, self.one(depth)])}

    def union(self, depth: int) -> Schema:
        return {"anyOf": [self.one(depth) for _ in range(1 + self.below(3))]}

    def record(self, depth: int) -> Schema:
        names = self.sample(WORDS, self.below(5))
        more: list[Schema] = [{"additionalProperties": False}] * 3 + [
            {}, {"additionalProperties": True}, {"additionalProperties": self.string()},
            {"patternProperties": {"^p_": self.number()}},
        ]  # fmt: skip
        needed = [name for name in names if self.below(3)]
        properties = {name: self.one(depth) for name in names}
        return {
            "type": "object",
            "properties": properties,
            **({"required": needed} if needed else {}),
            **self.pick(more),
        }


def read(text: str) -> Any:
    return json.loads(text)


_FORMATS = copy(jsonschema.Draft202012Validator.FORMAT_CHECKER)  # whose `time` needs a further library


@_FORMATS.checks("time", raises=ValueError)
def _is_time(value: object) -> bool:
    """RFC 3339: a second 60 is a leap second, of which there is none at another minute than 23:59 UTC."""
    digits = re.fullmatch(r"(\d\d:\d\d:\d\d)(\.\d+)?([Zz]|[+-]\d\d:\d\d)", value) if isinstance(value, str) else None
    return digits is not None and time.fromisoformat(digits[1] + digits[3].upper().replace("Z", "+00:00")) is not None


def _multiples(validator: Any, divisor: float, value: Any, schema: Schema) -> Iterator[jsonschema.ValidationError]:
    """Without rounding: whole numbers have any number of digits."""
    if validator.is_type(value, "number") and Fraction(value) % Fraction(divisor):
        yield jsonschema.ValidationError(f"{value} is not a multiple of {divisor}")


_Exact = jsonschema.validators.extend(jsonschema.Draft202012Validator, {"multipleOf": _multiples})


def check(text: str, schema: Schema) -> None:
    """Raise ValueError unless the text is JSON that validates."""
    rules = _Exact(schema, format_checker=_FORMATS)
    wrong = next(rules.iter_errors(read(text)), None)
    if wrong is not None:
        raise ValueError(f"{wrong.message[:200]}, in {str(wrong.schema)[:200]}")


def small_model(folder: Path, tokenizer: Any) -> str:
    """A random network of two layers with the vocabulary of another model, so that it has the masks of a real one."""
    torch.manual_seed(40)
    config = LlamaConfig(
        vocab_size=tokenizer.vocab_size, hidden_size=32, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=2048, tie_word_embeddings=False,
        bos_token_id=None, eos_token_id=min(tokenizer.eos_ids),
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" not in name:
                weight.normal_(0.0, 0.3)
    model.save_pretrained(folder)
    Tokenizer.from_str(tokenizer.to_json()).save(str(folder / "tokenizer.json"))
    return str(folder)


def settings_of(schema: Schema, i: int, tokenizer: Any) -> SamplingParams:
    """Half of the texts are greedy. A bias towards tokens that close ends texts that a random network would not end."""
    heat, most = (0.0, 9.0) if i % 2 == 0 else (1.0, 12.0)
    bias = dict.fromkeys(tokenizer.eos_ids, most)
    for pieces, value in (((":", "@", "."), most - 3), (("}", "]"), most), (('"', '"}'), most + 5)):  # first: addresses
        bias |= {token: value for piece in pieces for token in tokenizer.encode(piece, False)}
    return SamplingParams.from_dict(
        {"json_schema": schema, "max_tokens": 800, "temperature": heat, "seed": i, "logit_bias": bias}
    )
