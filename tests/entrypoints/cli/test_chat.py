# SPDX-License-Identifier: Apache-2.0
"""`quire chat` and `quire complete` against a scripted server."""

from __future__ import annotations

import builtins
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quire.entrypoints.cli.chat import ChatMessagePrinter, StreamTimings
from quire.entrypoints.cli.main import main
from quire.entrypoints.cli.run import DENIED
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


def typed(monkeypatch: pytest.MonkeyPatch, *lines: str | type[BaseException]) -> None:
    """Let `input` return these lines, raise what is an exception, and then end."""
    remaining = iter(lines)

    def read(prompt: str) -> str:
        line = next(remaining, EOFError)
        if isinstance(line, str):
            return line
        raise line

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


def test_failed_turn_is_reported_and_dropped(
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
    assert "error: the server answered 400: too long" in captured.err
    assert captured.out == "say fine\n\n"
    assert [message["content"] for message in server.bodies("/v1/chat/completions")[1]["messages"]] == [
        "fine"
    ]


def test_interrupt_ends_the_turn_only(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def take(printer: ChatMessagePrinter, event: Any) -> None:
        monkeypatch.undo()
        typed(monkeypatch, KeyboardInterrupt, "fine")
        raise KeyboardInterrupt

    typed(monkeypatch, "long")
    monkeypatch.setattr(ChatMessagePrinter, "take", take)
    assert run(server, "chat", "--model-name", "second") == 0
    captured = capsys.readouterr()
    assert "interrupted; the message is not kept" in captured.err
    assert "Ctrl-D ends the chat" in captured.err
    assert captured.out == "say fine\n\n"
    contents = [message["content"] for message in server.bodies("/v1/chat/completions")[-1]["messages"]]
    assert contents == ["fine"]


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


THOUGHTFUL = [
    {"role": "assistant", "content": ""},
    {"reasoning": "Let me ", "reasoning_content": "Let me "},
    {"reasoning": "see.", "reasoning_content": "see."},
    {"content": "It is "},
    {"content": "4."},
]


def deltas(*pieces: dict[str, Any]) -> bytes:
    return event_stream([{"choices": [{"delta": piece}]} for piece in pieces])


def calls(*names: str, arguments: str = "{}") -> dict[str, Any]:
    return {
        "tool_calls": [
            {
                "index": index,
                "id": f"id{index}",
                "type": "function",
                "function": {"name": name, "arguments": arguments},
            }
            for index, name in enumerate(names)
        ]
    }


def test_reasoning_stands_apart_and_stays_in_the_conversation(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    server.answers["/v1/chat/completions"] = lambda _: deltas(*THOUGHTFUL)
    typed(monkeypatch, "one", "two")
    assert run(server, "chat") == 0
    assert capsys.readouterr().out == "Let me see.\n\nIt is 4.\n" * 2 + "\n"
    second = server.bodies("/v1/chat/completions")[1]["messages"]
    assert second[1] == {"role": "assistant", "content": "It is 4.", "reasoning": "Let me see."}


def test_reasoning_by_its_older_name_is_sent_back_by_it(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.answers["/v1/chat/completions"] = lambda _: deltas({"reasoning_content": "So."}, {"content": "4"})
    typed(monkeypatch, "one", "two")
    assert run(server, "chat") == 0
    assert server.bodies("/v1/chat/completions")[1]["messages"][1] == {
        "role": "assistant",
        "content": "4",
        "reasoning_content": "So.",
    }


def test_reasoning_is_dimmed_on_a_terminal_only(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    server.answers["/v1/chat/completions"] = lambda _: deltas(*THOUGHTFUL)
    monkeypatch.setattr("click.utils.should_strip_ansi", lambda *_, **__: False)
    assert run(server, "chat", "-q", "x") == 0
    assert capsys.readouterr().out == "\x1b[2mLet me \x1b[0m\x1b[2msee.\x1b[0m\n\nIt is 4.\n"


@pytest.fixture
def tool_file(tmp_path: Path) -> str:
    path = tmp_path / "clock.py"
    path.write_text(
        "def now(zone: str = 'UTC') -> str:\n    'Tell the time.'\n    return f'noon in {zone}'\n"
    )
    return str(path)


def calling_server(server: FakeServer, call: dict[str, Any]) -> None:
    """Calls a tool, and says its result."""

    def answer(body: dict[str, Any]) -> bytes:
        last = body["messages"][-1]
        return deltas({"content": f"It is {last['content']}."} if last["role"] == "tool" else call)

    server.answers["/v1/chat/completions"] = answer


@pytest.mark.parametrize(("typed_answer", "said"), [("y", "noon in CET"), ("n", DENIED), (None, DENIED)])
def test_tool_runs_after_confirmation(
    server: FakeServer,
    tool_file: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    typed_answer: str | None,
    said: str,
) -> None:
    questions: list[str] = []

    def confirm(text: str) -> str:
        questions.append(text)
        if typed_answer is None:
            raise EOFError
        return typed_answer

    monkeypatch.setattr("click.termui.visible_prompt_func", confirm)
    calling_server(server, calls("now", arguments='{"zone": "CET"}'))
    assert run(server, "chat", "-q", "time?", "--tool", tool_file) == 0
    captured = capsys.readouterr()
    assert captured.out == f"It is {said}.\n"
    assert "The model wants to run now(zone='CET')" in captured.err + "".join(questions)
    first, second = server.bodies("/v1/chat/completions")
    assert first["tools"] == second["tools"]
    assert first["tools"][0]["function"]["description"] == "Tell the time."
    assert [message["role"] for message in second["messages"]] == ["user", "assistant", "tool"]
    assert second["messages"][1]["tool_calls"][0]["id"] == second["messages"][2]["tool_call_id"] == "id0"


def test_yes_skips_questions_and_every_call_gets_its_result(
    server: FakeServer, tool_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    calling_server(server, calls("now", "gone"))
    assert run(server, "chat", "-q", "time?", "--tool", f"{tool_file}:now", "--yes") == 0
    captured = capsys.readouterr()
    assert "Running now()" in captured.err
    results = [
        message["content"]
        for message in server.bodies("/v1/chat/completions")[1]["messages"]
        if message["role"] == "tool"
    ]
    assert results == ["noon in UTC", "Error: there is no tool gone; there are: now"]


def test_streamed_call_deltas_are_joined(
    server: FakeServer, tool_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    begin = calls("now", arguments='{"zo')
    more = {"tool_calls": [{"index": 0, "function": {"arguments": 'ne": "CET"}'}}]}

    def answer(body: dict[str, Any]) -> bytes:
        last = body["messages"][-1]
        return deltas({"content": last["content"]}) if last["role"] == "tool" else deltas(begin, more)

    server.answers["/v1/chat/completions"] = answer
    assert run(server, "chat", "-q", "time?", "--tool", tool_file, "--yes") == 0
    assert capsys.readouterr().out == "noon in CET\n"


def test_a_model_that_never_answers_is_stopped(
    server: FakeServer, tool_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    server.answers["/v1/chat/completions"] = lambda _: deltas(calls("now"))
    assert run(server, "chat", "-q", "time?", "--tool", tool_file, "--yes") == 1
    assert "still calls tools after 32 rounds" in capsys.readouterr().err


def test_invalid_tool_is_reported_before_any_request(
    server: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(server, "chat", "-q", "x", "--tool", "nothing") == 2
    assert "--tool must be module:function" in capsys.readouterr().err
    assert not server.requests
