"""From the bytes of a request to what its answer needs: JSON, fields, prompts, token ids.

The front reads small bodies itself. Larger ones, which may take seconds, are read by `ReaderProcess`: one at a time, in
a process with a low priority (`python -m forerun.server.reading FD`) that the first large body starts. A body that
takes too long is given up and its process ended. A prompt that cannot fit the context is refused before tokenisation.

`tool_choice` says which tools a text must call; the calls in a text are found by `forerun.server.parsers`. Where a text
is free to call (`auto`) and a tool is strict, what begins as a call must be a call of a tool that was offered, with
arguments of its schema: `strict_calls`.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import pickle
import sys
from collections.abc import Sequence
from dataclasses import replace
from heapq import heappop, heappush
from itertools import count
from subprocess import Popen
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel, ValidationError
from pydantic_core import from_json

from forerun.api.calls import as_messages, as_token_list, check_text
from forerun.core.errors import PromptTooLong
from forerun.core.params import for_schema
from forerun.core.thinking import EFFORTS
from forerun.models.load.tokenizer import Tokenizer, TokenizerParts
from forerun.server.backends.child import take_channel
from forerun.server.backends.start import start_child
from forerun.server.backends.wire import Channel
from forerun.server.doors.base import Door
from forerun.server.doors.embeddings import EmbeddingsRequest
from forerun.server.doors.messages import CountRequest, MessagesRequest
from forerun.server.doors.responses import ResponsesRequest
from forerun.server.errors import ApiError, as_api_error, from_validation
from forerun.server.generation import Job, check_number, make_jobs, sampling_of
from forerun.server.schemas import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    FunctionSpec,
    Generation,
    TokenizeRequest,
)
from forerun.server.settings import LOG_FORMAT

What = Literal["chat", "completion", "responses", "messages", "count", "embeddings", "tokenize", "detokenize"]
BODIES: dict[str, type[BaseModel]] = {
    "chat": ChatRequest,
    "completion": CompletionRequest,
    "responses": ResponsesRequest,
    "messages": MessagesRequest,
    "count": CountRequest,
    "embeddings": EmbeddingsRequest,
    "tokenize": TokenizeRequest,
    "detokenize": DetokenizeRequest,
}
SHORT = 8192  # characters of a text whose number of tokens is not worth an estimate
# what a template gets from the request's other fields
_OWN_VARIABLES = ("messages", "add_generation_prompt", "continue_final_message", "self")


class ReaderFacts(NamedTuple):
    """What a reader has to know of a server, in plain values."""

    vocab_size: int
    has_encoder: bool
    model_names: tuple[str, ...]
    max_choices: int
    keeps_prompts: bool  # in what is read: for the log


class RequestReader:
    def __init__(self, tokenizer: Tokenizer, facts: ReaderFacts) -> None:
        self.tokenizer, self.facts = tokenizer, facts

    def read(self, what: What, raw: bytes, context: int, adapters: Sequence[str] = ()) -> Any:
        """The texts to write and the request they are of, or the bytes of an answer.

        `context` is the model's; `adapters` are served beside it, each as a model of its own name.
        """
        body: Any = as_body(BODIES[what], raw)
        model = body.model
        self.check_model(model, adapters)
        match what:
            case "tokenize":
                return self._tokenize(body, context)
            case "detokenize":
                return self._detokenize(body, context)
            case "count":
                return _as_json({"input_tokens": len(self._prompt_of(body, context)[1])})
        if what == "embeddings":
            body, jobs = self._embeddings(body, context)
        else:
            jobs = self.completion_jobs(body, context) if what == "completion" else self.chat_jobs(body, context)
            body = self._without_prompt(body)
        if model in adapters:
            jobs = [replace(job, options={**job.options, "adapter": model}) for job in jobs]
        return body, jobs

    def check_model(self, name: str | None, adapters: Sequence[str] = ()) -> None:
        if name is not None and name not in (*self.facts.model_names, *adapters):
            known = ", ".join((*self.facts.model_names, *adapters))
            message = f"the model {name[:200]!r} is not served here; there is {known}"
            raise ApiError(404, message, "not_found_error", param="model", code="model_not_found")

    def chat_jobs(self, body: ChatRequest, context: int) -> list[Job]:
        check_number(body, 1, self.facts.max_choices)
        body, ids = self._prompt_of(body, context)
        forced = must_call(body)
        if not forced:
            return self._jobs(body, [ids], context, strict_calls(body, self.tokenizer.chat_template))
        if body.response_format is not None and body.response_format.type != "text":
            raise ApiError(400, "a text cannot both call a tool and have a response_format", param="tool_choice")
        return self._jobs(body, [ids], context, for_schema(schema_of_calls(forced)))

    def _prompt_of(self, body: ChatRequest, context: int) -> tuple[ChatRequest, tuple[int, ...]]:
        """The prompt of a chat, and the chat with the limit of thinking that its effort means."""
        variables = dict(body.chat_template_kwargs or {})
        for name in _OWN_VARIABLES:
            if name in variables:
                said = f"chat_template_kwargs cannot set {name!r}: the request's own fields do; leave it out"
                raise ApiError(400, said, param="chat_template_kwargs")
        if body.reasoning_effort is not None:
            body = self._with_effort(body, body.reasoning_effort, variables)
        if body.tools and body.tool_choice != "none":
            variables["tools"] = [tool.model_dump(exclude_none=True) for tool in body.tools]
        if body.continue_final_message:
            if body.add_generation_prompt:
                said = "continue_final_message and add_generation_prompt exclude each other; leave one of them out"
                raise ApiError(400, said, param="continue_final_message")
            variables["continue_final_message"] = True
        return body, self._chat_ids(body.messages, body.add_generation_prompt is not False, context, **variables)

    def _with_effort(self, body: ChatRequest, effort: str, variables: dict[str, Any]) -> ChatRequest:
        """`reasoning_effort` is told to the chat template, and limits the thinking of a model that thinks."""
        if effort == "none":
            variables.setdefault("enable_thinking", False)
        elif effort in ("low", "medium", "high"):
            variables.setdefault("reasoning_effort", effort)
        if self.tokenizer.thinking is None or body.max_thinking_tokens is not None:
            return body
        return body.model_copy(update={"max_thinking_tokens": EFFORTS[effort]})

    def completion_jobs(self, body: CompletionRequest, context: int) -> list[Job]:
        """The texts that a completion asks for: of one prompt or several, in text or ids."""
        if body.suffix is not None:
            raise ApiError(400, "suffix is not supported: this model only continues text", param="suffix")
        prompt: Any = body.prompt
        several = isinstance(prompt, list) and prompt and not isinstance(prompt[0], int)
        prompts = prompt if several else [prompt]
        check_number(body, len(prompts), self.facts.max_choices)
        special = body.add_special_tokens is not False
        return self._jobs(body, [self._ids(each, special, context) for each in prompts], context)

    def _embeddings(self, asked: EmbeddingsRequest, context: int) -> tuple[Generation, list[Job]]:
        """A text of one token for each prompt, of which the embedding is taken and the text is not."""
        if self.facts.has_encoder:
            raise ApiError(400, "an encoder-decoder has no embeddings here; serve a decoder, or an embedding model")
        prompts = [self._ids(each, True, context) for each in asked.prompts()]
        body = asked.as_completion()
        options = {**sampling_of(body, max(map(len, prompts)), context), "pooling": asked.pooling}
        return self._without_prompt(body), [Job(i, prompt, options, False) for i, prompt in enumerate(prompts)]

    def _tokenize(self, body: TokenizeRequest, context: int) -> bytes:
        if (body.prompt is None) == (body.messages is None):
            raise ApiError(400, "give a prompt or messages, one of the two")
        if body.prompt is not None:
            ids = self._ids(body.prompt, body.add_special_tokens, context)
        else:
            ids = self._chat_ids(body.messages, body.add_generation_prompt, context)
        spelt = [self.tokenizer.token(index) for index in ids] if body.return_token_strs else None
        return _as_json({"count": len(ids), "max_model_len": context, "tokens": ids, "token_strs": spelt})

    def _detokenize(self, body: DetokenizeRequest, context: int) -> bytes:
        self._check_count(len(body.tokens), "token ids", context)
        if not all(0 <= token < self.facts.vocab_size for token in body.tokens):
            said = f"a token lies outside the vocabulary of {self.facts.vocab_size}"
            raise ApiError(400, said, param="tokens")
        return _as_json({"prompt": self.tokenizer.decode(body.tokens, skip_special=False)})

    def _chat_ids(self, messages: Any, opens: bool, context: int, **variables: Any) -> tuple[int, ...]:
        self._check_count(len(messages), "messages", context)
        text = self.tokenizer.chat_text(as_messages(messages), opens, **variables)
        return self._encode(text, False, context)

    def _ids(self, prompt: Any, add_special: bool, context: int) -> tuple[int, ...]:
        if isinstance(prompt, str):
            return self._encode(check_text(prompt), add_special, context)
        self._check_count(len(prompt), "tokens", context)
        return as_token_list(prompt)

    def _encode(self, text: str, add_special: bool, context: int) -> tuple[int, ...]:
        """The ids of a text, unless there are too many of them for the context, whatever they are."""
        if len(text) > SHORT and not self.facts.has_encoder:
            least = self.tokenizer.fewest_tokens(text)
            if least > context:
                raise PromptTooLong(
                    f"the prompt has at least {least} tokens ({len(text)} characters); the context holds at most "
                    f"{context}; shorten it"
                )
        return tuple(self.tokenizer.encode(text, add_special))

    def _check_count(self, count: int, of_what: str, context: int) -> None:
        """Refuse more parts than the context has tokens: each takes one at least."""
        if count > context and not self.facts.has_encoder:
            said = f"the request has {count} {of_what}; the context holds at most {context} tokens; shorten it"
            raise PromptTooLong(said)

    def _jobs(
        self,
        body: Generation,
        prompts: list[tuple[int, ...]],
        context: int,
        response_format: dict[str, Any] | None = None,
    ) -> list[Job]:
        taken = [1 if self.facts.has_encoder else len(prompt) for prompt in prompts]  # 1 = a start token
        jobs = make_jobs(body, list(zip(prompts, taken, strict=True)), response_format, context)
        if body.prediction is not None:
            ids = self._prediction_ids(body.prediction.text, context)
            jobs = [replace(job, options={**job.options, "prediction": ids}) for job in jobs]
        return jobs

    def _prediction_ids(self, text: str, context: int) -> tuple[int, ...]:
        """The tokens of a prediction, of which the context must hold all: else it would predict another text."""
        least = self.tokenizer.fewest_tokens(text) if len(text) > SHORT else 0
        ids = () if least > context else tuple(self.tokenizer.encode(check_text(text), False))
        if max(least, len(ids)) > context:
            said = f"the prediction has {max(least, len(ids))} tokens or more; the context holds {context}: shorten it"
            raise ApiError(400, said, param="prediction")
        return ids

    def _without_prompt(self, body: Generation) -> Generation:
        """The request without what its texts were made of: the front needs the rest, and it may be large."""
        if self.facts.keeps_prompts:
            return body
        empty: dict[str, Any] = {
            "messages": [],
            "prompt": "",
            "chat_template_kwargs": None,
            "response_format": None,
            "prediction": None,
        }
        return body.model_copy(update={k: v for k, v in empty.items() if k in type(body).model_fields})


def as_body(kind: type[BaseModel], raw: bytes) -> Any:
    try:
        body = kind.model_validate(from_json(raw.removeprefix(b"\xef\xbb\xbf"), allow_inf_nan=False))
        return body.as_chat() if isinstance(body, Door) else body
    except ValidationError as error:
        raise from_validation(error.errors(include_url=False, include_input=False)) from None
    except ValueError as error:
        half = " (half of a surrogate pair is no character)" if "hex escape" in str(error) else ""
        raise ApiError(400, f"the body is not JSON: {error}{half}", code="invalid_json") from None


def _as_json(value: dict[str, Any]) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


log = logging.getLogger(__name__)
LONGEST = 60.0  # seconds that a body may take
MOST_WAITING = 64 << 20  # bytes of bodies
NICENESS = 5  # a third of the time that a thread of the engine gets on the same core


class ReaderProcess:
    """The front's side. To be used inside one event loop."""

    def __init__(self, tokenizer: Tokenizer, facts: ReaderFacts) -> None:
        self._tokenizer, self._facts = tokenizer, facts
        self._child: tuple[Popen[bytes], Channel] | None = None
        self._numbers = count()
        # a heap: the smallest is read next
        self._waiting: list[tuple[int, int, Any, asyncio.Future[Any]]] = []
        self._reading: tuple[asyncio.Future[Any], asyncio.TimerHandle] | None = None

    async def read(self, what: What, raw: bytes, context: int, adapters: Sequence[str] = ()) -> Any:
        """As `RequestReader.read` does; nothing is read for a caller that has stopped waiting by then."""
        waiting = sum(size for size, _, _, reply in self._waiting if not reply.done())
        if waiting + len(raw) > MOST_WAITING:
            said = "too many large requests wait to be read; try again soon"
            raise ApiError(429, said, "rate_limit_error", code="queue_full", headers={"Retry-After": "1"})
        reply = asyncio.get_running_loop().create_future()
        heappush(self._waiting, (len(raw), next(self._numbers), (what, raw, context, tuple(adapters)), reply))
        self._read_next()
        return await reply

    def close(self) -> None:
        """End the process; whoever waits gets an error."""
        waiting, self._waiting = self._waiting, []
        leaving = ApiError(503, "the server is shutting down", "server_error")
        for *_, reply in waiting:
            _settle(reply, leaving)
        self._end(leaving)

    def _read_next(self) -> None:
        while self._reading is None and self._waiting:
            *_, order, reply = heappop(self._waiting)
            if not reply.done():
                self._channel().send(order)
                late = ApiError(400, f"the request could not be read within {LONGEST:g} s; shorten it")
                self._reading = reply, asyncio.get_running_loop().call_later(LONGEST, self._end, late)

    def _channel(self) -> Channel:
        if self._child is None:
            self._child = start_child(__name__)
            channel = self._child[1]
            channel.send((tuple(self._tokenizer.parts()), tuple(self._facts), log.getEffectiveLevel()))
            asyncio.get_running_loop().add_reader(channel.fileno(), self._take, channel)
        return self._child[1]

    def _take(self, channel: Channel) -> None:
        """Called by the event loop when the process has sent something, or is gone."""
        messages = channel.receive_ready()
        if messages is None:
            log.error("the process that reads large requests has ended")
            self._end(ApiError(500, "the process that reads large requests has ended", "server_error"))
        for answer in messages or ():
            self._settle_current(pickle.loads(answer))
            self._read_next()

    def _end(self, why: ApiError) -> None:
        """End the process, and the request that it reads."""
        if self._child is not None:
            process, channel = self._child
            self._child = None
            asyncio.get_running_loop().remove_reader(channel.fileno())
            process.kill()
            process.wait()
            channel.release()
        self._settle_current(why)
        self._read_next()

    def _settle_current(self, found: Any) -> None:
        if self._reading is not None:
            (reply, timer), self._reading = self._reading, None
            timer.cancel()
            _settle(reply, found)


def _settle(reply: asyncio.Future[Any], found: Any) -> None:
    """Answer a call, unless the caller has stopped waiting."""
    if reply.done():
        return
    if isinstance(found, ApiError):
        reply.set_exception(found)
    else:
        reply.set_result(found)


def main(number: int) -> int:
    """The whole life of the process; `number` is the socket that the front has left open for it."""
    channel = take_channel(number)
    orders = channel.receive()
    first = next(orders, None)
    if first is None:
        return 0
    parts, facts, level = first
    logging.basicConfig(level=level, format=LOG_FORMAT)
    reader = RequestReader(TokenizerParts(*parts).tokenizer(), ReaderFacts(*facts))
    os.nice(NICENESS)  # from here on: the first request waits for the imports
    for what, raw, context, adapters in orders:
        try:
            found = reader.read(what, raw, context, adapters)
        except Exception as error:
            found = as_api_error(error)
        channel.send(pickle.dumps(found))
        found = raw = None  # nothing is kept while it waits
    return 0


_MARK = "<tool_call>"
_TAGS = "<arg_key>", "<function="
_VALUES = ("const", "enum", "default", "examples")  # keys of a JSON schema that hold no schemas
_NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}  # of a tool without `parameters`


def must_call(body: ChatRequest) -> list[FunctionSpec]:
    """The functions of which the text has to call one, as `tool_choice` says; none where it is free."""
    choice, known = body.tool_choice, [tool.function for tool in body.tools or ()]
    if choice is None or choice in ("none", "auto"):
        return []
    if not known:
        raise ApiError(400, "tool_choice needs tools to choose from", param="tool_choice")
    if choice == "required":
        return known
    inner = choice.get("function") if isinstance(choice, dict) else None
    name = inner.get("name") if isinstance(inner, dict) else None
    chosen = [tool for tool in known if tool.name == name]
    if not chosen:
        raise ApiError(400, f"tool_choice names no tool that was offered: {str(name)[:80]!r}", param="tool_choice")
    return chosen


def strict_calls(body: ChatRequest, template: str | None) -> dict[str, Any] | None:
    """The structural tags of calls, once one begins; None where no tool is strict, or another structure is asked for.

    Of the formats, Hermes' has a mark that is text and arguments that are JSON. Another is not held to its schema.
    """
    tools = [] if body.tool_choice == "none" else [tool.function for tool in body.tools or ()]
    if not any(tool.strict for tool in tools) or not _teaches_hermes(template or ""):
        return None
    asked = body.response_format is not None and body.response_format.type != "text"
    guided = (body.guided_json, body.guided_regex, body.guided_choice, body.guided_grammar, body.structured_outputs)
    if asked or any(each is not None for each in guided):
        return None
    structures = [
        {
            "begin": f'{_MARK}\n{{"name": {json.dumps(tool.name)}, "arguments": ',
            "schema": _arguments_of(tool) if tool.strict else {"type": "object"},
            "end": f"}}\n{_MARK.replace('<', '</')}",
        }
        for tool in tools
    ]
    return {"type": "structural_tag", "structures": structures, "triggers": [_MARK]}


def _teaches_hermes(template: str) -> bool:
    """Are calls taught as JSON between the marks? GLM and Qwen-Coder put tags there; our own offer is Hermes'."""
    return "tools" not in template or (_MARK in template and not any(tag in template for tag in _TAGS))


def _arguments_of(tool: FunctionSpec) -> dict[str, Any]:
    return _NO_ARGUMENTS if tool.parameters is None else tool.parameters or {"type": "object"}


def schema_of_calls(tools: Sequence[FunctionSpec]) -> dict[str, Any]:
    """The JSON schema of a call of one of these functions: its name, then its arguments."""
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": tool.name}, "arguments": {"$ref": f"#/$defs/{i}"}},
            "required": ["name", "arguments"], "additionalProperties": False,
        }
        for i, tool in enumerate(tools)
    ]  # fmt: skip
    arguments = [_arguments_of(tool) for tool in tools]
    return {"anyOf": calls, "$defs": {str(i): _moved(own, f"#/$defs/{i}") for i, own in enumerate(arguments)}}


def _moved(schema: Any, place: str) -> Any:
    """A schema that is a part of another one: its references are to itself there."""
    if isinstance(schema, list):
        return [_moved(each, place) for each in schema]
    if not isinstance(schema, dict):
        return schema
    own = {key: value if key in _VALUES else _moved(value, place) for key, value in schema.items()}
    if isinstance(reference := own.get("$ref"), str) and reference.startswith("#"):
        own["$ref"] = place + reference[1:]
    return own


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
