"""Batch files: one answer for each line, in order, whatever the line is, and few lines in memory."""

from __future__ import annotations

import io
import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.config import ServerConfig
from quire.entrypoints.openai.app import build_app
from quire.entrypoints.openai.batch import Batch, LineCounts, bounded_lines
from quire.entrypoints.openai.batch_output import opened_output
from quire.errors import ConfigError
from tests.entrypoints.openai.fake_engine import FakeEngine

HI = [{"role": "user", "content": "hi"}]


def line(custom_id: Any = "x", url: str = "/v1/completions", **body: Any) -> bytes:
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body}).encode()


async def answered(
    engine: FakeEngine, *lines: bytes, **options: Any
) -> tuple[list[dict[str, Any]], LineCounts]:
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
        line("text2", prompt="hi", max_tokens=5),
        line("text", prompt="hi"),
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
    assert ids == ["chat", "text", "text2", "text", None, None, "lost", "streamed", "bad", None, "last"]
    statuses = [answer["response"] and answer["response"]["status_code"] for answer in answers]
    assert statuses == [200, 200, 200, None, None, None, None, None, 400, None, 200]
    assert all((answer["response"] is None) != (answer["error"] is None) for answer in answers)
    assert (counts.num_lines, counts.num_failed) == (11, 7)
    assert "custom_id 'text' is that of an earlier line" in answers[3]["error"]["message"]
    assert answers[0]["response"]["body"]["choices"][0]["message"]["content"] == "Reply 0!"
    assert [len(answers[i]["response"]["body"]["choices"][0]["text"]) for i in (1, 2)] == [3, 5]
    assert answers[8]["response"]["body"]["error"]["param"] == "max_tokens"
    assert "1024 bytes" in answers[9]["error"]["message"]
    assert answers[0]["response"]["request_id"]


LINES = st.lists(st.sampled_from(["a", "b", "c", None, "nonsense"]), max_size=8)


@given(kinds=LINES, num_kept=st.integers(0, 8), cut=st.integers(0, 30))
async def test_batch_resumed_anywhere_has_the_answers_of_one_run(
    kinds: list[str | None], num_kept: int, cut: int
) -> None:
    """A batch run interrupted at any byte and resumed gives the answers of one run."""
    lines = [b"{" if kind == "nonsense" else line(kind, prompt="hi", max_tokens=2) for kind in kinds]
    config = ServerConfig()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "out"

        async def run(*, resume: bool) -> LineCounts:
            batch = Batch(build_app(FakeEngine(), config), config)  # type: ignore[arg-type]
            with opened_output(path, overwrite=False, resume=resume) as (out, answered):
                return await batch.run(io.BytesIO(b"\n".join(lines)), out, window=3, answered=answered)

        def shown() -> list[Any]:
            answers = [json.loads(text) for text in path.read_text().splitlines()]
            return [
                (one["custom_id"], one["response"] is None, (one["error"] or {}).get("message"))
                for one in answers
            ]

        await run(resume=False)
        expected, written = shown(), path.read_bytes().splitlines(keepends=True)
        rest = b"".join(written[num_kept:])
        path.write_bytes(b"".join(written[:num_kept]) + rest[: min(cut, max(0, len(rest) - 1))])
        counts = await run(resume=True)
        assert sorted(shown(), key=repr) == sorted(expected, key=repr)
        assert counts.num_skipped + counts.num_lines == len(kinds)


@pytest.mark.parametrize("content", ["precious", '{"id": "x"}\n', '{"custom_id": "a"}', "\n"])
def test_output_with_content_is_refused_and_kept(content: str, tmp_path: Path) -> None:
    path = tmp_path / "out"
    path.write_text(content)
    with (
        pytest.raises(ConfigError, match="has content; --resume"),
        opened_output(path, overwrite=False, resume=False),
    ):
        raise AssertionError
    with (
        pytest.raises(ConfigError, match="line 1 is no answer"),
        opened_output(path, overwrite=False, resume=True),
    ):
        raise AssertionError
    assert path.read_text() == content


def test_output_is_replaced_once_all_answers_are_there(tmp_path: Path) -> None:
    path = tmp_path / "out"
    path.write_text("old")

    def fail() -> None:
        with opened_output(path, overwrite=True, resume=False) as (out, _):
            out.write(b"some")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    (draft,) = tmp_path.glob("out.*.partial")
    assert (path.read_text(), draft.read_text()) == ("old", "some")
    with opened_output(path, overwrite=True, resume=False) as (out, answered):
        out.write(b"new")
        assert (path.read_text(), answered) == ("old", {})
    assert path.read_text() == "new"


def test_output_is_written_by_one_run_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "out"
    with (
        opened_output(path, overwrite=False, resume=False),
        pytest.raises(ConfigError, match="another run"),
        opened_output(path, overwrite=False, resume=True),
    ):
        raise AssertionError


def test_output_device_is_written_without_a_word() -> None:
    with opened_output(Path("/dev/null"), overwrite=False, resume=False) as (out, answered):
        out.write(b"x")
    assert not answered


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
