# SPDX-License-Identifier: Apache-2.0
"""OpenTelemetry tracing: a span for every request, sent to a collector over HTTP.

Invariant: spans are made from statistics when a request has ended, and sent by a thread from a bounded queue. A slow
or broken collector loses spans and delays no request. No span holds text.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

from quire.config import EngineConfig
from quire.metrics.stats import EndedRequest, IterationStats, StatLogger
from quire.outputs import RequestStateStats
from quire.scheduler.output import SchedulerStats

logger = logging.getLogger(__name__)

SPAN = "llm_request"
SERVICE = "quire"
UNNAMED = "unknown_service"  # Default service name without OTEL_SERVICE_NAME.
CLOSE_S = 2.0  # Time limit for sending the last spans when the engine ends.


class RequestTracer(StatLogger):
    """Tracer with a span per request, and child spans for queue, prefill and decode.

    Args:
        provider: an `opentelemetry.sdk.trace.TracerProvider` owned by this tracer.
        model_name: an attribute of every span.
        clock: clock of the requests' times, in seconds.
    """

    def __init__(self, provider: Any, model_name: str, clock: Callable[[], float] = time.monotonic) -> None:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = provider
        self._tracer = provider.get_tracer("quire")
        self._propagator = TraceContextTextMapPropagator()
        self._model_name = model_name
        self._clock = clock

    def record(self, iteration: IterationStats, scheduler: SchedulerStats | None, core: int) -> None:
        if iteration.ended:
            epoch_s = time.time() - self._clock()
            for request in iteration.ended:
                self._trace(request, epoch_s)

    def close(self) -> None:
        """Send the remaining spans, in a thread because the SDK would wait half a minute for an absent collector."""
        closing = threading.Thread(target=self._provider.shutdown, name="quire-traces-end", daemon=True)
        closing.start()
        closing.join(CLOSE_S)

    def _trace(self, request: EndedRequest, epoch_s: float) -> None:
        from opentelemetry import trace

        times = request.times
        parent = self._propagator.extract(request.trace_headers)
        span = self._tracer.start_span(
            SPAN,
            context=parent,
            kind=trace.SpanKind.SERVER,
            attributes={"gen_ai.request.model": self._model_name, **attributes_of(request)},
            start_time=_nanoseconds(epoch_s, times.arrival_time),
        )
        inside = trace.set_span_in_context(span)
        for name, start, end in phases_of(times):
            phase = self._tracer.start_span(name, context=inside, start_time=_nanoseconds(epoch_s, start))
            phase.end(_nanoseconds(epoch_s, end))
        if "error" in request.finish_reasons:
            span.set_status(trace.StatusCode.ERROR, "the engine failed")
        span.end(_nanoseconds(epoch_s, request.ended_ts))


def attributes_of(request: EndedRequest) -> dict[str, Any]:
    """Return a span's attributes, by OpenTelemetry's generative AI conventions, and vLLM's names for times."""
    params, times = request.params, request.times
    attributes: dict[str, Any] = {
        "gen_ai.request.id": request.label,
        "gen_ai.request.n": request.num_sequences,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.response.finish_reasons": request.finish_reasons,
        "gen_ai.usage.prompt_tokens": request.num_prompt_tokens,
        "gen_ai.usage.completion_tokens": request.num_generation_tokens,
        "gen_ai.usage.cache_read.input_tokens": request.num_cached_tokens,
        "gen_ai.latency.e2e": request.ended_ts - times.arrival_time,
    }
    if params.max_tokens is not None:
        attributes["gen_ai.request.max_tokens"] = params.max_tokens
    if times.scheduled_ts:
        attributes["gen_ai.latency.time_in_queue"] = times.scheduled_ts - times.arrival_time
    if times.first_token_ts:
        attributes["gen_ai.latency.time_to_first_token"] = times.first_token_ts - times.arrival_time
        attributes["gen_ai.latency.time_in_model_prefill"] = times.first_token_ts - times.scheduled_ts
        attributes["gen_ai.latency.time_in_model_decode"] = times.last_token_ts - times.first_token_ts
        attributes["gen_ai.latency.time_in_model_inference"] = times.last_token_ts - times.scheduled_ts
    return attributes


def phases_of(times: RequestStateStats) -> list[tuple[str, float, float]]:
    """Return name, start and end of each phase that was reached."""
    phases = []
    if times.scheduled_ts:
        phases.append(("queue", times.arrival_time, times.scheduled_ts))
    if times.first_token_ts:
        phases.append(("prefill", times.scheduled_ts, times.first_token_ts))
        phases.append(("decode", times.first_token_ts, times.last_token_ts))
    return phases


def make_tracers(config: EngineConfig) -> list[StatLogger]:
    """Return no tracer or one, as configured; `ObservabilityConfig.check` has checked the packages."""
    endpoint = config.observability.otlp_traces_endpoint
    if not endpoint:
        return []
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    resource = Resource.create()
    if str(resource.attributes["service.name"]).startswith(UNNAMED):
        resource = resource.merge(Resource({"service.name": SERVICE}))
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
    logger.info(
        "sending a span of every request to %s", urlsplit(endpoint).hostname
    )  # the URL may hold a password
    names = config.model.served_model_name
    return [RequestTracer(provider, names[0] if names else config.model.model)]


def _nanoseconds(epoch_s: float, ts: float) -> int:
    return int((epoch_s + ts) * 1e9)
