# SPDX-License-Identifier: Apache-2.0
"""The `quire` command as a whole: exit codes, one sentence per mistake, and nothing heavy imported for help."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable

import pytest

from quire.config import EngineConfig, ServerConfig
from quire.entrypoints.cli import main as main_module
from quire.entrypoints.cli.main import COMMANDS, main
from quire.errors import ConfigError, ModelLoadError, ValidationError
from quire.version import __version__
from tests.fixtures.folded import folded

HEAVY = ("torch", "numpy", "transformers", "fastapi", "uvicorn", "zmq", "tokenizers", "huggingface_hub")


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[tuple[EngineConfig, ServerConfig]]:
    """Replace `run_server` and return the list of configurations that `quire serve` passed to it."""
    calls: list[tuple[EngineConfig, ServerConfig]] = []

    class FakeApiServer:
        @staticmethod
        def run_server(engine: EngineConfig, server: ServerConfig) -> int:
            calls.append((engine, server))
            return 7

    monkeypatch.setitem(sys.modules, "quire.entrypoints.openai.api_server", FakeApiServer)  # type: ignore[arg-type]
    return calls


def failing(error: Exception) -> Callable[..., int]:
    def fail(*args: object, **kwargs: object) -> int:
        raise error

    return fail


@pytest.mark.parametrize(
    "argv", [["--help"], ["serve", "--help"], ["bench", "serve", "--help"], ["run", "--max-tokens", "x"]]
)
def test_help_and_mistakes_import_nothing_heavy(argv: list[str]) -> None:
    script = (
        "import sys; from quire.entrypoints.cli.main import main; main(sys.argv[1:]);"
        f"print('heavy:', sorted(set({HEAVY!r}) & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", script, *argv], capture_output=True, text=True, check=True)
    assert "heavy: []" in done.stdout


@folded(
    "argv",
    [[], *([name] for name in COMMANDS), *(["bench", name] for name in ("throughput", "latency", "serve"))],
    ids=" ".join,
)
def test_help_of_every_command(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*argv, "--help"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"Usage: {' '.join(['quire', *argv])} ")
    assert "--help" in out


def test_help_lists_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--help"])
    out = capsys.readouterr().out
    assert all(f"\n  {name} " in out for name in COMMANDS)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.split()[-1] == __version__


def test_unknown_command_and_flag(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serv"]) == 2
    assert "Did you mean 'serve'" in capsys.readouterr().err
    assert main(["serve", "--prt", "1"]) == 2
    assert "Did you mean '--port'" in capsys.readouterr().err


def test_serve_takes_the_model_by_position_flag_or_file(
    served: list[tuple[EngineConfig, ServerConfig]], tmp_path: pytest.TempPathFactory
) -> None:
    file = f"{tmp_path}/serve.yaml"
    with open(file, "w", encoding="utf-8") as stream:
        stream.write("model: filed\n")
    for argv in (["m"], ["--model", "m"], ["m", "--model", "m"], ["m", "--config", file], ["--config", file]):
        assert main(["serve", *argv]) == 7
    assert [engine.model.model for engine, _ in served] == ["m", "m", "m", "m", "filed"]


def test_serve_refuses_two_models(
    served: list[tuple[EngineConfig, ServerConfig]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", "a", "--model", "b"]) == 2
    assert "MODEL a and --model b" in capsys.readouterr().err
    assert not served


def test_bad_config_value_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--block-size", "0"]) == 2
    assert capsys.readouterr().err == "error: --block-size must be at least 1, got 0\n"


@pytest.mark.parametrize(
    ("error", "code"),
    [(ModelLoadError("no weights"), 1), (ConfigError("bad flag"), 2), (ValidationError("too long"), 2)],
)
def test_errors_end_in_a_sentence(
    error: Exception, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("QUIRE_DEBUG", raising=False)
    monkeypatch.setattr(main_module.cli, "main", failing(error))
    assert main(["serve"]) == code
    assert capsys.readouterr().err == f"error: {error}\n"


def test_debug_shows_the_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_DEBUG", "1")
    monkeypatch.setattr(main_module.cli, "main", failing(ModelLoadError("no weights")))
    with pytest.raises(ModelLoadError):
        main(["serve"])


def test_our_own_bugs_are_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(main_module.cli, "main", failing(KeyError("bug")))
    with pytest.raises(KeyError):
        main(["serve"])


def test_interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    import click

    monkeypatch.setattr(main_module.cli, "main", failing(click.Abort()))
    assert main(["serve"]) == 130


def test_reader_that_went_away_is_no_traceback() -> None:
    command = f"{sys.executable} -m quire.entrypoints.cli.main serve --help | head -c 10 >/dev/null"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("redirection", "code", "message"),
    [
        (">/dev/full", 1, "error: standard output cannot be written: No space left on device\n"),
        ("<&- >&- 2>&-", 0, ""),
    ],
)
def test_standard_streams_that_fail(redirection: str, code: int, message: str) -> None:
    command = f"{sys.executable} -m quire list {redirection}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (code, message)


def test_interrupt_during_imports_leaves_no_traceback() -> None:
    program = (
        "import builtins, sys; real = builtins.__import__\n"
        "def interrupted(name, *rest):\n"
        "    if name == 'click': raise KeyboardInterrupt\n"
        "    return real(name, *rest)\n"
        "from quire.__main__ import run; builtins.__import__ = interrupted; run()"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (130, "")


@pytest.mark.parametrize(
    ("words", "found"),
    [("quire run-b", "plain,run-batch"), ("quire serve --max-model", "plain,--max-model-len")],
)
def test_shells_can_complete_commands_and_flags(words: str, found: str) -> None:
    environment = {
        "_QUIRE_COMPLETE": "bash_complete",
        "COMP_WORDS": words,
        "COMP_CWORD": str(words.count(" ")),
    }
    done = subprocess.run(
        [sys.executable, "-m", "quire.entrypoints.cli.main"],
        env={**os.environ, **environment}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.stdout.splitlines() == [found]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shells_can_load_the_completion(shell: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "quire.entrypoints.cli.main"],
        env={**os.environ, "_QUIRE_COMPLETE": f"{shell}_source"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert f"_QUIRE_COMPLETE={shell}_complete" in done.stdout


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--tool-call-parser", "hermess"], "got 'hermess'; did you mean 'hermes'?"),
        (["--reasoning-parser", "deepseek_r11"], "did you mean 'deepseek_r1'?"),
        (["--chat-template", "./none.jinja"], "--chat-template ./none.jinja is neither a readable file"),
    ],
)
def test_serve_checks_formats_before_it_loads(
    flags: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", "/no/such/model", *flags]) == 2
    assert words in capsys.readouterr().err
