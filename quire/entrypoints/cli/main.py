# SPDX-License-Identifier: Apache-2.0
"""The `quire` command.

Invariant: a command's module is imported when the command is named, and imports torch, the server or the engine only
when it runs, so help and usage errors are immediate. A usage error ends in one sentence on stderr.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import click

from quire.__main__ import run
from quire.entrypoints.cli.options import without_far_suggestions
from quire.errors import QuireError
from quire.logging_setup import EXIT_FAILED, EXIT_USAGE, configure_logging, say_error, say_failure
from quire.version import __version__
from quire.vllm_names.row import nearest

COMMANDS = {
    "serve": "quire.entrypoints.cli.serve",
    "run": "quire.entrypoints.cli.run",
    "run-batch": "quire.entrypoints.cli.run_batch",
    "transcribe": "quire.entrypoints.cli.transcribe",
    "chat": "quire.entrypoints.cli.chat",
    "complete": "quire.entrypoints.cli.chat",
    "bench": "quire.entrypoints.cli.bench",
    "quantize": "quire.entrypoints.cli.quantize",
    "trace": "quire.entrypoints.cli.trace",
    "simulate": "quire.entrypoints.cli.simulate",
    "pull": "quire.entrypoints.cli.models",
    "list": "quire.entrypoints.cli.models",
    "show": "quire.entrypoints.cli.models",
    "rm": "quire.entrypoints.cli.models",
    "ps": "quire.entrypoints.cli.models",
    "kv-store": "quire.entrypoints.cli.kv_store",
    "disagg-proxy": "quire.entrypoints.cli.disagg_proxy",
    "doctor": "quire.entrypoints.cli.doctor",
    "collect-env": "quire.entrypoints.cli.collect_env",
    "docs": "quire.entrypoints.cli.pages",
}  # Command -> module that holds it under the same name, with _ for -.

EXIT_INTERRUPTED = 130


class LazyGroup(click.Group):
    """Group that imports commands lazily."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command:
        if cmd_name not in COMMANDS:
            near = nearest(cmd_name, COMMANDS)
            ctx.fail(f"No such command {cmd_name!r}." + (f" Did you mean {near!r}?" if near else ""))
        command = getattr(import_module(COMMANDS[cmd_name]), cmd_name.replace("-", "_"))
        assert isinstance(command, click.Command)
        return command


def _dashes(name: str) -> str:
    return name.replace("_", "-")


@click.group(
    cls=LazyGroup,
    epilog="A page docs/NAME.md that a help or a message names: `quire docs NAME` prints it.",
    context_settings={
        "token_normalize_func": _dashes,
        "max_content_width": 110,
        "help_option_names": ["-h", "--help"],
    },
)
@click.version_option(__version__, "-v", "--version", prog_name="quire")
def cli() -> None:
    """Serve and run large language models."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the process's exit code: 0, 1 (failed) or 2 (usage error)."""
    try:
        configure_logging()
        result: Any = cli.main(args=argv, prog_name="quire", standalone_mode=False)
        return result if isinstance(result, int) else 0
    except click.ClickException as error:
        return _say_usage(error)
    except click.Abort:
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # the reader has gone
        _drop_output()
        return EXIT_FAILED
    except OSError as error:
        if error.errno != errno.ENOSPC or error.filename is not None:
            raise
        _drop_output()
        say_error("error: standard output cannot be written: " + os.strerror(error.errno))
        return EXIT_FAILED
    except QuireError as error:
        if os.environ.get("QUIRE_DEBUG") == "1":
            raise
        return say_failure(error)


def _drop_output() -> None:
    """Discard what standard output still buffers, since the interpreter's last flush would fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _say_usage(error: click.ClickException) -> int:
    """Print click's message in the form of all others, and the command whose help has the options."""
    if isinstance(error, click.NoSuchOption):
        error = without_far_suggestions(error)
    message = error.format_message()
    if message[1:2].islower():
        message = message[0].lower() + message[1:]
    context = getattr(error, "ctx", None)
    help_command = f" (see `{context.command_path} --help`)" if context is not None else ""
    say_error(f"error: {message}{help_command}")
    return EXIT_USAGE


if __name__ == "__main__":  # vLLM's way to run its command
    run()
