# SPDX-License-Identifier: Apache-2.0
"""Load, cancellation and the end of streams, against a real server.

Every test ends with the look at the server that `service` takes.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import resource
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.reliability.service import ADMIN, Service, rss_bytes, serving, wait_until

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the current weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


def events(reply: httpx.Response) -> list[Any]:
    """Return the events of an OpenAI stream, parsed; [DONE] stays text."""
    data = [line.removeprefix("data: ") for line in reply.iter_lines() if line.startswith("data: ")]
    return [one if one == "[DONE]" else json.loads(one) for one in data]


def stream(service: Service, path: str, body: dict[str, Any]) -> list[Any]:
    with service.client.stream("POST", path, json={**body, "stream": True}) as reply:
        if reply.status_code != 200:
            reply.read()
            assert reply.status_code == 200, reply.text
        return events(reply)


def random_request(seed: int) -> tuple[str, dict[str, Any]]:
    """A path and a body; the same for the same seed."""
    rng = random.Random(seed)
    texts = [
        "What is 12 + 30?",
        "Tell me a joke.",
        "What is the weather like in Paris?",
        "Grüße, 世界 🌍!",
        "Count",
    ]
    body: dict[str, Any] = {
        "max_tokens": rng.choice([1, 2, 5, 17, 40]),
        "temperature": rng.choice([0, 0.7, 1.3]),
        "seed": rng.randrange(1000),
        "n": rng.choice([1, 1, 2, 3]),
    }
    optional: dict[str, Any] = {
        "top_p": 0.9,
        "top_k": 20,
        "min_p": 0.05,
        "presence_penalty": 1.0,
        "frequency_penalty": 0.5,
        "repetition_penalty": 1.2,
        "stop": rng.choice(["e", [" the", "a"], [".", "!", "?"], "42"]),
        "min_tokens": 1,
        "ignore_eos": True,
        "logit_bias": {"5": 20.0},
        "skip_special_tokens": False,
        "include_stop_str_in_output": True,
    }
    body |= {name: optional[name] for name in rng.sample(sorted(optional), rng.randrange(5))}
    if rng.random() < 0.5:
        body |= {"prompt": rng.choice([*texts, [7, 8, 9], [texts[0], texts[1]]])}
        body |= {"logprobs": 2} if rng.random() < 0.5 else {}
        return "/v1/completions", body
    body |= {"messages": [{"role": "user", "content": rng.choice(texts)}]}
    body |= {"tools": [WEATHER]} if rng.random() < 0.4 else {}
    body |= {"logprobs": True, "top_logprobs": 2} if rng.random() < 0.4 and "tools" not in body else {}
    return "/v1/chat/completions", body


def joined(path: str, chunks: list[Any]) -> dict[int, dict[str, Any]]:
    """Join the chunks of each choice."""
    choices: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            mine = choices.setdefault(
                choice["index"], {"text": "", "logprobs": [], "calls": {}, "finish": [], "stop": None}
            )
            delta = choice.get("delta", choice)
            mine["text"] += delta.get("content" if "chat" in path else "text") or ""
            mine["logprobs"] += logprobs_of(choice)
            for call in delta.get("tool_calls") or []:
                known = mine["calls"].setdefault(call["index"], ["", ""])
                known[0] += call["function"].get("name") or ""
                known[1] += call["function"].get("arguments") or ""
            if choice["finish_reason"] is not None:
                mine["finish"].append(choice["finish_reason"])
                mine["stop"] = choice.get("stop_reason")
    return choices


def logprobs_of(choice: dict[str, Any]) -> list[Any]:
    found = choice.get("logprobs") or {}
    if "content" in found:
        return list(found["content"])
    return list(zip(found.get("tokens", []), found.get("token_logprobs", []), strict=True))


def whole(path: str, reply: dict[str, Any]) -> dict[int, dict[str, Any]]:
    """The same of a reply that came at once."""
    choices: dict[int, dict[str, Any]] = {}
    for choice in reply["choices"]:
        message = choice.get("message", choice)
        calls = {
            index: [call["function"]["name"], call["function"]["arguments"]]
            for index, call in enumerate(message.get("tool_calls") or [])
        }
        choices[choice["index"]] = {
            "text": message.get("content" if "chat" in path else "text") or "",
            "logprobs": logprobs_of(choice),
            "calls": calls,
            "finish": [choice["finish_reason"]],
            "stop": choice.get("stop_reason"),
        }
    return choices


@pytest.mark.item(37, 38)
@pytest.mark.parametrize(
    "seeds", [range(30), pytest.param(range(30, 200), marks=pytest.mark.more)], ids=["30", "170"]
)
def test_stream_equals_the_whole_reply_and_ends_once(seeds: range, service: Service) -> None:
    def compare(seed: int) -> None:
        path, body = random_request(seed)
        options = {"stream_options": {"include_usage": True}}
        *chunks, done = stream(service, path, {**body, **options})
        reply = service.post(path, body).json()
        assert done == "[DONE]"
        assert chunks[-1]["choices"] == []
        got, want = joined(path, chunks), whole(path, reply)
        assert {len(choice["finish"]) for choice in got.values()} == {1}
        assert got == want, body
        for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
            assert chunks[-1]["usage"][name] == reply["usage"][name]

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(compare, seeds))


@pytest.mark.item(39)
def test_usage_and_metrics_agree_and_every_reply_has_times(service: Service) -> None:
    counters = (
        "quire:prompt_tokens_total",
        "quire:generation_tokens_total",
        "quire:prompt_tokens_cached_total",
    )
    before = [service.metrics(name) for name in counters]
    bodies = [{"prompt": [9] * 40, "n": n, "max_tokens": 7, "ignore_eos": True, "seed": 1} for n in (1, 2, 3)]
    sums = [0, 0, 0]
    for body in bodies:
        reply = service.post("/v1/completions", body).json()
        usage = reply["usage"]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        sums = [sums[0] + usage["prompt_tokens"], sums[1] + usage["completion_tokens"], sums[2] + cached]
        assert set(reply["timings"]) == {"queue_s", "prefill_s", "decode_s", "tokens_per_s"}
        assert all(value >= 0 for value in reply["timings"].values())
    wait_until(
        lambda: (
            [service.metrics(name) for name in counters] == [a + b for a, b in zip(before, sums, strict=True)]
        ),
        5,
        lambda: f"{[service.metrics(name) for name in counters]} after {before} and {sums}",
    )


BODY = {"prompt": "Tell me a long story.", "max_tokens": 400, "ignore_eos": True}
LONG = {"prompt": [11] * 1500, "max_tokens": 400, "ignore_eos": True}


def leave_at(service: Service, body: dict[str, Any], moment: str, path: str = "/v1/completions") -> None:
    """Send a request and go away at this moment."""
    content = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        f"content-length: {len(content)}\r\n\r\n"
    ).encode()
    with socket.create_connection(("127.0.0.1", service.process.port), timeout=30) as client:
        if moment == "in the head":
            client.sendall(head[:40])
        elif moment == "in the upload":
            client.sendall(head + content[: len(content) // 2])
        else:
            client.sendall(head + content)
        if moment == "a little later":
            time.sleep(0.02)
        if moment in ("at the first byte", "reset at the first byte"):
            client.recv(1)
        if moment == "after some tokens":
            received = 0
            while received < 5000 and (data := client.recv(4096)):
                received += len(data)
        if moment.startswith("reset"):
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")


MOMENTS = [
    "in the head", "in the upload", "at once", "reset at once", "a little later", "at the first byte",
    "reset at the first byte", "after some tokens",
]  # fmt: skip


@pytest.mark.item(32)
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_client_that_leaves_takes_its_request_along(moment: str, service: Service) -> None:
    shapes: list[tuple[str, dict[str, Any]]] = [
        ("/v1/completions", {**BODY, "stream": True}),
        ("/v1/completions", {**BODY, "stream": True, "n": 4}),
        ("/v1/completions", {**LONG, "stream": True}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a " * 1500}], "stream": True}),
    ]
    if "byte" not in moment and moment != "after some tokens":  # those get their first byte at the end
        shapes += [(path, {**body, "stream": False}) for path, body in shapes]
        shapes.append(("/v1/completions", {**BODY, "best_of": 4}))
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda shape: leave_at(service, shape[1], moment, shape[0]), shapes * 2))


@pytest.mark.item(33)
def test_an_abort_ends_a_request_once_however_often_it_comes(service: Service) -> None:
    def abort(body: dict[str, Any]) -> int:
        reply = service.client.post("/abort_requests", json=body, headers=ADMIN)
        return int(reply.json()["num_aborted"])

    with service.client.stream("POST", "/v1/completions", json={**BODY, "stream": True}) as reply:
        lines = reply.iter_lines()
        first = json.loads(next(line for line in lines if line.startswith("data")).removeprefix("data: "))
        wait_until(lambda: abort({"request_ids": [first["id"]]}) == 1, 300, "it is not found")
        abort({"request_ids": [first["id"], first["id"], "unknown"]})
        rest = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    terminal = [
        event
        for event in rest
        if "error" in event or any(choice["finish_reason"] for choice in event["choices"])
    ]
    assert len(terminal) == 1
    assert abort({}) == 0


@pytest.mark.item(33)
def test_aborts_at_any_moment_leave_one_end_to_each_stream(service: Service) -> None:
    rng = random.Random(5)

    def one(number: int) -> int:
        body = {**BODY, "max_tokens": 1 + number % 7, "stream": True, "seed": number}
        with service.client.stream("POST", "/v1/completions", json=body) as reply:
            if reply.status_code != 200:  # it was aborted before there was anything to stream
                return 1 if "error" in json.loads(reply.read()) else 0
            found = events(reply)
        assert found[-1] == "[DONE]"
        ends = [event for event in found[:-1] if "error" in event or event["choices"][0]["finish_reason"]]
        return len(ends)

    with ThreadPoolExecutor(8) as pool:
        streams = [pool.submit(one, number) for number in range(40)]
        while not all(one.done() for one in streams):
            service.client.post("/abort_requests", json={}, headers=ADMIN)
            time.sleep(rng.random() / 50)
    assert {stream.result() for stream in streams} == {1}


@pytest.mark.item(36)
def test_a_deadline_ends_a_request_and_gives_its_memory_back(service: Service) -> None:
    late = service.complete([3] * 1900, timeout=1e-6)
    assert late.status_code == 504
    assert late.headers["x-should-retry"] == "false"
    wait_until(lambda: not service.held(), 300, "the late one holds something")
    cut = service.complete(timeout=0.25, max_tokens=2000, ignore_eos=True)
    assert cut.status_code == 200, cut.text
    assert cut.json()["choices"][0]["stop_reason"] == "timeout"
    *chunks, done = stream(service, "/v1/completions", {**BODY, "max_tokens": 2000, "timeout": 0.25})
    assert done == "[DONE]"
    assert chunks[-1]["choices"][0]["stop_reason"] == "timeout"


@pytest.mark.item(34)
def test_client_that_does_not_read_affects_no_others(service: Service) -> None:
    """test_connection.py has the end of the write timeout; here the client goes first."""
    clients = []
    for _ in range(20):
        client = socket.create_connection(("127.0.0.1", service.process.port))
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        content = json.dumps({**BODY, "max_tokens": 200, "stream": True}).encode()
        client.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
            b"content-length: %d\r\n\r\n" % len(content) + content
        )
        clients.append(client)
    assert service.complete(temperature=0).status_code == 200
    assert service.canary() == service.baseline.canary
    for client in clients:
        client.close()


@pytest.mark.more
@pytest.mark.item(40)
def test_a_cache_that_is_too_small_for_all_serves_all(tmp_path: Path, service: Service) -> None:
    """64 requests grow in a cache of 40 blocks, which is room for six, and give what they give with room for all."""
    bodies = [
        {"prompt": [5 + index, 7, 9], "max_tokens": 90, "ignore_eos": True, "temperature": 1.0, "seed": index}
        | {"return_token_ids": True, "logprobs": 1}
        for index in range(64)
    ]

    def run(where: Service) -> list[Any]:
        def one(body: dict[str, Any]) -> Any:
            choice = where.post("/v1/completions", body).json()["choices"][0]
            return choice["token_ids"], choice["logprobs"]["token_logprobs"]

        with ThreadPoolExecutor(64) as pool:
            return list(pool.map(one, bodies))

    small = ("--num-gpu-blocks-override", "40", "--max-model-len", "512", "--no-enable-prefix-caching")
    expected = run(service)
    with serving(tmp_path, *small) as tiny:
        assert run(tiny) == expected
        assert tiny.metrics("quire:num_preemptions_total") > 0
        tiny.baseline.check()


@pytest.mark.more
@pytest.mark.item(28)
def test_requests_beyond_the_queue_are_refused_and_places_return(tmp_path: Path) -> None:
    """While the core stands still nothing leaves the queue: exactly so many are let in, and the rest need no core."""
    args = ("--max-num-queued-reqs", "4", "--core-heartbeat-timeout", "600")
    with serving(tmp_path, *args) as limited, ThreadPoolExecutor(60) as pool:
        for _ in range(3):
            core = limited.process.core_pid()
            assert core is not None
            os.kill(core, signal.SIGSTOP)
            try:
                asked = [pool.submit(limited.complete, ignore_eos=True) for _ in range(60)]
                refused = [one.result() for one in itertools.islice(as_completed(asked, 60), 56)]
                waiting = [one for one in asked if not one.done()]
            finally:
                os.kill(core, signal.SIGCONT)
            assert {reply.status_code for reply in refused} == {503}
            assert all(int(reply.headers["retry-after"]) > 0 for reply in refused)
            assert [one.result().status_code for one in waiting] == [200] * 4
        limited.baseline.check()


@pytest.mark.more
@pytest.mark.item(52)
def test_short_memory_keeps_in_flight_and_refuses_other_requests(
    tmp_path: Path,
) -> None:
    """The limit is beyond what any machine has, so memory is always short."""
    body = {"prompt": "Count", "max_tokens": 400, "ignore_eos": True, "stream": True}
    with serving(tmp_path, "--min-free-memory", str(10**9)) as limited:
        for _ in range(2):
            with limited.client.stream("POST", "/v1/completions", json=body) as first:
                lines = first.iter_lines()
                next(lines)
                refused = [limited.complete(), limited.chat()]
                assert {reply.status_code for reply in refused} == {503}
                for reply in refused:
                    assert int(reply.headers["retry-after"]) > 0
                    assert "memory is short" in reply.json()["error"]["message"]
                assert limited.process.health() == 200
                assert list(lines)[-2:] == ["data: [DONE]", ""]
            assert limited.complete().status_code == 200
        name = 'quire:admission_rejections_total{model_name="quire-demo",reason="min_free_memory"}'
        assert limited.metrics(name) == 4
        limited.baseline.check()


@pytest.mark.more
@pytest.mark.item(35)
def test_connections_beyond_open_files_refused_server_continues(tmp_path: Path) -> None:
    with serving(tmp_path, "--max-connections", "20", "--read-timeout", "3") as limited:
        idle: list[socket.socket] = []
        for _ in range(80):
            with contextlib.suppress(OSError):
                client = socket.create_connection(("127.0.0.1", limited.process.port), timeout=5)
                client.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n")
                idle.append(client)
        threading.Event().wait(0.2)
        with contextlib.suppress(httpx.TransportError):
            assert limited.client.get("/health").status_code == 503
        wait_until(lambda: limited.process.health() == 200, 300, "half-sent heads keep their connections")
        for client in idle:
            client.close()
        limited.baseline.check()


SLOW = 1000
"""Clients that send half a head and no more."""


@pytest.mark.more
@pytest.mark.item(35)
@pytest.mark.skipif(
    resource.getrlimit(resource.RLIMIT_NOFILE)[0] < 2 * SLOW, reason="ulimit -n leaves no room for them"
)
def test_thousand_half_sent_heads_close_and_real_requests_pass(tmp_path: Path) -> None:
    with serving(tmp_path, "--read-timeout", "5") as attacked, contextlib.ExitStack() as stack:
        for _ in range(SLOW):
            client = stack.enter_context(socket.create_connection(("127.0.0.1", attacked.process.port), 30))
            client.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nx-slow: ")
            stack.callback(client.close)
            slow = client
        assert {attacked.complete().status_code for _ in range(5)} == {200}
        assert attacked.process.health() == 200
        answer = b""
        slow.settimeout(30)
        while block := slow.recv(4096):
            answer += block
        assert answer.startswith(b"HTTP/1.1 408 ")
        attacked.baseline.check()  # descriptors, too: ours are open still, and the server's are closed


@pytest.mark.item(59)
def test_memory_is_given_back_however_often_a_request_comes(service: Service) -> None:
    def burst() -> None:
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda index: service.complete([index] * 200, n=2, logprobs=2), range(100)))

    for _ in range(3):
        burst()
    before = rss_bytes(service.pid), rss_bytes(service.baseline.core_pid)
    for _ in range(2):
        burst()
    grown = [
        now - then
        for now, then in zip(
            (rss_bytes(service.pid), rss_bytes(service.baseline.core_pid)), before, strict=True
        )
    ]
    assert max(grown) < 20 * 2**20, grown
