"""Heads that come with the package: told by their config, and used only where they fit."""

from __future__ import annotations

import json
import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from forerun.api.llm import LLM
from forerun.build import engine as build
from forerun.build.auto_drafter import prospect_of, time_levels, weigh_head
from forerun.build.engine import build_named, choose_drafter, make_engine, refuse_missing_head
from forerun.build.fingerprint import Fingerprint, find_head
from forerun.control.cost import METHOD, QUICK, CostModel
from forerun.core.errors import InvalidInput
from forerun.core.params import SamplingParams, SpeculativeConfig
from forerun.core.types import Offer, Request, Scores
from forerun.drafters.base import Parts
from forerun.drafters.heads.eagle import Eagle3Drafter
from forerun.drafters.heads.eagle_head import EagleConfig, EagleHead, write_head
from forerun.heads import HeadFolder, fitting_heads, heads_in_the_box, open_head, with_head
from forerun.testing import TableLM
from tests.drafters.tiny_heads import HEADS, eagle_config, eagle_weights, save_head

MOST_BYTES = 20_000_000  # of a head that comes with the package
MODEL = {"hidden_size": 8, "vocab_size": 24, "num_hidden_layers": 4}


def boxed(box: Path, name: str = "one", target: str = "org/Tiny-24M-Instruct", **ours: Any) -> Path:
    """A random EAGLE-3 head for a target of this name."""
    config = eagle_config("eagle3", 24)
    values = {field: getattr(config, field) for field in EagleConfig.__dataclass_fields__}
    folder = box / name
    named = EagleConfig(**{**values, "target": target})
    write_head(folder, named, eagle_weights(named))
    if ours:
        document = json.loads((folder / "config.json").read_text())
        document["forerun"] |= ours
        (folder / "config.json").write_text(json.dumps(document))
    return folder


@pytest.mark.parametrize("drafter", HEADS)
def test_a_folder_with_a_head_is_recognised(tmp_path: Path, drafter: str) -> None:
    found = open_head(save_head(drafter, tmp_path, 24))
    assert found is not None
    assert found.serves(drafter)
    assert not found.serves("draft_model")
    alone = ("eagle2", "hydra", "dspark", "dflash", "peagle", "mtp")
    assert found.drafter in ("ngram+eagle3", "ngram+medusa", *alone)
    assert found.size > 0


def test_eagle_heads_whose_config_calls_them_ordinary_models_are_told_by_their_weights(tmp_path: Path) -> None:
    for drafter in ("eagle", "eagle3"):
        folder = save_head(drafter, tmp_path / drafter, 24)
        values = json.loads((folder / "config.json").read_text())
        values["architectures"] = ["LlamaForCausalLM"]
        (folder / "config.json").write_text(json.dumps(values))
        found = open_head(folder)
        assert found is not None
        assert found.kind == drafter


def test_what_holds_no_head_is_left_alone(tmp_path: Path) -> None:
    assert open_head(tmp_path) is None
    assert open_head(tmp_path / "nowhere") is None
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    assert open_head(tmp_path) is None
    (tmp_path / "model.safetensors").write_bytes(b"broken")
    assert open_head(tmp_path) is None
    (tmp_path / "config.json").write_text("[1, 2")
    assert open_head(tmp_path) is None


def test_only_heads_of_the_right_shape_are_looked_at(tmp_path: Path) -> None:
    boxed(tmp_path, target_layers=4)
    assert len(fitting_heads(MODEL, box=tmp_path)) == 1
    for key in MODEL:
        assert fitting_heads(MODEL | {key: 99}, box=tmp_path) == []
    assert len(fitting_heads(MODEL, "eagle3", tmp_path)) == 1
    assert fitting_heads(MODEL, "medusa", tmp_path) == []


def test_the_box_is_read_and_may_be_empty(tmp_path: Path) -> None:
    assert heads_in_the_box(tmp_path) == []
    boxed(tmp_path, "b")
    boxed(tmp_path, "a")
    (tmp_path / "c").mkdir()
    assert [head.path.name for head in heads_in_the_box(tmp_path)] == ["a", "b"]
    assert all(isinstance(head, HeadFolder) and head.target for head in heads_in_the_box())


@pytest.mark.parametrize("head", heads_in_the_box(), ids=lambda head: head.path.name)
def test_heads_of_the_box_are_small_and_know_their_target(head: HeadFolder) -> None:
    assert head.size < MOST_BYTES
    assert "/" not in head.target
    record = json.loads((head.path / "provenance.json").read_text(encoding="utf-8"))
    assert "/" not in record["arguments"]["target"]
    assert Fingerprint.read(head.path) is not None
    assert head.kind == "medusa" or len(head.rates) >= 5  # else `auto` cannot weigh it on a CPU


class Named:
    """As much of a checkpoint as choosing a drafter looks at."""

    name, path, config = "Tiny-24M-Instruct", Path("Tiny-24M-Instruct.gguf"), MODEL
    weights, adapted_from = dict[str, Any](), ""


def chosen(device: str = "cuda", **wish: Any) -> tuple[str, str | None]:
    found = choose_drafter(SpeculativeConfig(**wish), Named, device)  # type: ignore[arg-type]
    return found.drafter, found.draft_model


def test_the_default_is_the_head_of_the_box_or_what_passes_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "box").mkdir()
    monkeypatch.setattr(build, "find_head", partial(find_head, box=tmp_path / "box"))
    monkeypatch.setattr(build, "_device", lambda name: name)
    assert chosen() == chosen("cpu") == ("auto", None)  # what passes take decides, once they are measured
    assert chosen(drafter="eagle3") == ("eagle3", None)
    with pytest.raises(InvalidInput, match="drafter='eagle3' needs a head, and none comes with the package"):
        refuse_missing_head(SpeculativeConfig("eagle3"), Named)  # type: ignore[arg-type]
    folder = str(boxed(tmp_path / "box"))
    assert chosen() == ("ngram+eagle3", folder)
    assert chosen("cpu") == ("auto", folder)  # what passes cost there decides, once they are measured
    assert chosen(drafter="eagle3") == ("eagle3", folder)
    assert chosen(drafter="ngram") == ("ngram", folder)  # for requests that ask for it
    assert chosen(drafter="none") == ("none", folder)
    assert chosen(drafter="draft_model") == ("draft_model", None)  # a head is no second model
    assert chosen(drafter="medusa") == ("medusa", None)
    for drafter in ("auto", "ngram", "none", "draft_model"):
        refuse_missing_head(SpeculativeConfig(drafter), Named)  # type: ignore[arg-type]


def test_what_draft_model_is_decides_the_drafter(tmp_path: Path) -> None:
    head = str(save_head("medusa", tmp_path / "m", 24))
    assert chosen(draft_model=head) == ("ngram+medusa", head)
    assert chosen(draft_model=head, drafter="medusa") == ("medusa", head)
    assert chosen(draft_model="smollm2") == ("draft_model", "smollm2")


FLAT, STEEP = (dict.fromkeys(QUICK, 2.0), {n: 2.0 * n for n in QUICK})  # seconds, by nodes
OFTEN, SELDOM = [[0.9, 0.05]] * 3, [[0.02, 0.01]] * 3


@pytest.mark.parametrize(
    ("curve", "known", "controller", "drafter"),
    [
        (FLAT, {"rates": OFTEN}, "adaptive", "ngram+eagle3"),
        (STEEP, {"rates": OFTEN}, "adaptive", "ngram"),  # a node costs what it gains
        (FLAT, {"rates": SELDOM}, "adaptive", "ngram"),  # nothing is accepted
        (FLAT, {"rates": []}, "adaptive", "ngram"),  # nothing is known of it
        (FLAT, {"rates": [[2.0], "x"]}, "adaptive", "ngram"),
        (FLAT, {"rates": OFTEN}, "fixed", "ngram"),  # nothing would stop it where it does not pay
    ],
)
def test_on_a_cpu_costs_and_acceptance_decide(
    tmp_path: Path, curve: dict[int, float], known: dict[str, Any], controller: str, drafter: str
) -> None:
    folder, costs = str(boxed(tmp_path, **known)), tmp_path / "costs.json"
    costs.write_text(json.dumps({"seconds": curve, "method": METHOD}))
    wish = SpeculativeConfig("auto", draft_model=folder, controller=controller)
    engine = make_engine(TableLM(24, order=1, seed=5), frozenset(), wish, cost_file=costs)
    assert engine.default_drafter == drafter
    engine.submit(Request((1, 2, 3), SamplingParams(12)))
    while engine.busy:
        engine.step()
    assert engine.target.used_slots == 0


def test_a_head_that_is_far_from_paying_is_not_loaded_at_the_second_start(tmp_path: Path) -> None:
    folder, costs = boxed(tmp_path, rates=OFTEN), tmp_path / "costs.json"
    target, wish = TableLM(24, order=1, seed=5), SpeculativeConfig("auto", draft_model=str(folder))
    built: list[str] = []

    def start(curve: dict[int, float] | None = None) -> tuple[bool, int]:
        """Is it drafted with, and how many drafters were built?"""
        if curve is not None:
            costs.write_text(json.dumps({"seconds": curve, "method": METHOD}))
        built.clear()

        def build(name: str) -> Any:
            built.append(name)
            return build_named(Parts(target, None, wish), name)

        measure = partial(CostModel.measure_or_load, target, costs)
        prospect, drafter = weigh_head(wish, target, measure, costs, build)
        assert prospect is not None
        return drafter is not None, len(built)

    assert start(STEEP) == (False, 1)
    assert start() == (False, 0)  # known
    kept = json.loads(costs.read_text())
    assert start(STEEP) == (False, 1), "what was timed goes with the curve that it was timed beside"
    (levels,) = kept["levels"].values()
    for damaged in ([], ["x"], [-1.0], "x", {}, None):
        costs.write_text(json.dumps(kept | {"levels": dict.fromkeys(kept["levels"], damaged)}))
        assert start() == (False, 1), damaged
    weights = next(folder.glob("*.safetensors"))
    os.utime(weights, (1, 1))  # another head in its place
    assert start() == (False, 1)
    assert levels
    assert all(seconds > 0 for seconds in levels)
    assert start(FLAT) == (True, 1)
    assert start() == (True, 1), "one that pays is built and timed at every start"


def test_a_prospect_says_its_numbers() -> None:
    cost = CostModel({1: 0.010, 2: 0.011, 4: 0.013, 8: 0.020})
    found = prospect_of("ngram+eagle3", Offer(seconds=(0.001,)), cost, (0.6, 0.6, 0.6))
    assert found.depth == 2  # 1.96 tokens in 14 ms; one gives 1.6 in 12, three 2.18 in 16
    assert found.speedup == pytest.approx(1.96 * 10 / 14)
    assert found.pays
    assert not prospect_of("eagle3", Offer(seconds=(0.005,)), cost, (0.6, 0.6, 0.6)).pays
    busy = CostModel({1: 0.030, 2: 0.011, 4: 0.013, 8: 0.020})  # the first was measured during a pause
    assert prospect_of("eagle3", Offer(seconds=(0.001,)), busy, (0.6,)).speedup == pytest.approx(1.6 * 11 / 12)
    for number in ("1.40x", "10.0 ms", "12.0 ms", "2.0 ms", "60%, 36%, 22%"):
        assert number in str(found), number


def test_levels_are_timed_in_rounds() -> None:
    """Each draft comes behind a pass and reads its row; what was timed leaves nothing behind."""
    config, log, target = eagle_config("eagle3", 24), list[str](), TableLM(24, width=8)
    drafter = Eagle3Drafter(EagleHead(config, eagle_weights(config, seed=1), None))
    score, begin = target.score, drafter._runner.begin

    def scored(*given: Any) -> Scores:
        log.append("pass")
        return score(*given)

    def begun(seqs: Any, sequences: Any, budgets: Any) -> Any:
        log.append(f"{len(sequences[0].tokens)} unread")
        return begin(seqs, sequences, budgets)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(target, "score", scored)
        patch.setattr(drafter._runner, "begin", begun)
        offer = time_levels(drafter, target)
    assert log == ["15 unread", *["pass", "1 unread"] * 4, "pass"]
    assert offer.seconds[0] > 0.0
    assert offer.seconds[1] != offer.seconds[0]
    assert target.used_slots == 0
    assert not drafter._sequences


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_head_under_the_controller_writes_the_plain_text(tmp_path: Path, temperature: float) -> None:
    folder = str(boxed(tmp_path))

    def write(drafter: str) -> list[list[int]]:
        target = TableLM(24, order=1, seed=5, sharpness=3.0)
        engine = make_engine(target, frozenset(), SpeculativeConfig(drafter, draft_model=folder))
        params = SamplingParams(40, temperature=temperature, seed=7)
        ids = [engine.submit(Request((1, 2, 3, i), params)) for i in range(3)]
        seqs = [engine.find(i) for i in ids]
        while engine.busy:
            engine.step()
        return [seq.tokens for seq in seqs if seq is not None]

    assert write("ngram+eagle3") == write("hybrid_eagle3") == write("eagle3") == write("none")


def test_a_request_gets_the_head_of_the_box_that_its_drafter_runs() -> None:
    box = {head.kind: head for head in heads_in_the_box() if "smollm2" in head.path.name}
    loaded = SpeculativeConfig(drafter="ngram", draft_model=str(box["eagle3"].path))
    for drafter in ("medusa", "ngram+medusa"):
        assert with_head(loaded, drafter).draft_model == str(box["medusa"].path)
        assert with_head(loaded, drafter, swapped=str(box["eagle3"].path)).draft_model == str(box["medusa"].path)
    for drafter in ("eagle3", "ngram+eagle3", "ngram", "none"):
        assert with_head(loaded, drafter) == loaded
    assert with_head(SpeculativeConfig(), "medusa") == SpeculativeConfig(), "which says what is missing"
    with pytest.raises(InvalidInput, match="'hydra' cannot run the head 'smollm2-135m-eagle3'"):
        with_head(loaded, "hydra")


def test_a_head_of_another_target_is_not_taken_for_it(tmp_path: Path) -> None:
    own = SpeculativeConfig(draft_model=str(boxed(tmp_path)))  # an EAGLE-3 head, of a target of its own
    with pytest.raises(InvalidInput, match="cannot run the head"):
        with_head(own, "medusa")


@pytest.mark.slow
@pytest.mark.model
def test_whatever_it_was_loaded_with_a_call_may_name_a_head_of_the_box(smollm2_path: str) -> None:
    llm = LLM.load("smollm2", drafter="ngram")
    plain = llm.chat("Name three colours.", max_tokens=12, drafter="none")
    for drafter in ("eagle3", "medusa"):
        drafted = llm.chat("Name three colours.", max_tokens=12, drafter=drafter, budget=4)
        assert (drafted.drafter, drafted.token_ids) == (drafter, plain.token_ids)
        assert drafted.rounds < plain.rounds, "it did draft"
