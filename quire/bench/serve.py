# SPDX-License-Identifier: Apache-2.0
"""Load generator: sends requests to a running server at chosen times, and computes metrics.

TTFT: send to first token. TPOT: time per token after the first. ITL: gap between two events of a stream.

Invariant: a failed request is recorded and affects no other. Measured times are seconds since the first arrival;
reported times are milliseconds.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, nullcontext
from dataclasses import dataclass, field
from typing import Any

from quire.bench.workload import arrival_times, mean, percentile, random_prompts, standard_deviation
from quire.entrypoints.cli.chat import first_model
from quire.entrypoints.cli.client import ServerClient, carries_tokens
from quire.errors import QuireError
from quire.progress import Progress

TITLES = {
    "ttft": "Time to First Token",
    "tpot": "Time per Output Token (excl. 1st token)",
    "itl": "Inter-token Latency",
}
WIDTH = 50


@dataclass
class RequestRecord:
    """One request: send time, event times, tokens, and `error` if it failed."""

    sent_s: float
    event_times_s: list[float] = field(default_factory=list)
    end_s: float = 0.0
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    error: str | None = None

    @property
    def ttft_s(self) -> float:
        return self.event_times_s[0] - self.sent_s

    @property
    def itl_s(self) -> list[float]:
        return [after - before for before, after in itertools.pairwise(self.event_times_s)]

    @property
    def tpot_s(self) -> float:
        return (self.event_times_s[-1] - self.event_times_s[0]) / (self.num_output_tokens - 1)


@dataclass(frozen=True)
class ServeResult:
    """All requests of a run of `duration_s` seconds."""

    records: Sequence[RequestRecord]
    duration_s: float
    request_rate: float
    max_concurrency: int | None

    @property
    def completed(self) -> list[RequestRecord]:
        return [record for record in self.records if record.error is None]

    @property
    def failed(self) -> list[RequestRecord]:
        return [record for record in self.records if record.error is not None]

    def times_ms(self) -> dict[str, list[float]]:
        """Return metric -> values in milliseconds over the completed requests."""
        done = [record for record in self.completed if record.event_times_s]
        return {
            "ttft": [1000 * record.ttft_s for record in done],
            "tpot": [1000 * record.tpot_s for record in done if record.num_output_tokens > 1],
            "itl": [1000 * gap for record in done for gap in record.itl_s],
        }

    def as_json(self) -> dict[str, float | None]:
        done = self.completed
        num_input, num_output = sum(r.num_prompt_tokens for r in done), sum(r.num_output_tokens for r in done)
        totals: dict[str, float | None] = {
            "duration": self.duration_s,
            "completed": len(done),
            "failed": len(self.failed),
            "total_input_tokens": num_input,
            "total_output_tokens": num_output,
            "request_throughput": len(done) / self.duration_s,
            "output_throughput": num_output / self.duration_s,
            "total_token_throughput": (num_input + num_output) / self.duration_s,
            "max_output_tokens_per_s": peak_tokens_per_s(done),
            "max_concurrent_requests": peak_concurrency(done),
            "request_rate": self.request_rate if self.request_rate != float("inf") else None,
            "max_concurrency": self.max_concurrency,
        }
        for name, values in self.times_ms().items():
            totals |= _summary(name, values)
        return totals

    def lines(self) -> list[str]:
        """Return the result as text."""
        result = self.as_json()
        rows = [" Serving Benchmark Result ".center(WIDTH, "=")]
        rows += [_row(label, result[key]) for label, key in _TOTALS.items() if result[key] is not None]
        for name, title in TITLES.items():
            rows.append(title.center(WIDTH, "-"))
            for statistic in ("mean", "median", "p99"):
                label = f"{statistic.capitalize()} {name.upper()} (ms):"
                rows.append(_row(label, result[f"{statistic}_{name}_ms"]))
        return [*rows, "=" * WIDTH]


def peak_concurrency(records: Sequence[RequestRecord]) -> int:
    """Return the most requests in flight at once."""
    changes = [(record.sent_s, 1) for record in records] + [(record.end_s, -1) for record in records]
    return max(itertools.accumulate(change for _, change in sorted(changes)), default=0)


def peak_tokens_per_s(records: Sequence[RequestRecord]) -> float:
    """Return the most tokens in one whole second; a request's tokens are spread evenly over its events."""
    seconds: Counter[int] = Counter()
    tokens: dict[int, float] = {}
    for record in records:
        seconds.clear()
        seconds.update(int(time_s) for time_s in record.event_times_s)
        for second, num_events in seconds.items():
            share = num_events / len(record.event_times_s)
            tokens[second] = tokens.get(second, 0.0) + share * record.num_output_tokens
    return max(tokens.values(), default=0.0)


def _summary(name: str, values: Sequence[float]) -> dict[str, float | None]:
    return {
        f"mean_{name}_ms": mean(values),
        f"median_{name}_ms": percentile(values, 50),
        f"std_{name}_ms": standard_deviation(values),
        f"p99_{name}_ms": percentile(values, 99),
    }


_TOTALS = {
    "Successful requests:": "completed",
    "Failed requests:": "failed",
    "Maximum request concurrency:": "max_concurrency",
    "Request rate configured (RPS):": "request_rate",
    "Benchmark duration (s):": "duration",
    "Total input tokens:": "total_input_tokens",
    "Total generated tokens:": "total_output_tokens",
    "Request throughput (req/s):": "request_throughput",
    "Output token throughput (tok/s):": "output_throughput",
    "Peak output token throughput (tok/s):": "max_output_tokens_per_s",
    "Peak concurrent requests:": "max_concurrent_requests",
    "Total token throughput (tok/s):": "total_token_throughput",
}


def _row(label: str, value: float | None) -> str:
    shown = f"{value:.2f}" if isinstance(value, float) else str(value)
    return f"{label:<40}{shown:>10}"


ALPHABET_TEXT = (
    "The quick brown fox jumps over the lazy dog while 1234567890 pages gather, fold and wait to be read."
)
"""Text tokenized by the server under test; random prompts draw from its token ids."""

Body = dict[str, Any]


@dataclass(frozen=True)
class LoadPlan:
    """Requests to send: lengths in tokens, rate in requests per second."""

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
    """Warm up the server, send the requests, and wait until all have finished.

    Raises:
        QuireError: the server is unreachable, or a warm-up request failed.
    """
    model = model or await first_model(client, "/v1/models")
    bodies = await request_bodies(client, model, plan)
    for body in bodies[: plan.num_warmups]:
        await _warm_up(client, plan.endpoint, body)
    slots: AbstractAsyncContextManager[Any] = nullcontext()
    if plan.max_concurrency is not None:
        slots = asyncio.Semaphore(plan.max_concurrency)
    start_s = clock()

    progress = Progress(plan.num_prompts, "Benchmark", "requests", ends=False)

    async def send(body: Body, arrival_s: float) -> RequestRecord:
        await asyncio.sleep(arrival_s - (clock() - start_s))
        async with slots:
            record = await send_one(client, plan.endpoint, body, lambda: clock() - start_s)
        progress.update()
        return record

    arrivals = arrival_times(plan.num_prompts, plan.request_rate, plan.seed)
    to_send = zip(bodies[plan.num_warmups :], arrivals, strict=True)
    records = await asyncio.gather(*(send(body, arrival_s) for body, arrival_s in to_send))
    duration_s = clock() - start_s
    progress.close()
    return ServeResult(records, duration_s, plan.request_rate, plan.max_concurrency)


async def send_one(
    client: ServerClient, endpoint: str, body: Body, clock: Callable[[], float]
) -> RequestRecord:
    """Send one request and record its events; a failure sets the record's `error`."""
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
    """Return a body for each warm-up request and then for each prompt."""
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
    """Return message -> number of requests that failed with it."""
    messages = [record.error for record in records if record.error is not None]
    return {message: messages.count(message) for message in dict.fromkeys(messages)}
