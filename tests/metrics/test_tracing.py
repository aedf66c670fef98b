# SPDX-License-Identifier: Apache-2.0
"""Spans of requests: what they say, whose trace they join, and that no collector can hurt."""

from __future__ import annotations

import http.server
import threading
import time
from collections.abc import Iterator

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from quire import LLM, SamplingParams
from quire.config import ObservabilityConfig
from quire.errors import ConfigError
from quire.metrics.stats import EndedRequest, IterationStats
from quire.metrics.tracing import CLOSE_S, RequestTracer
from quire.outputs import RequestStateStats

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
NOW = 1000.0


@pytest.fixture(autouse=True)
def no_thread_is_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let exporters give up soon, and wait for them: they draw from `random`, which property tests watch."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    yield
    for thread in threading.enumerate():
        if thread.name.startswith(("quire-traces-end", "Otel")):
            thread.join()


def ended(headers: dict[str, str] | None = None, reason: str = "stop", **times: float) -> EndedRequest:
    timeline = RequestStateStats(**times)
    params = SamplingParams(temperature=0.5, top_p=0.9, max_tokens=16, n=2)
    return EndedRequest(
        "chatcmpl-1-0", params, 2, [reason, "stop"], 10, 4, 8, 5, timeline, NOW, headers or {}
    )


def spans_of(request: EndedRequest) -> dict[str, ReadableSpan]:
    """The spans of a request by name."""
    exporter, provider = InMemorySpanExporter(), TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracer = RequestTracer(provider, "tiny", clock=lambda: NOW)
    tracer.record(IterationStats(ended=[request]), None, 0)
    tracer.close()
    return {span.name: span for span in exporter.get_finished_spans()}


def seconds(span: ReadableSpan) -> float:
    assert span.start_time is not None
    assert span.end_time is not None
    return round((span.end_time - span.start_time) / 1e9, 3)


TIMES = {"arrival_time": 990.0, "scheduled_ts": 991.0, "first_token_ts": 993.0, "last_token_ts": 999.0}


def test_span_has_the_request_and_its_duration() -> None:
    spans = spans_of(ended(**TIMES))
    assert dict(spans["llm_request"].attributes or {}) == {
        "gen_ai.request.id": "chatcmpl-1-0",
        "gen_ai.request.model": "tiny",
        "gen_ai.request.n": 2,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.9,
        "gen_ai.request.max_tokens": 16,
        "gen_ai.response.finish_reasons": ("stop", "stop"),
        "gen_ai.usage.prompt_tokens": 10,
        "gen_ai.usage.completion_tokens": 8,
        "gen_ai.usage.cache_read.input_tokens": 4,
        "gen_ai.latency.e2e": 10.0,
        "gen_ai.latency.time_in_queue": 1.0,
        "gen_ai.latency.time_to_first_token": 3.0,
        "gen_ai.latency.time_in_model_prefill": 2.0,
        "gen_ai.latency.time_in_model_decode": 6.0,
        "gen_ai.latency.time_in_model_inference": 8.0,
    }
    assert {name: seconds(span) for name, span in spans.items()} == {
        "llm_request": 10.0, "queue": 1.0, "prefill": 2.0, "decode": 6.0,
    }  # fmt: skip
    whole = spans["llm_request"].context
    assert all(span.parent == whole for name, span in spans.items() if name != "llm_request")
    assert abs((spans["llm_request"].end_time or 0) / 1e9 - time.time()) < 60, "seconds of the calendar"


def test_phases_that_were_not_reached_are_left_out() -> None:
    assert spans_of(ended(arrival_time=990.0)).keys() == {"llm_request"}
    assert spans_of(ended(arrival_time=990.0, scheduled_ts=991.0)).keys() == {"llm_request", "queue"}


@pytest.mark.parametrize("reason", ["error", "abort"])
def test_only_an_error_of_the_engine_is_one_of_the_span(reason: str) -> None:
    assert spans_of(ended(reason=reason, **TIMES))["llm_request"].status.is_ok is not (reason == "error")


def test_the_clients_trace_goes_on() -> None:
    span = spans_of(ended({"traceparent": f"00-{TRACE}-{SPAN}-01", "tracestate": "a=1"}, **TIMES))[
        "llm_request"
    ]
    assert span.context is not None
    assert span.parent is not None
    assert (f"{span.context.trace_id:032x}", f"{span.parent.span_id:016x}") == (TRACE, SPAN)
    assert span.context.trace_state.to_header() == "a=1"


def test_a_trace_that_its_client_does_not_sample_has_no_spans() -> None:
    assert not spans_of(ended({"traceparent": f"00-{TRACE}-{SPAN}-00"}, **TIMES))


@pytest.mark.parametrize(
    "header", ["", "x", "00-0-0-01", f"00-{'0' * 32}-{SPAN}-01", f"ff-{TRACE}-{SPAN}-01"]
)
def test_invalid_header_begins_a_trace(header: str) -> None:
    span = spans_of(ended({"traceparent": header, "tracestate": "\x00,=,=="}, **TIMES))["llm_request"]
    assert span.parent is None


class Collector(http.server.BaseHTTPRequestHandler):
    """Keeps what it is sent; answers with `status`."""

    received: list[ExportTraceServiceRequest]
    status = 200

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.received.append(ExportTraceServiceRequest.FromString(body))
        self.send_response(self.status)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def collector() -> Iterator[tuple[str, type[Collector]]]:
    """The URL of one that runs, and its class."""
    handler = type("OneCollector", (Collector,), {"received": []})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}/v1/traces", handler
        server.shutdown()


def run(url: str) -> tuple[int, float]:
    """Tokens of an engine that traces to this collector, and how long its end took."""
    llm = LLM("quire-demo", distributed_executor_backend="null", max_model_len=64, otlp_traces_endpoint=url)
    params = SamplingParams(max_tokens=3, ignore_eos=True)
    outputs = llm.generate([[5, 6], [7]], params, use_tqdm=False)
    started = time.monotonic()
    llm.llm_engine.shutdown()
    return sum(len(one.outputs[0].token_ids) for one in outputs), time.monotonic() - started


def test_spans_reach_a_collector(
    collector: tuple[str, type[Collector]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OTEL_SERVICE_NAME", raising=False)
    url, handler = collector
    assert run(url)[0] == 6
    resources = [one for message in handler.received for one in message.resource_spans]
    names = [span.name for one in resources for scope in one.scope_spans for span in scope.spans]
    assert sorted(names) == sorted(["llm_request", "queue", "prefill", "decode"] * 2)
    services = {
        pair.value.string_value
        for one in resources
        for pair in one.resource.attributes
        if pair.key == "service.name"
    }
    assert services == {"quire"}


@pytest.mark.parametrize("status", [400, 503])
def test_refusing_collector_affects_no_request(collector: tuple[str, type[Collector]], status: int) -> None:
    url, handler = collector
    handler.status = status
    num_tokens, end_s = run(url)
    assert num_tokens == 6
    assert end_s < CLOSE_S + 30


def test_absent_collector_affects_no_request() -> None:
    num_tokens, end_s = run("http://127.0.0.1:9/v1/traces")
    assert num_tokens == 6
    assert end_s < CLOSE_S + 30


def test_flag_without_its_packages_names_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.config.observability.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install opentelemetry-sdk"):
        ObservabilityConfig(otlp_traces_endpoint="http://localhost:4318/v1/traces").check()
    ObservabilityConfig().check()


def test_an_endpoint_is_a_url() -> None:
    with pytest.raises(
        ConfigError, match="must be a URL, such as http://localhost:4318/v1/traces, got 'localhost:4317'"
    ):
        ObservabilityConfig(otlp_traces_endpoint="localhost:4317").check()
