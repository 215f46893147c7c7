"""The real opus-mt-en-fr against transformers' own texts; skips where the model is absent (docs/encoder-decoder.md)."""

from __future__ import annotations

from pathlib import Path

import pytest

from forerun import LLM
from forerun.models.load.catalog import cache_folder, find_folder
from lab.translate import OWN, PEER, alternate, our_contender, peer_contender

pytestmark = [pytest.mark.extra, pytest.mark.slow]


@pytest.fixture(scope="module")
def folder() -> Path:
    found = find_folder("opus-en-fr", cache_folder())
    if found is None:
        pytest.skip("opus-mt-en-fr is not here; see docs/encoder-decoder.md")
    return found


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return LLM(folder, drafter="ngram")


def test_texts_are_those_of_transformers_one_by_one_and_in_a_batch(llm: LLM, folder: Path) -> None:
    sources = [tuple(llm.tokenizer.encode(sentence)) for sentence in OWN]
    tallies = alternate({PEER: peer_contender(str(folder), 64), "ours": our_contender(llm, 64)}, sources)
    assert tallies["ours"].equal == len(OWN)
    alone = [llm.generate(source, max_tokens=64).text for source in sources]
    assert [one.text for one in llm.generate(list(OWN), max_tokens=64)] == alone


def test_sampled_texts_do_not_depend_on_the_drafter(llm: LLM) -> None:
    asked = {"max_tokens": 32, "temperature": 0.8, "seed": 7}
    for sentence in OWN[:2]:
        plain = llm.generate(sentence, drafter="none", **asked)  # type: ignore[call-overload]
        assert llm.generate(sentence, **asked).text == plain.text  # type: ignore[call-overload]


def test_names_are_copied_from_the_source(llm: LLM) -> None:
    names = "Featherstonehaugh Cholmondeley met Featherstonehaugh Marjoribanks in Llanfairpwll."
    done = llm.generate(names, max_tokens=64)
    assert done.accepted > 0
    assert "Featherstonehaugh" in done.text
