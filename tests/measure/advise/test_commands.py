"""What the advisor tells people to type exists, parses, runs; and vLLM gets an answer wherever it can have one."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import typer

from forerun.cli import app
from forerun.cli.flags import HELP
from forerun.cli.flags import Settings as Flags
from forerun.control.cost import CostModel
from forerun.core import registry
from forerun.core.params import SpeculativeConfig
from forerun.measure.advise import answer as advise
from forerun.measure.advise.answer import PROMPT, Setup, costly_part, document, forerun_command, in_words, vllm_config
from forerun.measure.advise.evidence import Costs, Drafting, Evidence, Text
from forerun.measure.bench.settings import Settings
from forerun.testing import TableLM
from tests.measure.advise.known import changed, complete

FLAT = CostModel({1: 1.0, 8: 1.2, 64: 4.0})
COPYING = Text((1, 2, 3, 4, 5, 6, 7, 8), (1, 2, 3, 4, 5, 6, 7, 8) * 4)
FRESH = Text((1,), tuple(range(100, 140)))
REPLAYED = ("ngram", "suffix")
VLLM_KEYS = {
    "method", "model", "num_speculative_tokens", "num_speculative_tokens_per_batch_size",
    "prompt_lookup_min", "prompt_lookup_max",
}  # fmt: skip


def evidence_for(drafter: str) -> Evidence:
    """Evidence by which this drafter pays: replayed where it can be, else rounds of four tokens."""
    if drafter in REPLAYED:
        found = Evidence([COPYING] * 2, Costs(FLAT, 0.0), 1000.0, {}, (drafter,), 8, SpeculativeConfig())
        return complete(found)
    rounds = (((4, 4, 3),) * 10,) * 2
    draftings = {drafter: Drafting(rounds, level=0.02)}
    return complete(Evidence([FRESH] * 2, Costs(FLAT, 0.0), 1000.0, draftings, (), 8, SpeculativeConfig()))


def parsed(command: str) -> dict[str, Any]:
    """What the real command line makes of a printed command, without running it."""
    program, name, *words = shlex.split(command)
    assert program == "forerun"
    group: Any = typer.main.get_command(app.app)
    assert name in group.commands
    context = group.commands[name].make_context(name, words)
    values: dict[str, Any] = context.params
    return values


def parsed_group(command: str) -> dict[str, Any]:
    """The same of a command in a group."""
    _, name, second, *words = shlex.split(command)
    group: Any = typer.main.get_command(app.app)
    context = group.commands[name].commands[second].make_context(second, words)
    values: dict[str, Any] = context.params
    return values


@pytest.mark.slow(keep=6)
@pytest.mark.parametrize("drafter", [name for name in registry.drafters.names() if name != "none"])
def test_every_recommendation_parses_and_vllm_gets_an_answer_where_it_can(drafter: str) -> None:
    setup = Setup("my model.gguf", "ngram", "a folder", flags=("--dtype", "q8"))
    found = document(evidence_for(drafter), setup, TableLM(8))
    assert found["recommended"]["drafter"] == drafter
    values = parsed(found["forerun"])
    flags = Flags.of({name: value for name, value in values.items() if name in HELP})
    assert (values["prompt"], flags.model, flags.speculative.drafter) == (PROMPT, "my model.gguf", drafter)
    assert flags.engine.dtype == "q8"
    assert (flags.speculative.draft_model is None) is (registry.drafters.spec(drafter).needs == "nothing")
    if registry.drafters.spec(drafter).vllm is None:
        assert found["vllm"] is None
        assert drafter in found["vllm_note"]
    else:
        assert found["vllm"]["method"] == registry.drafters.spec(drafter).vllm
        assert found["vllm"]["num_speculative_tokens"] >= 1
        assert found["vllm"].keys() <= VLLM_KEYS
        assert found["vllm"].get("model") == (None if drafter in REPLAYED else "a folder")
    assert "null" not in " ".join(in_words(found))


def test_only_what_vllm_lacks_is_left_unanswered() -> None:
    lacking = {name for name in registry.drafters.names() if registry.drafters.spec(name).vllm is None}
    lacking -= {"prediction", "forced"}  # which live on what a request brings
    assert lacking == {"none", "hydra", "recycling", "lookahead", "layer_skip", "sparse_kv", "draft_text", "specdec"}
    config, note = vllm_config(evidence_for("hydra"), Setup("m", "ngram", "folder"), "hydra")
    assert config is None
    assert "hydra" in note


def test_a_head_that_comes_with_the_package_is_named_by_its_folder() -> None:
    known = evidence_for("ngram+eagle3")
    setup = Setup("m", "ngram", checkpoints={"ngram+eagle3": "box/eagle3"})
    config, note = vllm_config(known, setup, "ngram+eagle3")
    assert config is not None
    assert (config["method"], config["model"]) == ("eagle3", "box/eagle3")
    assert "vLLM composes no drafters" in note
    export = parsed_group(note[note.index("forerun drafters export") :])
    assert (str(export["folder"]), export["to"], export["target"]) == ("box/eagle3", "vllm", "m")
    assert "--draft-model" not in forerun_command(setup, "ngram+eagle3", None), "forerun finds it by itself"
    assert vllm_config(known, replace(setup, checkpoints={}), "ngram+eagle3")[0] is None


def test_a_hybrids_chain_for_vllm_is_that_of_its_costly_part_alone() -> None:
    known = evidence_for("ngram+eagle3")
    # the head alone never drafted more than two
    short = Drafting((((2, 2, 2), (2, 2, 1)) * 8,) * 2, level=0.02)
    both = replace(known, draftings={**known.draftings, "eagle3": short})
    setup = Setup("m", "ngram", checkpoints={"ngram+eagle3": "box/eagle3"})
    config, _ = vllm_config(both, setup, "ngram+eagle3")
    assert config is not None
    assert config["num_speculative_tokens"] == 2
    assert (costly_part("ngram+draft_model"), costly_part("eagle3")) == ("draft_model", "eagle3")


def test_a_lookup_that_only_pays_when_weighed_is_still_answered_and_said_to_be_so() -> None:
    dear = CostModel({1: 1.0, 2: 1.9, 64: 60.0})
    known = replace(evidence_for("ngram"), texts=[FRESH, FRESH], costs=Costs(dear, 0.0))
    config, note = vllm_config(known, Setup("m", "ngram"), "ngram")
    assert config is not None
    assert config["num_speculative_tokens"] >= 1
    assert "num_speculative_tokens_per_batch_size" not in config
    assert "With a fixed budget" in note


def test_batch_sizes_have_ranges_without_holes() -> None:
    bend = CostModel({1: 1.0, 16: 1.05, 17: 3.0, 64: 30.0})
    known = replace(evidence_for("ngram"), texts=[COPYING, FRESH], costs=Costs(bend, 0.0))
    config, _ = vllm_config(known, Setup("m", "ngram"), "ngram")
    assert config is not None
    ranges = config["num_speculative_tokens_per_batch_size"]
    assert [row[0] for row in ranges[1:]] == [row[1] + 1 for row in ranges[:-1]]
    assert (ranges[0][0], ranges[-1][1]) == (1, 32)
    assert config["num_speculative_tokens"] == max(row[2] for row in ranges)


def test_nothing_to_draft_leaves_the_option_out() -> None:
    costs = Costs(CostModel({1: 1.0, 2: 9.0}), 0.0)
    steep = changed(evidence_for("ngram"), texts=[FRESH] * 2, costs=costs)
    found = document(steep, Setup("m", "ngram"), TableLM(8))
    assert (found["vllm"], found["recommended"]["drafter"]) == (None, "none")
    assert "In vLLM: Leave --speculative-config out." in in_words(found)
    assert parsed(found["forerun"])["drafter"] == "none"


def test_a_command_that_does_not_exist_would_be_noticed() -> None:
    with pytest.raises(AssertionError):
        parsed("forerun sirve --model m --drafter ngram")
    with pytest.raises(Exception, match=r"[Nn]o such option"):
        parsed("forerun generate --modle m")


@pytest.mark.slow
def test_the_printed_command_runs_as_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    pytest.importorskip("gguf")
    from tests.models.tiny_gguf import write_tiny

    monkeypatch.setenv("FORERUN_CACHE", str(tmp_path / "cache"))
    model = write_tiny(tmp_path / "a tiny model.gguf")
    prompts = tmp_path / "own.jsonl"
    prompts.write_text("\n".join(json.dumps({"prompt": text}) for text in ("abcd abcd abcd", "cd ab cd ab")))
    found = advise.run_advisor(Settings(str(model), suite=str(prompts), max_tokens=12, threads=1))
    assert found["auto"]["drafter"] == "ngram"
    setup = Setup(str(model), "ngram", flags=("--threads", "1"))
    commands = {  # whichever it came to, one that drafts, and the default
        found["recommended"]["drafter"] or "ngram": found["forerun"],
        "ngram": forerun_command(setup, "ngram", 2),
        "none": forerun_command(setup, "none", None),
    }
    commands = [*commands.items(), ("ngram", forerun_command(setup, None, None))]
    for drafter, command in commands:
        monkeypatch.setattr("sys.argv", [*shlex.split(command), "--json", "-", "--max-tokens", "6"])
        with pytest.raises(SystemExit) as ended:
            app.main()
        printed = capsys.readouterr()
        assert not ended.value.code, printed.err
        written = json.loads(printed.out)
        assert written["drafter"] == drafter
        assert 1 <= written["tokens"] <= 6
