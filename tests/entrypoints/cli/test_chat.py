"""`quire chat` and `quire complete` against a scripted server."""

from __future__ import annotations

import builtins
from collections.abc import Iterator
from typing import Any

import pytest

from quire.entrypoints.cli.conversation import StreamTimings
from quire.entrypoints.cli.main import main
from tests.fixtures.fake_server import FakeServer, chat_events, completion_events, event_stream, json_answer

MODELS = json_answer({"data": [{"id": "first"}, {"id": "second"}]})


@pytest.fixture
def server() -> Iterator[FakeServer]:
    answers = {
        "/v1/models": lambda _: MODELS,
        "/v1/chat/completions": lambda body: event_stream(
            chat_events(["say ", body["messages"][-1]["content"]])
        ),
        "/v1/completions": lambda body: event_stream(completion_events([body["prompt"], " more"])),
    }
    with FakeServer(answers) as running:
        yield running


def typed(monkeypatch: pytest.MonkeyPatch, *lines: str) -> None:
    """Let `input` return these lines and then end."""
    remaining = iter(lines)

    def read(prompt: str) -> str:
        try:
            return next(remaining)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr(builtins, "input", read)


def run(server: FakeServer, *argv: str) -> int:
    return main([argv[0], "--url", f"{server.url}/v1", *argv[1:]])


def test_quick_chat(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(server, "chat", "-q", "hello", "--system-prompt", "be kind", "--stats") == 0
    captured = capsys.readouterr()
    assert captured.out == "say hello\n"
    assert captured.err.startswith("[2 tokens in ")
    (body,) = server.bodies("/v1/chat/completions")
    assert body["model"] == "first"
    assert body["stream"] is True
    assert body["messages"] == [
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": "hello"},
    ]


def test_chat_remembers(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    typed(monkeypatch, "one", "  ", "two")
    assert run(server, "chat", "--model-name", "second") == 0
    assert capsys.readouterr().out == "say one\nsay two\n\n"
    first, second = server.bodies("/v1/chat/completions")
    assert [message["content"] for message in second["messages"]] == ["one", "say one", "two"]
    assert [message["role"] for message in second["messages"]] == ["user", "assistant", "user"]
    assert first["model"] == "second"
    assert not server.bodies("/v1/models")


def test_failed_turn_is_said_and_forgotten(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    good = server.answers["/v1/chat/completions"]

    def answer(body: dict[str, Any]) -> bytes:
        refused = body["messages"][-1]["content"] == "bad"
        return json_answer({"error": {"message": "too long"}}, 400) if refused else good(body)

    server.answers["/v1/chat/completions"] = answer
    typed(monkeypatch, "bad", "fine")
    assert run(server, "chat") == 0
    captured = capsys.readouterr()
    assert "Error: the server answered 400: too long" in captured.err
    assert captured.out == "say fine\n\n"
    assert [message["content"] for message in server.bodies("/v1/chat/completions")[1]["messages"]] == [
        "fine"
    ]


def test_complete(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(server, "complete", "-q", "once", "--max-tokens", "1k") == 0
    typed(monkeypatch, "twice")
    assert run(server, "complete") == 0
    assert capsys.readouterr().out == "once more\ntwice more\n\n"
    first, second = server.bodies("/v1/completions")
    assert first["max_tokens"] == 1000
    assert "max_tokens" not in second


@pytest.mark.parametrize(
    ("flags", "environment", "key"),
    [
        (["--api-key", "flag"], {"QUIRE_API_KEY": "ours", "OPENAI_API_KEY": "theirs"}, "Bearer flag"),
        ([], {"QUIRE_API_KEY": "ours", "OPENAI_API_KEY": "theirs"}, "Bearer ours"),
        ([], {"OPENAI_API_KEY": "theirs"}, "Bearer theirs"),
        ([], {}, None),
    ],
)
def test_key(
    server: FakeServer,
    monkeypatch: pytest.MonkeyPatch,
    flags: list[str],
    environment: dict[str, str],
    key: str | None,
) -> None:
    for name in ("QUIRE_API_KEY", "OPENAI_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    run(server, "chat", "-q", "hello", *flags)
    assert {headers.get("Authorization") for headers in server.headers} == {key}


def test_no_server(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", "--url", "http://127.0.0.1:9/v1", "-q", "hello"]) == 1
    assert "is `quire serve` running?" in capsys.readouterr().err


def test_server_without_models(capsys: pytest.CaptureFixture[str]) -> None:
    with FakeServer({"/v1/models": lambda _: json_answer({"data": []})}) as empty:
        assert run(empty, "complete", "-q", "x") == 2
    assert "serves no model" in capsys.readouterr().err


def test_timings() -> None:
    ticks = iter([10.0, 10.5, 11.0, 12.5, 12.5])
    timings = StreamTimings(clock=lambda: next(ticks))
    for event in (
        {"choices": [{"text": "a"}]},
        {"choices": [{"text": "a"}]},
        {"choices": [{"text": "a"}]},
        {"choices": [], "usage": {"completion_tokens": 5}},
    ):
        timings.record(event)
    assert str(timings) == "[5 tokens in 2.50 s: first after 500 ms, then 2.0 tokens/s]"


def test_timings_of_an_empty_answer() -> None:
    assert (
        str(StreamTimings(clock=lambda: 1.0)) == "[0 tokens in 0.00 s: first after 0 ms, then 0.0 tokens/s]"
    )
