"""`quire run-batch`: answer a file of requests in this process, without a server."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

import click

from quire.entrypoints.cli.options import EngineCommand, engine_config
from quire.entrypoints.openai.batch_output import Answered, opened_output

FILE = click.Path(dir_okay=False, allow_dash=True)


@click.command(cls=EngineCommand)
@click.option(
    "-i", "--input-file", type=FILE, required=True, help="Requests, one a line (-: standard input)."
)
@click.option("-o", "--output-file", type=FILE, required=True, help="Answers (-: standard output).")
@click.option("--resume", is_flag=True, help="Continue behind the answers in the output file.")
@click.option("--overwrite", is_flag=True, help="Replace the output file once all new answers are complete.")
def run_batch(input_file: str, output_file: str, resume: bool, overwrite: bool, **params: Any) -> None:
    """Answer a file in OpenAI's batch format and end.

    A line is {"custom_id": ..., "method": "POST", "url": "/v1/chat/completions", "body": {...}}. Answers come in the
    order of the lines; a line that cannot be answered has its error there. An output file with content is refused
    without --resume or --overwrite.
    """
    config = engine_config(params)
    if resume and overwrite:
        raise click.UsageError("--resume and --overwrite exclude each other")
    if (
        os.path.exists(output_file)
        and os.path.exists(input_file)
        and os.path.samefile(input_file, output_file)
    ):
        raise click.UsageError("--input-file and --output-file are the same file")
    with _input(input_file) as lines, _output(output_file, resume, overwrite) as (out, answered):
        from quire.entrypoints.openai.batch import run_file

        counts = run_file(config, lines, out, answered)
    skipped = f", {counts.num_skipped} had been answered before" if counts.num_skipped else ""
    click.echo(
        f"{counts.num_lines} lines answered, {counts.num_failed} of them with an error{skipped}", err=True
    )


def _input(path: str) -> AbstractContextManager[Any]:
    """Open the input before the model is loaded, so that a wrong name costs no time."""
    try:
        return click.open_file(path, "rb") if path == "-" else open(path, "rb")
    except OSError as error:
        raise click.FileError(path, error.strerror) from None


@contextmanager
def _output(path: str, resume: bool, overwrite: bool) -> Iterator[tuple[Any, Answered]]:
    """Open the output file or standard output, unbuffered."""
    if path == "-":
        with click.open_file(path, "wb") as out:
            yield out, Answered()
        return
    with ExitStack() as stack:
        try:
            opened = stack.enter_context(opened_output(Path(path), resume=resume, overwrite=overwrite))
        except OSError as error:
            raise click.FileError(path, error.strerror) from None
        yield opened
