# SPDX-License-Identifier: Apache-2.0
"""`/metrics` of the server, over a whole engine of two cores that computes nothing: it agrees with the replies."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from quire.config import EngineConfig, ServerConfig
from quire.engine.async_llm import AsyncLLM
from quire.entrypoints.openai.app import build_app
from quire.metrics.catalog import METRICS, PREFIX
from tests.entrypoints.openai.fake_engine import FakeEngine
from tests.entrypoints.openai.serving import client_for, events, live_server


@contextlib.asynccontextmanager
async def serving(num_cores: int = 1, **server_args: Any) -> AsyncIterator[httpx.AsyncClient]:
    config = EngineConfig.from_args(
        model="quire-demo",
        distributed_executor_backend="null",
        max_model_len=256,
        block_size=4,
        data_parallel_size=num_cores,
    )
    engine = AsyncLLM(config, in_process=True)
    try:
        await engine.wait_ready()
        transport = httpx.ASGITransport(build_app(engine, ServerConfig(**server_args)))
        async with httpx.AsyncClient(transport=transport, base_url="http://quire", timeout=60) as client:
            yield client
    finally:
        await engine.shutdown()


async def totals(client: httpx.AsyncClient) -> Counter[str]:
    """Samples of the server, summed up over their labels."""
    sums: Counter[str] = Counter()
    for family in text_string_to_metric_families((await client.get("/metrics")).text):
        for sample in family.samples:
            sums[sample.name.removeprefix(PREFIX)] += sample.value  # type: ignore[assignment]
    return sums


REQUESTS: list[tuple[str, dict[str, Any]]] = [
    ("completions", {"prompt": "one two three four five six seven"}),
    ("completions", {"prompt": "one two three four five six seven", "n": 4}),
    ("completions", {"prompt": ["one two three", "one two three four five"], "n": 3, "stream": True}),
    ("completions", {"prompt": "a b c", "best_of": 5, "n": 2}),
    ("completions", {"prompt": [[5, 6, 7], [8]], "echo": True, "stop": "e"}),
    ("chat/completions", {"messages": [{"role": "user", "content": "hello there"}], "n": 2}),
    ("chat/completions", {"messages": [{"role": "user", "content": "hello there"}], "n": 2, "stream": True}),
]


async def usage_of(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> dict[str, Any]:
    options = {"stream_options": {"include_usage": True}} if body.get("stream") else {}
    response = await client.post(f"/v1/{path}", json={"max_tokens": 9, "seed": 1, **body, **options})
    assert response.status_code == 200, response.text
    reply = events(response.text)[-2] if options else response.json()
    usage: dict[str, Any] = reply["usage"]
    return usage


@pytest.mark.parametrize("num_cores", [1, 2])
async def test_tokens_of_the_metrics_are_those_of_the_replies(num_cores: int) -> None:
    async with serving(num_cores) as client:
        before = await totals(client)
        usages = await asyncio.gather(*(usage_of(client, *request) for request in REQUESTS * 2))
        usages += [await usage_of(client, *request) for request in REQUESTS]
        counted = await totals(client)
        counted.subtract(before)
    prompt = sum(usage["prompt_tokens"] for usage in usages)
    cached = sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in usages)
    completion = sum(usage["completion_tokens"] for usage in usages)
    assert cached > 0
    expected = {
        "prompt_tokens_total": prompt,
        "prompt_tokens_by_source_total": prompt,
        "request_prompt_tokens_sum": prompt,
        "prompt_tokens_cached_total": cached,
        "request_prefill_kv_computed_tokens_sum": prompt - cached,
        "generation_tokens_total": completion,
        "request_generation_tokens_sum": completion,
    }
    assert {name: counted[name] for name in expected} == expected
    num_prompts = sum(
        len(body["prompt"]) if isinstance(body.get("prompt"), list) else 1 for _, body in REQUESTS
    )
    assert counted["request_params_n_count"] == counted["request_prompt_tokens_count"] == 3 * num_prompts


async def test_everything_in_the_table_is_served_and_nothing_else() -> None:
    async with serving() as client:
        await usage_of(client, "completions", {"prompt": "hi"})
        text = (await client.get("/metrics")).text
    families = {family.name for family in text_string_to_metric_families(text)}
    # The parser takes "_total" off the name of a histogram, too.
    served = {
        name.removesuffix("_created").removesuffix("_total").removesuffix("_tokens_total")
        for name in families
    }
    of_servers = [metric.name for metric in METRICS if not metric.name.startswith("router_")]
    assert served == {PREFIX + name.removesuffix("_total") for name in of_servers}


async def test_for_dashboards_of_vllm_the_names_are_its_own() -> None:
    async with serving(metrics_compat="vllm") as client:
        await usage_of(client, "completions", {"prompt": "hi"})
        text = (await client.get("/metrics")).text
    assert 'vllm:generation_tokens_total{engine="0",model_name="quire-demo"} 9.0' in text
    assert (
        'vllm:request_success_total{engine="0",finished_reason="length",model_name="quire-demo"} 1.0' in text
    )
    assert "quire:generation_tokens" not in text
    assert (
        'http_requests_total{handler="/v1/completions",method="POST",status="2xx"} 1.0' in text.splitlines()
    )
    assert "quire:http_client_disconnects_total" in text


async def test_clients_that_leave_are_counted() -> None:
    engine = FakeEngine()
    engine.hold_after = 2
    async with live_server(engine) as server, httpx.AsyncClient(base_url=server.url, timeout=30) as client:
        for body in ({"prompt": "hi", "stream": True}, {"prompt": "hi"}):
            task = asyncio.create_task(client.post("/v1/completions", json=body))
            async with asyncio.timeout(300):
                while not engine.running:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
                task.cancel()
                while engine.running:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
        assert (await totals(client))["http_client_disconnects_total"] == 2


async def test_requests_refused_by_a_full_queue_are_counted_by_limit() -> None:
    config = EngineConfig.from_args(
        model="quire-demo", distributed_executor_backend="null", max_model_len=64, max_num_queued_reqs=1
    )
    engine = AsyncLLM(config, in_process=True)
    try:
        await engine.wait_ready()
        app = build_app(engine, ServerConfig())
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://quire", timeout=60) as client:
            waiting = engine.output_processor.waiting
            waiting.add("somebody", 1)
            assert (await client.post("/v1/completions", json={"prompt": "hi"})).status_code == 503
            registry: CollectorRegistry = app.state.server.registry
            labels = {"model_name": "quire-demo", "reason": "max_num_queued_reqs"}
            assert registry.get_sample_value("quire:admission_rejections_total", labels) == 1
    finally:
        await engine.shutdown()


async def test_the_trace_of_a_client_reaches_the_engine() -> None:
    engine = FakeEngine()
    headers = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", "tracestate": "a=1"}
    chat = {"messages": [{"role": "user", "content": "hi"}]}
    async with client_for(engine) as client:
        for path, body in (("/v1/completions", {"prompt": "hi"}), ("/v1/chat/completions", chat)):
            for stream in (False, True):
                await client.post(path, json={**body, "stream": stream}, headers=headers)
        await client.post("/v1/messages", json={**chat, "max_tokens": 5}, headers=headers)
        await client.post("/v1/completions", json={"prompt": "hi"}, headers={"tracestate": "a" * 600})
    assert engine.trace_headers == [headers] * 5 + [{}]
