"""A peer at an OpenAI-compatible URL: vLLM, SGLang, llama.cpp, or forerun itself.

The prompt is sent as token ids (`/v1/completions` takes them), so that every contender answers the same prompt.
Tokens are counted by the server's own usage field. Its text is not compared with ours: it may run in
another number format, or be another model.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from time import perf_counter
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from forerun.core.errors import InvalidInput
from forerun.measure.bench.alternate import Contender, Written

TIMEOUT = 600.0  # seconds for one answer


def endpoint_contender(url: str, ignore_eos: bool = False) -> Contender:
    """The model that a server lists first, asked greedily, one prompt at a time."""
    base, name = base_of(url), first_model(url)

    def write(prompts: Sequence[Sequence[int]], max_tokens: int) -> Written:
        texts = []
        started = perf_counter()
        for ids in prompts:
            question = {"model": name, "prompt": list(ids), "max_tokens": max_tokens, "temperature": 0.0}
            answer = _call(f"{base}/v1/completions", {**question, **({"ignore_eos": True} if ignore_eos else {})})
            texts.append([0] * int(answer["usage"]["completion_tokens"]))  # counted, not compared
        return Written(texts, perf_counter() - started)

    return Contender("endpoint", write, exact=False)


def base_of(url: str) -> str:
    """A server's address without the API's own part."""
    return url.rstrip("/").removesuffix("/v1")


def first_model(url: str) -> str:
    base = base_of(url)
    models = _call(f"{base}/v1/models", None).get("data") or []
    if not models:
        raise InvalidInput(f"{base}/v1/models lists no model; check that the server has loaded one")
    return str(models[0]["id"])


def _call(url: str, body: Mapping[str, Any] | None) -> dict[str, Any]:
    if not url.startswith(("http://", "https://")):
        raise InvalidInput(f"{url!r} is not a web address; write it as http://HOST:PORT")
    data = None if body is None else json.dumps(body).encode()
    request = Request(url, data, {"Content-Type": "application/json"})
    try:
        with urlopen(request, timeout=TIMEOUT) as response:
            answer = json.loads(response.read())
    except HTTPError as error:
        detail = " ".join(error.read().decode(errors="replace").split())[:160]
        raise InvalidInput(f"{url} answered {error.code}: {detail}; check the server") from None
    except (URLError, OSError, ValueError) as error:
        raise InvalidInput(f"{url} does not answer ({error}); check the address and the server") from None
    if not isinstance(answer, dict):
        raise InvalidInput(f"{url} answered something other than a JSON object; is it an OpenAI endpoint?")
    return answer
