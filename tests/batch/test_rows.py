# SPDX-License-Identifier: Apache-2.0
"""Jobs on tables: every row has its answer beside it, whatever ends a run, and nothing that is finished is lost."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from quire.batch.line_file import partial_of
from quire.batch.rows import RowJob
from quire.batch.template import PromptTemplate
from quire.errors import ConfigError
from tests.batch.tables import SUFFIXES, Stub, read_table, run_job, write_table

TEXTS = ["plain", "ünï ☃ 𝔘", 'a "quoted", one', "two\nlines", "tab\tcr\r", "{braces} {{}}", "", " spaced "]
ROWS = [{"text": text, "n{o}": str(number)} for number, text in enumerate(TEXTS)]
ADDED = {"answer", "answer_error", "answer_finish_reason", "answer_prompt_tokens", "answer_completion_tokens"}
ADDED |= {"answer_prompt_hash"}
FORM = RowJob(PromptTemplate("", ""), schema={"type": "object"})


@pytest.fixture(params=SUFFIXES)
def suffix(request: pytest.FixtureRequest) -> str:
    assert isinstance(request.param, str)
    return request.param


def test_job_adds_columns_to_the_rows(suffix: str, tmp_path: Path) -> None:
    source, out = write_table(tmp_path / f"in{suffix}", ROWS), tmp_path / f"out{suffix}"
    counts = run_job(source, out, '{"n{o}"}: {text}')
    assert (counts.num_answered, counts.num_failed, counts.num_skipped) == (len(ROWS), 0, 0)
    for row, given in zip(read_table(out), ROWS, strict=True):
        assert set(row) == set(given) | ADDED
        assert {name: row[name] for name in given} == given
        assert row["answer"] == f"{given['n{o}']}: {given['text']}".upper()
        assert not row["answer_error"]
        assert int(row["answer_prompt_tokens"]) == len(row["answer"])
    assert sorted(tmp_path.iterdir()) == sorted([source, out])


@pytest.mark.parametrize("life", range(0, len(ROWS) + 1, 3))
def test_killed_job_goes_on_to_the_same_file(suffix: str, life: int, tmp_path: Path) -> None:
    source, out, whole = (tmp_path / f"{name}{suffix}" for name in ("in", "out", "whole"))
    write_table(source, ROWS)
    run_job(source, whole)
    with pytest.raises(ZeroDivisionError):
        run_job(source, out, stub=Stub(life=min(life, len(ROWS) - 1)), window=1)
    assert not out.exists()
    partial = partial_of(out)
    if life:
        torn = partial.read_bytes()
        partial.write_bytes(torn + torn[:20])  # as a kill leaves it in the middle of a line
    stub = Stub()
    counts = run_job(source, out, stub=stub)
    assert len(stub.bodies) == counts.num_answered == len(ROWS) - counts.num_skipped
    assert counts.num_skipped == min(life, len(ROWS) - 1)
    assert out.read_bytes() == whole.read_bytes()
    assert not partial.exists()


def test_finished_job_sends_no_request(suffix: str, tmp_path: Path) -> None:
    source, out = write_table(tmp_path / f"in{suffix}", ROWS), tmp_path / f"out{suffix}"
    for job in (RowJob(PromptTemplate("", "")), FORM):
        run_job(source, out, job=job, overwrite=True)
        before, stub = out.read_bytes(), Stub()
        counts = run_job(source, out, stub=stub, job=job)
        assert (counts.num_answered, counts.num_skipped, len(stub.bodies)) == (0, len(ROWS), 0)
        assert out.read_bytes() == before
    assert sorted(tmp_path.iterdir()) == sorted([source, out])


def test_failed_rows_are_sent_again(suffix: str, tmp_path: Path) -> None:
    source, out, whole = (tmp_path / f"{name}{suffix}" for name in ("in", "out", "whole"))
    write_table(source, ROWS)
    run_job(source, whole)
    assert run_job(source, out, stub=Stub(refused=["plain", " spaced "])).num_failed == 2
    assert [bool(row["answer_error"]) for row in read_table(out)] == [True, *[False] * 6, True]
    assert read_table(out)[0]["answer_error"] == "400: no"
    stub = Stub(refused=["plain"])
    counts = run_job(source, out, stub=stub, retry_failed=True)
    assert (counts.num_answered, counts.num_failed, len(stub.bodies)) == (2, 1, 2)
    assert run_job(source, out).num_failed == 1
    assert run_job(source, out, retry_failed=True).num_failed == 0
    assert out.read_bytes() == whole.read_bytes()


def test_changed_prompt_is_refused_and_overwritten(suffix: str, tmp_path: Path) -> None:
    source, out = write_table(tmp_path / f"in{suffix}", ROWS), tmp_path / f"out{suffix}"
    run_job(source, out)
    before = out.read_bytes()
    with pytest.raises(ConfigError, match=r"row 1 was answered for another prompt.*--overwrite"):
        run_job(source, out, "other {text}")
    with pytest.raises(ZeroDivisionError):
        run_job(source, out, "other {text}", stub=Stub(life=3), window=1, overwrite=True)
    assert out.read_bytes() == before
    with pytest.raises(ConfigError, match="another prompt"):
        run_job(source, out)
    counts = run_job(source, out, "other {text}")
    assert (counts.num_skipped, counts.num_answered) == (3, len(ROWS) - 3)
    assert all(row["answer"].startswith("OTHER") for row in read_table(out))


def test_added_rows_are_sent(suffix: str, tmp_path: Path) -> None:
    source, out = write_table(tmp_path / f"in{suffix}", ROWS[:3]), tmp_path / f"out{suffix}"
    run_job(source, out)
    write_table(source, ROWS)
    assert run_job(source, out).num_answered == len(ROWS) - 3
    assert [row["text"] for row in read_table(out)] == TEXTS


def test_other_table_in_place_of_the_output_is_kept(suffix: str, tmp_path: Path) -> None:
    source, out = write_table(tmp_path / f"in{suffix}", ROWS), write_table(tmp_path / f"out{suffix}", ROWS)
    before = out.read_bytes()
    with pytest.raises(ConfigError, match="row 1 is no answer of a batch job"):
        run_job(source, out)
    assert out.read_bytes() == before
    assert sorted(tmp_path.iterdir()) == sorted([source, out])
    run_job(source, out, overwrite=True)
    assert read_table(out)[0]["answer"] == "PLAIN"


def test_answers_of_a_schema_are_json(suffix: str, tmp_path: Path) -> None:
    source, out = write_table(tmp_path / f"in{suffix}", ROWS), tmp_path / f"out{suffix}"
    stub = Stub()
    run_job(source, out, job=FORM, stub=stub)
    assert stub.bodies[0]["response_format"]["json_schema"]["schema"] == {"type": "object"}
    for row in read_table(out):
        answer = row["answer"] if suffix == ".jsonl" else json.loads(row["answer"])
        assert answer == {"a": row["text"]}


def test_incomplete_json_is_an_error(tmp_path: Path) -> None:
    job = RowJob(PromptTemplate("", ""), raw=True, schema={"type": "object"})

    class Cut(Stub):
        async def ask(self, url: str, body: bytes) -> Any:
            return await super().ask(url, body.replace(b"response_format", b"other"))

    source, out = write_table(tmp_path / "in.jsonl", ROWS[:1]), tmp_path / "out.jsonl"
    assert run_job(source, out, job=job, stub=Cut()).num_failed == 1
    assert "not complete JSON" in read_table(out)[0]["answer_error"]


def test_requests_have_the_given_fields(tmp_path: Path) -> None:
    source = write_table(tmp_path / "in.csv", ROWS[:2])
    job = RowJob(
        PromptTemplate("", ""), PromptTemplate("Be {text}.", "--system"), fields={"max_tokens": 3}, seed=7
    )
    stubs = [Stub(), Stub(), Stub()]
    run_job(source, tmp_path / "a.csv", job=job, stub=stubs[0])
    run_job(source, tmp_path / "b.csv", job=job, stub=stubs[1])
    run_job(
        source,
        tmp_path / "c.csv",
        job=RowJob(PromptTemplate("", ""), raw=True, fields={"seed": 1}),
        stub=stubs[2],
    )
    first, second = stubs[0].bodies
    assert first["messages"][0] == {"role": "system", "content": "Be plain."}
    assert (first["max_tokens"], stubs[1].bodies[0]) == (3, first)
    assert first["seed"] != second["seed"]
    assert stubs[2].bodies[0] == {"seed": 1, "prompt": "plain"}


@pytest.mark.parametrize("name", ["messages", "prompt", "stream", "n", "response_format"])
def test_fields_of_the_job_itself_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"--body: {name}"):
        RowJob(PromptTemplate("", ""), fields={name: 1})


def test_system_message_without_a_chat_is_refused() -> None:
    with pytest.raises(ConfigError, match="--raw and --system"):
        RowJob(PromptTemplate("", ""), PromptTemplate("", ""), raw=True)


@pytest.mark.parametrize("form", [".csv", ".jsonl", ".parquet"])
def test_columns_are_checked_before_any_request(form: str, tmp_path: Path) -> None:
    source = write_table(tmp_path / f"in{form}", [{"text": "a", "answer_error": "b"}])
    with pytest.raises(ConfigError, match="'answer_error' already; choose another name with --answer-column"):
        run_job(source, tmp_path / f"out{form}")
    run_job(source, tmp_path / f"out{form}", job=RowJob(PromptTemplate("", ""), column="reply"))
    assert read_table(tmp_path / f"out{form}")[0]["reply"] == "A"
    if form != ".jsonl":
        with pytest.raises(ConfigError, match="--prompt: there is no column 'txet'; there are: 'text'"):
            run_job(source, tmp_path / f"other{form}", "{txet}")


MALFORMED = {
    ".csv": (
        'text,k\nok,1\nmany,2,3\nfew\n"a"b,1\n\xff,5\n\n"a ""b""\nc",6\n"open,7\n',
        [
            "OK",
            "3 fields, the header 2",
            "1 fields, the header 2",
            "no CSV",
            "not UTF-8",
            'A "B"\nC',
            "no CSV",
        ],
    ),
    ".jsonl": (
        '{"text":"ok","x":1.50}\n{"text":\n\n[1]\n{"t":1}\n"\xff"\n{"text":"'
        + "x" * 70000
        + '"}\n{"text":"end"}',
        [
            "OK",
            "not JSON",
            "no JSON object",
            "no column 'text'; there are: 't'",
            "not JSON",
            "longer than",
            "END",
        ],
    ),
}


@pytest.mark.parametrize("form", MALFORMED)
def test_malformed_row_costs_only_itself(form: str, tmp_path: Path) -> None:
    source, out = tmp_path / f"in{form}", tmp_path / f"out{form}"
    text, expected = MALFORMED[form]
    source.write_bytes(text.encode("latin-1"))
    counts = run_job(source, out)
    assert (counts.num_answered, counts.num_failed) == (
        len(expected),
        sum(one.upper() != one for one in expected),
    )
    kept = out.read_bytes()
    assert (b"\xff,5" if form == ".csv" else b'"x":1.50') in kept
    out.write_bytes(kept.replace(b"\xff", b"?"))
    for row, words in zip(read_table(out), expected, strict=True):
        assert words in (row["answer"] or row["answer_error"])
    out.write_bytes(kept)
    assert run_job(source, out).num_answered == 0


@pytest.mark.parametrize("form", [".csv", ".jsonl"])
def test_empty_table_has_an_empty_output(form: str, tmp_path: Path) -> None:
    source, out = tmp_path / f"in{form}", tmp_path / f"out{form}"
    source.write_text("")
    for _ in range(2):
        assert run_job(source, out).num_answered == 0
        assert out.read_bytes() == b""


def test_table_of_no_rows_keeps_its_columns(suffix: str, tmp_path: Path) -> None:
    source, out = tmp_path / f"in{suffix}", tmp_path / f"out{suffix}"
    if suffix == ".parquet":
        import pyarrow as pa
        import pyarrow.parquet as pq

        pq.write_table(pa.table({"text": pa.array([], pa.string())}), source)
    else:
        source.write_text({".csv": "text\n", ".tsv": "text\tb\n", ".jsonl": "\n"}[suffix])
    assert run_job(source, out).num_answered == 0
    assert run_job(source, out).num_answered == 0
    if suffix == ".csv":
        assert out.read_text().startswith("text,answer,answer_error")


def memory_of(num_rows: int, folder: Path) -> int:
    """Most bytes that a run held at a time."""
    source = folder / f"{num_rows}.csv"
    with source.open("w") as file:
        file.write("text\n")
        file.writelines(f"prompt {number} {'x' * 100}\n" for number in range(num_rows))
    tracemalloc.start()
    try:
        run_job(source, folder / f"{num_rows}.out.csv")
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.more
def test_memory_of_a_large_table_is_flat(tmp_path: Path) -> None:
    small, large = memory_of(1_000, tmp_path), memory_of(100_000, tmp_path)
    assert large - small < 100_000 * 40
