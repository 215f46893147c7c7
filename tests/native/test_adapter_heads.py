"""A head of an adapter's own: it drafts for the texts of that adapter alone, changes none, and goes with it."""

from __future__ import annotations

import json
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import torch

from forerun import LLM
from forerun.core.errors import ForerunError, InvalidInput
from forerun.drafters.heads.eagle_head import write_head
from forerun.drafters.heads.formats import read_tensors, write_shards
from forerun.models.adapters import Adapter
from forerun.models.native import library
from tests.drafters.tiny_heads import eagle_config, eagle_weights
from tests.models.tiny_checkpoints import VOCAB
from tests.models.tiny_folder import LETTERS, add_tokenizer
from tests.native.test_adapters import Tiny

pytestmark = pytest.mark.skipif(not library.available(), reason="no native kernels")
PROMPTS = [[5, 9, 2, 5, 9, 2, 7], [11, 3, 11, 3, 11, 3]]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    made = Tiny("mistral-no-window", tmp_path_factory.mktemp("tiny"))
    add_tokenizer(made.folder / "base", made.config | {"max_position_embeddings": 512}, LETTERS[1])
    return made


def head_of(tiny: Tiny, seed: int, width: int = 32) -> str:
    folder = tiny.folder / f"head{seed}-{width}"
    config = eagle_config("eagle", VOCAB, width=width)
    write_head(folder, config, eagle_weights(config, seed=seed))
    return str(folder)


def load(tiny: Tiny, adapters: dict[str, str], **drafting: Any) -> LLM:
    fixed = {"drafter": "eagle", "draft_model": head_of(tiny, 1), "controller": "fixed", "budget": 4, **drafting}
    return LLM(str(tiny.folder / "base"), max_batch=4, threads=1, adapters=adapters, speculative_config=fixed)


def texts(llm: LLM, adapter: str | None, **options: Any) -> list[Any]:
    return [llm.generate(prompt, max_tokens=20, ignore_eos=True, adapter=adapter, **options) for prompt in PROMPTS]


def drafts_of(llm: LLM, adapter: str | None) -> tuple[list[Any], list[Any]]:
    """Greedy texts, and the tokens that were drafted for the first of them."""
    seen = list[list[int]]()
    for name in ("eagle", *(["eagle2@one"] if llm.engine.drafters.has("eagle2@one") else [])):
        drafter = llm.engine.drafters.get(name)

        def propose(*args: Any, drafter: Any = drafter) -> Any:
            trees = type(drafter).propose(drafter, *args)
            seen.append(trees.to_host()[0])
            return trees

        drafter.propose = propose  # type: ignore[method-assign]
    return texts(llm, adapter, temperature=0.0), seen


def test_an_adapters_own_head_drafts_for_it_alone_and_changes_no_text(tiny: Tiny) -> None:
    one, two = tiny.written(1), tiny.written(2)
    shared = load(tiny, {"one": one, "two": two})
    own = load(tiny, {"one": f"{one},head={head_of(tiny, 2)}", "two": two})
    for adapter in ("one", "two", None):
        plain = texts(shared, adapter, drafter="none", temperature=0.0)
        (_, before), (changed, after) = drafts_of(shared, adapter), drafts_of(own, adapter)
        assert [done.token_ids for done in changed] == [done.token_ids for done in plain]
        assert {done.drafter for done in changed} == {"eagle2@one" if adapter == "one" else "eagle"}
        assert (before == after) == (adapter != "one"), "another head drafts other tokens"
    sampled = [texts(llm, "one", temperature=1.0, seed=5) for llm in (shared, own)]
    assert [done.token_ids for done in sampled[0]] == [done.token_ids for done in sampled[1]]
    assert {done.drafter for done in texts(own, "one", prediction="abc")} == {"prediction+eagle2@one"}
    assert {done.drafter for done in texts(own, "one", drafter="ngram")} == {"ngram"}


def test_a_head_goes_with_its_adapter_and_another_may_come(tiny: Tiny) -> None:
    llm, one = load(tiny, {}), tiny.written(1)
    wanted = [done.token_ids for done in texts(load(tiny, {"one": one}), "one", drafter="none")]
    for head in (2, 3):
        llm.load_adapter("one", f"{one},head={head_of(tiny, head)}")
        under_way = llm.stream(PROMPTS[0], max_tokens=20, ignore_eos=True, adapter="one")
        first = next(under_way).tokens
        assert llm.engine.drafters.has("eagle2@one")
        llm.unload_adapter("one")
        assert [*first, *(token for event in under_way for token in event.tokens)] == wanted[0]
        assert not llm.engine.drafters.has("eagle2@one"), "its memory is free when its last text has ended"
    llm.load_adapter("one", one)
    assert {done.drafter for done in texts(llm, "one")} == {"eagle"}


def test_a_head_that_does_not_fit_is_refused_in_one_line(tiny: Tiny, tmp_path: Path) -> None:
    llm, one = load(tiny, {}), tiny.written(1)
    damaged = copytree(head_of(tiny, 2), tmp_path / "damaged")
    next(damaged.glob("*.safetensors")).write_bytes(b"no tensors")
    for head in (str(tmp_path), str(damaged), head_of(tiny, 2, width=64)):
        with pytest.raises(ForerunError) as found:
            llm.load_adapter("one", f"{one},head={head}")
        assert "\n" not in str(found.value)
        assert llm.adapters == []
    with pytest.raises(InvalidInput):
        load(tiny, {"one": f"{one},head={tmp_path}"})


def test_acceptance_is_counted_by_adapter_also_where_a_batch_mixes_them(tiny: Tiny) -> None:
    llm = load(tiny, {"one": tiny.written(1), "two": tiny.written(2)}, drafter="ngram", draft_model=None)
    asked = ["one", "two", None, "one"]
    streams = [llm.stream(PROMPTS[0], max_tokens=48, ignore_eos=True, adapter=name) for name in asked]
    for stream in streams:
        next(stream)  # all are under way before one has ended
    assert len(llm.engine.running) == len(asked)
    done = [stream.completion for stream in streams if [*stream]]
    wanted = dict[str, tuple[int, ...]]()
    for name, text in zip(asked, done, strict=True):
        if name is not None:
            counts = text.rounds, text.tokens, text.drafted, text.accepted
            wanted[name] = tuple(map(sum, zip(wanted.get(name, (0, 0, 0, 0)), counts, strict=True)))
    assert llm.engine.stats.adapters == wanted
    assert wanted["one"][1] == 96
    assert wanted["one"][3] / wanted["one"][2] != wanted["two"][3] / wanted["two"][2], "they accept unequally"
    under_way = llm.stream(PROMPTS[0], max_tokens=48, ignore_eos=True, adapter="one")
    next(under_way)
    llm.unload_adapter("one")
    assert len([*under_way]) > 3
    assert llm.engine.stats.adapters == {"two": wanted["two"]}, "nothing is kept of one that went"


def lora_of(tiny: Tiny, head: str, base: str = "", rows: int = 0) -> Path:
    """A LoRA of two of a head's matrices, in PEFT's form; with `rows` its changes have so many rows more."""
    folder, dice = tiny.folder / f"lora{len(base)}-{rows}", torch.Generator().manual_seed(8)
    pairs = {}
    for name in ("fc.weight", "layers.0.self_attn.q_proj.weight"):
        outputs, inputs = read_tensors(Path(head))[name].shape
        down, up = torch.randn(4, inputs, generator=dice), torch.randn(outputs + rows, 4, generator=dice)
        pairs[name] = down / inputs**0.5, up
    Adapter(base or head, 4, 0.5, pairs).write(folder)
    return folder


def test_a_head_may_be_a_lora_of_another_and_drafts_as_the_merged_head(tiny: Tiny) -> None:
    head = head_of(tiny, 2)
    lora, merged = lora_of(tiny, head), tiny.folder / "merged"
    weights, (changes, scale) = read_tensors(Path(head)), (Adapter.read(lora).changes, 0.5)
    for name, (down, up) in changes.items():
        weights[name] = weights[name] + scale * up @ down
    copytree(head, merged, dirs_exist_ok=True)
    for file in merged.glob("*.safetensors*"):
        file.unlink()
    write_shards(merged, weights)
    one = tiny.written(1)
    found = [drafts_of(load(tiny, {"one": f"{one},head={own}"}), "one") for own in (lora, merged, head)]
    texts = [[done.token_ids for done in done_] for done_, _ in found]
    assert texts[0] == texts[1] == texts[2]
    drafted = [drafts for _, drafts in found]
    assert drafted[0] == drafted[1]
    assert drafted[0] != drafted[2], "negative control: the LoRA changes what is drafted"


def test_a_lora_of_a_head_that_does_not_fit_is_refused_in_one_line(tiny: Tiny, tmp_path: Path) -> None:
    llm, one, head = load(tiny, {}), tiny.written(1), head_of(tiny, 2)
    nowhere, itself = lora_of(tiny, head, base=str(tmp_path / "nowhere")), tmp_path / "itself"
    copytree(nowhere, itself)
    settings = json.loads((itself / "adapter_config.json").read_text())
    (itself / "adapter_config.json").write_text(json.dumps(settings | {"base_model_name_or_path": str(itself)}))
    for lora, said in (
        (lora_of(tiny, head, rows=1), "another head's"),
        (nowhere, "base_model_name_or_path"),
        (itself, "base_model_name_or_path"),
        (Path(one), "base_model_name_or_path"),  # the adapter of the target itself
    ):
        with pytest.raises(ForerunError, match=said) as found:
            llm.load_adapter("one", f"{one},head={lora}")
        assert "\n" not in str(found.value)
        assert llm.adapters == []
