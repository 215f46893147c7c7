"""Prometheus metrics under the names that operators know from vLLM, with our prefix."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from forerun.completion import Completion
from forerun.server.backend import Backend
from forerun.server.generation import Timing

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_PER_TOKEN = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0)
_TOKENS = (1, 8, 32, 128, 512, 2048, 8192, 32768)


class Metrics:
    """Counts of one server, and what its engine says of itself when it is asked."""

    def __init__(self, backend: Backend, model: str) -> None:
        self.registry = CollectorRegistry()
        self._model = model
        self._read = self._counter("prompt_tokens", "Tokens of prompts that were answered")
        self._written = self._counter("generation_tokens", "Tokens written")
        self._ended = self._counter("request_success", "Requests that ended, by reason", "finished_reason")
        self._refused = self._counter("requests_refused", "Requests turned away, by status", "status")
        self._drafts = self._counter("spec_decode_num_drafts", "Rounds of the target")
        self._drafted = self._counter("spec_decode_num_draft_tokens", "Tokens drafted")
        self._accepted = self._counter("spec_decode_num_accepted_tokens", "Drafted tokens that were accepted")
        self._by_place = self._counter(
            "spec_decode_num_accepted_tokens_per_pos", "Accepted drafted tokens by depth", "position"
        )
        self._first = self._histogram("time_to_first_token_seconds", "From request to first token", _SECONDS)
        self._per_token = self._histogram(
            "time_per_output_token_seconds", "Per token after the first", _PER_TOKEN
        )
        self._whole = self._histogram("e2e_request_latency_seconds", "From request to its end", _SECONDS)
        self._lengths = self._histogram("request_generation_tokens", "Tokens written per request", _TOKENS)
        Gauge("forerun:info", "The model served", ["model_name"], registry=self.registry).labels(model).set(1)
        self.registry.register(_EngineGauges(backend, model))

    def render(self) -> bytes:
        return generate_latest(self.registry)

    def count_refused(self, status: int) -> None:
        self._refused.labels(self._model, str(status)).inc()

    def count(self, done: Completion, timing: Timing) -> None:
        """One text has ended."""
        self._read.labels(self._model).inc(done.prompt_tokens)
        self._written.labels(self._model).inc(done.tokens)
        self._ended.labels(self._model, done.finish_reason).inc()
        self._drafts.labels(self._model).inc(done.rounds)
        self._drafted.labels(self._model).inc(done.drafted)
        self._accepted.labels(self._model).inc(done.accepted)
        for place, kept in enumerate(done.kept):
            self._by_place.labels(self._model, str(place)).inc(kept)
        self._lengths.labels(self._model).observe(done.tokens)
        if timing.ended is None:
            return
        self._whole.labels(self._model).observe(timing.ended - timing.started)
        if timing.first is not None:
            self._first.labels(self._model).observe(timing.first - timing.started)
            if done.tokens > 1:
                self._per_token.labels(self._model).observe((timing.ended - timing.first) / (done.tokens - 1))

    def _counter(self, name: str, says: str, *labels: str) -> Counter:
        return Counter(f"forerun:{name}", says, ["model_name", *labels], registry=self.registry)

    def _histogram(self, name: str, says: str, buckets: Iterable[float]) -> Histogram:
        return Histogram(
            f"forerun:{name}", says, ["model_name"], buckets=tuple(buckets), registry=self.registry
        )


class _EngineGauges:
    """Read from the engine whenever metrics are asked for."""

    def __init__(self, backend: Backend, model: str) -> None:
        self._backend, self._model = backend, model

    def collect(self) -> Iterable[Metric]:
        load = self._backend.load()
        for name, says, value in (
            ("num_requests_running", "Sequences in the batch", load.running),
            ("num_requests_waiting", "Requests that wait for a place", load.waiting),
            ("kv_cache_used_slots", "Tokens that the KV cache has slots for in use", load.used_slots),
            ("kv_cache_cached_slots", "Tokens of finished texts that are kept", load.cached_slots),
        ):
            gauge = GaugeMetricFamily(f"forerun:{name}", says, labels=["model_name"])
            gauge.add_metric([self._model], float(value))
            yield gauge
        for name, says, count in (
            ("rounds", "Rounds of the engine", load.rounds),
            ("prefix_cache_queries", "Tokens of prompts that were looked up", load.read),
            ("prefix_cache_hits", "Tokens of prompts that were found in the prefix cache", load.reused),
            ("num_preemptions", "Sequences that gave their slots to older ones", load.preemptions),
        ):
            counter = CounterMetricFamily(f"forerun:{name}", says, labels=["model_name"])
            counter.add_metric([self._model], float(count))
            yield counter
        seconds = CounterMetricFamily(
            "forerun:round_seconds", "Where rounds spend time", labels=["model_name", "part"]
        )
        for part, spent in load.seconds.items():
            seconds.add_metric([self._model, part], spent)
        yield seconds
