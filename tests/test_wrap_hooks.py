"""transformers' processors and criteria in the drop-in: token by token what its own loop does; wrap's own options."""

from __future__ import annotations

from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

from forerun import wrap  # noqa: E402
from forerun.core.errors import ForerunError, InvalidInput, UnknownName  # noqa: E402
from tests.test_wrap import EOS, VOCAB, Letters, llama, ragged  # noqa: E402

LIB = transformers.generation.logits_process
DRAFTS: list[dict[str, Any]] = [{}, {"prompt_lookup_num_tokens": 5}, {"num_assistant_tokens": 4}]


class ByTheSum(transformers.LogitsProcessor):  # type: ignore[misc, name-defined]
    """Allows a third of the tokens: which one depends on all that came before, pads included."""

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        kept = (torch.arange(VOCAB) + ids.sum(-1, keepdim=True) + ids.shape[1]) % 3 == 0
        return scores.masked_fill(~kept, -torch.inf)


class AfterTheSum(transformers.StoppingCriteria):  # type: ignore[misc, name-defined]
    def __call__(self, ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        return ids.sum(-1) % 7 == 3


HOOKS: dict[str, dict[str, Any]] = {
    "processor": {"logits_processor": [ByTheSum()]},
    "several": {"logits_processor": transformers.LogitsProcessorList(
        [ByTheSum(), LIB.NoRepeatNGramLogitsProcessor(2), LIB.RepetitionPenaltyLogitsProcessor(1.2)])},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 2},
    "begin_suppress_tokens": {"begin_suppress_tokens": [*range(3, 30)]},
    "prefix_allowed_tokens_fn": {"prefix_allowed_tokens_fn": lambda row, ids: [
        (int(ids.sum()) + row) % VOCAB, (int(ids[-1]) * 5 + row) % VOCAB, 4]},
    "criteria": {"stopping_criteria": [AfterTheSum()]},
    "length": {"stopping_criteria": transformers.StoppingCriteriaList([transformers.MaxLengthCriteria(14)])},
    "both": {"logits_processor": [ByTheSum()], "stopping_criteria": [AfterTheSum()], "min_new_tokens": 3},
}  # fmt: skip


@pytest.fixture(scope="module")
def model() -> Any:
    return llama()


@pytest.mark.slow
@pytest.mark.parametrize("name", HOOKS)
def test_greedy_equals_transformers(model: Any, name: str) -> None:
    ours, small = wrap(model), llama(seed=1, width=16)
    for batch in (ragged((9,)), ragged()):
        wanted = model.generate(**batch, max_new_tokens=20, **HOOKS[name])
        assert not torch.equal(wanted, model.generate(**batch, max_new_tokens=20))  # it does something
        for draft in DRAFTS:
            given = {**draft, "assistant_model": small} if "num_assistant_tokens" in draft else draft
            assert torch.equal(ours.generate(**batch, max_new_tokens=20, **HOOKS[name], **given), wanted)


@pytest.mark.slow
def test_sampled_texts_do_not_depend_on_the_drafter(model: Any) -> None:
    settings: dict[str, Any] = {
        "do_sample": True, "temperature": 1.3, "max_new_tokens": 20, "seed": 3, "eos_token_id": None,
        "logits_processor": [ByTheSum()],
    }  # fmt: skip
    batch, small = ragged(), llama(seed=1, width=16)
    wanted = wrap(model, drafter="none").generate(**batch, **settings)
    assert torch.equal(wrap(model).generate(**batch, **settings, prompt_lookup_num_tokens=6), wanted)
    assert torch.equal(wrap(model, draft_model=small).generate(**batch, **settings), wanted)
    for row in wanted:  # what was written is what the processor allows
        for end in range(9, len(row)):
            assert ByTheSum()(row[None, :end], torch.zeros(1, VOCAB))[0, row[end]] == 0


def test_a_processor_sees_every_text_that_is_written(model: Any) -> None:
    seen: set[tuple[int, ...]] = set()

    def watch(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        assert ids.shape[0] == scores.shape[0] == 1
        seen.add(tuple(ids[0].tolist()))
        return scores

    batch = ragged((9, 4))
    written = wrap(model).generate(
        **batch, max_new_tokens=12, logits_processor=[watch], prompt_lookup_num_tokens=4, eos_token_id=None
    )
    for row in written.tolist():
        assert {tuple(row[:end]) for end in range(9, len(row))} <= seen
    assert len(seen) > 2 * 12  # drafts that fell were asked about too


def test_criteria_end_a_stream(model: Any) -> None:
    class Recorder:
        seen: list[int] = []  # noqa: RUF012

        def put(self, value: torch.Tensor) -> None:
            self.seen += value.flatten().tolist()

        def end(self) -> None:
            self.seen.append(-1)

    recorder, one = Recorder(), ragged((9,))
    wanted = model.generate(**one, max_new_tokens=20, stopping_criteria=[AfterTheSum()])
    ours = wrap(model)
    ours.generate(**one, max_new_tokens=20, stopping_criteria=[AfterTheSum()], streamer=recorder)
    assert recorder.seen == [*wanted[0].tolist(), -1]
    assert ours.last[0].finish_reason == "stop"
    assert ours.last[0].token_ids == wanted[0, 9:].tolist()
    assert ours._target.used_slots == 0


def test_time_runs_out(model: Any) -> None:
    assert wrap(model).generate(ragged((6,))["input_ids"], max_time=0.0, eos_token_id=None).shape[1] == 7


@pytest.mark.parametrize(
    "settings",
    [
        {"logits_processor": [object()]},
        {"logits_processor": [ByTheSum]},
        {"stopping_criteria": 5},
        {"prefix_allowed_tokens_fn": [1]},
        {"no_repeat_ngram_size": "2"},
        {"max_time": "soon"},
    ],
    ids=["object", "class", "number", "list", "text", "time"],
)
def test_what_cannot_be_called_is_refused_by_name(model: Any, settings: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput, match=next(iter(settings))) as caught:
        wrap(model).generate(ragged((6,))["input_ids"], **settings)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("hook", ["logits_processor", "stopping_criteria"])
def test_a_hook_that_fails_is_named_and_leaves_nothing(model: Any, hook: str) -> None:
    def fail(ids: torch.Tensor, scores: Any) -> Any:
        raise RuntimeError("out\nof ideas")

    ours, one = wrap(model), ragged((6,))
    with pytest.raises(ForerunError, match="RuntimeError: out of ideas"):
        ours.generate(**one, **{hook: [fail]})
    assert ours._target.used_slots == 0
    wanted = model.generate(**one, max_new_tokens=5)
    assert torch.equal(ours.generate(**one, max_new_tokens=5), wanted)


def test_what_the_last_call_came_to(model: Any) -> None:
    ours = wrap(model, Letters())
    batch = ragged()
    written = ours.generate(**batch, max_new_tokens=12, eos_token_id=None, prompt_lookup_num_tokens=4)
    assert [done.token_ids for done in ours.last] == written[:, 9:].tolist()
    assert [done.text for done in ours.last] == [Letters().decode(row) for row in written[:, 9:].tolist()]
    assert [done.prompt_tokens for done in ours.last] == [9, 4, 6]
    assert all(done.rounds <= 12 and done.drafter == "ngram" and done.exact for done in ours.last)
    assert sum(done.drafted for done in ours.last) > 0
    ours.generate(ragged((4,))["input_ids"], max_new_tokens=2)
    assert len(ours.last) == 1


@pytest.mark.slow
def test_a_drafter_by_name(model: Any) -> None:
    one, small = ragged((9,)), llama(seed=1, width=16)
    wanted = model.generate(**one, max_new_tokens=12)
    for options, drafter in (
        ({"drafter": "none"}, "none"),
        ({"drafter": "ngram"}, "ngram"),
        ({"draft_model": small}, "draft_model"),
        ({"drafter": "ngram+draft_model", "draft_model": small}, "ngram+draft_model"),
        ({}, "ngram"),
    ):
        ours = wrap(model, **options)  # type: ignore[arg-type]
        assert torch.equal(ours.generate(**one, max_new_tokens=12), wanted)
        assert ours.last[0].drafter == drafter
        assert repr(ours) == f"wrap(LlamaForCausalLM, drafter={drafter!r})"
    again = wrap(model, drafter="none").generate(**one, max_new_tokens=12, assistant_model=small)
    assert torch.equal(again, wanted)
    with pytest.raises(UnknownName, match="did you mean 'ngram'"):
        wrap(model, drafter="n-gram")


@pytest.mark.parametrize("wrong", ["gpt2", 5, None, object(), torch.nn.Linear(2, 2), transformers.LlamaForCausalLM])
def test_what_is_no_model_is_said(model: Any, wrong: Any) -> None:
    with pytest.raises(InvalidInput, match=r"^wrap takes a"):
        wrap(wrong)
    if wrong is not None:
        with pytest.raises(ForerunError):
            wrap(model, draft_model=wrong)
        with pytest.raises(InvalidInput, match="assistant_model"):
            wrap(model).generate(ragged((6,))["input_ids"], assistant_model=wrong)


def test_lists_of_ids_are_fine(model: Any) -> None:
    rows = ragged((6,))["input_ids"]
    wanted = model.generate(rows, max_new_tokens=6, eos_token_id=EOS)
    assert torch.equal(wrap(model).generate(rows.tolist(), max_new_tokens=6), wanted)
