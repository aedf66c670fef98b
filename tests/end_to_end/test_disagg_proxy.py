# SPDX-License-Identifier: Apache-2.0
"""Two real servers behind the proxy: the bits of one, also when either is killed."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from quire.disagg.engines import ProxiedEngine
from quire.disagg.proxy import ASKED, DisaggProxy
from tests.disagg import fakes
from tests.disagg.fakes import served
from tests.end_to_end.server import Server, free_port, has_ended, wait_until

PATH = "/v1/completions"
WITHIN_S = 300.0
PROMPT = "A prompt that is long enough for a good number of blocks of four tokens each, and a little more."
CHAT = {
    "messages": [{"role": "user", "content": PROMPT}],
    "max_tokens": 8,
    "temperature": 0,
    "logprobs": True,
}
TEXT = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0, "logprobs": 1, "ignore_eos": True}


def serve(log: Path, transfer: dict[str, Any] | None) -> Server:
    options = ["--block-size", "4", "--cpu-threads", "1", "--max-num-seqs", "4"]
    if transfer is not None:
        options += ["--kv-transfer-config", json.dumps(transfer)]
    return Server(*options, log=log)


def config(role: str, port: int, **extra: Any) -> dict[str, Any]:
    waits = {"pull_timeout_s": WITHIN_S, "lease_s": WITHIN_S}
    settings = {"kv_connector": "RowServerConnector", "kv_role": role, "kv_port": port}
    return settings | {"kv_connector_extra_config": waits | extra}


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Server]]:
    """A prefill server and a decode server."""
    folder, port = tmp_path_factory.mktemp("disagg"), free_port()
    prefill = serve(folder / "prefill.log", config("kv_producer", port))
    decode = serve(folder / "decode.log", config("kv_consumer", port, peers=[f"127.0.0.1:{port}"]))
    yield prefill.wait_ready(), decode.wait_ready()
    for server in (prefill, decode):
        server.stop()


def post(url: str, body: dict[str, Any], path: str = PATH) -> httpx.Response:
    return httpx.post(f"{url}{path}", json=body, timeout=WITHIN_S)


def answer_of(reply: httpx.Response) -> Any:
    """Return text and logprobs of a reply."""
    assert reply.status_code == 200, reply.text
    return [{name: one[name] for name in one if name != "index"} for one in reply.json()["choices"]]


def metrics_of(server: Server) -> dict[str, float]:
    lines = httpx.get(f"{server.url}/metrics", timeout=WITHIN_S).text.splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if line.startswith("quire:kv_transfer"))
    return {name.partition("{")[0].removeprefix("quire:kv_transfer_"): float(value) for name, value in pairs}


def salted(body: dict[str, Any], salt: str) -> dict[str, Any]:
    """Return a request whose blocks no other test has computed."""
    return body | {"cache_salt": salt}


@pytest.mark.parametrize(("path", "body"), [(PATH, TEXT), ("/v1/chat/completions", CHAT)])
def test_the_proxy_has_the_bits_of_one_server(
    path: str, body: dict[str, Any], engines: tuple[Server, Server]
) -> None:
    prefill, decode = engines
    asked = salted(body, f"bits of {path}")
    expected = answer_of(post(prefill.url, asked | {"cache_salt": "alone"}, path))
    with served(DisaggProxy([ProxiedEngine(prefill.url)], [ProxiedEngine(decode.url)])) as url:
        reply = post(url, asked, path)
        assert answer_of(reply) == expected
        assert reply.json()["usage"]["prompt_tokens_details"]["stored_tokens"] > 20
        streamed = post(url, asked | {"stream": True}, path).text
    assert streamed.endswith("data: [DONE]\n\n")
    metrics = metrics_of(decode)
    assert metrics["pulls_total"] >= 1
    assert metrics["failed_pulls_total"] == 0
    assert metrics_of(prefill)["offered_blocks_total"] >= metrics["pulled_blocks_total"] > 0


def test_vllms_protocol_over_plain_http(engines: tuple[Server, Server]) -> None:
    """The requests that vLLM's example proxy and llm-d's side-car send, with nothing of ours between."""
    prefill, decode = engines
    asked = salted(TEXT, "plain")
    first = post(
        prefill.url,
        asked | {"max_tokens": 1, "max_completion_tokens": 1, "stream": False, "kv_transfer_params": ASKED},
    )
    params = first.json()["kv_transfer_params"]
    assert (params["do_remote_prefill"], params["do_remote_decode"]) == (True, False)
    assert params["remote_block_ids"][0]
    assert all(
        params[name] for name in ("remote_engine_id", "remote_host", "remote_port", "remote_request_id")
    )
    second = post(decode.url, asked | {"kv_transfer_params": params})
    assert answer_of(second) == answer_of(post(decode.url, salted(TEXT, "alone")))
    assert second.json()["usage"]["prompt_tokens_details"]["stored_tokens"] == params["remote_num_tokens"]


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ("x", "kv_transfer_params"),
        ({"do_remote_prefill": "yes"}, "true or false"),
        ({"do_remote_decode": True}, "whose kv_role is kv_consumer"),
        (
            {
                "do_remote_prefill": True, "remote_host": "169.254.169.254", "remote_port": 80,
                "remote_request_id": "r" * 36,
            },
            "not among the peers",
        ),
        ({"do_remote_prefill": True, "remote_block_ids": [0] * 200_000}, "131072 are allowed"),
    ],
)  # fmt: skip
def test_hostile_params_are_refused_with_a_message(
    params: Any, words: str, engines: tuple[Server, Server]
) -> None:
    for path, body in ((PATH, TEXT), ("/v1/chat/completions", CHAT)):
        reply = post(engines[1].url, body | {"kv_transfer_params": params}, path)
        assert reply.status_code == 400
        assert words in reply.json()["error"]["message"]
    many = TEXT | {"prompt": ["a", "b"], "kv_transfer_params": {"do_remote_prefill": True}}
    assert "for one prompt" in post(engines[1].url, many).json()["error"]["message"]


@pytest.mark.more
def test_servers_without_transfers_refuse_params(tmp_path: Path) -> None:
    server = serve(tmp_path / "log", None).wait_ready()
    reply = post(server.url, TEXT | {"kv_transfer_params": ASKED})
    assert reply.status_code == 400
    assert "--kv-transfer-config" in reply.json()["error"]["message"]
    assert post(server.url, TEXT | {"kv_transfer_params": None}).status_code == 200
    server.stop()


@pytest.mark.more
@pytest.mark.parametrize("stage", ["before", "between", "while it is pulled from"])
def test_a_killed_prefill_server_costs_no_request(
    stage: str, engines: tuple[Server, Server], tmp_path: Path
) -> None:
    port = free_port()
    prefill = serve(tmp_path / "prefill.log", config("kv_producer", port)).wait_ready()
    decode = serve(
        tmp_path / "decode.log", config("kv_consumer", port, peers=[f"127.0.0.1:{port}"])
    ).wait_ready()
    asked, expected = salted(TEXT, stage), answer_of(post(engines[0].url, salted(TEXT, "alone")))
    if stage == "before":
        kill(prefill)
        with served(
            DisaggProxy([ProxiedEngine(f"http://127.0.0.1:{prefill.port}")], [ProxiedEngine(decode.url)])
        ) as url:
            assert answer_of(post(url, asked)) == expected
    else:
        params = post(prefill.url, asked | {"max_tokens": 1, "kv_transfer_params": ASKED}).json()[
            "kv_transfer_params"
        ]
        if stage == "between":
            kill(prefill)
            reply = post(decode.url, asked | {"kv_transfer_params": params})
        else:
            core = prefill.core_pid()
            assert core is not None
            os.kill(core, signal.SIGSTOP)
            with ThreadPoolExecutor(1) as pool:
                pending = pool.submit(post, decode.url, asked | {"kv_transfer_params": params})
                wait_until(lambda: metrics_of(decode)["pulls_total"] == 1, WITHIN_S, "it does not pull")
                os.kill(core, signal.SIGKILL)
                reply = pending.result(WITHIN_S)
            prefill.stop()
        assert answer_of(reply) == expected
        assert metrics_of(decode)["failed_pulls_total"] == 1
    decode.stop()


@pytest.mark.more
def test_engines_that_do_not_fit_cost_no_request(engines: tuple[Server, Server], tmp_path: Path) -> None:
    """A prefill engine that is not among the peers, has another key, or offers nothing: the decode engine computes."""
    prefill, decode = engines
    expected, port = answer_of(post(decode.url, salted(TEXT, "alone"))), free_port()
    key_files = []
    for digits in ("ab", "cd"):
        key_files.append(str(tmp_path / digits))
        (tmp_path / digits).write_text(digits * 32)
        (tmp_path / digits).chmod(0o600)
    keyed = serve(tmp_path / "keyed.log", config("kv_producer", port, key_file=key_files[0])).wait_ready()
    peers = [f"127.0.0.1:{port}"]
    other = serve(tmp_path / "other.log", config("kv_consumer", port, peers=peers, key_file=key_files[1]))
    other.wait_ready()
    cases = {
        "of another key": (keyed, other, {"prefilled": 1}),
        "no peer": (prefill, other, {"prefilled": 1, "params_refused": 1}),
        "no producer": (decode, other, {"prefill_skipped": 1}),
    }
    for name, (first, second, counts) in cases.items():
        with served(DisaggProxy([ProxiedEngine(first.url)], [ProxiedEngine(second.url)])) as url:
            for stream in (False, True):
                asked = salted(TEXT, f"{name} {stream}") | {"stream": stream, "n": 2}
                reply = post(url, asked)
                assert reply.status_code == 200, name
                if not stream:
                    assert answer_of(reply) == expected * 2
            got = httpx.get(f"{url}/health", timeout=WITHIN_S).json()["counts"]
            assert got == {count: 2 * number for count, number in counts.items()}
    assert "it has another key; give both sides the same one" in (tmp_path / "other.log").read_text()
    for server in (keyed, other):
        server.stop()


@pytest.mark.more
def test_a_killed_decode_server_ends_its_stream_in_one_error(
    engines: tuple[Server, Server], tmp_path: Path
) -> None:
    prefill, decode = engines
    port = free_port()
    lost = serve(tmp_path / "lost.log", config("kv_both", port, peers=[f"127.0.0.1:{port}"])).wait_ready()
    long = TEXT | {"stream": True, "max_tokens": 400}
    with served(DisaggProxy([ProxiedEngine(lost.url)], [ProxiedEngine(lost.url)], probe_s=3600.0)) as url:
        with httpx.stream("POST", f"{url}{PATH}", json=long, timeout=WITHIN_S) as reply:
            pieces = reply.iter_text()
            begun = next(pieces)
            kill(lost)
            events = (begun + "".join(pieces)).split("\n\n")
        assert events[-2:] == ["data: [DONE]", ""]
        assert sum('"error"' in event for event in events) == 1
    other = [ProxiedEngine(f"http://127.0.0.1:{lost.port}"), ProxiedEngine(decode.url)]
    with served(DisaggProxy([ProxiedEngine(prefill.url)], other, probe_s=3600.0)) as url:
        reply_text = post(url, salted(TEXT, "after")).text
        assert json.loads(reply_text)["usage"]["prompt_tokens_details"]["stored_tokens"] > 20


@pytest.mark.more
@pytest.mark.parametrize("half", ["prefill", "decode"])
def test_an_engine_killed_with_the_request_is_replaced(
    half: str, engines: tuple[Server, Server], tmp_path: Path
) -> None:
    """It is suspended, so that it has the request and no answer when it is killed."""
    prefill, decode = engines
    port = free_port()
    lost = serve(tmp_path / "lost.log", config("kv_both", port, peers=[f"127.0.0.1:{port}"])).wait_ready()
    asked, expected = salted(TEXT, f"killed {half}"), answer_of(post(decode.url, salted(TEXT, "alone")))
    halves = {
        "prefill": ([ProxiedEngine(lost.url)], [ProxiedEngine(decode.url)]),
        "decode": ([ProxiedEngine(prefill.url)], [ProxiedEngine(lost.url), ProxiedEngine(decode.url)]),
    }[half]
    with served(DisaggProxy(*halves, probe_s=3600.0)) as url, ThreadPoolExecutor(1) as pool:

        def health() -> dict[str, Any]:
            state: dict[str, Any] = httpx.get(f"{url}/health", timeout=WITHIN_S).json()
            return state

        wait_until(lambda: all(health()[half].values()), WITHIN_S, "an engine is not healthy")
        lost.process.send_signal(signal.SIGSTOP)
        reply = pool.submit(post, url, asked)
        wait_until(lambda: health()["num_requests"] == 1, WITHIN_S, "the request does not arrive")
        kill(lost)
        assert answer_of(reply.result(WITHIN_S)) == expected
        assert health()["counts"][f"{half}_lost"] == 1


@pytest.mark.more
def test_a_decode_engine_killed_while_it_pulls_is_replaced(
    engines: tuple[Server, Server], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The prefill engine has answered, and its blocks never come."""
    expected = answer_of(post(engines[1].url, salted(TEXT, "alone")))
    with socket.create_server(("127.0.0.1", 0)) as silent, contextlib.ExitStack() as at_end:
        port = silent.getsockname()[1]
        place = {"remote_host": "127.0.0.1", "remote_port": port, "remote_request_id": "r" * 36}
        monkeypatch.setattr(fakes, "PARAMS", {"do_remote_prefill": True, **place})
        prefill = fakes.FakeEngine()
        at_end.callback(prefill.stop)
        decoders = []
        for name in ("lost", "other"):
            extra = {"peers": [f"127.0.0.1:{port}"], "pull_timeout_s": WITHIN_S if name == "lost" else 1.0}
            settings = config("kv_consumer", free_port())
            settings["kv_connector_extra_config"] |= extra
            decoders.append(serve(tmp_path / f"{name}.log", settings).wait_ready())
        lost, other = decoders
        at_end.callback(other.stop)
        halves = [ProxiedEngine(prefill.url)], [ProxiedEngine(lost.url), ProxiedEngine(other.url)]
        with served(DisaggProxy(*halves, probe_s=3600.0)) as url, ThreadPoolExecutor(1) as pool:
            reply = pool.submit(post, url, salted(TEXT, "pulls"))
            wait_until(lambda: metrics_of(lost)["pulls_total"] == 1, WITHIN_S, "it does not pull")
            kill(lost)
            assert answer_of(reply.result(WITHIN_S)) == expected
        wait_until(
            lambda: metrics_of(other)["failed_pulls_total"] == 1, WITHIN_S, "no failed pull is counted"
        )


@pytest.mark.more
@pytest.mark.parametrize("stream", [False, True])
def test_a_failed_pull_is_an_error_by_policy(
    stream: bool, engines: tuple[Server, Server], tmp_path: Path
) -> None:
    port = free_port()
    settings = config("kv_consumer", port, peers=[f"127.0.0.1:{port}"]) | {"kv_load_failure_policy": "fail"}
    server = serve(tmp_path / "log", settings).wait_ready()
    params = {
        "do_remote_prefill": True, "remote_host": "127.0.0.1", "remote_port": port, "remote_request_id": "r" * 36,
    }  # fmt: skip
    for path, body in ((PATH, TEXT), ("/v1/chat/completions", CHAT)):
        asked = salted(body, path) | {"stream": stream, "kv_transfer_params": params}
        reply = post(server.url, asked, path)
        if stream:
            assert reply.text.count('"error"') == 1
        else:
            assert (reply.status_code, "retry-after" in reply.headers) == (503, True)
        assert "did not all come from the prefill engine" in reply.text
    assert answer_of(post(server.url, TEXT)) == answer_of(post(engines[1].url, salted(TEXT, "alone")))
    server.stop()


def kill(server: Server) -> None:
    """Kill a server; its core notices and ends."""
    core = server.core_pid()
    server.process.kill()
    server.process.wait(60)
    if core is not None:
        wait_until(lambda: has_ended(core), WITHIN_S, "the core of a killed server runs on")
