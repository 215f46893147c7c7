"""Prometheus metrics under the names that operators know from vLLM, with our prefix, and OpenTelemetry spans.

There are no spans where the package `opentelemetry-api` is not installed. Where spans go is set outside:
`opentelemetry-instrument forerun serve`, or a tracer provider of the program that embeds the application.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import Self, get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from forerun.api.completion import Completion
from forerun.engine.stats import Form
from forerun.server.backends.base import Backend, Load
from forerun.server.generation import Timing
from forerun.server.sse import ClientLeft

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_PER_TOKEN = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0)
_TOKENS = (1, 8, 32, 128, 512, 2048, 8192, 32768)


class Metrics:
    def __init__(self, backend: Backend, model: str) -> None:
        self.registry = CollectorRegistry()
        self._model = model
        self._read = self._counter("prompt_tokens", "Tokens of prompts that were answered").labels(model)
        self._ended = self._counter("request_success", "Texts that ended, by reason", "finished_reason")
        self._refused = self._counter("requests_refused", "Requests turned away, by status", "status")
        self._answered = self._counter("http_requests", "Answers, by route and status", "route", "status")
        self._first = self._histogram("time_to_first_token_seconds", "From request to first token", _SECONDS)
        self._per_token = self._histogram("time_per_output_token_seconds", "Per token after the first", _PER_TOKEN)
        self._whole = self._histogram("e2e_request_latency_seconds", "From request to its end", _SECONDS)
        self._queue = self._histogram("request_queue_time_seconds", "Until its prompt was read", _SECONDS)
        self._prompts = self._histogram("request_prompt_tokens", "Tokens of a prompt", _TOKENS)
        self._lengths = self._histogram("request_generation_tokens", "Tokens written per text", _TOKENS)
        self._predicted = self._counter("prediction_tokens", "Predicted tokens, and whether texts have them", "in_text")
        self._urgent = self._counter(
            "prioritised_texts", "Texts that ended and had a priority other than 0", "priority"
        )
        self.asleep = self._gauge("engine_sleep_state", "1 while the engine sleeps")
        self._gauge("info", "The model served").set(1)
        self.registry.register(_EngineGauges(backend, model))

    def render(self) -> bytes:
        return generate_latest(self.registry)

    def count_answered(self, route: str, status: int) -> None:
        """A request was answered; `route` is the server's, never a path that a client made up."""
        self._answered.labels(self._model, route, str(status)).inc()
        if status >= 400:
            self._refused.labels(self._model, str(status)).inc()

    def count_dropped(self, texts: int, reason: str) -> None:
        """Texts that were not written to their end: the client left, or there was an error."""
        self._ended.labels(self._model, reason).inc(texts)

    def count(self, done: Completion, timing: Timing, priority: int = 0) -> None:
        if done.accepted_prediction_tokens or done.rejected_prediction_tokens:
            self._predicted.labels(self._model, "yes").inc(done.accepted_prediction_tokens)
            self._predicted.labels(self._model, "no").inc(done.rejected_prediction_tokens)
        if priority:
            self._urgent.labels(self._model, "raised" if priority < 0 else "lowered").inc()
        self._read.inc(done.prompt_tokens)
        self._ended.labels(self._model, done.finish_reason).inc()
        self._prompts.observe(done.prompt_tokens)
        self._queue.observe(done.queue_seconds)
        self._lengths.observe(done.tokens)
        if timing.ended is None:
            return
        self._whole.observe(timing.ended - timing.started)
        if timing.first is not None:
            self._first.observe(timing.first - timing.started)
            if done.tokens > 1:
                self._per_token.observe((timing.ended - timing.first) / (done.tokens - 1))

    def _counter(self, name: str, says: str, *labels: str) -> Counter:
        return Counter(f"forerun:{name}", says, ["model_name", *labels], registry=self.registry)

    def _gauge(self, name: str, says: str) -> Gauge:
        return Gauge(f"forerun:{name}", says, ["model_name"], registry=self.registry).labels(self._model)

    def _histogram(self, name: str, says: str, buckets: Iterable[float]) -> Histogram:
        made = Histogram(f"forerun:{name}", says, ["model_name"], buckets=tuple(buckets), registry=self.registry)
        return made.labels(self._model)


class _EngineGauges:
    """Read from the engine whenever metrics are asked for."""

    def __init__(self, backend: Backend, model: str) -> None:
        self._backend, self._model = backend, model

    def collect(self) -> Iterable[Metric]:
        load = self._backend.load()
        share = load.used_slots / load.slots if load.slots else 0.0
        for name, says, value in (
            ("num_requests_running", "Sequences in the batch", load.running),
            ("num_requests_waiting", "Requests that wait for a place", load.waiting),
            ("kv_cache_used_slots", "Tokens that the KV cache has slots for in use", load.used_slots),
            ("kv_cache_usage_perc", "Share of the KV cache in use; 0 where it has no limit", share),
            ("kv_cache_cached_slots", "Tokens of finished texts that are kept", load.cached_slots),
        ):
            gauge = GaugeMetricFamily(f"forerun:{name}", says, labels=["model_name"])
            gauge.add_metric([self._model], float(value))
            yield gauge
        for name, says, label, counts in self._counters(load):
            counter = CounterMetricFamily(f"forerun:{name}", says, labels=["model_name", *label])
            for which, count in counts.items():
                counter.add_metric([self._model, *([which] if label else [])], float(count))
            yield counter

    def _counters(self, load: Load) -> Iterable[tuple[str, str, tuple[str, ...], Mapping[str, float]]]:
        """Name, meaning, label and counts by label: kept by the engine, so texts that were dropped count too."""
        drafts = load.sequence_rounds - load.forms.get("plain", 0)
        places = {str(place): kept for place, kept in enumerate(load.kept)}
        by_adapter = (
            ("adapter_sequence_rounds", "Rounds of sequences, by adapter"),
            ("adapter_generation_tokens", "Tokens written, by adapter"),
            ("adapter_draft_tokens", "Tokens drafted, by adapter"),
            ("adapter_accepted_tokens", "Drafted tokens that were accepted, by adapter"),
        )
        return (
            ("generation_tokens", "Tokens written", (), {"": load.tokens}),
            ("rounds", "Rounds of the engine", (), {"": load.rounds}),
            ("prefix_cache_queries", "Tokens of prompts that were looked up", (), {"": load.read}),
            ("prefix_cache_hits", "Of these, found in the prefix cache", (), {"": load.reused}),
            ("num_preemptions", "Sequences that gave their slots to others", (), {"": load.preemptions}),
            ("num_requests_aged", "Requests admitted before more urgent ones: they had waited longest", (),
             {"": load.aged}),
            ("sequence_rounds", "Rounds of sequences, by what was put to the target", ("form",),
             {form: load.forms.get(form, 0) for form in get_args(Form)}),
            ("spec_decode_num_drafts", "Rounds of sequences with a draft", (), {"": drafts}),
            ("spec_decode_num_draft_tokens", "Tokens drafted", (), {"": load.drafted}),
            ("spec_decode_num_accepted_tokens", "Drafted tokens that were accepted", (), {"": load.accepted}),
            ("spec_decode_num_accepted_tokens_per_pos", "Of these, by depth", ("position",), places),
            ("round_seconds", "Where rounds spend time", ("part",), load.seconds),
            ("cpu_seconds", "CPU time of the engine's thread, of the HTTP front's, and of all others", ("thread",),
             self._backend.cpu_seconds()),
            *((name, says, ("adapter",), {adapter: counts[i] for adapter, counts in load.adapters.items()})
              for i, (name, says) in enumerate(by_adapter)),
        )  # fmt: skip


try:
    from opentelemetry import propagate, trace
except ImportError:
    IS_THERE = False
else:
    IS_THERE = True


Value = str | int | float | bool


class RequestSpan:
    """The span of one request, from its headers to the end of its answer. Entered and left once."""

    def __init__(self, headers: Mapping[str, str], name: str, model: str, request_id: str) -> None:
        self._tokens = self._prompt_tokens = 0
        if not IS_THERE:
            return
        asked: dict[str, Value] = {"gen_ai.system": "forerun", "gen_ai.request.model": model}
        # the web framework may have begun a span of its own, from the same headers: ours is then below it
        begun = trace.get_current_span().get_span_context().is_valid
        parent = None if begun else propagate.extract(dict(headers))
        self._span = trace.get_tracer("forerun").start_span(
            name, parent, trace.SpanKind.SERVER, {**asked, "gen_ai.request.id": request_id}
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if not IS_THERE:
            return
        if isinstance(error, Exception) and not isinstance(error, ClientLeft):
            self._span.record_exception(error)
            self._span.set_status(trace.StatusCode.ERROR, str(error))
        elif error is not None:  # cancelled, or its client has left
            self._span.set_attribute("forerun.finish_reason", "aborted")
        self._span.end()

    @property
    def trace_id(self) -> str | None:
        """For the log; None where the request belongs to no trace."""
        if not IS_THERE:
            return None
        context = self._span.get_span_context()
        return trace.format_trace_id(context.trace_id) if context.is_valid else None

    def headers(self) -> dict[str, str]:
        """What to send on: `traceparent` and, where there is one, `tracestate`."""
        carrier: dict[str, str] = {}
        if IS_THERE:
            propagate.inject(carrier, trace.set_span_in_context(self._span))
        return carrier

    def note(self, done: Completion, timing: Timing) -> None:
        """One of its texts has ended."""
        if not IS_THERE:
            return
        self._tokens += done.tokens
        self._prompt_tokens += done.prompt_tokens
        facts: dict[str, Value] = {
            "gen_ai.usage.prompt_tokens": self._prompt_tokens,
            "gen_ai.usage.completion_tokens": self._tokens,
            "gen_ai.latency.time_in_queue": done.queue_seconds,
            "forerun.drafter": done.drafter,
            "forerun.tokens_per_round": done.tokens_per_round,
            "forerun.finish_reason": done.finish_reason,
        }
        if timing.first is not None:
            facts["gen_ai.latency.time_to_first_token"] = timing.first - timing.started
        if timing.ended is not None:
            facts["gen_ai.latency.e2e"] = timing.ended - timing.started
        self._span.set_attributes(facts)
