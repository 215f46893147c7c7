"""LLM and AsyncLLM have the same calls: names, signatures, results; and options of a call are named as the server's."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from forerun import LLM, AsyncLLM, AsyncStream, Completion, Stream
from forerun.api.calls import Options
from forerun.core.errors import CannotSample, ForerunError, InvalidInput, Overloaded
from forerun.core.params import SPELLINGS, SamplingParams
from forerun.server.schemas import ChatRequest, CompletionRequest
from tests.test_llm import Letters, make, until

PARAMS = SamplingParams(max_tokens=12, ignore_eos=True)
HOT: dict[str, Any] = {"max_tokens": 9, "temperature": 1.0, "seed": 3, "ignore_eos": True}

# What only one of two classes has; a name that is added to one of them is added to the other, or here.
ONLY_ASYNC = {"items", "fail", "failure", "cpu_seconds", "requests"}  # its thread, and what servers ask of it
EXTRA_PARAMETERS = {"__init__": {"max_requests", "refuse"}, "close": {"timeout"}}
PAIRS = [(LLM, AsyncLLM), (Stream, AsyncStream)]
SPECIAL = {"__enter__": "__aenter__", "__exit__": "__aexit__", "__iter__": "__aiter__", "__next__": "__anext__"}


def public(kind: type) -> set[str]:
    return {name for name in dir(kind) if not name.startswith("_")}


def parameters(call: Any, left_out: set[str] = frozenset()) -> list[tuple[str, Any, Any]]:  # type: ignore[assignment]
    given = inspect.signature(call).parameters.values()
    return [(one.name, one.kind, one.default) for one in given if one.name not in left_out]


def differences(one: type, other: type) -> list[str]:
    """Names that only one of two classes has, and calls whose parameters are not the same."""
    found = sorted((public(one) ^ public(other)) - ONLY_ASYNC)
    for name in sorted(public(one) & public(other) | {"__init__"}):
        mine, theirs = inspect.getattr_static(one, name), inspect.getattr_static(other, name)
        if isinstance(mine, property):
            found += [] if isinstance(theirs, property) else [name]
        elif parameters(getattr(one, name)) != parameters(getattr(other, name), EXTRA_PARAMETERS.get(name, set())):
            found.append(name)
    return found


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair[0].__name__)
def test_the_two_have_the_same_names_and_signatures(pair: tuple[type, type]) -> None:
    assert differences(*pair) == []
    for name, its in SPECIAL.items():
        assert hasattr(pair[0], name) == hasattr(pair[1], its)


def test_the_calls_are_all_there() -> None:
    """Neither class has lost what the comparison is about."""
    assert {"generate", "chat", "stream", "stream_chat", "load", "encode", "abort", "close"} <= public(LLM)
    assert {"completion", "close"} <= public(Stream)


def test_negative_control_a_difference_is_found() -> None:
    class Drifted(AsyncLLM):
        def stream(self, prompt: Any, params: Any = None, tail: int = 0, **options: Any) -> Any: ...

        def summarise(self) -> None: ...

    assert differences(LLM, Drifted) == ["summarise", "stream"]


CALLS: dict[str, Callable[[Any], Any]] = {
    "a prompt": lambda llm: llm.generate("abc", PARAMS),
    "token ids": lambda llm: llm.generate([1, 2, 3], PARAMS),
    "prompts": lambda llm: llm.generate(["abc", "xyz", [3, 4]], PARAMS),
    "more prompts than places": lambda llm: llm.generate(["abc", "xyz", "def", "ghi", "jkl", "mno"], PARAMS),
    "parameters of their own": lambda llm: llm.generate(["abc", "xyz"], [PARAMS, {"max_tokens": 3}]),
    "n texts": lambda llm: llm.generate("abc", n=3, **HOT),
    "n texts of each": lambda llm: llm.generate(["abc", "xyz"], n=2, **HOT),
    "n greedy texts": lambda llm: llm.generate("abc", PARAMS, n=2),
    "a question": lambda llm: llm.chat("abc", PARAMS, system="xy"),
    "a chat": lambda llm: llm.chat([{"role": "user", "content": "abc"}], **HOT, logprobs=2),
    "chats": lambda llm: llm.chat(["abc", [{"role": "user", "content": "xyz"}]], PARAMS),
    "n answers of each": lambda llm: llm.chat(["abc", "xyz"], n=2, **HOT),
}
REFUSED: dict[str, Callable[[Any], Any]] = {
    "an option": lambda llm: llm.generate("abc", max_token=3),
    "no prompt": lambda llm: llm.generate(5),
    "one prompt of several": lambda llm: llm.generate(["abc", ""], PARAMS),
    "no message": lambda llm: llm.chat([{"content": "abc"}]),
    "an end": lambda llm: llm.generate(
        ["abc", "xyz"], [PARAMS, {"logit_bias": {token: -float("inf") for token in range(26)}}]
    ),
}


def plain(found: Any) -> Any:
    """Completions, in their lists, without what depends on the machine's pace."""
    if isinstance(found, list):
        return [plain(one) for one in found]
    assert isinstance(found, Completion)
    return replace(found, seconds=0.0, queue_seconds=0.0, cached_tokens=0, rounds=0, drafted=0, accepted=0,
                   tokens_per_round=0.0, accepted_per_position=[], reached=[], kept=[])  # fmt: skip


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_the_two_return_the_same(call: Callable[[Any], Any]) -> None:
    async def main() -> Any:
        async with AsyncLLM(make(), max_requests=2) as llm:
            found = await call(llm)
            assert llm.requests == 0
            assert not llm.engine.busy
            return found

    assert plain(asyncio.run(main())) == plain(call(make()))


@pytest.mark.parametrize("call", REFUSED.values(), ids=REFUSED)
def test_the_two_refuse_the_same(call: Callable[[Any], Any]) -> None:
    with pytest.raises(InvalidInput) as wanted:
        call(make())

    async def main() -> None:
        async with AsyncLLM(make()) as llm:
            awaited = call(llm)  # what is wrong is said where it is awaited
            with pytest.raises(type(wanted.value)) as caught:
                await awaited
            assert str(caught.value) == str(wanted.value)
            assert llm.requests == 0
            assert (await llm.generate("abc", PARAMS)).tokens == 12
            assert not llm.engine.busy

    asyncio.run(main())


def test_a_text_that_fails_lets_the_others_of_its_call_finish() -> None:
    async def main() -> None:
        async with AsyncLLM(make()) as llm:
            before = llm.engine.stats.tokens
            with pytest.raises(CannotSample):
                await REFUSED["an end"](llm)
            assert llm.engine.stats.tokens - before == 12

    asyncio.run(main())


def test_a_cancelled_call_of_several_prompts_drops_them_all() -> None:
    async def main() -> None:
        async with AsyncLLM(make(), max_requests=3) as llm:
            endless = SamplingParams(max_tokens=1 << 19, ignore_eos=True)
            task = asyncio.create_task(llm.generate(["abc"] * 5, endless))
            await until(lambda: llm.requests == 3)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert llm.requests == 0
            assert (await llm.generate("abc", PARAMS)).tokens == 12
            assert not llm.engine.busy

    asyncio.run(main())


def test_more_prompts_than_are_allowed_are_refused_and_leave_nothing() -> None:
    async def main() -> None:
        async with AsyncLLM(make(), max_requests=2, refuse=True) as llm:
            with pytest.raises(Overloaded, match="2 requests"):
                await llm.generate(["abc"] * 3, PARAMS)
            assert llm.requests == 0
            assert len(await llm.generate(["abc"] * 2, PARAMS)) == 2

    asyncio.run(main())


@pytest.mark.slow
def test_an_async_llm_loads_by_name_and_closes_what_it_loaded(smollm2_path: str) -> None:
    closed, wanted = list[LLM](), LLM(smollm2_path, drafter="none").chat("Hi", max_tokens=4)

    async def main() -> list[Completion]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(LLM, "close", lambda self: closed.append(self))
            async with AsyncLLM.load(smollm2_path, drafter="none") as one:
                first = await one.chat("Hi", max_tokens=4)
            assert closed == [one.llm]
            async with AsyncLLM(one.llm, max_requests=4) as other:
                second = await other.chat("Hi", max_tokens=4)
            assert closed == [one.llm], "an LLM that was given is its owner's to close"
            assert repr(other) == f"AsyncLLM({smollm2_path!r}, drafter='none')"
        return [first, second]

    assert [done.text for done in asyncio.run(main())] == [wanted.text] * 2


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (lambda: AsyncLLM(5), "model=5 is out of range: a name or a path"),  # type: ignore[arg-type]
        (lambda: AsyncLLM(make(), drafter="none"), "an LLM is loaded already"),
        (lambda: AsyncLLM(make().engine), "an engine comes with its tokenizer"),
        (lambda: AsyncLLM.load("there-is-no-such-model", max_token=4), "unknown option of LLM 'max_token'"),
    ],
)
def test_what_cannot_be_loaded_is_said_in_one_line(given: Callable[[], Any], words: str) -> None:
    with pytest.raises(ForerunError) as caught:
        given()
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_engine_and_its_tokenizer_make_either() -> None:
    async def main() -> str:
        async with AsyncLLM(make().engine, Letters(), "letters") as llm:  # type: ignore[arg-type]
            assert repr(llm) == "AsyncLLM('letters', drafter='ngram')"
            return (await llm.generate("abc", PARAMS)).text

    assert asyncio.run(main()) == make().generate("abc", PARAMS).text


# Fields of the server that no call has: its own affairs, and what it does beyond a text.
SERVER_ONLY = {
    "model", "messages", "prompt", "stream", "stream_options", "record", "speculative", "best_of", "echo", "suffix",
    "tools", "tool_choice", "add_generation_prompt", "continue_final_message", "add_special_tokens",
    "response_format", "parallel_tool_calls", "reasoning_effort",
    "guided_json", "guided_regex", "guided_choice", "guided_grammar",  # old names of structured_outputs
}  # fmt: skip


def test_fields_of_the_server_are_options_of_a_call() -> None:
    """Under the same names; a field that the server gets is added to the calls, or named above."""
    fields = {*ChatRequest.model_fields, *CompletionRequest.model_fields}
    known = {*Options.__annotations__, *SPELLINGS, "n"}
    assert fields - known - SERVER_ONLY == set()
    assert len(fields & known) > 15
