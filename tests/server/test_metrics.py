"""Metrics against what the answers themselves say: every count in `/metrics` is one that a run can be held to."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.server.conftest import Running

ASKED = {"prompt": "one two three four one two three four one two", "temperature": 0, "ignore_eos": True}
TREES = {"drafter": "eagle3", "budget": {"nodes": 8, "depth": 4, "width": 2}}
MODES: tuple[Any, ...] = ("off", {"drafter": "ngram", "budget": 4}, TREES)


def read(http: httpx.Client) -> dict[str, float]:
    """Every sample: its name, with its labels but the model's, and its value."""
    found = re.findall(r"^(forerun:\w+)(?:\{(.*)\})? (\S+)$", http.get("/metrics").text, re.MULTILINE)
    values = {}
    for name, labels, value in found:
        others = [label for label in re.findall(r'\w+="[^"]*"', labels) if not label.startswith("model_name")]
        values[name.removeprefix("forerun:") + "".join(f" {label}" for label in others)] = float(value)
    return values


class Change:
    """What changed between the beginning and the end of a block."""

    def __init__(self, http: httpx.Client) -> None:
        self._http, self._before, self._after = http, read(http), dict[str, float]()

    def __enter__(self) -> Change:
        return self

    def __exit__(self, *_: object) -> None:
        self._after = read(self._http)

    def of(self, name: str) -> float:
        return self._after.get(name, 0.0) - self._before.get(name, 0.0)

    def labels(self, name: str) -> Iterator[tuple[str, float]]:
        for key in self._after:
            if key.startswith(f"{name} "):
                yield key.split('"')[1], self.of(key)


def test_drafting_is_counted_as_the_answers_count_it(http: httpx.Client) -> None:
    with Change(http) as change:
        answers = [
            http.post("/v1/completions", json={**ASKED, "speculative": mode, "max_tokens": 24}).json() for mode in MODES
        ]
    own = [answer["metrics"]["speculative_decoding"] for answer in answers]
    assert own[0]["num_draft_tokens"] == 0 < own[1]["num_accepted_draft_tokens"]
    total = {name: sum(each[name] for each in own) for name in own[0] if name.startswith("num_")}
    assert change.of("generation_tokens_total") == 72
    assert change.of("prompt_tokens_total") == sum(answer["usage"]["prompt_tokens"] for answer in answers)
    assert change.of("spec_decode_num_draft_tokens_total") == total["num_draft_tokens"]
    assert change.of("spec_decode_num_accepted_tokens_total") == total["num_accepted_draft_tokens"]
    by_place = dict(change.labels("spec_decode_num_accepted_tokens_per_pos_total"))
    assert sum(by_place.values()) == total["num_accepted_draft_tokens"]
    for place, count in by_place.items():  # rounds that accepted more than so many
        assert count == sum(sum(each["acceptance_histogram"][int(place) + 1 :]) for each in own)
    forms = dict(change.labels("sequence_rounds_total"))
    assert sum(forms.values()) == total["num_spec_steps"]
    assert forms["plain"] >= own[0]["num_spec_steps"]
    assert forms["tree"] > 0, "a drafter of trees was asked"
    assert change.of("spec_decode_num_drafts_total") == forms["chain"] + forms["tree"]


def test_the_histogram_of_an_answer_adds_up(http: httpx.Client) -> None:
    for mode in MODES:
        body = {**ASKED, "max_tokens": 24, "n": 2, "speculative": mode}
        own = http.post("/v1/completions", json=body).json()["metrics"]["speculative_decoding"]
        histogram = own["acceptance_histogram"]
        assert sum(histogram) == own["num_spec_steps"]
        assert sum(i * count for i, count in enumerate(histogram)) == own["num_accepted_draft_tokens"]
        assert own["mean_acceptance_length"] == 48 / own["num_spec_steps"]


def test_every_text_is_in_every_histogram(http: httpx.Client) -> None:
    with Change(http) as change:
        http.post("/v1/completions", json={**ASKED, "max_tokens": 8, "n": 3})
    for name in (
        "time_to_first_token_seconds", "time_per_output_token_seconds", "e2e_request_latency_seconds",
        "request_queue_time_seconds", "request_prompt_tokens", "request_generation_tokens",
    ):  # fmt: skip
        assert change.of(f"{name}_count") == 3, name
    assert change.of("request_generation_tokens_sum") == 24
    assert change.of('request_success_total finished_reason="length"') == 3
    first, whole = change.of("time_to_first_token_seconds_sum"), change.of("e2e_request_latency_seconds_sum")
    assert change.of("request_queue_time_seconds_sum") < first < whole


@pytest.mark.slow
def test_who_waits_is_seen_and_counted(http: httpx.Client, served: Running) -> None:
    """Four fit the batch; the others wait, and their wait is in the histogram."""
    body = {**ASKED, "max_tokens": 80, "n": 8, "stream": True}
    seen = dict[str, float]()

    def ask() -> None:
        chunks = 0
        with httpx.stream("POST", f"{served.url}/v1/completions", json=body, timeout=60) as answer:
            for line in answer.iter_lines():
                chunks += '"index":0' in line
                if chunks == 5 and not seen:  # by then all eight have been queued
                    seen.update(read(http))

    with Change(http) as change:
        thread = threading.Thread(target=ask)
        thread.start()
        thread.join()
    assert (seen["num_requests_running"], seen["num_requests_waiting"]) == (4, 4)
    assert seen["kv_cache_used_slots"] > 0
    slots = served.llm.engine.target.slots
    assert slots is not None
    assert seen["kv_cache_usage_perc"] == pytest.approx(seen["kv_cache_used_slots"] / slots)
    buckets = {key: change.of(key) for key in seen if key.startswith("request_queue_time_seconds_bucket")}
    assert min(buckets.values()) <= 4 < max(buckets.values()) == 8, "four did not wait, four did"


def test_texts_that_nobody_waits_for_are_counted_as_such(http: httpx.Client, served: Running) -> None:
    with Change(http) as change:
        with http.stream("POST", "/v1/completions", json={**ASKED, "max_tokens": 900, "stream": True}) as answer:
            written = json.loads(next(answer.iter_lines()).removeprefix("data: "))
        while served.stats()["running"] or served.stats()["waiting"]:
            pass
    assert written["choices"][0]["text"]
    assert change.of('request_success_total finished_reason="aborted"') == 1
    assert 900 > change.of("generation_tokens_total") > 0, "what was written before counts"


def test_predictions_and_priorities_are_counted(http: httpx.Client) -> None:
    with Change(http) as change:
        body = {**ASKED, "max_tokens": 8, "prediction": {"type": "content", "content": " three four one two"}}
        for priority in (-1, 3, 0):
            answer = http.post("/v1/completions", json={**body, "priority": priority}).json()
            details = answer["usage"]["completion_tokens_details"]
    assert change.of('prediction_tokens_total in_text="yes"') == 3 * details["accepted_prediction_tokens"] > 0
    assert change.of('prediction_tokens_total in_text="no"') == 3 * details["rejected_prediction_tokens"]
    assert dict(change.labels("prioritised_texts_total")) == {"raised": 1, "lowered": 1}


@pytest.mark.parametrize("body", [{"prompt": "", "max_tokens": 1}, {"prompt": "x", "temperature": -1}])
def test_refused_requests_are_no_failures(http: httpx.Client, body: dict[str, Any]) -> None:
    with Change(http) as change:
        assert http.post("/v1/completions", json=body).status_code == 400
    assert change.of('requests_refused_total status="400"') == 1
    assert not any(count for _, count in change.labels("request_success_total"))
