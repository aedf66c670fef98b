"""The `quire` command.

Invariant: a command's module is imported when the command is named, and imports torch, the server or the engine only
when it runs, so help and usage errors are immediate. A usage error ends in one sentence on stderr.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import click

from quire.entrypoints.cli.options import without_far_suggestions
from quire.errors import ClientError, ConfigError, QuireError
from quire.logging_setup import configure_logging, say_error
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
    "kv-store": "quire.entrypoints.cli.kv_store",
    "disagg-proxy": "quire.entrypoints.cli.disagg_proxy",
    "doctor": "quire.entrypoints.cli.doctor",
    "collect-env": "quire.entrypoints.cli.collect_env",
}  # Command -> module that holds it under the same name, with _ for -.

EXIT_FAILED = 1
EXIT_USAGE = 2
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
        (without_far_suggestions(error) if isinstance(error, click.NoSuchOption) else error).show()
        return error.exit_code
    except click.Abort:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader has gone; the interpreter's last flush must not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED
    except QuireError as error:
        if os.environ.get("QUIRE_DEBUG") == "1":
            raise
        say_error(f"Error: {error}")
        return EXIT_USAGE if isinstance(error, ConfigError | ClientError) else EXIT_FAILED


if __name__ == "__main__":
    sys.exit(main())
