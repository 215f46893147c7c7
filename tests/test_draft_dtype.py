"""The number format of a drafter's weights: what takes one, and what refuses it before weights are loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from forerun import LLM, SamplingParams
from forerun.build.engine import build_named, load_target
from forerun.cli.loading import unused_flag
from forerun.core.errors import InvalidInput
from forerun.core.params import EngineConfig, SpeculativeConfig
from forerun.drafters.base import Parts
from forerun.models.base import Target
from forerun.models.load.checkpoint import Checkpoint
from forerun.testing import TableLM
from tests.models.tiny_folder import make_tiny_folder

PROMPTS, PARAMS = ["abc abc abc", "the dog "], SamplingParams(max_tokens=24, ignore_eos=True)


def loaded(folder: str, **drafting: Any) -> LLM:
    return LLM.load(folder, speculative_config={"draft_model": folder, **drafting}, device="cpu", dtype="float32")


def test_a_draft_model_has_its_own_format_and_texts_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_tiny_folder(tmp_path / "model")
    plain = [one.text for one in LLM.load(folder, drafter="none", device="cpu").generate(PROMPTS, PARAMS)]
    found = list[str]()

    def note(checkpoint: Checkpoint, config: EngineConfig) -> Target:
        found.append(config.dtype)
        return load_target(checkpoint, config)

    monkeypatch.setattr("forerun.build.load.load_target", note)
    for dtype in ("auto", "bfloat16"):
        llm = loaded(folder, draft_dtype=dtype, budget=4, controller="fixed")
        written = llm.generate(PROMPTS, PARAMS)
        assert [one.text for one in written] == plain
        assert sum(one.drafted for one in written) > 0
    assert found == ["float32", "float32", "float32", "bfloat16"]


@pytest.mark.parametrize("dtype", ["int8", "fp8", "w4"])
def test_formats_of_a_gpu_are_refused_on_a_cpu(dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_tiny_folder(tmp_path / "model")
    monkeypatch.setattr("forerun.build.load.load_target", lambda *_: pytest.fail("weights were loaded"))
    with pytest.raises(
        InvalidInput, match=rf"draft_dtype='{dtype}' needs a CUDA device; on a CPU only draft models take one"
    ):
        loaded(folder, draft_dtype=dtype)


def test_a_head_on_a_cpu_has_one_format(smollm2_path: str) -> None:
    for drafter in ("eagle3", "auto"):
        with pytest.raises(InvalidInput, match=r"draft_dtype='bfloat16' needs a CUDA device"):
            LLM.load(smollm2_path, speculative_config={"drafter": drafter, "draft_dtype": "bfloat16"}, device="cpu")


def test_heads_without_kernels_for_it_refuse_it() -> None:
    """Whoever builds an engine without loading it, and single requests, get no other format than they asked for."""
    target = TableLM(vocab_size=10)
    for drafter in ("medusa", "dflash", "eagle3"):
        parts = Parts(target, None, SpeculativeConfig(drafter, "folder", draft_dtype="w4"))
        with pytest.raises(InvalidInput, match=rf"draft_dtype='w4' is for .* leave it out for a head of '{drafter}'"):
            build_named(parts, drafter)


def test_mistakes_are_said() -> None:
    with pytest.raises(InvalidInput, match="draft_dtype"):
        SpeculativeConfig(draft_dtype="fp7")  # type: ignore[arg-type]
    asked = SpeculativeConfig(draft_dtype="fp8")
    assert "--draft-dtype does nothing with the drafter ngram" in (unused_flag(asked, "ngram") or "")
    assert unused_flag(asked, "ngram+eagle3") is None
