"""The built-in suite is complete, and files in the three layouts are read or refused with one line."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from forerun.core.errors import InvalidInput
from forerun.measure.bench.suites import OWN_TASK, TASKS, load_suite


def write(path: Path, rows: list[object]) -> Path:
    path.write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")
    return path


def test_the_built_in_suite_has_eight_prompts_of_every_task() -> None:
    items = load_suite()
    assert Counter(item.task for item in items) == dict.fromkeys(TASKS, 8)
    assert len({item.id for item in items}) == len(items)


def test_no_prompt_is_empty_or_twice_there() -> None:
    texts = [message["content"] for item in load_suite() for message in item.messages]
    texts += [turn for item in load_suite() for turn in item.later_turns]
    assert all(len(text.split()) >= 8 for text in texts)
    assert len(set(texts)) == len(texts)


def test_tasks_carry_what_they_are_about() -> None:
    by_task = {task: [item.messages[0]["content"] for item in load_suite(tasks=[task])] for task in TASKS}
    assert all(len(item.later_turns) == 1 for item in load_suite(tasks=["multi_turn"]))
    for text in by_task["summarization"]:
        assert 120 <= len(text.split("\n\n", 1)[1].split()) <= 250
    for text in by_task["code_edit"]:
        assert 15 <= text.split("```")[1].count("\n") - 1 <= 30
    assert all(text.count("Passage ") >= 2 and "Question: " in text for text in by_task["rag"])
    assert all("JSON" in text for text in by_task["structured"])


def test_limit_and_tasks_choose_prompts_in_order() -> None:
    chosen = load_suite(tasks=["rag", "qa"], limit=2)
    assert [item.id for item in chosen] == ["qa-1", "qa-2", "rag-1", "rag-2"]


def test_spec_bench_questions_are_filed_by_category(tmp_path: Path) -> None:
    rows: list[object] = [
        {"question_id": 81, "category": "writing", "turns": ["First?", "Second?"], "reference": []},
        {"question_id": 400, "category": "math_reasoning", "turns": ["How many?"]},
        {"question_id": 500, "category": "math", "turns": ["Sum?"], "task": "other"},
    ]
    items = load_suite(write(tmp_path / "question.jsonl", rows))
    assert [(item.id, item.task) for item in items] == [
        ("81", "multi_turn"),
        ("400", "math_reasoning"),
        ("500", "other"),
    ]
    assert items[0].messages == ({"role": "user", "content": "First?"},)
    assert items[0].later_turns == ("Second?",)


def test_speed_bench_keeps_its_own_categories(tmp_path: Path) -> None:
    row = {"question_id": "x1", "category": "math", "sub_category": "algebra", "turns": ["Sum?"]}
    items = load_suite(write(tmp_path / "qualitative.jsonl", [row]))
    assert [(item.id, item.task) for item in items] == [("x1", "math")]


def test_the_built_in_suite_has_a_name() -> None:
    assert load_suite("builtin") == load_suite()


def test_own_chats_lose_the_answer_that_was_recorded(tmp_path: Path) -> None:
    chat = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "One?"},
        {"role": "assistant", "content": "1"},
    ]
    items = load_suite(write(tmp_path / "own.jsonl", [{"messages": chat}, {"prompt": "Two?"}]))
    assert items[0].messages == tuple(chat[:2])
    assert items[0].answers == tuple(chat[2:]), "for those who read whole conversations"
    assert items[1].answers == ()
    assert items[1].messages == ({"role": "user", "content": "Two?"},)
    assert {item.task for item in items} == {OWN_TASK}


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        ({"turns": []}, "'turns'"),
        ({"turns": ["  "]}, "'turns'"),
        ({"messages": [{"role": "user"}]}, "'messages'"),
        ({"messages": [{"role": "assistant", "content": "1"}]}, "asks for no answer"),
        ({"text": "?"}, "none of"),
        (["?"], "not a JSON object"),
        ({"prompt": "half \ud83d"}, "U+D83D at character 5"),
        ({"turns": ["Fine?", "\ud83d"]}, "U+D83D"),
        ({"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "\ud83d"}]}, "U+D83D"),
    ],
)
def test_a_line_that_cannot_be_used_is_named(tmp_path: Path, row: object, complaint: str) -> None:
    path = write(tmp_path / "own.jsonl", [{"prompt": "Fine?"}, row])
    with pytest.raises(InvalidInput, match="line 2") as caught:
        load_suite(path)
    assert complaint in str(caught.value)
    assert "\n" not in str(caught.value)


def test_other_mistakes_are_named_too(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="no prompts at"):
        load_suite(tmp_path / "absent.jsonl")
    with pytest.raises(InvalidInput, match="unknown task 'poetry'"):
        load_suite(tasks=["poetry"])
    with pytest.raises(InvalidInput, match="limit=0"):
        load_suite(limit=0)
    with pytest.raises(InvalidInput, match="used before"):
        load_suite(write(tmp_path / "own.jsonl", [{"id": 1, "prompt": "a"}, {"id": 1, "prompt": "b"}]))
    (tmp_path / "broken.jsonl").write_text("{")
    with pytest.raises(InvalidInput, match="line 1 is not JSON"):
        load_suite(tmp_path / "broken.jsonl")
    (tmp_path / "deep.jsonl").write_text("[" * 200_000)
    with pytest.raises(InvalidInput, match="line 1 is not JSON"):
        load_suite(tmp_path / "deep.jsonl")
    (tmp_path / "sixteen.jsonl").write_bytes('{"prompt": "Why?"}'.encode("utf-16"))
    with pytest.raises(InvalidInput, match=r"cannot read '.*sixteen.jsonl': .*; give a JSONL file in UTF-8"):
        load_suite(tmp_path / "sixteen.jsonl")
    (tmp_path / "marked.jsonl").write_bytes('{"prompt": "Why?"}'.encode("utf-8-sig"))
    assert load_suite(tmp_path / "marked.jsonl")[0].messages[0]["content"] == "Why?"
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(InvalidInput, match="holds no prompts"):
        load_suite(tmp_path / "empty.jsonl")
