# SPDX-License-Identifier: Apache-2.0
"""The load generator against a scripted server."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quire.bench.serve import LoadPlan, ServeResult, error_counts, run_load
from quire.entrypoints.cli.client import ServerClient
from quire.entrypoints.cli.main import main
from quire.errors import ClientError
from tests.fixtures.fake_server import FakeServer, chat_events, completion_events, event_stream, json_answer

IDS = [11, 12, 13, 14]


def complete(body: dict[str, Any]) -> bytes:
    return event_stream(
        completion_events(["x"] * body["max_tokens"], num_prompt_tokens=len(body["prompt"])), cut=10**6
    )


@pytest.fixture
def server() -> Iterator[FakeServer]:
    answers = {
        "/v1/models": lambda _: json_answer({"data": [{"id": "served"}]}),
        "/tokenize": lambda _: json_answer({"tokens": IDS, "count": 4}),
        "/detokenize": lambda body: json_answer({"prompt": " ".join(map(str, body["tokens"]))}),
        "/v1/completions": complete,
        "/v1/chat/completions": lambda _: event_stream(chat_events(["a", "b"])),
    }
    with FakeServer(answers) as running:
        yield running


def load(server: FakeServer, **plan: Any) -> ServeResult:
    settings: dict[str, Any] = {
        "endpoint": "/v1/completions",
        "num_prompts": 6,
        "input_len": 8,
        "output_len": 3,
        "request_rate": float("inf"),
        **plan,
    }
    return asyncio.run(run_load(ServerClient(server.url), None, LoadPlan(**settings)))


def test_completions(server: FakeServer) -> None:
    result = load(server, ignore_eos=True)
    content = result.as_json()
    assert (content["completed"], content["failed"]) == (6, 0)
    assert (content["total_input_tokens"], content["total_output_tokens"]) == (48, 18)
    assert [len(record.event_times_s) for record in result.records] == [3] * 6
    bodies = server.bodies("/v1/completions")
    assert len(bodies) == 7, "one warm-up and six measured"
    assert {len(body["prompt"]) for body in bodies} == {8}
    assert {token for body in bodies for token in body["prompt"]} == set(IDS)
    assert len({tuple(body["prompt"]) for body in bodies}) == 7
    settings = {key: value for key, value in bodies[0].items() if key != "prompt"}
    assert settings == {
        "model": "served",
        "max_tokens": 3,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
    }


def test_chat(server: FakeServer) -> None:
    result = load(server, endpoint="/v1/chat/completions", num_warmups=0)
    assert result.as_json()["total_output_tokens"] == 12
    assert [len(record.event_times_s) for record in result.records] == [2] * 6, "role and end are no tokens"
    bodies = server.bodies("/v1/chat/completions")
    assert len(bodies) == 6
    (message,) = bodies[0]["messages"]
    assert message["role"] == "user"
    assert set(message["content"].split()) <= {str(token) for token in IDS}
    assert "ignore_eos" not in bodies[0]


def test_concurrency_is_bounded(server: FakeServer) -> None:
    def slow(body: dict[str, Any]) -> bytes:
        time.sleep(0.05)
        return complete(body)

    server.answers["/v1/completions"] = slow
    assert load(server, max_concurrency=2).as_json()["max_concurrent_requests"] == 2
    assert server.max_in_flight == 2


def test_failed_requests_are_counted_and_affect_no_others(server: FakeServer) -> None:
    asked: list[int] = []

    def sometimes(body: dict[str, Any]) -> bytes:
        asked.append(1)
        return complete(body) if len(asked) % 2 else json_answer({"error": {"message": "broken"}}, 500)

    server.answers["/v1/completions"] = sometimes
    result = load(server, max_concurrency=1)
    assert (result.as_json()["completed"], result.as_json()["failed"]) == (3, 3)
    assert error_counts(result.records) == {"the server answered 500: broken": 3}


def test_failing_warm_up_ends_the_run(server: FakeServer) -> None:
    server.answers["/v1/completions"] = lambda _: json_answer({"error": {"message": "too long"}}, 400)
    with pytest.raises(ClientError, match="400: too long"):
        load(server)


def test_arrivals_follow_the_rate(server: FakeServer) -> None:
    result = load(server, request_rate=100.0, seed=3)
    sent = [record.sent_s for record in result.records]
    assert sent == sorted(sent)
    assert 0.01 < sent[-1] < 1.0


def test_command(server: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "result.json"
    argv = [
        "--base-url",
        server.url,
        "--num-prompts",
        "3",
        "--random-input-len",
        "4",
        "--random-output-len",
        "2",
    ]
    assert main(["bench", "serve", *argv, "--json", str(file)]) == 0
    out = capsys.readouterr().out
    assert "Successful requests:                             3" in out
    content = json.loads(file.read_text())
    assert (content["completed"], content["total_input_tokens"], content["total_output_tokens"]) == (3, 12, 6)


def test_command_names_the_failure(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    server.answers["/v1/completions"] = lambda _: json_answer({"error": {"message": "full"}}, 503)
    assert main(["bench", "serve", "--base-url", server.url, "--num-prompts", "2", "--num-warmups", "0"]) == 1
    captured = capsys.readouterr()
    assert "Failed requests:                                 2" in captured.out
    assert "2 failed: the server answered 503: full" in captured.err


def test_json_file_that_cannot_be_written(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--base-url", server.url, "--num-prompts", "1", "--json", "/no/such/directory/x.json"]
    assert main(["bench", "serve", *argv]) == 2
    assert "--json /no/such/directory/x.json: No such file or directory" in capsys.readouterr().err
