"""`quire run-batch` and `quire collect-env` as commands."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from quire.entrypoints.cli.collect_env import variables_section
from quire.entrypoints.cli.main import main


def test_a_file_is_answered(
    tiny_model: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    body = {"prompt": "hello", "max_tokens": 4, "temperature": 0}
    request = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body}
    lines, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines.write_text(json.dumps(request) + "\nnonsense\n")
    model = str(tiny_model("llama"))
    assert main(["run-batch", "-i", str(lines), "-o", str(out), "--model", model, "--cpu-threads", "1"]) == 0
    first, second = (json.loads(line) for line in out.read_text().splitlines())
    assert first["response"]["body"]["usage"]["completion_tokens"] == 4
    assert second["error"]["code"] == "BadRequestError"
    assert "2 lines answered, 1 of them with an error" in capsys.readouterr().err
    answers = out.read_bytes()
    assert main(["run-batch", "-i", str(lines), "-o", str(out), "--model", model]) == 2
    assert "has content; --resume" in capsys.readouterr().err
    assert main(["run-batch", "-i", str(lines), "-o", str(out), "--model", model, "--resume"]) == 0
    assert "0 lines answered, 0 of them with an error, 2 had been answered before" in capsys.readouterr().err
    assert out.read_bytes() == answers
    before = lines.read_bytes()
    assert main(["run-batch", "-i", str(lines), "-o", str(lines), "--model", model]) == 2
    assert lines.read_bytes() == before
    assert main(["run-batch", "-i", str(tmp_path / "none"), "-o", str(out), "--model", model]) == 1
    assert "No such file" in capsys.readouterr().err


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
