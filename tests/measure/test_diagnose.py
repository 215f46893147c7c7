"""The diagnosis names the cause that was planted, and nothing else."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from forerun.api.llm import LLM
from forerun.cli import app
from forerun.core.errors import VocabularyMismatch
from forerun.core.types import Budget, Seq
from forerun.measure import diagnose as diagnosing
from forerun.measure.bench.alternate import Prompt, Run, Written
from forerun.measure.bench.contenders import own_contender
from forerun.measure.bench.figures import Figures
from forerun.measure.bench.settings import Cell, DrafterSetup, Settings
from forerun.measure.bench.suites import Item
from forerun.measure.diagnose import Asked, diagnose, logit_gap, marks_in
from forerun.testing import ScriptedDrafter
from tests.measure.conftest import Letters, table_llm

PROMPTS = [Prompt("a", "qa", tuple(range(2, 9))), Prompt("b", "qa", (40, 41, 40, 41))]
NONE = DrafterSetup("none", "none")
SETTINGS = Settings(max_tokens=24)


def found_by(
    llm: LLM, setup: DrafterSetup, temperature: float = 0.0, prompts: Sequence[Prompt] = PROMPTS
) -> dict[str, Any]:
    return diagnose(llm, prompts, SETTINGS, Asked(setup, NONE, temperature))


def verdicts(found: dict[str, Any]) -> dict[str, str]:
    return {finding["about"]: finding["verdict"] for finding in found["findings"]}


def test_a_drafter_that_fits_is_found_fine() -> None:
    found = found_by(table_llm("draft_model"), DrafterSetup("draft_model:3", "draft_model", 3))
    assert verdicts(found) == {"texts": "fine", "acceptance": "fine", "template": "look", "context": "fine"}
    assert found["ok"]
    assert found["partings"] == []


def test_a_drafter_that_guesses_blindly_is_found_out() -> None:
    llm = table_llm()

    def blind(seq: Seq, budget: Budget) -> tuple[list[int], list[int]]:
        likeliest = llm.engine.target.law(seq.tokens).argsort()  # type: ignore[attr-defined]
        return [seq.tokens[-1], int(likeliest[0])], [-1, 0]  # what the target is least likely to say

    llm.engine.drafters._made["blind"] = ScriptedDrafter(blind)
    found = found_by(llm, DrafterSetup("blind", "blind", 1))
    assert verdicts(found)["acceptance"] == "bad"
    assert verdicts(found)["texts"] == "fine"
    assert not found["ok"]


def test_a_text_that_differs_is_located_and_its_gap_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = table_llm()
    honest = own_contender(llm, SETTINGS, Cell(), DrafterSetup("n", "ngram", 2)).write([PROMPTS[0].ids], 24)
    text = list(honest.texts[0])
    wrong = [*text[:5], (text[5] + 1) % 64, *text[6:]]

    def rigged(*args: Any) -> Any:
        contender = own_contender(*args)
        if args[-1] == NONE:
            return contender
        lie = Written([wrong], 1.0, honest.rounds, 1.0, honest.passes, honest.drafts)
        return type(contender)(contender.name, lambda prompts, most: lie)

    monkeypatch.setattr(diagnosing, "own_contender", rigged)
    found = found_by(llm, DrafterSetup("n", "ngram", 2), prompts=PROMPTS[:1])
    (parting,) = found["partings"]
    assert parting["position"] == 5
    assert parting["tokens"] == (text[5], wrong[5])
    logits = llm.engine.target.logits([*PROMPTS[0].ids, *text[:5]])  # type: ignore[attr-defined]
    assert parting["gap"] == pytest.approx(abs(float(logits[text[5]] - logits[wrong[5]])))
    assert verdicts(found)["texts"] == "bad"


def test_a_near_tie_is_told_from_a_mistake(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = table_llm()
    parting = diagnosing.Parting("a", 3, (1, 2), 1e-5, 10)
    (tie,) = diagnosing._texts(llm, [parting], Cell(), 2)
    assert tie.verdict == "look"
    assert "near-tie" in tie.found
    (law,) = diagnosing._texts(llm, [parting], Cell("exact", 0.7), 2)
    assert law.verdict == "fine"


def test_the_gap_is_asked_without_leaving_anything_behind() -> None:
    llm = table_llm()
    assert logit_gap(llm, [3, 4, 5], (None, 1)) >= 0.0
    assert llm.engine.target.used_slots == 0  # type: ignore[attr-defined]


def test_a_context_beyond_the_drafters_is_named() -> None:
    llm = table_llm("draft_model")
    drafter: Any = llm.engine.drafters.get("draft_model")
    drafter.draft.max_length = 20
    found = found_by(llm, DrafterSetup("draft_model:3", "draft_model", 3))
    assert verdicts(found)["context"] == "bad"


def test_acceptance_that_falls_with_the_context_is_noticed() -> None:
    drafts = (tuple([(1, 1, 1)] * 10 + [(1, 1, 0)] * 20),)
    run = Run("d", "a", "qa", 0, ((0,) * 40,), 1.0, 30, 1.0, (), drafts)
    near, far = diagnosing._by_context([run], {"a": 4})
    assert near == pytest.approx(10 / 15)
    assert far == 0.0


@pytest.mark.parametrize(("long", "verdict"), [(40, "fine"), (3000, "look")])
def test_lengths_that_differ_much_are_told_apart(long: int, verdict: str) -> None:
    """A drafter that is right in short texts only, whichever come first."""
    llm = table_llm()

    def short_sighted(seq: Seq, budget: Budget) -> tuple[list[int], list[int]]:
        law = llm.engine.target.law(seq.tokens)  # type: ignore[attr-defined]
        return [seq.tokens[-1], int(law.argmax() if len(seq.tokens) < 2048 else law.argmin())], [-1, 0]

    llm.engine.drafters._made["short"] = ScriptedDrafter(short_sighted)
    prompts = [Prompt("long", "qa", tuple(2 + i % 40 for i in range(long))), *PROMPTS]
    found = found_by(llm, DrafterSetup("short", "short", 1), prompts=prompts)
    assert verdicts(found)["context"] == verdict
    (said,) = [one["found"] for one in found["findings"] if one["about"] == "context"]
    assert ("1.00 in <2k tokens, 0.00 in 2-8k tokens" in said) == (long > 2048)
    assert (found["by_context"] == {}) == (long < 2048)


def test_of_a_few_trees_nothing_is_said_by_context() -> None:
    """One prompt and a few look-ups: the second half of them may well have been rejected."""
    llm, calls = table_llm(), [0]

    def first_two(seq: Seq, budget: Budget) -> tuple[list[int], list[int]]:
        calls[0] += 1
        law = llm.engine.target.law(seq.tokens)  # type: ignore[attr-defined]
        token = int(law.argmax() if calls[0] <= 2 else law.argmin())
        return ([seq.tokens[-1], token], [-1, 0]) if calls[0] <= 6 else ([seq.tokens[-1]], [-1])

    llm.engine.drafters._made["few"] = ScriptedDrafter(first_two)
    found = found_by(llm, DrafterSetup("few", "few", 1), prompts=PROMPTS[:1])
    assert verdicts(found)["acceptance"] == "look", "too few to tell"
    (context,) = [each for each in found["findings"] if each["about"] == "context"]
    assert context["verdict"] == "fine"
    assert "too few trees" in str(context)


def test_temperature_is_held_against_greedy() -> None:
    found = found_by(table_llm("draft_model"), DrafterSetup("draft_model:3", "draft_model", 3), temperature=1.0)
    assert "temperature" in verdicts(found)
    assert verdicts(found)["texts"] == "fine"  # coupled: a function of the seed


def test_templates_that_are_there_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    items = [Item("x", "qa", ({"role": "user", "content": "<|im_start|>user\nHello"},))]
    (finding,) = marks_in(items)
    assert finding.verdict == "bad"
    assert "such as x" in finding.found
    assert list(marks_in([Item("x", "qa", ({"role": "user", "content": "Hello"},))])) == []
    monkeypatch.setattr(Letters, "bos_id", 7)
    found = found_by(table_llm(), DrafterSetup("ngram:2", "ngram", 2), prompts=[Prompt("a", "qa", (7, 7, 3, 4))])
    assert verdicts(found)["template"] == "bad"


def test_too_few_trees_say_nothing() -> None:
    run = Run("d", "a", "qa", 0, ((0,),), 1.0, 1, 1.0, (), (((1, 1, 1),),))
    (finding,) = diagnosing._acceptance(Figures([run]), "d")
    assert finding.verdict == "look"


def test_the_command_ends_with_what_it_found(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "own.jsonl"
    words = ("tell me tell me tell me", "again and again and again", "no no no")
    file.write_text("".join(json.dumps({"prompt": one}) + "\n" for one in words))

    def run(*flags: str) -> tuple[int, str]:
        words = ["diagnose", "--prompts", str(file), "--max-tokens", "24", "--drafter", "ngram:2", *flags]
        monkeypatch.setattr("sys.argv", ["forerun", *words])
        with pytest.raises(SystemExit) as ended:
            app.main()
        return int(ended.value.code or 0), capsys.readouterr().out

    monkeypatch.setattr(diagnosing, "load", lambda settings: (table_llm(), None))
    code, printed = run()
    assert f"all 3 of {file}" in printed
    assert "all 3 are equal, token for token" in printed
    assert code in (0, 1)
    code, printed = run("--json", "-")
    assert json.loads(printed)["ok"] is (code == 0)
    assert (json.loads(printed)["prompts_read"], json.loads(printed)["prompts_there"]) == (3, 3)
    code, printed = run("--limit", "1")
    assert f"1 of 3 of {file}, 1 per task; --limit 0 reads all" in printed
    code, printed = run("--prompts", "builtin", "--json", "-")
    assert json.loads(printed)["findings"][0]["found"] == "11 of 88 of our own, 1 per task"

    def mismatch(settings: Settings) -> Any:
        raise VocabularyMismatch("draft model 'x' does not share the vocabulary")

    monkeypatch.setattr(diagnosing, "load", mismatch)
    code, printed = run("--json", "-")
    assert code == 1
    assert json.loads(printed)["findings"][-1]["about"] == "vocabulary"


@pytest.mark.usefixtures("tiny_checkpoint")
def test_checkpoints_are_compared_before_anything_runs() -> None:
    (finding,) = diagnosing._checkpoints(Settings("tiny", draft_model="tiny"))
    assert (finding.about, finding.verdict) == ("vocabulary", "fine")
    assert torch.get_num_threads() >= 1
