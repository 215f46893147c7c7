"""One loaded model for all snippets and examples: loading it for each would take longer than running them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from forerun.api.llm import LLM
from forerun.models.load.catalog import known_models


@pytest.fixture(scope="module")
def one_load() -> Iterator[None]:
    """LLM.load loads once for every model and drafter that is asked for."""
    if not any(model.name == "smollm2" and model.path for model in known_models()):
        pytest.skip("the default model is absent; run: forerun models pull smollm2")
    load, loaded = LLM.load, dict[tuple[str, str], LLM]()

    def load_once(model: str = "smollm2", *, drafter: str = "ngram") -> LLM:
        if (model, drafter) not in loaded:
            loaded[model, drafter] = load(model, drafter=drafter)
        return loaded[model, drafter]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LLM, "load", load_once)
        yield
