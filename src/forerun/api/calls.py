"""The calls that LLM and AsyncLLM share: prompts, one signature, one check of arguments, and requests made from them.

An LLM returns results, an AsyncLLM returns what is awaited for them. The content of a message is text, or OpenAI's list
of parts, of which a text model can read those of text.
"""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from os import PathLike
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar, Unpack, overload

from forerun.api.completion import Completion, ended_of, raised_by, spelt
from forerun.core.checks import as_name, as_path, as_token_ids, as_whole, shown, unknown
from forerun.core.errors import InvalidInput
from forerun.core.params import SPELLINGS, SamplingOptions, SamplingParams
from forerun.core.request import Budget, Pooling, Request, budget_of, derived_seed

if TYPE_CHECKING:
    from forerun.engine.driver import Driver
    from forerun.engine.engine import Engine
    from forerun.engine.sequence import SequenceState
    from forerun.models.load.tokenizer import Tokenizer

Message = Mapping[str, Any]
Prompt = str | Sequence[int] | Sequence[Message]
Conversation = str | Sequence[Message]
_TEXT_PARTS = ("text", "input_text", "output_text")


def as_prompts(prompts: Any) -> tuple[list[Prompt], bool]:
    """The prompts in a list, and whether several were meant; arrays and tensors of ids are fine."""
    if hasattr(prompts, "tolist"):
        prompts = prompts.tolist()
    if isinstance(prompts, str):
        return [prompts], False
    _refuse_bytes(prompts)
    if isinstance(prompts, Mapping) or not isinstance(prompts, Sequence):
        raise InvalidInput(f"{shown(prompts)} is no prompt: give text, token ids or a list of chat messages")
    if not prompts:
        raise InvalidInput("the list of prompts is empty; give at least one")
    several = isinstance(prompts[0], Sequence) or getattr(prompts[0], "ndim", 0) > 0
    return ([*prompts], True) if several else ([prompts], False)


def as_conversations(messages: Any, system: Any = None) -> tuple[list[list[Message]], bool]:
    """The conversations in a list, and whether several were meant; a plain string is one user message."""
    if isinstance(messages, Sequence) and not isinstance(messages, str | bytes | bytearray) and messages:
        several = any(isinstance(part, Sequence) for part in messages)
        if several:
            return [as_messages(part, system) for part in messages], True
    return [as_messages(messages, system)], False


def as_messages(messages: Any, system: Any = None) -> list[Message]:
    """Chat messages from a plain question or a list, with a system message in front if one is given."""
    _refuse_bytes(messages)
    if not isinstance(messages, Sequence):
        raise InvalidInput(f"{shown(messages)} is no conversation: give text or a list of chat messages")
    turns = [{"role": "user", "content": messages}] if isinstance(messages, str) else [*messages]
    if not turns:
        raise InvalidInput("the list of messages is empty; give at least one")
    if system is not None and not isinstance(system, str):
        raise InvalidInput(f"system={shown(system)} is no system message: give text")
    return [_as_message(turn) for turn in ([{"role": "system", "content": system}] if system else []) + turns]


def as_variables(chat_template_kwargs: Any) -> dict[str, Any]:
    """Variables of a chat template, by their names."""
    given = {} if chat_template_kwargs is None else chat_template_kwargs
    if not isinstance(given, Mapping) or not all(isinstance(name, str) for name in given):
        raise InvalidInput(
            f"chat_template_kwargs={shown(given)} are no variables: give a dict such as {{'enable_thinking': False}}"
        )
    return {**given}


def as_token_list(prompt: Any) -> tuple[int, ...]:
    """Token ids from integers of any library."""
    ids = prompt.tolist() if hasattr(prompt, "tolist") else prompt
    if isinstance(ids, list | tuple) and set(map(type, ids)) == {int}:  # nearly always, and ten times faster
        return tuple(ids)
    try:
        if any(isinstance(part, bool) for part in ids):
            raise TypeError("a truth value is no token id")
        return tuple(operator.index(part) for part in ids)
    except TypeError:
        raise InvalidInput(f"{shown(prompt)} is no prompt: give text, token ids or chat messages") from None


def check_text(text: str) -> str:
    """Text that can be encoded: half of a surrogate pair is no character."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        code = f"U+{ord(text[error.start]):04X}"
        raise InvalidInput(
            f"the prompt holds {code} at character {error.start}, half of a surrogate pair and no character: "
            "decode its source as UTF-8 or UTF-16"
        ) from None
    return text


def is_chat(prompt: Any) -> bool:
    """Are these the messages of a chat?"""
    return isinstance(prompt, Sequence) and bool(prompt) and all(isinstance(part, Mapping) for part in prompt)


def _as_message(message: Any) -> Message:
    """A message whose content is text."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise InvalidInput(f"{shown(message)} is no chat message: give {{'role': 'user', 'content': 'Hi'}} or the like")
    content = message.get("content")
    if content is None and message.get("tool_calls"):
        return {**message, "content": ""}  # templates add it to other text
    if isinstance(content, str):
        text = content
    elif isinstance(content, Sequence) and not isinstance(content, bytes | bytearray):
        text = "\n".join(_text_of(part) for part in content)
    else:
        raise InvalidInput(f"content={shown(content)} of a chat message is neither text nor a list of parts")
    return {**message, "content": check_text(text)}


def _text_of(part: Any) -> str:
    """The text of one part of a message's content, as the OpenAI API has them."""
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind in _TEXT_PARTS and isinstance(part.get("text"), str):
        return str(part["text"])
    raise InvalidInput(
        f"a content part of type {shown(kind)} cannot be read: give {{'type': 'text', 'text': ...}}, "
        "this model takes only text"
    )


def _refuse_bytes(value: Any) -> None:
    if isinstance(value, bytes | bytearray | memoryview):
        raise InvalidInput("the prompt is bytes; decode it to text first, such as prompt.decode('utf-8')")


One = TypeVar("One")  # a Completion
Several = TypeVar("Several")  # a list of them
Lists = TypeVar("Lists")  # a list of such lists
Streamed = TypeVar("Streamed")  # a Stream or an AsyncStream


class Calls(ABC, Generic[One, Several, Lists, Streamed]):
    """What a loaded model can be asked for."""

    def __init__(self, engine: Engine, tokenizer: Tokenizer, name: str, driver: Driver) -> None:
        self.engine, self.tokenizer, self.name, self.driver = engine, tokenizer, name, driver

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r}, drafter={self.engine.default_drafter!r})"

    @property
    def adapters(self) -> list[str]:
        """Names of the LoRA adapters that calls may ask for (`adapter=NAME`)."""
        return [] if self.engine.adapters is None else self.engine.adapters.names

    def load_adapter(self, name: str, folder: str | PathLike[str]) -> None:
        """Serve the LoRA adapter in a folder of PEFT's form under a name, beside the base and other adapters.

        `FOLDER,head=FOLDER` names a head that drafts for this adapter's texts alone.
        """
        from forerun.build.engine import add_own_head  # not above: a server's front does without torch

        if self.engine.adapters is None:
            raise InvalidInput("this engine was made without adapters")
        name, given = as_name("name", name), as_path("folder", folder)
        self.engine.adapters.add(name, given)

        def add(engine: Engine) -> None:
            engine.settle()  # graphs of a head are captured by passes in the same buffers
            add_own_head(engine.drafters, name, given)

        try:
            self.driver.order(add)
        except Exception:
            self.engine.adapters.remove(name)
            raise

    def unload_adapter(self, name: str) -> None:
        """Serve it no longer; texts that are being written with it are finished."""
        if self.engine.adapters is None:
            raise InvalidInput("this engine was made without adapters")
        self.engine.adapters.remove(name)

        def drop(engine: Engine) -> None:
            engine.drafters.drop_own(name, engine.scheduler.every)
            engine.stats.adapters.pop(name, None)

        self.driver.order(drop)

    @overload  # a string is also a sequence of strings: the first signature that fits is meant
    def generate(
        self, prompts: Prompt, params: Params | None = None, *, n: None = None, **options: Unpack[Options]
    ) -> One: ...
    @overload
    def generate(
        self, prompts: Prompt, params: Params | None = None, *, n: int, **options: Unpack[Options]
    ) -> Several: ...
    @overload
    def generate(
        self, prompts: Sequence[Prompt], params: EachParams = None, *, n: None = None, **options: Unpack[Options]
    ) -> Several: ...
    @overload
    def generate(
        self, prompts: Sequence[Prompt], params: EachParams = None, *, n: int, **options: Unpack[Options]
    ) -> Lists: ...
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: EachParams = None,
        *,
        n: int | None = None,
        **options: Unpack[Options],
    ) -> Any:
        """A Completion for a prompt (text, token ids or chat messages), or a list of them for several prompts.

        Text is taken as it is; messages go through the model's chat template. Fields of SamplingParams may be given
        as keywords, over those of `params`; `drafter`, `verifier` and `budget` hold for this call only. Several
        prompts may share their parameters or bring a list of them. With `n`, each prompt gets a list of n texts: the
        first has the seed that was given, the i-th `noise.derived_seed(seed, i)`, and each says its own. A request
        that cannot go on raises its error once the others of the call have finished.
        """
        return self._answer(lambda: Call.of(*as_prompts(prompts), params, n, self._tokenized(options), self.encode))

    @overload
    def chat(
        self, messages: Conversation, params: Params | None = None, *, n: None = None, **options: Unpack[ChatOptions]
    ) -> One: ...
    @overload
    def chat(
        self, messages: Conversation, params: Params | None = None, *, n: int, **options: Unpack[ChatOptions]
    ) -> Several: ...
    @overload
    def chat(
        self,
        messages: Sequence[Conversation],
        params: EachParams = None,
        *,
        n: None = None,
        **options: Unpack[ChatOptions],
    ) -> Several: ...
    @overload
    def chat(
        self, messages: Sequence[Conversation], params: EachParams = None, *, n: int, **options: Unpack[ChatOptions]
    ) -> Lists: ...
    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        params: EachParams = None,
        *,
        n: int | None = None,
        **options: Unpack[ChatOptions],
    ) -> Any:
        """Answer a chat, or several at once; a plain string is one user message. Options are `generate`'s."""
        system = options.pop("system", None)
        return self._answer(
            lambda: Call.of(*as_conversations(messages, system), params, n, self._tokenized(options), self.encode)
        )

    def stream(self, prompt: Prompt, params: Params | None = None, **options: Unpack[Options]) -> Streamed:
        """Continue one prompt, event by event: an Event per round as the text grows. Options are `generate`'s."""
        return self._stream(make_request(prompt, params, self._tokenized(options), self.encode))

    def stream_chat(
        self, messages: Conversation, params: Params | None = None, **options: Unpack[ChatOptions]
    ) -> Streamed:
        """Answer one chat, event by event; a plain string is one user message. Options are `chat`'s."""
        asked = as_messages(messages, options.pop("system", None))
        return self._stream(make_request(asked, params, self._tokenized(options), self.encode))

    def encode(self, prompt: Prompt, chat_template_kwargs: Mapping[str, Any] | None = None) -> tuple[int, ...]:
        """The token ids of a prompt in any of its forms; variables reach the chat template that writes messages."""
        if is_chat(prompt):
            return tuple(self.tokenizer.chat_ids(as_messages(prompt), **as_variables(chat_template_kwargs)))
        if as_variables(chat_template_kwargs):
            raise InvalidInput("chat_template_kwargs are for chats: give messages, or use chat() and stream_chat()")
        return tuple(self.tokenizer.encode(check_text(prompt))) if isinstance(prompt, str) else as_token_list(prompt)

    def _tokenized(self, options: Mapping[str, Any]) -> Mapping[str, Any]:
        """The options with token ids for the text of a prediction, or a list of them where there are several."""
        given = options.get("prediction")
        if isinstance(given, str):
            return {**options, "prediction": self._predicted_ids(given)}
        if isinstance(given, list | tuple) and any(isinstance(one, str | list | tuple) for one in given):
            ids = [self._predicted_ids(one) if isinstance(one, str) else as_token_list(one) for one in given]
            return {**options, "prediction": ids}
        return options

    def _predicted_ids(self, text: str) -> tuple[int, ...]:
        return tuple(self.tokenizer.encode(check_text(text), add_special=False))

    def abort(self, request_id: str) -> None:
        """End the requests of that name before the next round, as "aborted", with what they have; never waits."""

        def end(engine: Engine) -> None:
            for seq in [*engine.running, *engine.reading, *engine.waiting]:
                if seq.request.request_id == request_id:
                    engine.abort(seq.id)

        self.driver.post(end, at_once=False)

    @abstractmethod
    def _answer(self, call: Callable[[], Call]) -> Any:
        """The completions of a call, in its shape."""

    @abstractmethod
    def _stream(self, request: Request) -> Streamed: ...

    def completion_of(self, seq: SequenceState) -> Completion:
        """A sequence that has ended as a Completion; raises the error that ended it, if one did."""
        if (error := raised_by(seq)) is not None:
            raise error
        ended = ended_of(seq, self.engine.verifiers.get(seq.verifier).exact)
        if ended.prompt_logprobs is not None:
            known = [None, *spelt(filter(None, ended.prompt_logprobs), self.tokenizer)]
            ended = ended._replace(prompt_logprobs=known)
        return ended._replace(logprobs=spelt(ended.logprobs, self.tokenizer)).completion()


Params = SamplingParams | Mapping[str, Any]
EachParams = Params | Sequence[Params] | None  # shared, or one set for each prompt
Encode = Callable[..., tuple[int, ...]]  # of a prompt, and of variables of the chat template if there are any
MOST_COPIES = 1024  # of one prompt in a call
_DEFAULTS = SamplingParams()


class Options(SamplingOptions, total=False):
    """Options of one call; the engine's defaults hold for what is left out."""

    drafter: str | None
    verifier: str | None
    budget: int | Budget | None
    json_schema: Mapping[str, Any] | bool | None  # short for a `response_format` with this schema
    shows_rejected: bool  # events tell what was drafted in vain
    cache_salt: str | None  # cached prompts are shared with calls of the same salt; None = with none
    request_id: str | None  # a name for `abort`
    chat_template_kwargs: Mapping[str, Any] | None  # variables of the chat template: enable_thinking, say
    prediction: str | Sequence[int] | Sequence[str] | None  # what the text should be; of several prompts a list
    adapter: str | None  # the name of a LoRA adapter; None = the base model
    pooling: Pooling | None  # Completion.embedding: the mean of the prompt's rows, or the last one
    priority: int  # smaller = admitted sooner, where requests wait; 0 is the default


class ChatOptions(Options, total=False):
    """Options of a chat."""

    system: str | None  # the message in front of the conversation


_ELSEWHERE = {  # what other libraries have as an option
    "stream": "this call has no option 'stream': call stream() or stream_chat() for text as it grows",
    "n": "a stream has no option 'n', it is one text: call it once for each, or use generate() or chat()",
    "tools": "this call has no option 'tools': calls of tools are read by the server, `forerun serve`",
    "do_sample": "this call has no option 'do_sample': temperature=0 is greedy, more than 0 samples",
}
_OURS = Options.__annotations__.keys() - SamplingOptions.__annotations__.keys() - {"json_schema"}


def make_request(prompt: Prompt, params: Params | None, options: Mapping[str, Any], encode: Encode) -> Request:
    """The request of a prompt and its options; keywords override `params`."""
    known = [*Options.__annotations__, *SPELLINGS]
    if strange := [name for name in options if name not in known]:
        raise InvalidInput(_ELSEWHERE.get(strange[0]) or unknown("option", strange[0], known))
    if params is not None and not isinstance(params, SamplingParams):
        params = SamplingParams.from_dict(params)
    sampling = {name: value for name, value in options.items() if name not in _OURS}
    budget = options.get("budget")
    if budget is not None and not isinstance(budget, Budget):
        budget = budget_of(as_whole("budget", budget, 0, 256), width=1)
    drafter, verifier, adapter = (
        None if options.get(name) is None else as_name(name, options[name])
        for name in ("drafter", "verifier", "adapter")
    )
    drafter = None if drafter == "auto" else drafter  # the engine's own, which may be the choice of auto
    merged = SamplingParams.from_dict(sampling, over=params or _DEFAULTS)
    rest = options.get("shows_rejected", False), options.get("cache_salt", ""), options.get("request_id")
    variables, predicted = options.get("chat_template_kwargs"), options.get("prediction")
    ids = encode(prompt) if variables is None else encode(prompt, variables)
    predicted, pooling = as_token_ids("prediction", predicted), options.get("pooling")
    more = adapter, pooling, options.get("priority", 0)
    return Request(ids, merged, drafter, verifier, budget, *rest, predicted, *more)


class Call(NamedTuple):
    """One call of `generate` or `chat`: its requests, prompt by prompt, and the shape of what it returns."""

    asked: list[list[Request]]  # of each prompt: one, or n of them unless all their texts would be alike
    several: bool  # prompts
    n: int | None

    @classmethod
    def of(
        cls,
        prompts: Sequence[Prompt],
        several: bool,
        params: EachParams,
        n: int | None,
        options: Mapping[str, Any],
        encode: Encode,
    ) -> Call:
        copies = None if n is None else as_whole("n", n, 1, MOST_COPIES)
        of_each = zip(prompts, _each(params, len(prompts)), _each_prediction(options, len(prompts)), strict=True)
        asked = [
            _copies(make_request(prompt, own, {**options, **predicted}, encode), copies)
            for prompt, own, predicted in of_each
        ]
        return cls(asked, several, copies)

    @property
    def requests(self) -> list[Request]:
        return [request for requests in self.asked for request in requests]

    def in_shape(self, done: Iterable[Completion]) -> Completion | list[Completion] | list[list[Completion]]:
        """Completions as they were asked for: one for each prompt, or with `n` a list for each."""
        left = iter(done)
        texts = [[next(left) for _ in requests] for requests in self.asked]
        if self.n is None:
            return [own[0] for own in texts] if self.several else texts[0][0]
        whole = [own if len(own) == self.n else own * self.n for own in texts]  # greedy texts are written once
        return whole if self.several else whole[0]


def _each(params: Any, count: int) -> Sequence[Params | None]:
    """The parameters of each of so many prompts: shared, or one set for each."""
    if params is None or isinstance(params, SamplingParams | Mapping):
        return [params] * count
    if not isinstance(params, Sequence) or isinstance(params, str | bytes | bytearray):
        raise InvalidInput(f"params={shown(params)} are no sampling parameters: give SamplingParams or a dict")
    if len(params) != count:
        raise InvalidInput(f"{count} prompts came with {len(params)} sets of parameters; give one or as many")
    return params


def _each_prediction(options: Mapping[str, Any], count: int) -> Sequence[Mapping[str, Any]]:
    """The prediction of each of so many prompts, as an option: shared, or one for each."""
    given = options.get("prediction")
    if not isinstance(given, list) or not all(isinstance(one, tuple) for one in given):
        return [{}] * count
    if len(given) != count:
        raise InvalidInput(f"{count} prompts came with {len(given)} predictions; give one or as many")
    return [{"prediction": one} for one in given]


def _copies(request: Request, count: int | None) -> list[Request]:
    """A request so many times, each with a seed of its own; once where all texts would be alike."""
    params = request.params
    if count is None or params.is_greedy:
        return [request]
    if params.seed is None:
        return [request] * count
    seeds = [derived_seed(params.seed, i) for i in range(count)]
    return [replace(request, params=replace(params, seed=seed)) for seed in seeds]
