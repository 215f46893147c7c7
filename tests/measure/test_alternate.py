"""The runner with contenders that pretend: their order, their figures, and texts that differ."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from forerun.core.errors import InvalidInput
from forerun.measure.bench.alternate import (
    TEXTS_PER_PLACE,
    Contender,
    Difference,
    Group,
    Prompt,
    Run,
    Written,
    agreement,
    alternate,
    differences,
    group,
    warm_up,
)
from forerun.measure.bench.figures import Figures, acceptance_by_context, summarise

PROMPTS = [Group.of([Prompt("a", "qa", (1,))]), Group.of([Prompt("b", "rag", (2, 2))])]


def pretend(
    name: str, calls: list[str], seconds: float = 1.0, text: Sequence[int] = (5, 6, 7), exact: bool = True
) -> Contender:
    def write(prompts: Sequence[Sequence[int]], max_tokens: int) -> Written:
        length = len(prompts[0])
        calls.append(f"{name}{length}")
        return Written([text[:max_tokens] for _ in prompts], seconds * length, 2, seconds)

    return Contender(name, write, exact)


def test_contenders_of_a_prompt_run_next_to_each_other_in_turning_order() -> None:
    calls: list[str] = []
    contenders = [pretend(name, calls) for name in "xyz"]
    runs = list(alternate(contenders, PROMPTS, max_tokens=3, repeats=2))
    assert calls == ["x1", "y1", "z1", "y2", "z2", "x2", "y1", "z1", "x1", "z2", "x2", "y2"]
    assert [(run.contender, run.prompt, run.repeat) for run in runs[3:5]] == [("y", "b", 0), ("z", "b", 0)]


def test_warming_up_leaves_no_runs_and_reaches_everybody() -> None:
    calls: list[str] = []
    warm_up([pretend(name, calls) for name in "xy"], PROMPTS[0], 2)
    assert calls == ["x1", "y1"]


def test_what_is_known_is_not_measured_again() -> None:
    calls: list[str] = []
    contenders = [pretend(name, calls) for name in "xy"]
    known = {("x", "a", 0): Run("x", "a", "qa", 0, ((9,),), 7.0)}
    runs = list(alternate(contenders, PROMPTS, 3, 1, known))
    assert calls == ["y1", "y2", "x2"]
    assert runs[0].seconds == 7.0


def test_a_group_has_several_texts_per_place_and_repeats_prompts_only_where_it_must() -> None:
    prompts = [Prompt(f"{task}{i}", task, (i,)) for task, count in (("qa", 9), ("rag", 4)) for i in range(count)]
    assert [one.id for one in group(prompts, 1)] == [prompt.id for prompt in prompts]
    (alone,) = group(prompts, 2)  # 9 of qa make one group; the rest is too little for a second
    assert (alone.task, len(alone.prompts)) == ("qa", TEXTS_PER_PLACE * 2)
    (mixed,) = group(prompts, 3)  # all of them, in turn
    assert (mixed.task, len(mixed.prompts), len(set(mixed.prompts))) == ("mixed", 13, 13)
    assert [prompt.id for prompt in mixed.prompts[:4]] == ["qa0", "rag0", "qa1", "rag1"]
    (again,) = group(prompts, 4)
    assert len(again.prompts) == TEXTS_PER_PLACE * 4
    assert set(again.prompts) == set(prompts)
    assert again.prompts[13:] == again.prompts[:3]
    with pytest.raises(InvalidInput, match="batches=14 needs as many prompts and there are 13"):
        group(prompts, 14)


def test_acceptance_by_context_counts_rounds_where_they_began() -> None:
    rounds = ((3, 3, 2), (0, 0, 0), (3, 1, 0))  # begin 0, 3 and 4 tokens behind the prompt
    assert acceptance_by_context([(2045, rounds), (40_000, rounds[:1])]) == {
        "<2k": {"tokens_per_round": 3.0, "accepted_counts": [1, 1]},
        "2-8k": {"tokens_per_round": 1.0, "accepted_counts": [0, 1]},
        ">32k": {"tokens_per_round": 3.0, "accepted_counts": [1, 1]},
    }
    assert acceptance_by_context([(2044, rounds[:2]), (9, rounds)]) == {}, "all of them below 2,048"
    assert list(acceptance_by_context([(8192, rounds)])) == []
    assert list(acceptance_by_context([(8189, rounds[:2]), (32768, rounds)])) == ["2-8k", "8-32k", ">32k"]


def test_texts_of_a_group_are_found_by_their_own_prompts() -> None:
    one = Group.of([Prompt("a", "qa", (1,) * 3000), Prompt("b", "qa", (1,) * 9)])
    run = Run("d", one.id, "qa", 0, ((5,), (5, 6)), 1.0, drafts=(((1, 1, 0),), ((1, 1, 1),)))
    assert Figures([run], [one]).by_context("d") == {
        "<2k": {"tokens_per_round": 2.0, "accepted_counts": [1, 1]},
        "2-8k": {"tokens_per_round": 1.0, "accepted_counts": [0, 1]},
    }
    assert Figures([run]).by_context("d") == {}


def test_what_is_left_over_is_shared_out() -> None:
    prompts = [Prompt(f"{task}{i}", task, (i,)) for task in ("qa", "rag", "code") for i in range(7)]
    sizes = [len(one.prompts) for one in group(prompts, 2)]
    assert sizes == [10, 11]
    names = [prompt.id for one in group(prompts, 2) for prompt in one.prompts]
    assert sorted(names) == sorted(prompt.id for prompt in prompts)


def test_a_differing_text_is_caught_and_located() -> None:
    calls: list[str] = []
    contenders = [
        pretend("one", calls),
        pretend("same", calls),
        pretend("wrong", calls, text=(5, 9, 7)),
        pretend("short", calls, text=(5, 6)),
        pretend("lossy", calls, text=(8,), exact=False),
    ]
    found = differences(alternate(contenders, PROMPTS[:1], 3, 1), contenders)
    assert found == [Difference("wrong", "a", 0, 1), Difference("short", "a", 0, 2)]


def test_a_contender_that_contradicts_itself_is_caught() -> None:
    texts = iter([(1, 2), (1, 2), (1, 2), (1, 3)])
    fickle = Contender("fickle", lambda ids, most: Written([next(texts)], 1.0))
    assert differences(alternate([fickle], PROMPTS, 2, 2), [fickle]) == [Difference("fickle", "b", 1, 1)]


def test_figures_follow_from_the_runs() -> None:
    calls: list[str] = []
    contenders = [
        pretend("transformers", calls, seconds=4.0),
        pretend("plain", calls, seconds=2.0),
        pretend("quick", calls, seconds=1.0),
        pretend("slow", calls, seconds=2.5),
        pretend("blind", calls, seconds=8.0),
    ]
    runs = list(alternate(contenders, PROMPTS, 3, 2))
    result = summarise(Figures(runs), contenders, differences(runs, contenders), "blind")
    assert result["ratios"] == {
        "quick_vs_plain": 2.0,
        "slow_vs_plain": 0.8,
        "blind_vs_plain": 0.25,
        "plain_vs_transformers": 2.0,
        "quick_vs_transformers": 4.0,
        "slow_vs_transformers": 1.6,
        "blind_vs_transformers": 0.5,
        "worst_drafter_vs_plain": 0.8,
        "worst_task_vs_plain": 0.8,
        "best_task_vs_plain": 2.0,
    }
    assert result["contenders"]["quick"] == {
        "tokens_per_second": 2.0,  # 3 tokens in 1 and in 2 seconds
        "decode_tokens_per_second": 3.0,
        "tokens_per_round": 1.5,
        "accepted_per_position": [],
        "accepted_counts": [],
        "by_context": {},
        "seconds": None,
    }
    assert result["by_task"]["quick"]["rag"] == {
        "speedup": 2.0,
        "low": None,  # one prompt of this task
        "high": None,
        "tokens_per_round": 1.5,
        "accepted_per_position": [],
        "accepted_counts": [],
    }
    assert result["intervals"]["quick_vs_transformers"] == [4.0, 4.0]
    assert result["intervals"].keys() == result["ratios"].keys() - {
        "worst_drafter_vs_plain",
        "worst_task_vs_plain",
        "best_task_vs_plain",
    }
    assert result["speedup"]["quick"] == {"speedup": 2.0, "low": 2.0, "high": 2.0}
    assert result["mean_over_prompts"]["slow_vs_plain"] == {"mean": 0.8, "low": 0.8, "high": 0.8}
    assert (result["equal"], result["compared"], result["differing"]) == (True, 20, [])


def test_rounds_give_acceptance_by_depth_and_where_the_time_went() -> None:
    passes = ({"draft": 0.1, "pass": 0.5, "verdict": 0.1, "host": 0.1}, {"pass": 0.2})
    drafts = (((3, 3, 2), (2, 2, 0)), ((3, 3, 3), (0, 0, 0)))
    run = Run("x", "a", "qa", 0, ((1, 2, 3, 4), (1, 2, 3, 4, 5)), 2.0, 2, 1.0, passes, drafts)
    figures = Figures([run])
    assert figures.accepted("x") == [(2, 3), (2, 3), (1, 2)]
    assert figures.acceptance("x") == [pytest.approx(2 / 3), pytest.approx(2 / 3), 0.5]
    assert figures.tokens_per_round("x") == 9 / 4  # two texts of two rounds each
    assert figures.seconds("x") == pytest.approx(
        {"prompt": 1.0, "draft": 0.1, "pass": 0.7, "verdict": 0.1, "host": 0.1}
    )


def test_a_peer_is_held_against_its_own_plain_loop() -> None:
    calls: list[str] = []
    lookup = Contender("lookup", pretend("lookup", calls, text=(5, 6, 8)).write, False, like="peer")
    contenders = [pretend("peer", calls, exact=False), lookup, pretend("plain", calls, text=(1,))]
    runs = list(alternate(contenders, PROMPTS, max_tokens=3, repeats=2))
    short = list(alternate(contenders, PROMPTS, max_tokens=2, repeats=1))
    assert agreement(runs, contenders) == {"lookup": ("peer", 0, 4)}
    assert agreement(short, contenders) == {"lookup": ("peer", 2, 2)}
