"""What `generate` is asked for, in our terms: precedence, lengths, and every refusal by name."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from forerun.api.dropin import merge_settings, sampling_params, token_ids
from forerun.core.errors import InvalidInput

REFUSED: list[dict[str, Any]] = [
    {"num_beams": 4},
    {"guidance_scale": 1.5},
    {"sequence_bias": {(1,): 2.0}},
    {"do_sample": True, "typical_p": 0.9},
    {"return_dict_in_generate": True, "output_scores": True},
    {"inputs_embeds": torch.zeros(1, 2, 3)},
    {"past_key_values": object()},
    {"max_length": 3},
    {"max_new_tokenz": 3},
    {"do_sample": True, "top_p": -1.0},
]


@pytest.mark.parametrize("settings", REFUSED, ids=lambda settings: list(settings)[-1])
def test_what_would_change_the_text_is_refused_by_name(settings: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput, match=f"^{list(settings)[-1]}=") as refusal:
        sampling_params(merge_settings(SimpleNamespace(), None, settings), 6, [2])
    assert "\n" not in str(refusal.value)


def test_a_refusal_says_why_and_what_to_do_instead() -> None:
    with pytest.raises(InvalidInput, match="keeps a KV cache of its own; pass all tokens as input_ids"):
        merge_settings(SimpleNamespace(), None, {"past_key_values": object()})
    with pytest.raises(InvalidInput, match=r"^max_new_tokenz=3 .* did you mean 'max_new_tokens'\?"):
        merge_settings(SimpleNamespace(), None, {"max_new_tokenz": 3})


def test_the_same_is_refused_in_a_configuration() -> None:
    with pytest.raises(InvalidInput, match="num_beams=3"):
        merge_settings(SimpleNamespace(num_beams=3), None, {})
    assert merge_settings(SimpleNamespace(num_beams=3), None, {"num_beams": 1})["num_beams"] == 1


def test_unknown_names_in_a_configuration_are_nobodys_business() -> None:
    assert sampling_params(merge_settings(SimpleNamespace(chat_format="x"), None, {}), 4, []).max_tokens == 20


def test_precedence() -> None:
    model = SimpleNamespace(top_k=7, top_p=0.5, temperature=0.7, do_sample=True)
    wish = merge_settings(model, SimpleNamespace(top_p=0.6, temperature=None), {"top_k": None})
    params = sampling_params(wish, 4, [])
    assert (params.top_k, params.top_p, params.temperature) == (0, 0.6, 0.7)


def test_greedy_ignores_what_only_sampling_reads() -> None:
    settings = {"temperature": 0.3, "top_k": 4, "typical_p": 0.2, "epsilon_cutoff": 0.1}
    params = sampling_params(merge_settings(SimpleNamespace(), None, settings), 4, [])
    assert params.is_greedy
    assert params.top_k == 0


def test_lengths_count_the_padded_prompt() -> None:
    wish = merge_settings(SimpleNamespace(max_length=30, min_length=20), None, {})
    params = sampling_params(wish, 12, [2])
    assert (params.max_tokens, params.min_tokens) == (18, 8)
    wish |= {"max_new_tokens": 5}
    params = sampling_params(wish, 12, [2])
    assert (params.max_tokens, params.min_tokens) == (5, 5)


def test_banning_the_end_token_is_ignored_as_in_transformers() -> None:
    wish = merge_settings(SimpleNamespace(), None, {"bad_words_ids": [[2], [3, 4]], "suppress_tokens": [5]})
    assert sampling_params(wish, 4, [2]).bad_words == ((3, 4), (5,))


def test_token_ids_in_every_form() -> None:
    assert token_ids(None) == token_ids(-1) == []
    assert token_ids(3) == token_ids([3]) == token_ids(torch.tensor([3])) == token_ids(torch.tensor(3)) == [3]
