"""The engines that can be checked: an OpenAI-compatible URL, a Python callable, transformers, Forerun itself.

A URL needs the standard library only. The others import their engine when they are made, never before.
"""

from __future__ import annotations

import http.client
import importlib
import json
import shlex
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forerun.core.errors import InvalidInput
from forerun.referee.ask import Answer, Ask, Broken, Mode, Refused, TokenLogprob, answer_of

_PAUSES = (0.1, 1.0)  # seconds before a lost connection is tried again
_COUNTERS = ("vllm:spec_decode_num_draft_tokens_total", "vllm:spec_decode_num_accepted_tokens_total")
_REFUSALS = (400, 404, 405, 415, 422, 501)


@dataclass
class UrlTarget:
    """A server with /v1/completions. `off` are fields that switch speculation off, `plain` a server without it."""

    url: str
    model: str | None = None
    ids: Mapping[str, int] = field(default_factory=dict)
    plain: str | None = None
    off: Mapping[str, Any] | None = None
    key: str | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)  # sent with every request, unless a check says otherwise
    names: Mapping[str, str] = field(default_factory=dict)  # what this server calls a field
    width: int = 16  # requests under way at once
    timeout: float = 120.0
    name: str = ""

    def __post_init__(self) -> None:
        self.url = _base(self.url)
        self.plain = None if self.plain is None else _base(self.plain)
        self.name = self.name or self.url
        self._pool = ThreadPoolExecutor(self.width)
        self._models: dict[str, str] = {}

    def check(self) -> None:
        """Refuse a server that is not up, or takes no key of ours: no check of its engine has failed then."""
        for base in filter(None, (self.url, self.plain)):
            try:
                self._post(f"{base}/models", None)
            except Refused:  # it answers, without that route
                continue
            except Broken as error:
                if self.model is None or error.status in (None, 401, 403):  # else the model's name is known anyway
                    raise InvalidInput(str(error)) from None

    @property
    def modes(self) -> tuple[Mode, ...]:
        return ("on", "off") if self.plain or self.off is not None else ("on",)

    def answer(self, asks: Sequence[Ask], mode: Mode = "on") -> list[Answer]:
        return list(self._pool.map(lambda ask: self._one(ask, mode), asks))

    def command(self, ask: Ask, mode: Mode = "on") -> str:
        url, body = self._request(ask, mode)
        key = f" -H 'Authorization: Bearer {'$OPENAI_API_KEY'}'" if self.key else ""
        data = shlex.quote(json.dumps(body))
        return f"curl -s {url}/completions -H 'Content-Type: application/json'{key} -d {data}"

    def drafting(self) -> tuple[int, int] | None:
        """Drafted and accepted tokens since the server's start by its /metrics, as vLLM counts them; None = no such."""
        found = dict.fromkeys(_COUNTERS, -1.0)
        try:
            with urllib.request.urlopen(f"{self.url.removesuffix('/v1')}/metrics", timeout=self.timeout) as answer:
                lines = answer.read().decode(errors="replace").splitlines()
        except OSError:
            return None
        for line in lines:
            name, _, value = line.rpartition(" ")
            if (name := name.partition("{")[0]) in found:
                found[name] = max(found[name], 0.0) + float(value)
        drafted, accepted = found.values()
        return (int(drafted), int(accepted)) if min(drafted, accepted) >= 0 else None

    def _request(self, ask: Ask, mode: Mode) -> tuple[str, dict[str, Any]]:
        base = self.plain if mode == "off" and self.plain else self.url
        off = self.off if mode == "off" and self.off is not None else {}
        body = {self.names.get(name, name): value for name, value in ask.body(self.ids).items()}
        if "json_schema" in body:  # under this name servers take the schema itself
            body["json_schema"] = body["json_schema"]["json_schema"]["schema"]
        return base, {"model": self._model(base), **self.extra, **body, **off}

    def _one(self, ask: Ask, mode: Mode) -> Answer:
        url, body = self._request(ask, mode)
        started = time.perf_counter()
        try:
            return answer_of(self._post(f"{url}/completions", body), time.perf_counter() - started)
        except Broken as error:
            error.command = self.command(ask, mode)
            raise

    def _model(self, base: str) -> str:
        if self.model is not None:
            return self.model
        if base not in self._models:
            try:
                found = self._post(f"{base}/models", None)
                self._models[base] = found["data"][0]["id"]
            except (Refused, KeyError, IndexError, TypeError):
                raise InvalidInput(f"{base}/models names no model; say which with --model") from None
        return self._models[base]

    def _post(self, url: str, body: Mapping[str, Any] | None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        if self.key:
            headers["Authorization"] = f"Bearer {self.key}"
        request = urllib.request.Request(url, data, headers)
        for pause in _PAUSES:  # a connection that is lost says nothing of the engine's decoding
            try:
                return self._open(request)
            except ConnectionError:
                time.sleep(pause)
        try:
            return self._open(request)
        except ConnectionError as error:
            raise Broken(f"{url} loses its connections: {error}; is the server up?") from None

    def _open(self, request: urllib.request.Request) -> Any:
        url = request.full_url
        try:
            with urllib.request.urlopen(request, timeout=self.timeout) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            said = " ".join(error.read(2000).decode(errors="replace").split())[:200]
            if error.code in _REFUSALS:
                raise Refused(f"{error.code}: {said}") from None
            raise Broken(f"{url} answered {error.code}: {said}", error.code) from None
        except (json.JSONDecodeError, UnicodeDecodeError, http.client.IncompleteRead) as error:
            raise Broken(f"{url} answered no JSON: {error}") from None
        except TimeoutError:
            raise Broken(f"{url} gave no answer within {self.timeout:g} s; give --seconds more") from None
        except urllib.error.URLError as error:
            if isinstance(getattr(error, "reason", None), ConnectionResetError):
                raise ConnectionResetError("reset by the server") from None
            raise Broken(f"{url} does not answer: {error}; is the server up?") from None


def _base(url: str) -> str:
    """With /v1 at its end."""
    url = url.rstrip("/")
    return url if url.endswith("/v1") else f"{url}/v1"


Called = Callable[[Mapping[str, Any]], Any]  # the fields of /v1/completions -> a text, or such an answer


@dataclass
class CallableTarget:
    """A Python function of the fields of /v1/completions, returning a text or the JSON of an answer.

    The fields have `speculative: "off"` where no drafting is asked for; a function that honours it sets
    `switches = True` on itself. It raises ValueError to refuse a request.
    """

    function: Called
    ids: Mapping[str, int] = field(default_factory=dict)
    name: str = ""
    path: str = ""

    def __post_init__(self) -> None:
        self.name = self.name or self.path or getattr(self.function, "__name__", "callable")

    @property
    def modes(self) -> tuple[Mode, ...]:
        return ("on", "off") if getattr(self.function, "switches", False) else ("on",)

    def answer(self, asks: Sequence[Ask], mode: Mode = "on") -> list[Answer]:
        return [self._one(ask, mode) for ask in asks]

    def command(self, ask: Ask, mode: Mode = "on") -> str:
        module, _, name = self.path.partition(":")
        body = {**ask.body(self.ids), **({"speculative": "off"} if mode == "off" else {})}
        if not module:
            return f"{self.name}({body!r})"
        code = f"import {module} as m; print(m.{name}({body!r}))"
        return f"python -c {shlex.quote(code)}"

    def _one(self, ask: Ask, mode: Mode) -> Answer:
        body = {**ask.body(self.ids), **({"speculative": "off"} if mode == "off" else {})}
        started = time.perf_counter()
        try:
            found = self.function(body)
        except (ValueError, NotImplementedError) as error:
            raise Refused(str(error)) from None
        seconds = time.perf_counter() - started
        return Answer(found, seconds=seconds) if isinstance(found, str) else answer_of(found, seconds)


@dataclass
class ForerunTarget:
    model: str
    options: Mapping[str, Any] = field(default_factory=dict)  # of LLM
    ids: Mapping[str, int] = field(default_factory=dict)
    name: str = ""

    modes: tuple[Mode, ...] = ("on", "off")

    def __post_init__(self) -> None:
        from forerun.api.llm import LLM

        self._llm = LLM(self.model, **self.options)
        self.close = self._llm.close
        self.name = self.name or f"forerun {Path(self.model).name} {self._llm.engine.default_drafter}"

    def answer(self, asks: Sequence[Ask], mode: Mode = "on") -> list[Answer]:
        from forerun.core.params import SamplingParams

        try:
            bodies = [ask.body(self.ids) for ask in asks]
            params = [
                SamplingParams.from_dict({name: value for name, value in body.items() if name != "prompt"})
                for body in bodies
            ]
            more: dict[str, Any] = {"drafter": "none"} if mode == "off" else {}
            done = self._llm.generate([ask.prompt for ask in asks], params, **more)
        except InvalidInput as error:
            raise Refused(str(error)) from None
        return [
            Answer(
                each.text,
                each.finish_reason,
                each.prompt_tokens,
                each.tokens,
                each.prompt_tokens + each.tokens,
                None
                if ask.logprobs is None
                else [TokenLogprob(e.text, e.logprob, {one.text: one.logprob for one in e.top}) for e in each.logprobs],
                each.drafted,
                each.accepted,
                each.rounds,
                each.seconds,
            )
            for ask, each in zip(asks, done, strict=True)
        ]

    def command(self, ask: Ask, mode: Mode = "on") -> str:
        values = {name: value for name, value in ask.body(self.ids).items() if name != "prompt"}
        off = ", drafter='none'" if mode == "off" else ""
        made = ", ".join([repr(self.model), *(f"{k}={v!r}" for k, v in self.options.items())])
        code = f"from forerun import LLM; print(LLM({made}).generate({ask.prompt!r}, {values!r}{off}).text)"
        return f"python -c {shlex.quote(code)}"


@dataclass
class TransformersTarget:
    """transformers' `generate` with an assistant model or prompt look-up; one request at a time, as it allows."""

    model: str
    assistant: str | None = None  # None = prompt look-up
    ids: Mapping[str, int] = field(default_factory=dict)
    tokens: int = 5  # drafted per round
    name: str = ""

    modes: tuple[Mode, ...] = ("on", "off")

    def __post_init__(self) -> None:
        import torch
        import transformers

        def load(folder: str) -> Any:
            return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

        self._model, self._tokenizer = (load(self.model), transformers.AutoTokenizer.from_pretrained(self.model))
        self._assistant = None if self.assistant is None else load(self.assistant)
        if self._assistant is not None:
            self._assistant.generation_config.num_assistant_tokens = self.tokens
            self._assistant.generation_config.num_assistant_tokens_schedule = "constant"
            self._assistant.generation_config.assistant_confidence_threshold = 0.0
        how = "prompt look-up" if self.assistant is None else "assistant model"
        self.name = self.name or f"transformers {transformers.__version__}, {how}"

    def answer(self, asks: Sequence[Ask], mode: Mode = "on") -> list[Answer]:
        return [self._one(ask, mode) for ask in asks]

    def command(self, ask: Ask, mode: Mode = "on") -> str:
        made = f"TransformersTarget({self.model!r}, {self.assistant!r}, {dict(self.ids)!r}, {self.tokens})"
        code = (
            "from forerun.referee.ask import Ask; from forerun.referee.tables import Rules; "
            "from forerun.referee.targets import TransformersTarget; "
            f"print({made}.answer([{ask!r}], {mode!r})[0].text)"
        )
        return f"python -c {shlex.quote(code)}"

    def _options(self, ask: Ask) -> dict[str, Any]:
        rules = ask.rules
        if ask.schema is not None:
            raise Refused("generate has no structured output of its own")
        if rules.presence_penalty or rules.frequency_penalty:
            raise Refused("generate has neither presence nor frequency penalties")
        values: dict[str, Any] = {"max_new_tokens": ask.max_tokens, "do_sample": rules.temperature > 0}
        if rules.temperature > 0:
            values |= {"temperature": rules.temperature, "top_k": rules.top_k, "top_p": rules.top_p}
            if rules.min_p:
                values["min_p"] = rules.min_p
        if rules.repetition_penalty != 1:
            values["repetition_penalty"] = rules.repetition_penalty
        if rules.bias:
            values["sequence_bias"] = [[[self.ids[symbol]], value] for symbol, value in rules.bias.items()]
        if ask.stop:
            values["stop_strings"] = list(ask.stop)
        return values

    def _one(self, ask: Ask, mode: Mode) -> Answer:
        import torch

        values = self._options(ask)
        if ask.stop:
            values["tokenizer"] = self._tokenizer
        if mode == "on" and self._assistant is not None:
            values["assistant_model"] = self._assistant
        elif mode == "on":
            values["prompt_lookup_num_tokens"] = self.tokens
        if ask.seed is not None:
            torch.manual_seed(ask.seed)
        ids = self._tokenizer(ask.prompt, return_tensors="pt")
        started = time.perf_counter()
        more = {"pad_token_id": self._tokenizer.pad_token_id, "output_logits": ask.logprobs is not None}
        try:
            with torch.no_grad():
                out = self._model.generate(**ids, **values, **more, return_dict_in_generate=True)
        except (ValueError, NotImplementedError) as error:
            raise Refused(" ".join(str(error).split())[:200]) from None
        seconds = time.perf_counter() - started
        read = ids["input_ids"].shape[1]
        new = out.sequences[0, read:].tolist()
        ended = bool(new) and new[-1] == self._tokenizer.eos_token_id
        text = self._tokenizer.decode(new, skip_special_tokens=True)
        stopped = any(each in text for each in ask.stop)
        for each in ask.stop:  # generate keeps the stop string
            text = text.split(each)[0]
        finish = "stop" if ended or stopped else "length"
        logprobs = None if ask.logprobs is None else self._logprobs(new, out.logits, ask.logprobs)
        return Answer(text, finish, read, len(new), read + len(new), logprobs, seconds=seconds)

    def _logprobs(self, tokens: Sequence[int], logits: Any, most: int) -> list[TokenLogprob]:
        found = []
        for token, row in zip(tokens, logits, strict=True):
            law = row[0].float().log_softmax(-1)
            top = law.topk(most) if most else None
            others = {} if top is None else dict(zip(top.indices.tolist(), top.values.tolist(), strict=True))
            spelt = {self._tokenizer.decode([i]): value for i, value in others.items()}
            found.append(TokenLogprob(self._tokenizer.decode([token]), float(law[token]), spelt))
        return found


def load_function(path: str) -> Called:
    """`package.module:function`."""
    module, _, name = path.partition(":")
    try:
        found: Called = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise InvalidInput(f"cannot import the target {path!r}: {error}") from None
    return found
