"""Spans of requests with the real OpenTelemetry packages, and that the server works without them."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import time
from collections.abc import Callable

import httpx
import pytest

pytest.importorskip("opentelemetry.sdk")

from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
HEADERS = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "vendor=value"}
BODY = {"prompt": "one two one two", "max_tokens": 6, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def exporter() -> InMemorySpanExporter:
    kept, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(kept))
    trace.set_tracer_provider(provider)
    return kept


@pytest.fixture
def spans(exporter: InMemorySpanExporter) -> InMemorySpanExporter:
    exporter.clear()
    return exporter


def only(spans: InMemorySpanExporter) -> ReadableSpan:
    """Our span; the web framework may have its own above it."""
    scopes = [(span.instrumentation_scope, span) for span in spans.get_finished_spans()]
    (span,) = [span for scope, span in scopes if scope is not None and scope.name == "forerun"]
    return span


def origin(span: ReadableSpan, spans: InMemorySpanExporter) -> str | None:
    """The span of somebody else that ours descends from."""
    known = {each.context.span_id: each for each in spans.get_finished_spans() if each.context is not None}
    while span.parent is not None and span.parent.span_id in known:
        span = known[span.parent.span_id]
    return None if span.parent is None else f"{span.parent.span_id:016x}"


def wait_for(what: Callable[[], bool], says: str) -> None:
    """Spans above ours end a little after the answer."""
    deadline = time.monotonic() + 60
    while not what():
        assert time.monotonic() < deadline, says
        time.sleep(0.005)


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_is_a_span_of_its_clients_trace(
    http: httpx.Client, spans: InMemorySpanExporter, stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "forerun.server")
    answer = http.post("/v1/completions", json={**BODY, "stream": stream, "n": 2}, headers=HEADERS)
    span = only(spans)
    assert span.context is not None
    assert f"{span.context.trace_id:032x}" == TRACE
    wait_for(lambda: origin(span, spans) == PARENT, "it descends from the client's span")
    facts = dict(span.attributes or {})
    assert facts["gen_ai.request.model"] == "smollm2"
    assert facts["gen_ai.usage.completion_tokens"] == 12
    assert facts["forerun.finish_reason"] == "length"
    assert 0 < float(str(facts["gen_ai.latency.time_to_first_token"])) < float(str(facts["gen_ai.latency.e2e"]))
    passed_on = answer.headers["traceparent"].split("-")
    assert passed_on[1:3] == [TRACE, f"{span.context.span_id:016x}"], "the trace goes on from our span"
    assert answer.headers["tracestate"] == "vendor=value"
    lines = [r.getMessage() for r in caplog.records if r.name == "forerun.server.service"]
    assert json.loads(lines[-1])["trace"] == TRACE


def test_without_a_trace_a_span_begins_one(http: httpx.Client, spans: InMemorySpanExporter) -> None:
    http.post("/v1/completions", json=BODY)
    wait_for(lambda: origin(only(spans), spans) is None, "it descends from no other")


def test_what_failed_is_said_in_the_span(http: httpx.Client, spans: InMemorySpanExporter) -> None:
    assert http.post("/v1/completions", json={**BODY, "n": 1000}, headers=HEADERS).status_code == 400
    span = only(spans)
    assert not span.status.is_ok
    assert [event.name for event in span.events] == ["exception"]


def test_a_client_that_leaves_ends_its_span(http: httpx.Client, spans: InMemorySpanExporter) -> None:
    body = {**BODY, "max_tokens": 900, "stream": True}
    with http.stream("POST", "/v1/completions", json=body) as answer:
        next(answer.iter_lines())
    while http.get("/stats").json()["running"]:
        pass
    assert (only(spans).attributes or {})["forerun.finish_reason"] == "aborted"


@pytest.mark.slow
def test_the_server_needs_no_opentelemetry() -> None:
    """Imported where the package cannot be: no span, no header, no trace."""
    program = """
import sys
import fastapi.responses  # newer ones import it themselves
sys.modules["opentelemetry"] = None
from forerun.server.metrics import IS_THERE, RequestSpan
with RequestSpan({"traceparent": "x"}, "name", "model", "id") as span:
    assert not IS_THERE and span.headers() == {} and span.trace_id is None
"""
    subprocess.run([sys.executable, "-c", program], check=True)
