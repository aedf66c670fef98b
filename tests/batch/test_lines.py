# SPDX-License-Identifier: Apache-2.0
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

from quire.batch.client import AppClient, answer_all
from quire.batch.line_file import LineFile, partial_of
from quire.batch.lines import (
    AnswerLines,
    EarlierAnswers,
    LineReader,
    RunCounts,
    answer_line,
    bounded_lines,
    opened_output,
    opened_stream,
)
from quire.config import ServerConfig
from quire.entrypoints.openai.app import build_app
from quire.errors import ConfigError
from quire.progress import Progress
from tests.entrypoints.openai.fake_engine import FakeEngine

HI = [{"role": "user", "content": "hi"}]


def line(custom_id: Any = "x", url: str = "/v1/completions", **body: Any) -> bytes:
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body}).encode()


async def run(
    engine: FakeEngine,
    text: bytes,
    out: LineFile,
    earlier: EarlierAnswers,
    *,
    window: int = 3,
    max_bytes: int = 2**20,
) -> RunCounts:
    client = AppClient(build_app(engine, ServerConfig()))  # type: ignore[arg-type]
    counts = RunCounts(num_failed=earlier.num_failed)
    lines = LineReader(earlier, counts, seed=0, max_bytes=max_bytes).read(io.BytesIO(text))
    writer = AnswerLines(out, counts, Progress(None, "Batch", "lines"))
    await answer_all(lines, lambda one: answer_line(client.ask, one), writer.write, window=window)
    return counts


async def answered(
    engine: FakeEngine, *lines: bytes, **options: int
) -> tuple[list[dict[str, Any]], RunCounts]:
    out = io.BytesIO()
    with opened_stream(out) as (file, earlier):
        counts = await run(engine, b"\n".join(lines), file, earlier, **options)
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
    answers, counts = await answered(engine, *lines, max_bytes=1024)
    ids = [answer["custom_id"] for answer in answers]
    assert ids == ["chat", "text", "text2", "text", None, None, "lost", "streamed", "bad", None, "last"]
    statuses = [answer["response"] and answer["response"]["status_code"] for answer in answers]
    assert statuses == [200, 200, 200, None, None, None, None, None, 400, None, 200]
    assert all((answer["response"] is None) != (answer["error"] is None) for answer in answers)
    assert (counts.num_answered, counts.num_failed) == (11, 7)
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
    text = b"\n".join(lines)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "out"

        async def once() -> RunCounts:
            with opened_output(path) as (out, earlier):
                return await run(FakeEngine(), text, out, earlier)

        def shown() -> list[Any]:
            answers = [json.loads(text) for text in path.read_text().splitlines()]
            return [
                (one["custom_id"], one["response"] is None, (one["error"] or {}).get("message"))
                for one in answers
            ]

        failed = (await once()).num_failed
        expected, written = shown(), path.read_bytes().splitlines(keepends=True)
        rest = b"".join(written[num_kept:])
        path.write_bytes(b"".join(written[:num_kept]) + rest[: min(cut, max(0, len(rest) - 1))])
        counts = await once()
        assert sorted(shown(), key=repr) == sorted(expected, key=repr)
        assert counts.num_skipped + counts.num_answered == len(kinds)
        assert counts.num_failed == failed


async def test_resumed_batch_samples_as_one_run_would(engine: FakeEngine) -> None:
    """Requests without a seed get that of their custom_id, wherever they may have one."""
    seeds: list[int | None] = []
    generate = engine.generate

    def noted(prompt: Any, params: Any, *args: Any, **more: Any) -> Any:
        seeds.append(params.seed)
        return generate(prompt, params, *args, **more)

    engine.generate = noted  # type: ignore[method-assign]
    lines = [
        line("a", prompt="hi"),
        line("b", "/v1/chat/completions", messages=HI),
        line("c", "/v1/responses", input="hi"),
        line("d", prompt="hi", seed=5),
    ]
    await answered(engine, *lines, window=1)
    await answered(engine, *lines[1:], window=1)
    assert len(set(seeds)) == 4
    assert seeds[4:] == seeds[1:4]
    assert seeds[3] == 5


@pytest.mark.parametrize("content", ["precious", '{"id": "x"}\n', '{"custom_id": "a"}', "\n"])
def test_output_of_another_kind_is_refused_and_kept(content: str, tmp_path: Path) -> None:
    path = tmp_path / "out"
    path.write_text(content)
    for retry_failed in (False, True):
        with (
            pytest.raises(ConfigError, match="line 1 is no answer"),
            opened_output(path, retry_failed=retry_failed),
        ):
            raise AssertionError
    assert path.read_text() == content
    assert list(tmp_path.iterdir()) == [path]


async def test_overwriting_keeps_the_file_until_it_is_done(engine: FakeEngine, tmp_path: Path) -> None:
    path = tmp_path / "out"
    text = b"\n".join(line(name, prompt="hi") for name in "abc")
    with opened_output(path) as (out, earlier):
        await run(engine, text, out, earlier)
    before = path.read_bytes()

    async def fail() -> None:
        with opened_output(path, overwrite=True) as (out, earlier):
            assert not earlier.ids
            await run(engine, line("a", prompt="hi"), out, earlier)
            raise ZeroDivisionError

    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            await fail()
    assert path.read_bytes() == before
    with opened_output(path) as (out, earlier):
        counts = await run(engine, text, out, earlier)
    assert (counts.num_skipped, counts.num_answered) == (1, 2)
    assert [json.loads(one)["custom_id"] for one in path.read_bytes().splitlines()] == ["a", "b", "c"]
    assert path.read_bytes() != before
    assert not partial_of(path).exists()


async def test_failed_requests_are_sent_again(engine: FakeEngine, tmp_path: Path) -> None:
    path = tmp_path / "out"
    text = b"\n".join([line("good", prompt="hi"), line("bad", prompt="hi", max_tokens=-1), b"nonsense"])
    with opened_output(path) as (out, earlier):
        await run(engine, text, out, earlier)
    kept = path.read_bytes().splitlines()[0]
    with opened_output(path) as (out, earlier):
        counts = await run(engine, text, out, earlier)
    assert (counts.num_answered, counts.num_failed, counts.num_skipped) == (0, 2, 3)
    mended = text.replace(b"-1", b"2")
    with opened_output(path, retry_failed=True) as (out, earlier):
        counts = await run(engine, mended, out, earlier)
    assert (counts.num_answered, counts.num_failed, counts.num_skipped) == (2, 1, 1)
    lines = path.read_bytes().splitlines()
    assert lines[0] == kept
    assert [json.loads(one)["custom_id"] for one in lines] == ["good", "bad", None]


RUNS: list[dict[str, bool]] = [{}, {"overwrite": True}, {"retry_failed": True}]


@pytest.mark.parametrize("second", RUNS)
@pytest.mark.parametrize("first", RUNS)
def test_output_is_written_by_one_run_at_a_time(
    first: dict[str, bool], second: dict[str, bool], tmp_path: Path
) -> None:
    path = tmp_path / "out"
    path.write_text('{"id":"batch_req_1","custom_id":"a","response":{"status_code":200}}\n')
    with (
        opened_output(path, **first),
        pytest.raises(ConfigError, match="another run"),
        opened_output(path, **second),
    ):
        raise AssertionError


def test_output_device_is_written_without_output() -> None:
    with opened_output(Path("/dev/null")) as (out, earlier):
        out.append({})
    assert not earlier.ids


def test_unfinished_empty_replacement_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "out"
    path.write_text('{"id":"batch_req_1","custom_id":"a"}\n')
    with pytest.raises(ZeroDivisionError), opened_output(path, overwrite=True):
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == [path]


async def test_window_bounds_requests_in_flight(engine: FakeEngine) -> None:
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
