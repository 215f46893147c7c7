"""Record how many tokens of a head's chains are accepted in real texts, round by round, for the controller's tests.

python -m tests.control.record_traces        # writes traces.json anew: a minute with the default model and its head
"""

from __future__ import annotations

import json
from pathlib import Path

from forerun.api.llm import LLM
from forerun.core.params import SamplingParams
from forerun.core.types import Budget, Request
from forerun.measure.bench.suites import load_suite, prompt_ids

FILE = Path(__file__).with_name("traces.json")
DEPTH, TOKENS = 5, 72


def record() -> dict[str, list[int]]:
    """Per prompt of the built-in suite, one of each task: accepted tokens of every chain."""
    llm, found = LLM.load("smollm2", drafter="eagle3"), dict[str, list[int]]()
    for item in load_suite(limit=1):
        ids = prompt_ids(llm.tokenizer, [dict(message) for message in item.messages])
        request = Request(ids, SamplingParams(max_tokens=TOKENS, ignore_eos=True), budget=Budget(DEPTH, DEPTH))
        (seq,) = llm.driver.write([request])
        found[item.id] = [one.accepted for one in seq.rounds if one.depth == DEPTH]
    return found


if __name__ == "__main__":
    FILE.write_text(json.dumps(record()) + "\n", encoding="utf-8")
