"""What a call may say: keywords, dicts and other libraries' names; n texts; several chats; content parts; seeds."""

from __future__ import annotations

import json
from dataclasses import fields
from typing import Any

import numpy as np
import pytest

from forerun.api.llm import LLM
from forerun.core.errors import ForerunError, InvalidInput, UnknownName
from forerun.core.noise import derived_seed
from forerun.core.params import SPELLINGS, SamplingOptions, SamplingParams
from tests.test_llm import make

HOT: dict[str, Any] = {"max_tokens": 12, "temperature": 1.0, "ignore_eos": True}


def test_keywords_are_the_fields_of_sampling_params() -> None:
    assert list(SamplingOptions.__annotations__) == [field.name for field in fields(SamplingParams)]
    assert set(SPELLINGS.values()) <= set(SamplingOptions.__annotations__)


def test_keywords_dicts_and_params_mean_the_same() -> None:
    llm = make()
    wanted = llm.generate("abc", SamplingParams(**HOT, seed=3)).token_ids
    assert wanted != llm.generate("abc", SamplingParams(**HOT, seed=4)).token_ids
    assert wanted == llm.generate("abc", **HOT, seed=3).token_ids
    assert wanted == llm.generate("abc", {**HOT, "seed": 3}).token_ids
    assert wanted == llm.generate("abc", SamplingParams(**HOT), seed=3).token_ids
    assert wanted == llm.generate("abc", {**HOT, "seed": 4}, seed=np.int64(3)).token_ids
    assert wanted == llm.chat("abc", **HOT, seed=3).token_ids
    assert wanted == [token for event in llm.stream("abc", **HOT, seed=3) for token in event.tokens]
    assert wanted == [token for event in llm.stream_chat("abc", **HOT, seed=3) for token in event.tokens]


def test_keywords_hold_for_every_set_of_parameters() -> None:
    llm = make()
    each = [{"max_tokens": 3}, SamplingParams(max_tokens=9)]
    assert [done.tokens for done in llm.generate(["abc", "xyz"], each, ignore_eos=True)] == [3, 9]
    assert [done.tokens for done in llm.generate(["abc", "xyz"], each, ignore_eos=True, max_tokens=5)] == [5, 5]


def test_names_of_other_libraries() -> None:
    llm = make()
    for name in ("max_tokens", "max_new_tokens", "max_completion_tokens"):
        assert llm.generate("abc", **{name: 3, "ignore_eos": True}).tokens == 3
    harder = llm.generate("abcabc", **HOT, seed=1, repetition_penalty=1.7).token_ids
    assert llm.generate("abcabc", **HOT, seed=1, repeat_penalty=1.7).token_ids == harder
    told = llm.generate("abc", max_tokens=3, logprobs=True, top_logprobs=2)  # OpenAI's chats
    assert [len(entry.top) for entry in told.logprobs] == [2, 2, 2]
    assert not llm.generate("abc", max_tokens=3, logprobs=False).logprobs
    biased = llm.generate("abc", max_tokens=3, logit_bias={"7": 50}, ignore_eos=True)  # ids as JSON has them
    assert biased.token_ids == [7, 7, 7]


def test_auto_is_the_drafter_of_the_engine() -> None:
    llm = make()
    asked = llm.generate("abcabcabc", max_tokens=9, ignore_eos=True, drafter="auto")
    assert asked.drafter == llm.engine.default_drafter
    assert asked.token_ids == llm.generate("abcabcabc", max_tokens=9, ignore_eos=True).token_ids


def test_none_is_not_given() -> None:
    llm = make()
    nothing: dict[str, Any] = dict.fromkeys(SamplingOptions.__annotations__)
    wanted = llm.generate("abc", SamplingParams(max_tokens=5)).token_ids
    assert llm.generate("abc", {"max_tokens": 5}, **{**nothing, "drafter": None}).token_ids == wanted
    assert SamplingParams(stop=None, bad_words=None, logit_bias=None) == SamplingParams()  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_token": 4}, "unknown option 'max_token'; did you mean 'max_tokens'?"),
        ({"temprature": 0.9}, "did you mean 'temperature'?"),
        ({"drafer": "ngram"}, "did you mean 'drafter'?"),
        ({"params": {"top_q": 1}}, "unknown sampling parameter 'top_q'; did you mean 'top_p'?"),
        ({"max_tokens": 3, "max_new_tokens": 4}, "'max_tokens' was given twice"),
        ({"params": 7}, "7 are no sampling parameters"),
        ({"params": "greedy"}, "'greedy' are no sampling parameters"),
        ({"budget": "5"}, "budget='5' is out of range: an integer, 0 to 256"),
        ({"drafter": 5}, "drafter=5 is out of range: a name"),
        ({"verifier": 5.5}, "verifier=5.5"),
        ({"logit_bias": {5: "1"}}, "logit_bias={5: '1'} is out of range"),
        ({"stream": True}, "call stream() or stream_chat() for text as it grows"),
        ({"do_sample": True}, "temperature=0 is greedy"),
        ({"tools": []}, "read by the server"),
        ({"request_id": 5}, "Request.request_id=5"),
        ({"n": 0}, "n=0 is out of range: 1 to 1024"),
        ({"n": "2"}, "n='2'"),
    ],
    ids=str,
)
def test_what_is_unknown_or_wrong_is_said_in_one_line(options: dict[str, Any], words: str) -> None:
    llm = make()
    for call in (llm.generate, llm.chat, llm.stream, llm.stream_chat):
        if call in (llm.stream, llm.stream_chat) and "n" in options:
            continue
        with pytest.raises(InvalidInput) as caught:
            list(call("abc", **options))  # type: ignore[operator, call-overload]
        assert words in str(caught.value)
        assert "\n" not in str(caught.value)
    assert not llm.engine.busy


def test_a_stream_is_one_text() -> None:
    with pytest.raises(InvalidInput, match="'n', it is one text: call it once for each"):
        make().stream("abc", n=2)  # type: ignore[call-arg]


def test_variables_reach_the_chat_template() -> None:
    llm, seen = make(), list[Any]()
    real = llm.tokenizer.chat_ids
    llm.tokenizer.chat_ids = lambda turns, **variables: (seen.append(variables), real(turns))[1]  # type: ignore[method-assign]
    thinks = {"chat_template_kwargs": {"enable_thinking": False}, "max_tokens": 2}
    llm.chat(["abc", "xyz"], **thinks)
    llm.generate([{"role": "user", "content": "abc"}], **thinks)
    list(llm.stream_chat("abc", **thinks))
    assert seen == [{"enable_thinking": False}] * 4
    with pytest.raises(InvalidInput, match="are for chats"):
        llm.generate("abc", **thinks)
    with pytest.raises(InvalidInput, match=r"chat_template_kwargs=\[1\] are no variables: give a dict"):
        llm.chat("abc", chat_template_kwargs=[1])  # type: ignore[call-overload]


def test_numbers_of_other_libraries() -> None:
    llm = make()
    done = llm.generate(
        "abc", max_tokens=np.int64(4), temperature=np.float32(0.5), budget=np.int64(2), ignore_eos=np.bool_(True)
    )
    assert done.tokens == 4
    assert SamplingParams(top_p=np.float64(0.5), stop_token_ids=np.array([3])) == SamplingParams(
        top_p=0.5, stop_token_ids=(3,)
    )


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        (b"abc", "bytes"),
        (bytearray(b"abc"), "bytes"),
        ("ab\ud800", "U+D800 at character 2"),
        ([{"role": "user", "content": "\udfff"}], "U+DFFF"),
        ([True, False], "no prompt"),
        ([1.0, 2.0], "no prompt"),
        (np.array([1.5]), "no prompt"),
        ([{"content": "abc"}], "no chat message"),
        ([{"role": "user", "content": 5}], "neither text nor"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "'image_url'"),
    ],
    ids=str,
)
def test_what_is_no_prompt_is_said_in_one_line(prompt: Any, words: str) -> None:
    llm = make()
    with pytest.raises(InvalidInput) as caught:
        llm.generate(prompt)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_n_texts_of_one_prompt() -> None:
    llm = make()
    one = llm.generate("abc", **HOT, seed=3)
    several = llm.generate("abc", **HOT, seed=3, n=4)
    assert len({tuple(done.token_ids) for done in several}) > 1
    assert several[0].token_ids == one.token_ids
    assert [done.seed for done in several] == [derived_seed(3, i) for i in range(4)]
    assert len({done.seed for done in several}) == 4
    for done in several:  # each says the seed that gives it alone
        assert llm.generate("abc", **HOT, seed=done.seed).token_ids == done.token_ids
    batches = llm.generate(["abc", "xyz"], **HOT, seed=3, n=2)
    assert [[done.token_ids for done in batch] for batch in batches] == [
        [done.token_ids for done in several[:2]],
        [llm.generate("xyz", **HOT, seed=derived_seed(3, i)).token_ids for i in range(2)],
    ]
    assert len(llm.generate("abc", **HOT, n=1)) == 1
    assert len({tuple(done.token_ids) for done in llm.generate("abc", **HOT, n=8)}) > 1
    before = llm.engine.stats.tokens
    greedy = llm.generate("abc", max_tokens=5, n=3, ignore_eos=True)
    assert llm.engine.stats.tokens == before + 5  # all are alike: written once
    assert [done.text for done in greedy] == [llm.generate("abc", max_tokens=5, ignore_eos=True).text] * 3


def test_several_chats_at_once() -> None:
    llm = make()
    chats: list[Any] = [[{"role": "user", "content": "abc"}], "xyz"]
    alone = [llm.chat(chat, max_tokens=6).text for chat in chats]
    assert [done.text for done in llm.chat(chats, max_tokens=6)] == alone
    assert [done.prompt_tokens for done in llm.chat(chats, max_tokens=6, system="hi")] == [5, 5]
    assert [len(texts) for texts in llm.chat(chats, max_tokens=6, n=2)] == [2, 2]
    lengths = [{"max_tokens": 2}, {"max_tokens": 4}]
    assert [done.tokens for done in llm.chat(chats, lengths, ignore_eos=True)] == [2, 4]


def test_content_parts_of_text_are_read() -> None:
    llm = make()
    parts = [{"type": "text", "text": "ab"}, {"type": "input_text", "text": "c"}]
    llm.tokenizer.chat_ids = lambda turns: [ord(c) % 26 for turn in turns for c in turn["content"]]  # type: ignore[method-assign]
    plain = llm.chat([{"role": "user", "content": "ab\nc"}], max_tokens=6)
    assert llm.chat([{"role": "user", "content": parts}], max_tokens=6).token_ids == plain.token_ids
    assert llm.generate([{"role": "user", "content": parts}], max_tokens=6).token_ids == plain.token_ids


@pytest.mark.parametrize("verifier", [None, "exact", "coupled", "block", "typical"])
@pytest.mark.parametrize("given", [None, 7])
@pytest.mark.parametrize("heat", [0.0, 1.0])
def test_a_seed_that_is_reported_gives_the_text_again(verifier: str | None, given: int | None, heat: float) -> None:
    llm = make()
    options: dict[str, Any] = {"max_tokens": 20, "temperature": heat, "ignore_eos": True}
    done = llm.generate("abcabc", **options, seed=given, verifier=verifier)
    if verifier == "coupled" or (heat and given and verifier is None):
        assert done.seed is not None
    if heat and verifier in ("exact", "block", "typical"):
        assert done.seed is None  # the text depends on what was drafted
    if done.seed is not None:
        for drafter in ("none", "ngram"):
            for budget in (1, 5):
                again = llm.generate("abcabc", **options, seed=done.seed, drafter=drafter, budget=budget)
                assert again.token_ids == done.token_ids


def test_a_completion_in_json_and_in_short() -> None:
    llm = make()
    done = llm.generate("abc", max_tokens=60, logprobs=1, ignore_eos=True, seed=1)
    document = json.loads(json.dumps(done.to_dict()))
    assert {key: document[key] for key in ("text", "token_ids", "seed", "tokens")} == {
        "text": done.text, "token_ids": done.token_ids, "seed": 1, "tokens": 60
    }  # fmt: skip
    first = document["logprobs"][0]
    assert first["token"] == done.token_ids[0]
    assert first["text"] == done.text[0] == bytes(first["bytes"]).decode()
    assert bytes(first["top"][0]["bytes"]) == first["top"][0]["text"].encode()
    assert str(done) == done.text
    assert len(repr(done)) < 130
    assert "60 tokens" in repr(done)
    assert repr(llm) == "LLM('', drafter='ngram')"
    assert repr(SamplingParams(temperature=0.5, seed=3)) == "SamplingParams(temperature=0.5, seed=3)"


def test_a_stream_reads_well_in_a_notebook(capfd: pytest.CaptureFixture[str]) -> None:
    """What the library prints is nothing, and pieces of text hold no terminal codes: they join to the text."""
    llm = make()
    stream = llm.stream("abc", **HOT, seed=3)
    text = "".join(event.text for event in stream)
    llm.generate(["abc"] * 3, **HOT)
    assert text == stream.completion.text
    assert text.isalpha()
    assert capfd.readouterr() == ("", "")


@pytest.mark.slow
def test_a_model_is_loaded_by_its_name(smollm2_path: str) -> None:
    llm = LLM("smollm2", drafter="none", max_length=64)
    assert repr(llm) == "LLM('smollm2', drafter='none')"
    by_path = LLM.load(smollm2_path, drafter="none", config={"max_model_len": 64})
    assert by_path.chat("Hi", max_tokens=4).token_ids == llm.chat("Hi", max_tokens=4).token_ids


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"drafter": 5}, "drafter=5 is out of range: a name"),
        ({"kv_slots": -5}, "kv_slots=-5 is out of range: at least 2"),
        ({"draft_modell": "x"}, "unknown option of LLM 'draft_modell'; did you mean 'draft_model'?"),
        ({"pipeline_parallel_size": 2}, "unknown option of LLM 'pipeline_parallel_size'"),
        ({"speculative_config": "ngram"}, "pass drafter='ngram'"),
        ({"speculative_config": {"metod": "ngram"}}, "did you mean 'method'?"),
        ({"dtype": "float"}, "dtype='float' is out of range: one of auto, float32"),
        ({"device": 0}, "device=0 is out of range"),
        ({"config": {"max_batch": 0}}, "max_batch=0 is out of range: at least 1"),
        ({"model": 5}, "model=5 is out of range: a name or a path"),
    ],
    ids=str,
)
def test_settings_are_checked_before_anything_is_loaded(options: dict[str, Any], words: str) -> None:
    options = {"model": "there-is-no-such-model", **options}
    for load in (LLM, LLM.load):
        with pytest.raises(ForerunError) as caught:
            load(**options)
        assert words in str(caught.value)
        assert "\n" not in str(caught.value)
    with pytest.raises(UnknownName, match="there-is-no-such-model"):
        LLM("there-is-no-such-model")
    with pytest.raises(InvalidInput, match="tokenizer"):
        LLM(make().engine)
