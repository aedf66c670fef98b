# SPDX-License-Identifier: Apache-2.0
"""`quire run-batch` and `quire collect-env` as commands."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from quire.entrypoints.cli.collect_env import variables_section
from quire.entrypoints.cli.main import main

SMALL = ("--cpu-threads", "1", "--max-model-len", "256", "--kv-cache-memory-bytes", "16M")
WITHIN_S = 300


def completion(custom_id: str, **body: Any) -> str:
    body = {"prompt": "hello", "max_tokens": 4, **body}
    return (
        json.dumps({"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": body}) + "\n"
    )


def test_a_file_is_answered(
    tiny_model: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines.write_text(completion("a") + "nonsense\n")
    command = ["run-batch", "-i", str(lines), "-o", str(out), "--model", str(tiny_model("llama")), *SMALL]
    assert main(command) == 3
    first, second = (json.loads(line) for line in out.read_text().splitlines())
    assert first["response"]["body"]["usage"]["completion_tokens"] == 4
    assert second["error"]["code"] == "BadRequestError"
    assert "1 have errors: --retry-failed asks them again" in capsys.readouterr().err
    answers = out.read_bytes()
    assert main(command) == 3
    assert "0 lines answered" in (said := capsys.readouterr().err)
    assert "2 were answered before; 1 have errors" in said
    assert out.read_bytes() == answers
    lines.write_text(completion("a") + completion("b"))
    assert main([*command, "--retry-failed"]) == 0
    assert "1 lines answered" in capsys.readouterr().err
    assert out.read_bytes().startswith(answers.splitlines(keepends=True)[0])
    assert main([*command, "--overwrite"]) == 0
    assert [json.loads(line)["custom_id"] for line in out.read_text().splitlines()] == ["a", "b"]
    before = lines.read_bytes()
    assert main(["run-batch", "-i", str(lines), "-o", str(lines)]) == 2
    assert lines.read_bytes() == before
    assert main(["run-batch", "-i", str(tmp_path / "none"), "-o", str(out)]) == 2
    assert "No such file" in capsys.readouterr().err


def test_a_finished_job_loads_no_model(tmp_path: Path) -> None:
    table, out = tmp_path / "in.csv", tmp_path / "out.csv"
    table.write_text("city\n")
    command = [
        "run-batch",
        "-i",
        str(table),
        "-o",
        str(out),
        "--prompt",
        "{city}",
        "--model",
        str(tmp_path / "none"),
    ]
    assert main(command) == 0
    assert out.read_text().startswith("city,answer,")


def test_a_table_gets_a_column_of_answers(tmp_path: Path) -> None:
    table, out, schema = tmp_path / "in.csv", tmp_path / "out.csv", tmp_path / "schema.json"
    schema.write_text('{"enum": ["Paris", "Rome"]}')
    table.write_text("country,k\nFrance,1\nItaly,2,3\n")
    command = [
        "run-batch", "-i", str(table), "-o", str(out), "--prompt", "What is the capital of {country}?",
        "--system", "Be brief.", "--max-tokens", "20", "--temperature", "0", "--body", '{"top_p": 0.9}',
        "--schema", str(schema), "--answer-column", "capital", *SMALL,
    ]  # fmt: skip
    assert main(command) == 3
    with out.open(newline="") as file:
        first, second = csv.DictReader(file)
    assert (first["k"], json.loads(first["capital"]), first["capital_error"]) == ("1", "Paris", "")
    assert (second["capital"], second["capital_error"]) == ("", "the row has 3 fields, the header 2")


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        (["--overwrite", "--retry-failed"], 2, "--overwrite and --retry-failed exclude each other"),
        (["--max-tokens", "4"], 2, "--max-tokens is about the rows of a table, which needs --prompt"),
        (["--raw"], 2, "--raw is about the rows"),
        (["--prompt", "{a"], 2, "--prompt: the brace at character 1"),
        (["--prompt", "{b}"], 2, "there is no column 'b'; there are: 'a'"),
        (["--prompt", "{a}", "-o", "out.jsonl"], 2, "the output has the format of the input"),
        (["--prompt", "{a}", "-o", "-"], 2, "a table is read and written as a regular file"),
        (["--prompt", "{a}", "-i", "in.txt"], 2, "ends in one of .csv, .tsv, .jsonl"),
        (["--prompt", "{a}", "--schema", "in.txt"], 2, "--schema in.txt: "),
        (["--prompt", "{a}", "--body", '{"n": 2}'], 2, "--body: n cannot be given"),
        (["--prompt", "{a}", "-i", "bad.parquet", "-o", "out.parquet"], 2, "bad.parquet is no Parquet file"),
        (["--prompt", "{a}", "-i", "twice.csv"], 2, "the header has 'a' twice"),
        (["--prompt", "{a}", "-o", "none/out.csv"], 1, "none/out.csv.partial: No such file"),
    ],
)
def test_mistake_is_reported_before_the_model_loads(
    args: Sequence[str],
    code: int,
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in (("in.csv", "a\n1\n"), ("in.txt", "x"), ("bad.parquet", "x"), ("twice.csv", "a,a\n")):
        Path(name).write_text(text)
    given = [*args]
    for flag, value in (("-i", "in.csv"), ("-o", "out.csv")):
        given += [] if flag in args else [flag, value]
    assert main(["run-batch", *given, "--model", "none"]) == code
    assert words in capsys.readouterr().err
    assert not list(tmp_path.glob("out*"))


def command_of(tmp_path: Path, out: Path) -> list[str]:
    """Return the command of a run of 40 rows of 20 tokens, whose sampling is random."""
    table = tmp_path / "in.csv"
    table.write_text("n\n" + "".join(f"{number}\n" for number in range(40)))
    return [
        *("run-batch", "-i", str(table), "-o", str(out)),
        *("--prompt", "Story {n}:", "--raw", "--max-tokens", "20", "--temperature", "1"),
        *("--body", '{"ignore_eos": true}', "--max-num-seqs", "2", *SMALL),
    ]


def started(command: list[str], log: Path) -> subprocess.Popen[bytes]:
    program = (sys.executable, "-m", "quire.entrypoints.cli.main")
    with log.open("ab") as file:
        return subprocess.Popen([*program, *command], stderr=file, start_new_session=True)


def wait_for_lines(process: subprocess.Popen[bytes], path: Path, num_lines: int) -> None:
    deadline = time.monotonic() + WITHIN_S
    while not path.exists() or path.read_bytes().count(b"\n") < num_lines:
        assert process.poll() is None, "it ended too early"
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("ending", [signal.SIGKILL, pytest.param(signal.SIGINT, marks=pytest.mark.more)])
def test_a_run_that_was_ended_goes_on_to_the_same_file(
    ending: signal.Signals, tmp_path: Path, capsys: pytest.CaptureFixture[str], restore_threads: None
) -> None:
    whole, out = tmp_path / "whole.csv", tmp_path / "out.csv"
    assert main(command_of(tmp_path, whole)) == 0
    ended = started(command_of(tmp_path, out), tmp_path / "log")
    wait_for_lines(ended, tmp_path / "out.csv.partial", 3)
    os.killpg(ended.pid, ending) if ending == signal.SIGKILL else ended.send_signal(ending)
    assert ended.wait(WITHIN_S) == (-signal.SIGKILL if ending == signal.SIGKILL else 130)
    assert not out.exists()
    assert (tmp_path / "out.csv.partial").read_bytes().count(b"\n") < 40
    assert "were answered before" not in capsys.readouterr().err
    assert main(command_of(tmp_path, out)) == 0
    assert out.read_bytes() == whole.read_bytes()
    assert "were answered before" in capsys.readouterr().err
    if ending == signal.SIGINT:
        said = (tmp_path / "log").read_text()
        assert "Interrupted; what is answered is kept. The same command" in said


def test_the_report_can_be_pasted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("QUIRE_API_KEY", "secret")
    assert main(["collect-env"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("```text\nMachine")
    assert text.endswith("```\n")
    assert "secret" not in text
    assert str(Path.home()) not in text
    for part in ("Versions", "Kernels", "Limits", "GPU", "Packages", "click"):
        assert part in text


def test_secrets_are_masked() -> None:
    facts = variables_section({"HF_TOKEN": "t", "QUIRE_API_KEY": "k", "OMP_X": "1", "OTHER": "2"}).facts
    assert facts == {"HF_TOKEN": "(set)", "QUIRE_API_KEY": "(set)", "OMP_X": "1"}
