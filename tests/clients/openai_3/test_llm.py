# SPDX-License-Identifier: Apache-2.0
"""`llm`, the command line for models, which reads the server's address from its own file."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.clients.world import (
    ANSWER,
    MISSING,
    MODEL,
    PERSON,
    PERSON_QUESTION,
    QUESTION,
    STRICT_PERSON,
    TOO_LONG,
    TOOL_ANSWER,
    TOOL_QUESTION,
    Person,
)

WEATHER = '''
def get_weather(city: str) -> str:
    """Get the current weather of a city."""
    return '{"city": "%s", "temperature": 21, "condition": "sunny"}' % city
'''


@pytest.fixture
def home(tmp_path: Path, base_url: str) -> Path:
    """Write the settings directory of `llm`, with the served model and one that the server does not have."""
    served = "".join(
        f"- model_id: {name}\n  model_name: {name}\n  api_base: {base_url}\n"
        "  supports_tools: true\n  supports_schema: true\n"
        for name in (MODEL, MISSING)
    )
    (tmp_path / "extra-openai-models.yaml").write_text(served)
    return tmp_path


def llm(home: Path, *arguments: str, typed: str = "") -> subprocess.CompletedProcess[str]:
    """Runs the command; whatever is not on this machine lies behind a proxy that is not there."""
    nowhere = {
        "HTTP_PROXY": "http://127.0.0.1:9",
        "HTTPS_PROXY": "http://127.0.0.1:9",
        "NO_PROXY": "127.0.0.1",
    }
    return subprocess.run(
        [sys.executable, "-m", "llm", *arguments],
        input=typed,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env=os.environ | nowhere | {"LLM_USER_PATH": str(home), "OPENAI_API_KEY": "none"},
    )


def test_streamed_prompt_equals_the_whole_answer(home: Path) -> None:
    options = ("-m", MODEL, "-o", "temperature", "0", QUESTION)
    whole, streamed = llm(home, "prompt", "--no-stream", *options), llm(home, "prompt", "--usage", *options)
    assert ANSWER in whole.stdout, whole.stderr
    assert streamed.stdout == whole.stdout
    assert "Token usage" in streamed.stderr


def test_a_chat_answers_line_by_line(home: Path) -> None:
    chat = llm(
        home, "chat", "-m", MODEL, "-o", "temperature", "0", typed=f"{QUESTION}\nWhat is 12 + 30?\nexit\n"
    )
    assert chat.returncode == 0, chat.stderr
    assert ANSWER in chat.stdout
    assert "42" in chat.stdout


@pytest.mark.parametrize("streaming", ["--no-stream", None])
def test_tool_is_called_and_its_result_is_in_the_answer(home: Path, streaming: str | None) -> None:
    options = ("-m", MODEL, "-o", "temperature", "0", "--functions", WEATHER, *filter(None, [streaming]))
    done = llm(home, "prompt", *options, TOOL_QUESTION)
    assert TOOL_ANSWER in done.stdout, done.stderr


def test_command_prints_errors(home: Path) -> None:
    missing, too_long = (
        llm(home, "prompt", "-m", MISSING, QUESTION),
        llm(home, "prompt", "-m", MODEL, TOO_LONG),
    )
    assert missing.returncode == too_long.returncode == 1
    assert MODEL in missing.stderr
    assert "maximum context length" in too_long.stderr


@pytest.mark.parametrize("streaming", ["--no-stream", None])
def test_an_answer_keeps_to_a_schema(home: Path, streaming: str | None) -> None:
    options = ("-m", MODEL, "-o", "temperature", "0", *filter(None, [streaming]))
    done = llm(home, "prompt", *options, "--schema", json.dumps(STRICT_PERSON), PERSON_QUESTION)
    assert Person.model_validate_json(done.stdout or "{}") == PERSON, done.stderr


def test_a_schema_may_be_said_in_short(home: Path) -> None:
    done = llm(
        home, "-m", MODEL, "-o", "temperature", "0", "--schema", "name, age int, city", PERSON_QUESTION
    )
    assert json.loads(done.stdout) == PERSON.model_dump(), done.stderr
