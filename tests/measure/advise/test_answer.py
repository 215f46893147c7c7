"""The advisor: what it recommends follows from its evidence, and it says "do not" when that is the truth."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from forerun.build.fingerprint import FoundHead, Likeness
from forerun.cli import app
from forerun.control.cost import CostModel
from forerun.core.errors import InvalidInput
from forerun.core.params import SpeculativeConfig
from forerun.drafters.lookup.suffix_table import Successors
from forerun.heads import HeadFolder
from forerun.measure.advise import answer as advise
from forerun.measure.advise.answer import Setup, document, in_words
from forerun.measure.advise.evidence import BATCHES, Costs, Drafting, Evidence, Text, gather, prospects
from forerun.measure.bench.alternate import Prompt
from forerun.measure.bench.settings import Settings, parse_setups
from forerun.testing import TableLM
from tests.measure.advise.known import changed, complete
from tests.measure.conftest import table_llm

FLAT = CostModel({1: 1.0, 8: 1.2, 64: 4.0})
STEEP = CostModel({1: 1.0, 2: 3.0, 64: 40.0})
COPYING = Text((1, 2, 3, 4, 5, 6, 7, 8), (1, 2, 3, 4, 5, 6, 7, 8) * 4)
FRESH = Text((1,), tuple(range(100, 140)))
SETUP = Setup("m", "ngram")


def evidence(cost: CostModel, *texts: Text, draft_model: bool = False) -> Evidence:
    rounds = tuple(((4, 4, 3),) * (len(text.tokens) // 4) for text in texts)
    draftings = {"draft_model": Drafting(rounds, level=0.1)} if draft_model else {}
    return complete(Evidence(list(texts), Costs(cost, 0.0), 1000.0, draftings, ("ngram",), 8, SpeculativeConfig()))


def test_copied_texts_on_flat_costs_are_worth_drafting() -> None:
    found = document(evidence(FLAT, COPYING, COPYING), SETUP, TableLM(8))
    assert found["pays"]
    assert found["recommended"] == {"drafter": "ngram", "budget": None}
    assert found["by_batch"]["1"]["ngram"]["speedup"]["value"] > 3.0
    assert found["forerun"] == "forerun generate 'Your prompt' --model m --drafter ngram"
    assert found["vllm"]["method"] == "ngram"
    assert found["vllm"]["num_speculative_tokens"] >= 5
    assert found["accepted_per_position"]["ngram"][0] > 0.9
    kept, drafted = found["accepted_counts"]["ngram"][0]
    assert kept / drafted == pytest.approx(found["accepted_per_position"]["ngram"][0], abs=1e-4)
    assert in_words(found)[0].startswith("Draft with ngram: expect ")
    json.dumps(found)


def test_lengths_that_differ_much_are_told_apart() -> None:
    long = replace(COPYING, prompt=COPYING.prompt * 300)
    found = document(evidence(FLAT, COPYING, long), SETUP, TableLM(8))
    assert list(found["by_context"]["ngram"]) == ["<2k", "2-8k"]
    (said,) = [line for line in in_words(found) if line.startswith("Tokens per round of ngram by tokens of context: ")]
    assert "at <2k, " in said
    short = document(evidence(FLAT, COPYING, COPYING), SETUP, TableLM(8))
    assert short["by_context"]["ngram"] == {}
    assert not [line for line in in_words(short) if "by tokens of context" in line]


def test_fresh_texts_are_not_and_it_says_so() -> None:
    found = document(evidence(STEEP, FRESH, FRESH), SETUP, TableLM(8))
    assert not found["pays"]
    assert found["recommended"]["drafter"] == "none"
    assert found["vllm"] is None
    assert found["off_from_batch"] == 1
    assert in_words(found)[0].startswith("Do not draft")


def test_the_load_from_which_on_it_stops_paying() -> None:
    bend = CostModel({1: 1.0, 16: 1.05, 17: 3.0, 64: 30.0})
    found = document(evidence(bend, COPYING, COPYING), SETUP, TableLM(8))
    assert found["pays"]
    assert found["off_from_batch"] in BATCHES[2:]
    ranges = found["vllm"]["num_speculative_tokens_per_batch_size"]
    assert ranges[0][0] == 1
    assert all(one[1] + 1 == two[0] for one, two in pairwise(ranges))
    assert ranges[-1][1] == BATCHES[-1]


def test_a_draft_model_is_set_to_the_length_that_pays() -> None:
    found = document(evidence(FLAT, FRESH, FRESH, draft_model=True), replace(SETUP, draft_model="small"), TableLM(8))
    assert found["recommended"]["drafter"] == "draft_model"
    assert found["recommended"]["budget"] in (3, 4)
    budget = found["recommended"]["budget"]
    assert found["forerun"].endswith(f"--drafter draft_model --draft-model small --budget {budget}")
    assert found["vllm"]["model"] == "small"
    best = prospects(evidence(FLAT, FRESH, draft_model=True), 1)[0]
    assert best.tokens_per_round == 4.0


def test_heads_and_hybrids_are_left_to_the_controller() -> None:
    tree = Drafting((((12, 4, 4), (4, 2, 2)) * 4,) * 2, level=0.05)
    found = evidence(FLAT, FRESH, FRESH)
    found = changed(found, draftings={"ngram+eagle3": tree, "eagle3": tree.cut(1)})
    best = prospects(found, 1)[0]
    assert (best.drafter, best.budget) == ("ngram+eagle3", None)
    # rounds of four tokens on average: passes over 13 and 5 nodes and three levels, on average
    assert best.speedup.value == pytest.approx(4.0 / ((1.45 + 1.1143) / 2 + 3 * 0.05), rel=0.01)
    said = document(found, replace(SETUP, draft_model="folder"), TableLM(8))
    assert said["recommended"] == {"drafter": "ngram+eagle3", "budget": None}
    assert said["vllm"]["method"] == "eagle3"
    assert said["vllm"]["num_speculative_tokens"] == 1  # the head alone drafted no deeper
    assert "A trained head exists already" in " ".join(in_words(said))
    assert tree.cut(2).rounds[0][0] == (6, 2, 2)


@pytest.mark.slow
def test_what_vllm_lacks_is_answered_with_the_next_best_that_it_has() -> None:
    slower, faster = (Drafting((((nodes, nodes, nodes),) * 8,) * 2) for nodes in (4, 8))
    copying = evidence(FLAT, COPYING, COPYING)
    known = changed(copying, draftings={"ngram": slower, "recycling": faster})
    found = document(known, SETUP, TableLM(8))
    assert found["recommended"]["drafter"] == "recycling"
    assert found["vllm"]["method"] == "ngram"
    assert "no drafter like 'recycling'. The next best that it has is ngram" in found["vllm_note"]
    only = changed(known, free=(), draftings={"recycling": known.draftings["recycling"]})
    alone = document(only, SETUP, TableLM(8))
    assert (alone["vllm"], alone["vllm_note"]) == (None, "vLLM has no drafter like 'recycling'.")


def test_whether_a_head_would_pay_depends_on_what_passes_cost() -> None:
    cheap = document(evidence(FLAT, FRESH), SETUP, TableLM(8))["head"]
    dear = document(evidence(STEEP, FRESH), SETUP, TableLM(8))["head"]
    assert cheap["pays"]
    assert not dear["pays"]
    assert cheap["break_even"] < 0.2
    assert dear["break_even"] is None or dear["break_even"] > 0.7
    assert cheap["capture_hours"] == pytest.approx(2_000_000 / 1000 / 3600, abs=0.01)


SHIPPED = HeadFolder(Path("box/its-head"), "eagle3", "its-target", None, None, None, 1)


@pytest.mark.parametrize(
    ("setup", "likeness", "said"),
    [
        (replace(SETUP, auto="ngram+eagle3"), "same", "The default (auto) drafts with it, as ngram+eagle3;"),
        (SETUP, "same", "The default (auto) leaves it out on this machine"),
        (replace(SETUP, auto="draft_model", draft_model="small"), "same", "Here --draft-model takes its place"),
        (replace(SETUP, auto="ngram+eagle3"), "tuned", "It was trained for its-target, of which this model looks like"),
    ],
)
def test_no_head_is_to_be_trained_where_one_comes_with_the_package(setup: Setup, likeness: Likeness, said: str) -> None:
    known = evidence(FLAT, FRESH, FRESH)
    control = document(known, setup, TableLM(8))
    assert control["head"]["pays"]
    assert "Training a head would pay" in " ".join(in_words(control))
    found = document(known, replace(setup, shipped=FoundHead(SHIPPED, likeness)), TableLM(8))
    assert not found["head"]["pays"]
    in_use = "(auto) drafts with it" in said or likeness == "tuned"
    expected = {"name": "its-head", "drafter": "ngram+eagle3", "target": "its-target", "likeness": likeness}
    assert found["head"]["shipped"] == {**expected, "in_use": in_use}
    words = " ".join(in_words(found))
    assert said in words
    assert "its-head comes with the package" in words
    assert ("no head needs to be trained" in words) is (likeness == "same")
    assert not any(word in words for word in ("Training a head", "would pay", "hours of passes"))
    assert json.loads(json.dumps(found)) == found


def test_a_head_of_the_package_that_was_measured_is_said_to_be_so() -> None:
    tree = Drafting((((4, 4, 3),) * 8,) * 2, level=0.01)
    known = changed(evidence(FLAT, FRESH, FRESH), draftings={"ngram+eagle3": tree})
    setup = replace(SETUP, auto="ngram+eagle3", shipped=FoundHead(SHIPPED, "same"))
    words = " ".join(in_words(document(known, setup, TableLM(8))))
    assert "A trained head exists already and was measured: ngram+eagle3." in words
    assert "not measured here" not in words


@pytest.mark.slow
def test_where_suffix_has_its_table_it_is_replayed_with_it() -> None:
    """As on a GPU: in a text that copies nothing, look-ups alone gain nothing. `auto` is suffix there too."""
    rows = torch.arange(200)[:, None] + 1
    table = Successors(rows, torch.full(rows.shape, 0.6))
    without = changed(evidence(FLAT, FRESH, FRESH), free=("ngram", "suffix"))
    known = changed(without, successors=table)
    found = {one.drafter: one.speedup.value for one in prospects(known, 1)}
    assert found["suffix"] > 1.3 > 1.01 > found["ngram"]
    assert max(one.speedup.value for one in prospects(without, 1)) < 1.01, "the control"
    gpu = Setup("m", "suffix", device="cuda")
    said = document(known, gpu, TableLM(8))
    assert said["recommended"]["drafter"] == "suffix"
    assert said["auto"]["agrees"]
    other = document(known, Setup("m", "ngram", device="cuda"), TableLM(8))
    assert "without a head by what a plain pass takes" in other["auto"]["why"]


def test_gathering_writes_every_prompt_with_every_drafter_that_is_there() -> None:
    prompts = [Prompt("a", "qa", tuple(range(2, 9))), Prompt("b", "qa", (40, 41, 40, 41))]
    settings = Settings(max_tokens=12, setups=parse_setups(["auto"]))
    found = gather(table_llm(), FLAT, prompts, settings)
    assert found.free == ("ngram", "suffix")
    assert list(found.draftings) == [
        "draft_model",
        "ngram+draft_model",
        "draft_text",
        "lookahead",
        "ngram",
        "recycling",
        "suffix",
    ]
    assert [len(text.tokens) for text in found.texts] == [12, 12]
    assert len(found.draftings["draft_model"].rounds) == 2


@pytest.mark.slow
def test_the_command_answers_and_checks_itself(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(advise, "load", lambda settings: (table_llm(), FLAT))
    for flags in (["--json", "-"], []):
        words = ["advise", "--max-tokens", "8", "--limit", "1", "--check", "--check-batches", "1,3", *flags]
        monkeypatch.setattr("sys.argv", ["forerun", *words])
        with pytest.raises(SystemExit) as ended:
            app.main()
        assert not ended.value.code
        printed = capsys.readouterr().out
        if flags:
            found: dict[str, Any] = json.loads(printed)
            assert found["check"]["equal"] is True
            assert found["check"]["prompts"] == 11
            assert [one["batch"] for one in found["check"]["by_batch"].values()] == [1, 3]
            assert all(one["equal"] for one in found["check"]["by_batch"].values())
            assert set(found["by_batch"]) == {str(batch) for batch in BATCHES}
        else:
            assert "Checked on 11 prompts held back: " in printed
            assert "Checked on 11 prompts held back, 3 at once" in printed
            assert "Predicted speed-up by batch size" in printed
    words = ["advise", "--max-tokens", "4", "--tasks", "qa,rag", "--limit", "1", "--drafters", "ngram", "--json", "-"]
    monkeypatch.setattr("sys.argv", ["forerun", *words])
    with pytest.raises(SystemExit):
        app.main()
    few = json.loads(capsys.readouterr().out)
    assert (few["texts"], few["prompts"]["given"], list(few["by_batch"]["1"])) == (2, 16, ["ngram"])


def test_batches_are_filled_with_prompts_that_come_again() -> None:
    prompts = [Prompt(name, "qa", (1,)) for name in "abcde"]
    found = [[prompt.id for prompt in one.prompts] for one in advise.in_batches(prompts, 4)]
    assert found == [["a", "b", "c", "d"], ["e", "a", "b", "c"]]
    assert [len(one.prompts) for one in advise.in_batches(prompts, 8)] == [8]


def test_nothing_to_check_with_is_refused() -> None:
    with pytest.raises(InvalidInput, match="leave none to check with"):
        advise.split([Prompt("a", "qa", (1,))])


@pytest.mark.slow
@pytest.mark.model
def test_the_default_model_gets_an_answer(smollm2_path: str, tmp_path: Any) -> None:
    file = tmp_path / "own.jsonl"
    file.write_text(json.dumps({"prompt": "Repeat this: the cat sat on the mat."}))
    found = advise.run_advisor(Settings(smollm2_path, suite=str(file), max_tokens=12, threads=1))
    assert found["by_batch"]["1"]["ngram"]["speedup"]["value"] > 0
    assert found["texts"] == 1
    assert found["head"]["shipped"]["name"] == "smollm2-135m-eagle3", "by its fingerprint"
    found = advise.run_advisor(
        Settings(smollm2_path, suite=str(file), max_tokens=12, threads=1, setups=parse_setups(["ngram"]))
    )
    words = " ".join(in_words(found))
    assert "smollm2-135m-eagle3 comes with the package for this model" in words
    assert "Training a head" not in words


def test_one_prompt_is_said_to_be_one() -> None:
    said = " ".join(in_words(document(evidence(FLAT, COPYING), SETUP, TableLM(8))))
    assert "(one prompt, no interval)" in said
    assert "This rests on one prompt" in said
    assert "one prompt" not in " ".join(in_words(document(evidence(FLAT, COPYING, COPYING), SETUP, TableLM(8))))


@pytest.mark.slow
def test_the_default_and_the_advice_agree_or_it_says_why_not() -> None:
    copying, fresh = evidence(FLAT, COPYING, COPYING), evidence(STEEP, FRESH, FRESH)
    tree = Drafting((((6, 3, 3),) * 8,) * 2, level=0.01)
    heads = changed(evidence(FLAT, FRESH, FRESH), draftings={"ngram+eagle3": tree})
    cases = {
        "agree": (copying, SETUP),
        "nothing pays": (fresh, SETUP),
        "a head on a CPU": (heads, replace(SETUP, checkpoints={"ngram+eagle3": "box/head"})),
        "a head on a GPU": (heads, replace(SETUP, auto="ngram", device="cuda")),
    }
    for case, (known, setup) in cases.items():
        found = document(known, setup, TableLM(8))
        auto, name = found["auto"], found["recommended"]["drafter"]
        assert auto["agrees"] is (auto["drafter"] == name) is (case == "agree"), case
        assert auto["why"] in in_words(found), case
        if not auto["agrees"]:
            assert auto["drafter"] in auto["why"], case
            assert name in auto["why"], case
            assert f"{auto['speedup']['value']:.2f}x" in auto["why"], case
    said = document(heads, cases["a head on a CPU"][1], TableLM(8))["auto"]["why"]
    assert "by the acceptance that the head's file names" in said
    said = document(copying, replace(SETUP, auto="suffix"), TableLM(8))["auto"]["why"]
    assert "suffix, which was not measured here" in said
    assert "predicted" not in said, "of what was not measured nothing is claimed"


@pytest.mark.slow
def test_the_drafter_called_auto_is_the_engines_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(advise, "shipped_head", lambda model: None)  # a table has no file
    prompts = [Prompt("a", "qa", tuple(range(2, 9))), Prompt("b", "qa", (40, 41, 40, 41))]
    settings = Settings(max_tokens=12, setups=parse_setups(["auto"]))
    for drafter in ("ngram", "draft_model"):
        found = advise.conclude(table_llm(drafter), FLAT, prompts, settings, False)
        assert found["auto"]["drafter"] == drafter


@pytest.mark.slow
def test_own_prompts_are_counted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(advise, "load", lambda settings: (table_llm(), FLAT))
    monkeypatch.setattr(advise, "load_average", lambda: 1000.0)
    monkeypatch.setattr(advise, "shipped_head", lambda model: None)
    file = tmp_path / "own.jsonl"
    file.write_text("\n".join(json.dumps({"prompt": f"tell me {word}"}) for word in "abcde"))
    found = advise.run_advisor(Settings(suite=str(file), max_tokens=6, limit=3))
    assert found["prompts"] == {"read": 3, "given": 5}
    assert "Read 3 of the 5 prompts; --limit 0 reads all." in in_words(found)
    found = advise.run_advisor(Settings(suite=str(file), max_tokens=6, limit=None))
    assert found["prompts"] == {"read": 5, "given": 5}
    assert not [line for line in in_words(found) if line.startswith("Read ")]
    assert in_words(found)[0].startswith("Warning: The machine was busy before the run (load average 1000 on")
