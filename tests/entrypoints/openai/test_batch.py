"""Batch files: one answer for each line, in order, whatever the line is, and few lines in memory."""

from __future__ import annotations

import io
import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from quire.config import ServerConfig
from quire.entrypoints.openai.app import build_app
from quire.entrypoints.openai.batch import Batch, Counts, bounded_lines
from tests.entrypoints.openai.fake_engine import FakeEngine

HI = [{"role": "user", "content": "hi"}]


def line(custom_id: Any = "x", url: str = "/v1/completions", **body: Any) -> bytes:
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body}).encode()


async def answered(engine: FakeEngine, *lines: bytes, **options: Any) -> tuple[list[dict[str, Any]], Counts]:
    window = options.pop("window", 3)
    config = ServerConfig(**options)
    out = io.BytesIO()
    batch = Batch(build_app(engine, config), config)  # type: ignore[arg-type]
    counts = await batch.run(io.BytesIO(b"\n".join(lines)), out, window=window)
    return [json.loads(text) for text in out.getvalue().splitlines()], counts


async def test_each_line_has_its_answer_in_its_place(engine: FakeEngine) -> None:
    lines = [
        line("chat", "/v1/chat/completions", messages=HI),
        line("text", prompt="hi", max_tokens=3),
        line("text", prompt="hi", max_tokens=5),
        b"  ",
        b"nonsense",
        line(None, prompt="hi"),
        line("lost", "/v1/audio/speech", input="x"),
        line("streamed", prompt="hi", stream=True),
        line("bad", prompt="hi", max_tokens=-1),
        b"x" * 3000,
        line("last", "/v1/responses", input="hi") + b"\r",
    ]
    answers, counts = await answered(engine, *lines, max_request_bytes=1024)
    ids = [answer["custom_id"] for answer in answers]
    assert ids == ["chat", "text", "text", None, None, "lost", "streamed", "bad", None, "last"]
    statuses = [answer["response"] and answer["response"]["status_code"] for answer in answers]
    assert statuses == [200, 200, 200, None, None, None, None, 400, None, 200]
    assert all((answer["response"] is None) != (answer["error"] is None) for answer in answers)
    assert (counts.num_lines, counts.num_failed) == (10, 6)
    assert answers[0]["response"]["body"]["choices"][0]["message"]["content"] == "Reply 0!"
    assert [len(answers[i]["response"]["body"]["choices"][0]["text"]) for i in (1, 2)] == [3, 5]
    assert answers[7]["response"]["body"]["error"]["param"] == "max_tokens"
    assert "1024 bytes" in answers[8]["error"]["message"]
    assert answers[0]["response"]["request_id"]


async def test_a_window_bounds_what_is_in_flight(engine: FakeEngine) -> None:
    most = 0

    def reply(prompt: str, index: int) -> str:
        nonlocal most
        most = max(most, len(engine.running) + 1)
        return "x" * (7 - int(prompt) % 7)  # later lines are done before earlier ones

    engine.reply = reply
    answers, _ = await answered(engine, *(line(str(i), prompt=str(i)) for i in range(20)), window=4)
    assert [answer["custom_id"] for answer in answers] == [str(i) for i in range(20)]
    assert 2 <= most <= 4


@given(text=st.binary(max_size=60), max_bytes=st.integers(1, 20))
def test_no_line_is_lost_and_none_is_long(text: bytes, max_bytes: int) -> None:
    lines = list(bounded_lines(io.BytesIO(text), max_bytes))
    expected = []
    for one in text.split(b"\n"):
        if len(one.rstrip(b"\r")) > max_bytes:
            expected.append(None)
        elif one.strip():
            expected.append(one.strip(b"\n"))
    assert [one and one.removesuffix(b"\n") for one in lines] == expected
