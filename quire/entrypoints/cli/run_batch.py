"""`quire run-batch`: answer a file of requests in this process, without a server."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from typing import Any

import click

from quire.entrypoints.cli.options import EngineCommand, engine_config

FILE = click.Path(dir_okay=False, allow_dash=True)


@click.command(cls=EngineCommand)
@click.option(
    "-i", "--input-file", type=FILE, required=True, help="Requests, one a line (-: standard input)."
)
@click.option("-o", "--output-file", type=FILE, required=True, help="Answers (-: standard output).")
def run_batch(input_file: str, output_file: str, **params: Any) -> None:
    """Answer a file in OpenAI's batch format and end.

    A line is {"custom_id": ..., "method": "POST", "url": "/v1/chat/completions", "body": {...}}. Answers come in the
    order of the lines; a line that cannot be answered has its error there.
    """
    config = engine_config(params)
    if (
        os.path.exists(output_file)
        and os.path.exists(input_file)
        and os.path.samefile(input_file, output_file)
    ):
        raise click.UsageError("--input-file and --output-file are the same file")
    with _opened(input_file, "rb") as lines, _opened(output_file, "wb") as out:
        from quire.entrypoints.openai.batch import run_file

        counts = run_file(config, lines, out)
    click.echo(f"{counts.num_lines} lines answered, {counts.num_failed} of them with an error", err=True)


def _opened(path: str, mode: str) -> AbstractContextManager[Any]:
    """Opened before the model is loaded, so that a wrong name costs no time; what is written is not kept back."""
    try:
        return (
            click.open_file(path, mode)
            if path == "-"
            else open(path, mode, buffering=-1 if mode == "rb" else 0)
        )
    except OSError as error:
        raise click.FileError(path, error.strerror) from None
