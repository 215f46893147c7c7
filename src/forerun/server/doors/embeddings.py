"""`/v1/embeddings`: the rows that leave a prompt's last norm, pooled. The engine that writes texts computes them."""

from __future__ import annotations

import sys
from array import array
from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass
from math import fsum, sqrt
from typing import Annotated, Any, Literal

from pydantic import Field, WithJsonSchema

from forerun.api.completion import Completion
from forerun.core.request import Pooling
from forerun.server.answers import Answer
from forerun.server.errors import ApiError
from forerun.server.parsers import Found
from forerun.server.schemas import PRIORITY, Body, CompletionRequest, Name, Texts, Whole, between

MOST_INPUTS = 2048  # as the OpenAI API has it
_TEXT: dict[str, Any] = {"type": "string", "minLength": 1}
_IDS: dict[str, Any] = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_SEVERAL: dict[str, Any] = {"type": "array", "minItems": 1, "maxItems": MOST_INPUTS}
_INPUT = {"anyOf": [_TEXT, _IDS, {**_SEVERAL, "items": _TEXT}, {**_SEVERAL, "items": _IDS}]}


class EmbeddingsRequest(Body):
    model: str | None = None
    input: Annotated[Texts, WithJsonSchema(_INPUT)]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Whole | None = between(1, description="the model's own number, or left out")
    pooling: Pooling = Field("mean", description="of the rows of all tokens, or the last token's")
    normalize: bool = Field(True, description="to a length of 1")
    cache_salt: Name | None = None
    priority: Whole | None = PRIORITY

    def prompts(self) -> list[Any]:
        """Each text, or list of token ids."""
        given: Any = self.input
        several = isinstance(given, list) and not (given and isinstance(given[0], int))
        prompts = list(given) if several else [given]
        if not 1 <= len(prompts) <= MOST_INPUTS:
            said = f"input: {len(prompts)} texts are out of range: 1 to {MOST_INPUTS} in one request"
            raise ApiError(400, said, param="input")
        if not all(prompts):
            raise ApiError(400, f"input: text {prompts.index(type(prompts[0])())} is empty", param="input")
        return prompts

    def as_completion(self) -> Embedded:
        asked = self.model_copy(update={"input": ""})
        shared = {"prompt": self.input, "model": self.model, "cache_salt": self.cache_salt, "priority": self.priority}
        return Embedded.model_validate({**shared, "max_tokens": 1, "temperature": 0, "asked": asked})


class Embedded(CompletionRequest):
    """A request for embeddings as the completion that computes them."""

    asked: EmbeddingsRequest


@dataclass(slots=True)
class EmbeddingsAnswer(Answer):
    """A list of embeddings, in the order of the texts."""

    def at_once(self, max_batch: int) -> int:
        return max_batch

    def whole(self, done: Sequence[Completion], found: Sequence[Found] = ()) -> dict[str, Any]:
        assert isinstance(self.body, Embedded)
        rows = [_row(each, self.body.asked) for each in done]
        data = [{"object": "embedding", "index": i, "embedding": row} for i, row in enumerate(rows)]
        read = sum(each.prompt_tokens for each in done)
        usage = {"prompt_tokens": read, "total_tokens": read}
        return {"object": "list", "data": data, "model": self.model, "usage": usage}


def _row(done: Completion, body: EmbeddingsRequest) -> list[float] | str:
    """An embedding in the form that was asked for."""
    if done.embedding is None:
        raise ApiError(500, "the engine gave no embedding", "server_error")
    row = array("f", done.embedding)
    if body.dimensions not in (None, len(row)):
        said = (
            f"dimensions={body.dimensions} is not supported: the model has {len(row)}, and parts of them mean nothing"
        )
        raise ApiError(400, said, param="dimensions")
    if body.normalize:
        length = sqrt(fsum(each * each for each in row))
        row = array("f", (each / length if length else 0.0 for each in row))
    if body.encoding_format != "base64":
        return row.tolist()
    if sys.byteorder == "big":
        row.byteswap()
    return b64encode(row.tobytes()).decode()
