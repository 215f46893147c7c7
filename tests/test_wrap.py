"""The drop-in against transformers' own generate: the same tokens, the same shapes, the same padding."""

from __future__ import annotations

import pkgutil
import subprocess
import sys
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

import forerun  # noqa: E402
from forerun import wrap  # noqa: E402
from forerun.api.dropin import Wrapped  # noqa: E402
from forerun.core.errors import InvalidInput, PromptTooLong, UnsupportedModel, VocabularyMismatch  # noqa: E402

VOCAB, PAD, EOS = 48, 0, 2
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 48, "max_position_embeddings": 128, "initializer_range": 0.4,
    "bos_token_id": 1, "eos_token_id": EOS, "pad_token_id": PAD,
}  # fmt: skip


def llama(seed: int = 0, width: int = 32, **changes: Any) -> Any:
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(hidden_size=width, **{**SIZES, **changes})
    return transformers.LlamaForCausalLM(config).eval()


def gpt2() -> Any:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=VOCAB, n_positions=128, n_embd=32, n_layer=2, n_head=4, initializer_range=0.4,
        bos_token_id=1, eos_token_id=EOS,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config).eval()


def gemma2() -> Any:
    torch.manual_seed(0)
    config = transformers.Gemma2Config(hidden_size=32, head_dim=8, sliding_window=6, **SIZES)
    return transformers.Gemma2ForCausalLM(config).eval()


@pytest.fixture(scope="module")
def model() -> Any:
    return llama()


@pytest.fixture(scope="module")
def wrapped(model: Any) -> Wrapped:
    return wrap(model, tokenizer=Letters())


class Letters:
    """A tokenizer with one letter per token."""

    def decode(self, ids: list[int]) -> str:
        return "".join(chr(ord("A") + token) for token in ids)


def ragged(lengths: tuple[int, ...] = (9, 4, 6)) -> dict[str, torch.Tensor]:
    """A left-padded batch whose texts repeat themselves, so that lookup finds something."""
    width = max(lengths)
    ids, mask = torch.full((len(lengths), width), PAD), torch.zeros(len(lengths), width, dtype=torch.long)
    for row, length in enumerate(lengths):
        ids[row, width - length :] = torch.tensor([5 + row + i % 3 for i in range(length)])
        mask[row, width - length :] = 1
    return {"input_ids": ids, "attention_mask": mask}


GREEDY: list[dict[str, Any]] = [
    {"max_new_tokens": 24},
    {"max_length": 30, "use_cache": True, "num_beams": 1, "typical_p": 0.5, "return_dict_in_generate": False},
    {},
    {"max_new_tokens": 16, "min_new_tokens": 12},
    {"max_new_tokens": 16, "min_length": 20, "eos_token_id": [2, 7, 11, 13]},
    {"max_new_tokens": 16, "repetition_penalty": 1.3, "eos_token_id": None},
    {"max_new_tokens": 16, "bad_words_ids": [[5, 6], [9], [EOS]], "suppress_tokens": [12]},
    {"max_new_tokens": 12, "eos_token_id": [*range(2, 48, 3)], "pad_token_id": 1},
    {"max_new_tokens": 16, "no_repeat_ngram_size": 0, "logits_processor": [], "token_type_ids": None},
]


@pytest.mark.slow(keep=3)
@pytest.mark.parametrize("settings", GREEDY, ids=lambda settings: "-".join(settings) or "defaults")
def test_greedy_equals_transformers(model: Any, wrapped: Wrapped, settings: dict[str, Any]) -> None:
    batch = ragged((6, 6)) if "repetition_penalty" in settings else ragged()
    ours = wrapped.generate(**batch, **settings)
    assert torch.equal(ours, model.generate(**batch, do_sample=False, **settings))


@pytest.mark.slow
@pytest.mark.parametrize("make", [gpt2, gemma2])
def test_other_families(make: Any) -> None:
    model, batch = make(), ragged()
    model.generation_config.pad_token_id = PAD
    assert torch.equal(wrap(model).generate(**batch, max_new_tokens=20), model.generate(**batch, max_new_tokens=20))


def test_prompt_lookup(model: Any, wrapped: Wrapped) -> None:
    settings = {"max_new_tokens": 24, "prompt_lookup_num_tokens": 5, "max_matching_ngram_size": 3}
    one = ragged((9,))
    assert torch.equal(wrapped.generate(**one, **settings), model.generate(**one, **settings))
    batch = ragged()  # which transformers refuses to do by lookup
    wanted = model.generate(**batch, max_new_tokens=24)
    assert torch.equal(wrapped.generate(**batch, **settings), wanted)


@pytest.mark.slow
@pytest.mark.parametrize("number", [None, 3])
def test_a_second_model_drafts(model: Any, wrapped: Wrapped, number: int | None) -> None:
    draft, one, batch = llama(seed=1, width=16), ragged((9,)), ragged()
    settings: dict[str, Any] = {"max_new_tokens": 20, "assistant_model": draft}
    if number:
        settings["num_assistant_tokens"] = number
    wanted = model.generate(**batch, max_new_tokens=20)
    assert torch.equal(wrapped.generate(**batch, **settings), wanted)
    assert torch.equal(wrapped.generate(**one, **settings), model.generate(**one, **settings))


@pytest.mark.parametrize(("size", "fits"), [(VOCAB - 1, False), (VOCAB + 1, False), (VOCAB, True)])
def test_an_assistant_of_another_vocabulary_is_refused(wrapped: Wrapped, size: int, fits: bool) -> None:
    """Padding may differ, by a hundredth: of so few tokens that is none."""
    draft = llama(seed=1, width=16, vocab_size=size)
    settings: dict[str, Any] = {**ragged((9,)), "max_new_tokens": 3, "assistant_model": draft}
    if fits:
        assert wrapped.generate(**settings).shape == (1, 12)
        return
    with pytest.raises(VocabularyMismatch, match=f"has {size} tokens and the model .* {VOCAB}"):
        wrapped.generate(**settings)


def test_drafting_saves_passes(model: Any, wrapped: Wrapped, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that drafts for itself is always right: five tokens a pass."""
    sizes: list[int] = []
    score = wrapped._target.score

    def counted(seqs: Any, trees: Any, *rest: Any) -> Any:
        sizes.append(len(trees.tokens))
        return score(seqs, trees, *rest)

    one = ragged((9,))
    settings: dict[str, Any] = {"max_new_tokens": 20, "eos_token_id": None}
    wanted = model.generate(**one, **settings)
    # costs are measured
    wrapped.generate(**one, assistant_model=model, num_assistant_tokens=4, max_new_tokens=1)
    monkeypatch.setattr(wrapped._target, "score", counted)
    ours = wrapped.generate(**one, assistant_model=model, num_assistant_tokens=4, **settings)
    assert torch.equal(ours, wanted)
    assert sizes == [5, 5, 5, 5]


def test_precedence_is_transformers(model: Any) -> None:
    """Arguments over the configuration given over the model's own."""
    own = llama()
    own.generation_config.max_new_tokens, own.generation_config.min_new_tokens = 6, 6
    given, batch = transformers.GenerationConfig(max_new_tokens=9), ragged()
    ours = wrap(own)
    for settings in ({}, {"generation_config": given}, {"generation_config": given, "max_new_tokens": 7}):
        theirs = own.generate(**batch, **settings)
        assert torch.equal(ours.generate(**batch, **settings), theirs)
    assert torch.equal(ours.generate(batch["input_ids"][:1], given), own.generate(batch["input_ids"][:1], given))


def test_padding_is_told_from_the_pad_token(model: Any, wrapped: Wrapped) -> None:
    ids = ragged()["input_ids"]
    assert torch.equal(wrapped.generate(ids, max_new_tokens=8), model.generate(ids, max_new_tokens=8))


def test_no_prompt_starts_from_bos(model: Any, wrapped: Wrapped) -> None:
    assert torch.equal(wrapped.generate(max_new_tokens=6), model.generate(max_new_tokens=6))


def test_sampling_is_a_function_of_the_seed(wrapped: Wrapped) -> None:
    settings = {"do_sample": True, "temperature": 1.5, "top_k": 0, "max_new_tokens": 20, "eos_token_id": None}
    batch = ragged()
    first = wrapped.generate(**batch, seed=3, **settings)
    assert torch.equal(wrapped.generate(**batch, seed=3, **settings), first)
    assert torch.equal(wrapped.generate(**batch, seed=3, prompt_lookup_num_tokens=4, **settings), first)
    assert not torch.equal(wrapped.generate(**batch, seed=4, **settings), first)
    torch.manual_seed(0)
    free = wrapped.generate(**batch, **settings)
    torch.manual_seed(0)
    assert torch.equal(wrapped.generate(**batch, **settings), free)


def test_sampling_with_one_choice_is_greedy(model: Any, wrapped: Wrapped) -> None:
    batch = ragged()
    wanted = model.generate(**batch, max_new_tokens=12)
    assert torch.equal(wrapped.generate(**batch, max_new_tokens=12, do_sample=True, top_k=1), wanted)
    assert torch.equal(wrapped.generate(**batch, max_new_tokens=12, do_sample=True, min_p=1.0), wanted)


def test_the_default_top_k_is_transformers() -> None:
    """Sampling without a top_k keeps 50 tokens there, and so it must here."""
    wide = llama(vocab_size=400, initializer_range=0.02)
    ids = torch.tensor([[5, 6, 7]])
    with torch.no_grad():
        likeliest = set(wide(ids).logits[0, -1].topk(50).indices.tolist())
    drawn = wrap(wide).generate(ids, do_sample=True, max_new_tokens=1, num_return_sequences=40, seed=0)
    assert set(drawn[:, -1].tolist()) <= likeliest
    assert len(set(drawn[:, -1].tolist())) > 5


def test_several_texts_for_a_prompt(wrapped: Wrapped) -> None:
    batch = ragged()
    texts = wrapped.generate(**batch, do_sample=True, temperature=2.0, num_return_sequences=3, max_new_tokens=8, seed=1)
    assert len(texts) == 9
    assert torch.equal(texts[:, :9], batch["input_ids"].repeat_interleave(3, 0))
    assert len({tuple(row) for row in texts[:3].tolist()}) == 3


def test_stop_strings(model: Any, wrapped: Wrapped) -> None:
    ids = ragged((6,))["input_ids"]
    free = wrapped.generate(ids, max_new_tokens=20, eos_token_id=None)[0, 6:].tolist()
    stop = Letters().decode(free[4:6])
    end = Letters().decode(free).index(stop) + 2
    assert wrapped.generate(ids, max_new_tokens=20, eos_token_id=None, stop_strings=stop)[0, 6:].tolist() == free[:end]
    bare = wrap(model)
    with pytest.raises(InvalidInput, match="tokenizer"):
        bare.generate(ids, stop_strings=["x"])
    again = bare.generate(ids, max_new_tokens=20, eos_token_id=None, stop_strings=[stop], tokenizer=Letters())
    assert again[0, 6:].tolist() == free[:end]


def test_streaming(model: Any, wrapped: Wrapped) -> None:
    class Recorder:
        def __init__(self) -> None:
            self.seen: list[int] = []
            self.ended = False

        def put(self, value: torch.Tensor) -> None:
            self.seen += value.flatten().tolist()

        def end(self) -> None:
            self.ended = True

    recorder, ids = Recorder(), ragged((6,))["input_ids"]
    result = wrapped.generate(ids, max_new_tokens=10, streamer=recorder)
    assert recorder.seen == result[0].tolist()
    assert recorder.ended
    with pytest.raises(InvalidInput, match="streamer"):
        wrapped.generate(**ragged(), streamer=recorder)


def test_a_dictionary_is_returned_on_request(wrapped: Wrapped) -> None:
    ids = ragged((6,))["input_ids"]
    out = wrapped.generate(ids, max_new_tokens=5, return_dict_in_generate=True)
    assert torch.equal(out.sequences, wrapped.generate(ids, max_new_tokens=5, output_scores=True))


def test_what_is_refused_is_named(wrapped: Wrapped) -> None:
    with pytest.raises(InvalidInput, match=r"^num_beams=4 is not supported"):
        wrapped.generate(ragged((6,))["input_ids"], num_beams=4)
    with pytest.raises(InvalidInput, match=r"^num_return_sequences=2"):
        wrapped.generate(ragged((6,))["input_ids"], num_return_sequences=2)


def test_bad_inputs(wrapped: Wrapped) -> None:
    batch = ragged()
    with pytest.raises(InvalidInput, match="padding_side='left'"):
        wrapped.generate(batch["input_ids"], attention_mask=batch["attention_mask"].flip(1))
    with pytest.raises(InvalidInput, match="attention_mask has shape"):
        wrapped.generate(batch["input_ids"], attention_mask=batch["attention_mask"][:1])
    with pytest.raises(InvalidInput, match="input_ids has shape"):
        wrapped.generate(torch.tensor([1, 2, 3]))
    with pytest.raises(PromptTooLong):
        wrapped.generate(torch.ones(1, 128, dtype=torch.long), max_new_tokens=4)
    with pytest.raises(InvalidInput, match="vocabulary"):
        wrapped.generate(torch.tensor([[VOCAB + 1]]), max_new_tokens=4)


def test_an_error_leaves_nothing_behind(model: Any, wrapped: Wrapped) -> None:
    ids = ragged((6, 6))["input_ids"].clone()
    ids[1, 0] = VOCAB + 1
    with pytest.raises(InvalidInput):
        wrapped.generate(ids, max_new_tokens=4)
    good = ragged()
    assert torch.equal(wrapped.generate(**good, max_new_tokens=9), model.generate(**good, max_new_tokens=9))
    assert wrapped._target.used_slots == 0


@pytest.mark.slow
def test_the_public_name_is_the_function() -> None:
    """A module of the same name would shadow it as soon as anybody imported that."""
    code = "import forerun.api.dropin, forerun; print(type(forerun.wrap).__name__)"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert said.strip() == "function"
    names = {module.name for module in pkgutil.iter_modules(forerun.__path__)}
    assert not names & set(forerun.__all__)


def test_the_rest_is_the_models_own(model: Any, wrapped: Wrapped) -> None:
    assert wrapped.config is model.config
    assert wrapped.num_parameters() == model.num_parameters()
    ids = torch.tensor([[1, 2, 3]])
    assert torch.equal(wrapped(ids).logits, model(ids).logits)
    with pytest.raises(AttributeError):
        _ = wrapped.no_such_thing


def test_a_model_that_cannot_be_a_target() -> None:
    config = transformers.MambaConfig(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=1, state_size=4)
    with pytest.raises(UnsupportedModel, match="mamba"):
        wrap(transformers.MambaForCausalLM(config))
