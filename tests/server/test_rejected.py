"""What was drafted in vain is told to those who ask, and to nobody else."""

from __future__ import annotations

import json
from typing import Any

import httpx

from forerun.core.types import Branch
from forerun.engine.round import rejected_branches

PROMPT = "one two three one two four one two three one two four one two"


def test_branches_of_a_tree() -> None:
    """Root 0 with children 1 and 2; 1 has 3 and 4; accepted: 1, 4. Left over: 2 after none, 3 after one."""
    tokens, parents = [9, 11, 12, 13, 14], [-1, 0, 0, 1, 1]
    assert rejected_branches(tokens, parents, [1, 4], 2) == (Branch(0, (12,)), Branch(1, (13,)))
    assert rejected_branches(tokens, parents, [], 0) == (
        Branch(0, (12,)), Branch(0, (11, 13)), Branch(0, (11, 14)),
    )  # fmt: skip
    assert rejected_branches(tokens, parents, [1, 4], 1) == (
        Branch(0, (12,)), Branch(1, (13,)), Branch(1, (14,)),
    )  # fmt: skip
    assert rejected_branches([9, 11], [-1, 0], [1], 1) == ()


def chunks_of(http: httpx.Client, **options: Any) -> list[dict[str, Any]]:
    body = {
        "prompt": PROMPT, "max_tokens": 30, "temperature": 0, "stream": True, "ignore_eos": True,
        "speculative": {"drafter": "ngram", "budget": 4}, "stream_options": options,
    }  # fmt: skip
    text = http.post("/v1/completions", json=body).text
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: {")]
    return [json.loads(line) for line in lines]


def test_rejected_branches_are_the_drafted_tokens_that_were_not_accepted(http: httpx.Client) -> None:
    chunks = chunks_of(http, include_speculative=True, include_rejected=True)
    rounds = [chunk["speculative"] for chunk in chunks if "speculative" in chunk]
    figures = chunks[-1]["metrics"]["speculative_decoding"]
    rejected = [branch for each in rounds for branch in each["rejected"]]
    assert rejected, "four drafted tokens a round are not all accepted"
    drafted = sum(each["accepted"] for each in rounds) + sum(len(branch["tokens"]) for branch in rejected)
    assert drafted == figures["num_draft_tokens"], "a chain: every drafted token is in one place"
    for each in rounds:
        for branch in each["rejected"]:
            assert branch["after"] == each["accepted"]
            assert branch["tokens"][0] != each["tokens"][branch["after"]], "the target said another token there"
            assert len(branch["texts"]) == len(branch["tokens"])


def test_nobody_who_did_not_ask_is_told(http: httpx.Client) -> None:
    assert all("rejected" not in chunk.get("speculative", {}) for chunk in chunks_of(http, include_speculative=True))
    assert all("speculative" not in chunk for chunk in chunks_of(http, include_usage=True))
