"""Record texts of the default model, token by token, for tests that look drafts up in them.

python -m tests.control.record_texts        # writes texts.json anew: a minute with the default model
"""

from __future__ import annotations

import json
from pathlib import Path

from forerun.api.llm import LLM
from forerun.core.params import SamplingParams
from forerun.core.types import Request
from forerun.measure.bench.suites import load_suite, prompt_ids

FILE = Path(__file__).with_name("texts.json")
TOKENS = 96


def record() -> list[tuple[list[int], list[int]]]:
    """Prompt and answer of two prompts of each task of the built-in suite."""
    llm = LLM.load("smollm2", drafter="none")
    prompts = [prompt_ids(llm.tokenizer, [dict(message) for message in one.messages]) for one in load_suite(limit=2)]
    params = SamplingParams(max_tokens=TOKENS, ignore_eos=True)
    texts = [llm.driver.write([Request(ids, params)])[0] for ids in prompts]
    return [(list(ids), seq.tokens[len(ids) :]) for ids, seq in zip(prompts, texts, strict=True)]


def read() -> list[tuple[list[int], list[int]]]:
    return [(prompt, answer) for prompt, answer in json.loads(FILE.read_text(encoding="utf-8"))]


if __name__ == "__main__":
    FILE.write_text(json.dumps(record(), separators=(",", ":")) + "\n", encoding="utf-8")
