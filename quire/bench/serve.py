"""The load generator: sends requests to a running server at chosen times and records when their tokens come.

Invariant: a request that fails is recorded and costs no other; the clock starts with the first arrival.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, nullcontext
from dataclasses import dataclass
from typing import Any

from quire.bench.serve_metrics import RequestRecord, ServeResult
from quire.bench.workload import arrival_times, random_prompts
from quire.entrypoints.cli.client import ServerClient, carries_tokens
from quire.entrypoints.cli.conversation import first_model
from quire.errors import QuireError

ALPHABET_TEXT = (
    "The quick brown fox jumps over the lazy dog while 1234567890 pages gather, fold and wait to be read."
)
"""Tokenized by the server under test; random prompts draw from the ids, which any model has."""

Body = dict[str, Any]


@dataclass(frozen=True)
class LoadPlan:
    """What to send: lengths in tokens, rate in requests per second."""

    endpoint: str
    num_prompts: int
    input_len: int
    output_len: int
    request_rate: float
    max_concurrency: int | None = None
    num_warmups: int = 1
    ignore_eos: bool = False
    temperature: float = 0.0
    seed: int = 0


async def run_load(
    client: ServerClient, model: str | None, plan: LoadPlan, clock: Callable[[], float] = time.perf_counter
) -> ServeResult:
    """Warm the server up, send the plan's requests, and wait until all have ended.

    Raises:
        QuireError: the server cannot be reached, or a warm-up request failed.
    """
    model = model or await first_model(client, "/v1/models")
    bodies = await request_bodies(client, model, plan)
    for body in bodies[: plan.num_warmups]:
        await _warm_up(client, plan.endpoint, body)
    slots: AbstractAsyncContextManager[Any] = nullcontext()
    if plan.max_concurrency is not None:
        slots = asyncio.Semaphore(plan.max_concurrency)
    start_s = clock()

    async def send(body: Body, arrival_s: float) -> RequestRecord:
        await asyncio.sleep(arrival_s - (clock() - start_s))
        async with slots:
            return await send_one(client, plan.endpoint, body, lambda: clock() - start_s)

    arrivals = arrival_times(plan.num_prompts, plan.request_rate, plan.seed)
    to_send = zip(bodies[plan.num_warmups :], arrivals, strict=True)
    records = await asyncio.gather(*(send(body, arrival_s) for body, arrival_s in to_send))
    return ServeResult(records, clock() - start_s, plan.request_rate, plan.max_concurrency)


async def send_one(
    client: ServerClient, endpoint: str, body: Body, clock: Callable[[], float]
) -> RequestRecord:
    """Send one request and record its events; a failure becomes the record's `error`."""
    record = RequestRecord(sent_s=clock())
    try:
        async with aclosing(client.stream(endpoint, body)) as events:
            async for event in events:
                if carries_tokens(event):
                    record.event_times_s.append(clock())
                if usage := event.get("usage"):
                    record.num_prompt_tokens = usage["prompt_tokens"]
                    record.num_output_tokens = usage["completion_tokens"]
    except QuireError as error:
        record.error = str(error)
    record.end_s = clock()
    return record


async def request_bodies(client: ServerClient, model: str, plan: LoadPlan) -> list[Body]:
    """A body for each warm-up request and then for each prompt of the plan."""
    alphabet = (await client.post("/tokenize", {"model": model, "prompt": ALPHABET_TEXT}))["tokens"]
    prompts = random_prompts(
        plan.num_warmups + plan.num_prompts, plan.input_len, sorted(set(alphabet)), plan.seed
    )
    body_of = _ENDPOINTS["chat" if plan.endpoint.endswith("/chat/completions") else "completions"]
    contents = [await body_of(client, model, prompt) for prompt in prompts]
    return [{**_common(model, plan), **content} for content in contents]


async def _completion_body(client: ServerClient, model: str, prompt: list[int]) -> Body:
    return {"prompt": prompt}


async def _chat_body(client: ServerClient, model: str, prompt: list[int]) -> Body:
    text = (await client.post("/detokenize", {"model": model, "tokens": prompt}))["prompt"]
    return {"messages": [{"role": "user", "content": text}]}


_ENDPOINTS = {"completions": _completion_body, "chat": _chat_body}


def _common(model: str, plan: LoadPlan) -> Body:
    body: Body = {
        "model": model,
        "max_tokens": plan.output_len,
        "temperature": plan.temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    return {**body, "ignore_eos": True} if plan.ignore_eos else body


async def _warm_up(client: ServerClient, endpoint: str, body: Body) -> None:
    async with aclosing(client.stream(endpoint, body)) as events:
        async for _ in events:
            pass


def error_counts(records: Sequence[RequestRecord]) -> dict[str, int]:
    """Message -> how many requests failed with it."""
    messages = [record.error for record in records if record.error is not None]
    return {message: messages.count(message) for message in dict.fromkeys(messages)}
