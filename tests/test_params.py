"""Parameters check themselves, in one line that names value and limit."""

from __future__ import annotations

from typing import Any

import pytest

from forerun.core.errors import InvalidInput, UnknownName
from forerun.core.params import EngineConfig, SamplingParams, SpeculativeConfig
from forerun.core.registry import Registry, drafters

BAD = [
    (SamplingParams, {"temperature": -0.1}),
    (SamplingParams, {"temperature": float("nan")}),
    (SamplingParams, {"top_p": 0.0}),
    (SamplingParams, {"top_p": 1.2}),
    (SamplingParams, {"top_k": -2}),
    (SamplingParams, {"min_p": 2.0}),
    (SamplingParams, {"max_tokens": 0}),
    (SamplingParams, {"min_tokens": 9, "max_tokens": 3}),
    (SamplingParams, {"repetition_penalty": 0.0}),
    (SamplingParams, {"stop": ("",)}),
    (SamplingParams, {"bad_words": ((),)}),
    (SamplingParams, {"logprobs": 65}),
    (SamplingParams, {"temperature": 1e-40}),
    (SamplingParams, {"temperature": None}),
    (SamplingParams, {"max_tokens": 2.5}),
    (SamplingParams, {"max_tokens": None}),
    (SamplingParams, {"logprobs": True}),
    (SamplingParams, {"seed": "x"}),
    (SamplingParams, {"presence_penalty": float("nan")}),
    (SamplingParams, {"stop_token_ids": [-1]}),
    (SamplingParams, {"bad_words": ["hello"]}),
    (SamplingParams, {"logit_bias": {5: float("inf")}}),
    (SpeculativeConfig, {"budget": 2.5}),
    (SpeculativeConfig, {"budget": -1}),
    (SpeculativeConfig, {"width": 0}),
    (SpeculativeConfig, {"prompt_lookup_min": 5, "prompt_lookup_max": 4}),
    (EngineConfig, {"max_batch": 0}),
    (EngineConfig, {"threads": 0}),
]


@pytest.mark.parametrize(("kind", "values"), BAD)
def test_a_bad_value_is_named(kind: Any, values: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput) as caught:
        kind(**values)
    message = str(caught.value)
    assert "\n" not in message
    assert any(name in message for name in values)


def test_one_stop_string_is_a_list_of_one() -> None:
    assert SamplingParams(stop="END").stop == ("END",)


def test_vllm_names_are_understood() -> None:
    config = SpeculativeConfig.from_dict({"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4})
    assert (config.drafter, config.budget, config.prompt_lookup_max) == ("ngram", 5, 4)
    with pytest.raises(InvalidInput, match="num_spec_tokens"):
        SpeculativeConfig.from_dict({"num_spec_tokens": 3})


def test_vllm_habits() -> None:
    assert SamplingParams(top_k=-1).top_k == 0
    config = SpeculativeConfig.from_dict({"model": "small", "num_speculative_tokens": 3})
    assert (config.drafter, config.draft_model, config.budget) == ("auto", "small", 3)


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({"quantization": "fp8"}, "fp8"),
        ({"dtype": "auto", "quantization": "int8"}, "int8"),
        ({"dtype": "w4", "quantization": "w4"}, "w4"),
        ({"dtype": "int8", "quantization": None}, "int8"),
        ({"dtype": "int8", "quantization": "auto"}, "int8"),
        ({"dtype": "bfloat16", "quantization": "fp8"}, "two formats for the same weights; give one of them"),
        ({"torch_dtype": "auto", "quantization": "int8"}, "int8"),
        ({"quantization": "gptq"}, "quantization='gptq' is no format to load weights in: auto, .*; leave it out"),
    ],
    ids=str,
)
def test_quantization_is_the_number_format_by_another_name(given: dict[str, Any], found: str) -> None:
    if " " not in found:
        assert EngineConfig.from_dict(given).dtype == found
        return
    with pytest.raises(InvalidInput, match=found) as caught:
        EngineConfig.from_dict(given)
    assert "\n" not in str(caught.value)


def test_an_unknown_drafter_names_the_nearest() -> None:
    with pytest.raises(UnknownName, match="did you mean 'ngram'"):
        drafters.get("n-gram")


def test_a_drafter_registered_at_run_time_is_found() -> None:
    registry = Registry("drafter")
    registry.register("mine", "forerun.drafters.base:NoDrafter")
    assert registry.get("mine").__name__ == "NoDrafter"
    assert registry.names() == ["mine"]


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        (None, None), (1 << 30, 1 << 30), ("8GB", 8 * 10**9), ("512 MiB", 512 << 20), ("1.5gib", 3 << 29), ("2k", 2000),
        ("4096", 4096), (0.5, 0.5), ("50%", 0.5), ("0.25", 0.25), ("100%", 1.0), (7e9, 7 * 10**9),
    ],
)  # fmt: skip
def test_memory_is_bytes_or_a_share(given: object, kept: object) -> None:
    assert EngineConfig(kv_memory=given).kv_memory == kept  # type: ignore[arg-type]


@pytest.mark.parametrize("given", [50, "50", 1.5, "100"])
def test_memory_of_a_few_bytes_was_meant_as_percent(given: object) -> None:
    with pytest.raises(InvalidInput, match=rf"kv_memory=.*8GB.*; {float(str(given)):g}% is a share"):
        EngineConfig(kv_memory=given)  # type: ignore[arg-type]


@pytest.mark.parametrize("given", [0, -1, "", "GB", "8 apples", "101%", "-5%", True, [], float("nan"), 2**70])
def test_memory_that_is_none_is_refused(given: object) -> None:
    with pytest.raises(InvalidInput, match=r"kv_memory=.*8GB"):
        EngineConfig(kv_memory=given)  # type: ignore[arg-type]
