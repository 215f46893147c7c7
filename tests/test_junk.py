"""Junk for every public parameter: it is refused in one line of the project's own errors, or it means something."""

from __future__ import annotations

from dataclasses import fields
from decimal import Decimal
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

hypothesis = pytest.importorskip("hypothesis")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from forerun.api.calls import Options  # noqa: E402
from forerun.api.dropin import KNOWN  # noqa: E402
from forerun.api.llm import LLM  # noqa: E402
from forerun.build.load import LoadOptions  # noqa: E402
from forerun.core.errors import ForerunError  # noqa: E402
from forerun.core.params import SPELLINGS, EngineConfig, SamplingParams, SpeculativeConfig  # noqa: E402
from forerun.core.types import Budget, Request  # noqa: E402
from tests.test_llm import make  # noqa: E402


class Hostile:
    """Fails at whatever is tried."""

    def _fail(self, *_: Any) -> Any:
        raise RuntimeError("hostile")

    __repr__ = __eq__ = __bool__ = __len__ = __iter__ = __index__ = __float__ = __getitem__ = _fail  # type: ignore[assignment]
    __hash__ = object.__hash__


ODD: list[Any] = [
    object(), Hostile(), np.int64(3), np.float32(0.5), np.float64("nan"), np.bool_(True), np.array([1, 2]),
    np.array([[1.5]]), np.array(3), torch.tensor(3), torch.tensor([1.5]), torch.tensor([[1, 2]]), len, int,
    Decimal("0.5"), Decimal("NaN"), 10**400, -(10**400), 2**63, 3.5e38, -3.5e38, 1e-300, "5", "auto", "ngram",
    "\ud800", "a\nb", b"abc", bytearray(b"abc"), range(3), {1, 2}, frozenset(), iter([1]), {5: "1"}, {"5": 1},
    {5: float("nan")}, {-1: 1.0}, {"a": 1}, [[1, 2]], [[]], [None], [{}], [[1], "a"], {"role": "user"}, 1j, ...,
    [{"role": "user", "content": None}], [{"role": "user", "content": [{"type": "text"}]}], NotImplemented,
    Budget(2, 2), SamplingParams(max_tokens=2), lambda *_: None,
]  # fmt: skip
TEXT = st.text(st.characters(), max_size=5)  # surrogates included
PLAIN = st.none() | st.booleans() | st.integers() | st.floats() | TEXT | st.binary(max_size=4)
JUNK = (
    st.sampled_from(ODD)
    | PLAIN
    | st.lists(PLAIN, max_size=3)
    | st.dictionaries(st.integers() | TEXT, PLAIN, max_size=3)
    | st.tuples(PLAIN, PLAIN)
)
KINDS: tuple[Any, ...] = (SamplingParams, SpeculativeConfig, EngineConfig, Budget, Request)
SETTINGS: list[tuple[Any, str]] = [(kind, field.name) for kind in KINDS for field in fields(kind)]
NEEDED: dict[Any, dict[str, Any]] = {Budget: {"nodes": 2, "depth": 2}, Request: {"prompt": (1, 2)}}
QUICK = settings(max_examples=30, deadline=None, derandomize=True, database=None)


@cache
def llm() -> LLM:
    return make(max_length=24)


def refused(call: Any, *args: Any, **kwargs: Any) -> bool:
    """Was it refused, in one line? Anything but a ForerunError fails the test."""
    try:
        call(*args, **kwargs)
    except ForerunError as error:
        message = str(error)
        assert message
        assert "\n" not in message
        assert len(message) < 900, "a message is for reading"
        message.encode("utf-8")
        return True
    return False


@pytest.mark.slow(keep=20)
@pytest.mark.parametrize(("kind", "name"), SETTINGS, ids=lambda value: getattr(value, "__name__", value))
@QUICK
@given(value=JUNK)
def test_settings(kind: Any, name: str, value: Any) -> None:
    given_ = {**NEEDED.get(kind, {}), name: value}
    if not refused(kind, **given_):
        assert kind is Budget or repr(kind(**given_))
        if kind is SamplingParams:  # what is accepted can be written with
            refused(llm().generate, "abc", kind(**{"max_tokens": 4, "min_tokens": 0, **given_}))
        if kind is Request:
            refused(llm().engine.submit, kind(**given_))
            drain()


def drain() -> None:
    for seq in [*llm().engine.waiting, *llm().engine.running]:
        llm().engine.abort(seq.id)


@pytest.mark.slow(keep=15)
@pytest.mark.parametrize("name", [*Options.__annotations__, *SPELLINGS, "n", "system", "messages", "best_of"])
@QUICK
@given(value=JUNK)
def test_options_of_a_call(name: str, value: Any) -> None:
    options = (
        {"max_tokens": 3, name: value} if name not in ("max_new_tokens", "max_completion_tokens") else {name: value}
    )
    prompt = {} if name == "messages" else {"messages": "abc"}
    refused(llm().chat, **prompt, **options)
    if name not in ("n", "system", "messages"):
        refused(lambda: list(llm().stream("abc", **options)))
    assert not llm().engine.busy


@QUICK
@given(value=JUNK, other=JUNK)
def test_prompts_and_parameters(value: Any, other: Any) -> None:
    refused(llm().generate, value, max_tokens=3)
    refused(llm().chat, value, max_tokens=3)
    refused(lambda: list(llm().stream(value, max_tokens=3)))
    refused(llm().generate, ["abc", value], max_tokens=3)
    refused(llm().generate, "abc", value, max_tokens=3)
    refused(llm().generate, [[value, other]], max_tokens=3)
    refused(llm().generate, [{"role": value, "content": other}], max_tokens=3)
    refused(llm().chat, [{"role": "user", "content": [value]}], [other], max_tokens=3)
    assert not llm().engine.busy


@pytest.mark.parametrize("name", [*LoadOptions.__annotations__, "max_model_len", "model_path"])
@QUICK
@given(value=JUNK)
def test_options_of_loading(name: str, value: Any) -> None:
    assert refused(LLM, "there-is-no-such-model", **{name: value})
    assert refused(LLM.load, ".", **{name: value})


@QUICK
@given(value=JUNK)
def test_models_and_dicts(value: Any) -> None:
    if value not in ("smollm2",) if isinstance(value, str) else True:
        assert refused(LLM, value)
    for kind in (SamplingParams, SpeculativeConfig, EngineConfig):
        refused(kind.from_dict, value)
        refused(kind.from_dict, {"seed": value, "width": value})


@cache
def wrapped() -> Any:
    from forerun import wrap
    from tests.test_wrap import Letters, llama

    return wrap(llama(), Letters())


@pytest.mark.slow(keep=24)
@pytest.mark.parametrize("name", [*sorted(KNOWN), "inputs", "input_ids", "attention_mask", "generation_config", "x"])
@settings(QUICK, max_examples=8)
@given(value=JUNK)
def test_arguments_of_the_drop_in(name: str, value: Any) -> None:
    pytest.importorskip("transformers")
    arguments = {"inputs": torch.tensor([[5, 6, 5, 6, 5]]), "max_new_tokens": 3, name: value}
    if name in ("input_ids", "max_length"):
        del arguments["inputs" if name == "input_ids" else "max_new_tokens"]
    if name in ("top_k", "top_p", "min_p", "temperature", "seed", "num_return_sequences"):
        arguments["do_sample"] = True
    if name == "tokenizer":
        arguments["stop_strings"] = "x"
    refused(wrapped().generate, **arguments)
    assert wrapped()._target.used_slots == 0


@QUICK
@given(value=JUNK)
def test_what_is_wrapped(value: Any) -> None:
    transformers = pytest.importorskip("transformers")
    assert isinstance(wrapped()._model, transformers.PreTrainedModel)
    from forerun import wrap

    assert refused(wrap, value)
    if value is not None:
        refused(wrap, wrapped()._model, drafter=value)
        assert refused(wrap, wrapped()._model, draft_model=value)


def test_the_check_itself_can_fail() -> None:
    with pytest.raises(TypeError):
        refused(len, 5)
    with pytest.raises(AssertionError):
        refused(_two_lines)


def _two_lines() -> None:
    raise ForerunError("one\ntwo")
