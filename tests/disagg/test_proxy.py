# SPDX-License-Identifier: Apache-2.0
"""The proxy speaks vLLM's protocol, and a client gets one reply or one error whatever its engines do."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from quire.disagg.engines import ProxiedEngine, Timeouts
from quire.disagg.proxy import ASKED, DisaggProxy
from quire.errors import ConfigError
from tests.disagg.fakes import EVENTS, PARAMS, FakeEngine, fakes, served

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 7}
PATH = "/v1/chat/completions"
WITHIN_S = 120.0


def proxy_of(prefill: list[FakeEngine], decode: list[FakeEngine], **options: Any) -> DisaggProxy:
    """Return a proxy that probes its engines once, at the start."""
    halves = [[ProxiedEngine(fake.url) for fake in half] for half in (prefill, decode)]
    return DisaggProxy(*halves, **({"probe_s": 3600.0} | options))


def post(url: str, body: Any = CHAT, path: str = PATH, **options: Any) -> httpx.Response:
    return httpx.post(f"{url}{path}", json=body, timeout=WITHIN_S, **options)


def wait_until(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + WITHIN_S
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.005)


def test_both_engines_get_the_params_of_vllms_proxy() -> None:
    with fakes(2) as (prefill, decode), served(proxy_of([prefill], [decode])) as url:
        body = CHAT | {"min_tokens": 5, "n": 2, "max_completion_tokens": 7}
        reply = post(url, body, headers={"authorization": "Bearer key", "x-request-id": "mine"})
        assert reply.status_code == 200
        assert reply.json()["got"] == PARAMS
        ((path, headers, first),) = prefill.requests
        assert first == CHAT | {
            "max_tokens": 1, "max_completion_tokens": 1, "stream": False, "kv_transfer_params": ASKED,
        }  # fmt: skip
        ((_, later, second),) = decode.requests
        assert second == body | {"kv_transfer_params": PARAMS}
        assert path == PATH
        for got in (headers, later):
            assert (got["authorization"], got["x-request-id"]) == ("Bearer key", "mine")
        post(url)
        assert prefill.requests[1][1]["x-request-id"] == decode.requests[1][1]["x-request-id"] != "mine"


def test_a_stream_arrives_unchanged() -> None:
    with fakes(2) as (prefill, decode), served(proxy_of([prefill], [decode])) as url:
        reply = post(url, CHAT | {"stream": True, "stream_options": {"include_usage": True}})
        assert reply.content == b"".join(EVENTS)
        assert "stream_options" not in prefill.requests[0][2]
        assert decode.requests[0][2]["stream_options"] == {"include_usage": True}


@pytest.mark.parametrize("stage", ["accept", "head", "body", "gone", 500, 503, 429])
@pytest.mark.parametrize("stream", [False, True])
def test_a_lost_prefill_engine_is_replaced(stage: str | int, stream: bool) -> None:
    with fakes(3) as (lost, other, decode), served(proxy_of([lost, other], [decode])) as url:
        _break(lost, stage)
        assert post(url, CHAT | {"stream": stream}).status_code == 200
        assert decode.requests[0][2]["kv_transfer_params"] == PARAMS
        _break(other, stage)
        assert post(url, CHAT | {"stream": stream}).status_code == 200
        assert "kv_transfer_params" not in decode.requests[1][2], "the decode engine does it all"


@pytest.mark.parametrize("stage", ["accept", "head", "body", "gone", 503])
@pytest.mark.parametrize("stream", [False, True])
def test_a_lost_decode_engine_is_replaced(stage: str | int, stream: bool) -> None:
    with fakes(3) as (prefill, lost, other), served(proxy_of([prefill], [lost, other])) as url:
        _break(lost, stage)
        reply = post(url, CHAT | {"stream": stream})
        assert reply.status_code == 200
        assert other.requests[0][2]["kv_transfer_params"] == PARAMS
        _break(other, stage)
        reply = post(url, CHAT | {"stream": stream})
        assert reply.status_code == 503
        assert set(reply.json()) == {"error"}


def test_a_stream_that_breaks_later_ends_in_one_error() -> None:
    with fakes(3) as (prefill, lost, other), served(proxy_of([prefill], [lost, other])) as url:
        lost.breaks = "event"
        other.breaks = "event"
        events = post(url, CHAT | {"stream": True}).content.split(b"\n\n")
        assert events[:2] == [event.strip() for event in EVENTS[:2]]
        assert b"the engine was lost" in events[2]
        assert events[3:] == [b"data: [DONE]", b""]
        assert len(lost.requests) + len(other.requests) == 1


def test_a_refusal_of_the_decode_engine_reaches_the_client() -> None:
    """Once; that the prefill engine refuses as well, or the blocks are refused first, does not matter."""
    with fakes(2) as (prefill, decode), served(proxy_of([prefill], [decode])) as url:
        decode.status = 400
        for prefill.status in (200, 400):
            reply = post(url)
            assert (reply.status_code, reply.json()) == (400, {"error": {"message": "no"}})
        assert ["kv_transfer_params" in body for _, _, body in decode.requests] == [True, False, False]


@pytest.mark.parametrize("status", [400, 401, 404])
def test_a_prefill_engine_that_refuses_is_done_without(status: int) -> None:
    """Such as one that is started without --kv-transfer-config, or serves another model or other keys."""
    with fakes(2) as (prefill, decode), served(proxy_of([prefill], [decode])) as url:
        prefill.status = status
        assert post(url).status_code == 200
        assert decode.requests[0][2] == CHAT
        assert httpx.get(f"{url}/health").json()["counts"] == {"prefill_skipped": 1}


@pytest.mark.parametrize("stream", [False, True])
def test_blocks_that_are_refused_are_done_without(stream: bool) -> None:
    """Such as those of a prefill engine that is not among the decode engine's peers."""
    with fakes(2) as (prefill, decode), served(proxy_of([prefill], [decode])) as url:
        decode.params_status = 400
        body = CHAT | {"stream": stream}
        assert post(url, body).status_code == 200
        assert [asked for _, _, asked in decode.requests] == [body | {"kv_transfer_params": PARAMS}, body]
        counts = httpx.get(f"{url}/health").json()["counts"]
        assert counts == {"prefilled": 1, "params_refused": 1}


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": ["a", "b"]},
        {"prompt": [[1], [2]]},
        {"prompt": "a", "echo": True},
        {"prompt": "a", "use_beam_search": True},
        {},
    ],
)
def test_unshareable_request_is_decoded_alone(body: dict[str, Any]) -> None:
    with fakes(2) as (prefill, decode), served(proxy_of([prefill], [decode])) as url:
        asked = body | {"kv_transfer_params": {"remote_host": "evil"}}
        assert post(url, asked, "/v1/completions").status_code == 200
        assert not prefill.requests
        assert decode.requests[0][2] == body


def test_other_paths_are_not_passed_on() -> None:
    with fakes(2) as (prefill, decode), served(proxy_of([prefill], [decode])) as url:
        assert httpx.get(f"{url}/v1/models", timeout=WITHIN_S).status_code == 200
        reply = post(url, {}, "/sleep")
        assert reply.status_code == 404
        assert "/v1/chat/completions" in reply.json()["error"]["message"]
        assert not decode.requests


def test_health_is_that_of_the_decode_engines() -> None:
    with fakes(2) as (prefill, decode):
        proxy = proxy_of([prefill], [decode], probe_s=0.01)
        with served(proxy) as url:
            prefill.status = 500
            wait_until(lambda: not httpx.get(f"{url}/health").json()["prefill"][prefill.url])
            assert httpx.get(f"{url}/health").status_code == 200
            decode.stop()
            wait_until(lambda: httpx.get(f"{url}/health").status_code == 503)
            prefill.status = 200
            wait_until(lambda: httpx.get(f"{url}/health").json()["prefill"][prefill.url])


def test_connections_are_bounded_and_a_gone_client_frees_its_own() -> None:
    with fakes(2) as (prefill, decode):
        prefill.waits = threading.Event()
        with served(proxy_of([prefill], [decode], max_connections=1)) as url:
            with pytest.raises(httpx.ReadTimeout):
                httpx.post(f"{url}{PATH}", json=CHAT, timeout=httpx.Timeout(WITHIN_S, read=2.0))
            wait_until(lambda: prefill.num_closed_early == 1)
            done: list[httpx.Response] = []
            first = threading.Thread(target=lambda: done.append(post(url)))
            first.start()
            wait_until(lambda: len(prefill.requests) == 2)
            assert post(url).status_code == 503
            prefill.waits.set()
            first.join(WITHIN_S)
            assert done[0].status_code == 200


def test_log_names_the_reason_for_skipping_an_engine(caplog: pytest.LogCaptureFixture) -> None:
    with fakes(2) as (prefill, decode), served(proxy_of([prefill], [decode])) as url:
        prefill.breaks = "body"
        assert post(url).status_code == 200
    reason = "it closed the connection before its reply was complete"
    assert f"{prefill.url} is not used: {prefill.url}: {reason}" in caplog.text


def test_a_slow_engine_is_left() -> None:
    with fakes(3) as (slow, prefill, decode):
        slow.waits = threading.Event()
        timeouts = Timeouts(reply_s=0.3)
        with served(proxy_of([slow, prefill], [decode], timeouts=timeouts)) as url:
            assert post(url).status_code in (200, 503), "a busy machine may find all of them slow"
            assert len(slow.requests) == 1


def test_an_engine_that_freezes_is_left_by_those_that_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    with fakes(3) as (frozen, prefill, decode):
        frozen.waits = threading.Event()
        with served(proxy_of([frozen, prefill], [decode], probe_s=0.01)) as url:
            done: list[httpx.Response] = []
            client = threading.Thread(target=lambda: done.append(post(url)))
            client.start()
            wait_until(lambda: bool(frozen.requests or prefill.requests))
            monkeypatch.setattr("quire.disagg.engines.PROBE_S", 0.1)
            frozen.is_frozen = True
            client.join(WITHIN_S)
            assert done[0].status_code in (200, 503), "a busy machine may find all of them frozen"
            assert not any(frozen.url in one.json().get("url", "") for one in done)


@pytest.mark.parametrize("url", ["localhost:1", "https://h:1", "http://h:x", "http://h/v1", "http://u@h", ""])
def test_other_urls_are_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="http://HOST:PORT"):
        ProxiedEngine(url)
    with pytest.raises(ConfigError, match="at least one"):
        DisaggProxy([], [])


def _break(engine: FakeEngine, stage: str | int) -> None:
    if stage == "gone":
        engine.stop()
    elif isinstance(stage, int):
        engine.status = stage
    else:
        engine.breaks = stage
