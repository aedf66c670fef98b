# SPDX-License-Identifier: Apache-2.0
"""The chat of `quire run`: answers are those of `LLM.chat`, commands act, and mistakes end nothing."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from quire.config import EngineConfig
from quire.engine.llm_engine import LLMEngine
from quire.entrypoints.chat.media import OfflineMedia
from quire.entrypoints.cli.main import main
from quire.entrypoints.cli.run import model_and_prompt, names_model
from quire.entrypoints.cli.run_chat import AnswerPrinting, ChatSession, read_message
from quire.entrypoints.llm import LLM
from quire.sampling_params import SamplingParams
from tests.fixtures.folded import folded

QUESTION = "What is the capital of France?"
GREEDY = {"temperature": 0.0, "max_tokens": 24}


def typed(*lines: str | type[BaseException]) -> Callable[[str], str]:
    """Input that gives these lines, raises what is an exception, and then ends."""
    left = iter(lines)

    def read(prompt: str) -> str:
        line = next(left, EOFError)
        if isinstance(line, str):
            return line
        raise line

    return read


@pytest.fixture(scope="module")
def engine() -> Iterator[LLMEngine]:
    made = LLMEngine(EngineConfig.from_args(cpu_threads=1, max_model_len=512, kv_cache_memory_bytes=2**24))
    yield made
    made.shutdown()


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    made = LLM(cpu_threads=1, max_model_len=512, kv_cache_memory_bytes=2**24)
    yield made
    made.shutdown()


@pytest.fixture
def chat(engine: LLMEngine) -> ChatSession:
    return ChatSession(AnswerPrinting(engine, OfflineMedia(engine.config)), None, GREEDY)


def answered(llm: LLM, messages: list[dict[str, Any]]) -> str:
    params = SamplingParams(**GREEDY)
    return llm.chat(messages, params, use_tqdm=False)[0].outputs[0].text


def test_chat_answers_as_llm_chat_with_history(
    chat: ChatSession, llm: LLM, capsys: pytest.CaptureFixture[str]
) -> None:
    chat.run(typed(QUESTION, "", "Are you sure?", "/bye", "never read"))
    first = answered(llm, [{"role": "user", "content": QUESTION}])
    history = [
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "content": first},
        {"role": "user", "content": "Are you sure?"},
    ]
    second = answered(llm, history)
    assert capsys.readouterr().out == f"{first}\n{second}\n"
    assert chat.messages == [*history, {"role": "assistant", "content": second}]


def test_commands_set_clear_and_help(chat: ChatSession, llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    chat.run(
        typed(
            "/set system Be brief.", "/set max_tokens 3", "/set", "/help", QUESTION, "/clear", "/unset system"
        )
    )
    captured = capsys.readouterr()
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": QUESTION}]
    params = SamplingParams(temperature=0, max_tokens=3)
    assert captured.out == llm.chat(messages, params, use_tqdm=False)[0].outputs[0].text + "\n\n"
    assert "system Be brief.\ntemperature 0.0\nmax_tokens 3\n" in captured.err
    assert "/bye" in captured.err
    assert chat.messages == []


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("/set wibble 3", "/set has no 'wibble'; there are system, temperature"),
        ("/set temperature hot", "/set temperature needs a number, got 'hot'"),
        ("/set temperature 9", "temperature must be finite and in [0, 2]"),
        ("/unset top_p", "'top_p' is not set"),
        ("/clera", "no command '/clera'; did you mean '/clear'?"),
        ("/helpp", "no command '/helpp'; did you mean '/help'?"),
        ("/image none.png", "/image needs the path of a file, got 'none.png'"),
        ("word " * 2000, "maximum context length is 512"),
    ],
)
def test_mistake_is_a_sentence_and_changes_nothing(
    chat: ChatSession, line: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    chat.run(typed(line, QUESTION))
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.startswith("error: ")
    assert "Paris" in captured.out
    assert len(chat.messages) == 2


def test_interrupt_ends_the_answer_only(
    engine: LLMEngine, chat: ChatSession, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    step, calls = engine.step, 0

    def interrupted() -> list[Any]:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise KeyboardInterrupt
        return step()

    monkeypatch.setattr(engine, "step", interrupted)
    chat.run(typed(QUESTION, KeyboardInterrupt, QUESTION))
    captured = capsys.readouterr()
    assert "Ctrl-D ends the chat" in captured.err
    cut, whole = chat.messages[1]["content"], chat.messages[3]["content"]
    assert "Paris" in whole
    assert "Paris" not in cut
    assert captured.out == f"{cut}\n{whole}\n\n"
    assert not engine.has_unfinished_requests()


def test_interrupt_outside_of_steps_ends_the_message_only(
    engine: LLMEngine, chat: ChatSession, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    step, add = engine.step, engine.add_request

    def interrupted(*args: Any) -> str:
        add(*args)
        monkeypatch.setattr(engine, "step", interrupted_again)
        raise KeyboardInterrupt

    def interrupted_again() -> list[Any]:
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(engine, "add_request", interrupted)
    chat.run(typed("Count to ten.", QUESTION))
    captured = capsys.readouterr()
    assert "interrupted; the message is not kept" in captured.err
    assert [message["content"] for message in chat.messages] == [QUESTION, captured.out.strip()]
    assert engine.step == step
    assert not engine.has_unfinished_requests()


class Recorded:
    """Printing that keeps what it is asked."""

    def __init__(self) -> None:
        self.asked: list[Any] = []

    def ask(self, messages: list[Any]) -> None:
        self.asked.append(messages[-1]["content"])

    def answer(self, asked: None, given: Any) -> str:
        return "yes"


def test_files_are_shown_with_one_message(tmp_path: Path) -> None:
    typed_path = tmp_path / "a b.png"
    typed_path.touch()
    printing = Recorded()
    session = ChatSession(printing, None, {}, [("image", "/given.png")])  # type: ignore[arg-type]
    session.run(typed(f"/audio {typed_path}", "first", "second", "/clear", "third"))
    first, second, third = printing.asked
    assert [list(part.values())[1] for part in first] == ["/given.png", str(typed_path), "first"]
    assert second == "second"
    assert [list(part.values())[1] for part in third] == ["/given.png", "third"]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (("one",), "one"),
        (('"""one', "two", 'three"""'), "one\ntwo\nthree"),
        (('"""', "one", "", "two", '"""'), "one\n\ntwo"),
        (('"""one line"""',), "one line"),
    ],
)
def test_message_of_several_lines_is_read(lines: tuple[str, ...], message: str) -> None:
    assert read_message(typed(*lines)) == message


def test_run_without_prompt_on_a_terminal_chats(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", typed(QUESTION))
    assert main(["run", "quire-demo", "--cpu-threads", "1", "--temperature", "0"]) == 0
    captured = capsys.readouterr()
    assert "Paris" in captured.out
    assert "INFO" not in captured.err
    assert main(["run", "--raw"]) == 2
    assert "--raw needs a PROMPT" in capsys.readouterr().err


@folded(
    ("words", "flag", "expected"),
    [
        (("hello",), None, (None, "hello")),
        (("hello",), "m", ("m", "hello")),
        (("quire-demo",), None, ("quire-demo", None)),
        (("quire-demo",), "m", ("m", "quire-demo")),
        (("org/model",), None, ("org/model", None)),
        (("org/model:Q4_K_M", "hello"), None, ("org/model:Q4_K_M", "hello")),
        (("x.gguf",), None, ("x.gguf", None)),
        (("is 3/4 more?",), None, (None, "is 3/4 more?")),
        (("./none",), None, ("./none", None)),
        (("/etc is what?",), None, (None, "/etc is what?")),
        (("gpt2",), None, ("gpt2", None)),
        (("llama3.2:1b",), None, ("llama3.2:1b", None)),
        (("quire-dmo",), None, ("quire-dmo", None)),
        (("10:30",), None, (None, "10:30")),
        (("2+2",), None, (None, "2+2")),
        (("a" * 9999,), None, (None, "a" * 9999)),
        ((), None, (None, None)),
        ((), "m", ("m", None)),
    ],
)
def test_words_are_model_and_prompt(
    words: tuple[str, ...], flag: str | None, expected: tuple[str | None, str | None]
) -> None:
    assert model_and_prompt(words, flag) == expected


def test_directory_with_a_model_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for folder, file in (("empty", "notes.txt"), ("one model", "config.json"), ("other", "model.gguf")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / file).touch()
    assert [names_model(folder) for folder in ("empty", "one model", "other")] == [False, True, True]


def test_too_many_words_are_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "what", "is", "this"]) == 2
    assert "put the prompt in quotes" in capsys.readouterr().err
