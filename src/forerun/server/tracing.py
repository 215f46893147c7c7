"""OpenTelemetry: a span for each request, as part of the trace that the client names in its headers.

Does nothing where the package `opentelemetry-api` is not installed. Where spans go is set outside, as for any program:
`opentelemetry-instrument forerun serve`, or a tracer provider of whoever embeds the application.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Self

from forerun.server.outbox import ClientLeft

try:
    from opentelemetry import propagate, trace
except ImportError:
    IS_THERE = False
else:
    IS_THERE = True

if TYPE_CHECKING:
    from forerun.api.completion import Completion
    from forerun.server.generation import Timing

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
