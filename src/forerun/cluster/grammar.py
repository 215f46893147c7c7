"""Grammars between processes: the front checks a schema and sends its text, the replica compiles it for itself."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from forerun.server.grammar import Grammars

if TYPE_CHECKING:
    from torch import Tensor

    from forerun.law_processor import LawProcessor, Prefix


@dataclass(frozen=True, slots=True)
class SchemaText:
    """Stands for the processor that holds a text to a JSON schema, which cannot leave its process."""

    text: str

    def __call__(self, prefix: Prefix, logits: Tensor) -> Tensor:
        raise AssertionError("the replica puts the real processor here")


class SentGrammars(Grammars):
    """The front's: a schema that cannot be used is refused here, one that can is sent on."""

    def held_to(self, schema: Any) -> list[LawProcessor]:
        super().held_to(schema)
        return [SchemaText(json.dumps(schema, sort_keys=True))]


def with_local_grammars(options: Mapping[str, Any], grammars: Grammars) -> dict[str, Any]:
    """The same options with real processors in place of schemas."""
    sent = options.get("processors")
    if not sent:
        return dict(options)
    made = [
        real
        for each in sent
        for real in (grammars.held_to(json.loads(each.text)) if isinstance(each, SchemaText) else [each])
    ]
    return {**options, "processors": tuple(made)}
