# SPDX-License-Identifier: Apache-2.0
"""`quire run-batch`: answer a file of requests or the rows of a table in this process, without a server."""

from __future__ import annotations

import json
import os
import stat
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, cast

import click

from quire.batch.summary import RunCounts
from quire.config import EngineConfig, ServerConfig
from quire.entrypoints.cli.options import EngineCommand, HumanInt, JsonObjectType, engine_config
from quire.errors import ConfigError, QuireError
from quire.progress import Progress

if TYPE_CHECKING:
    from quire.batch.line_file import LineFile
    from quire.batch.lines import EarlierAnswers
    from quire.batch.rows import RowJob

FILE = click.Path(dir_okay=False, allow_dash=True)
ROW_OPTIONS = ("system", "raw", "max_tokens", "temperature", "body", "schema", "answer_column")


@click.command(cls=EngineCommand)
@click.option("-i", "--input-file", type=FILE, required=True, help="Requests or a table (-: standard input).")
@click.option("-o", "--output-file", type=FILE, required=True, help="Answers (-: standard output).")
@click.option("--overwrite", is_flag=True, help="Start anew, and replace the output file at the end.")
@click.option(
    "--retry-failed", is_flag=True, help="Ask again for answers in the output file that are errors."
)
@click.option(
    "--prompt", metavar="TEMPLATE", help="Read a table, and make each row's prompt: 'Translate: {text}'."
)
@click.option("--system", metavar="TEMPLATE", help="System message before each prompt of a table.")
@click.option(
    "--raw", is_flag=True, default=None, help="Complete the prompts of a table without a chat template."
)
@click.option("--max-tokens", type=HumanInt(1), help="Longest answer to a row of a table.")
@click.option(
    "--temperature", type=click.FloatRange(0), help="Randomness of the answers to a table; 0: none."
)
@click.option("--body", type=JsonObjectType(), help='More fields of each row\'s request: {"top_p": 0.9}.')
@click.option(
    "--schema", type=click.Path(exists=True, dir_okay=False), help="JSON schema of the answers to a table."
)
@click.option("--answer-column", metavar="NAME", help="Column for the answers to a table. [default: answer]")
def run_batch(
    input_file: str, output_file: str, overwrite: bool, retry_failed: bool, prompt: str | None, **params: Any
) -> int:
    """Answer many requests and end.

    A line of the input is {"custom_id": ..., "method": "POST", "url": "/v1/chat/completions", "body": {...}}, or with
    --prompt the input is a table (.csv, .tsv, .jsonl, .parquet), and the output the same table with the answers. The
    same command again goes on where an earlier run ended. Exit code 3: some answers are errors. See docs/batch.md.
    """
    config = engine_config(params)
    if overwrite and retry_failed:
        raise click.UsageError("--overwrite and --retry-failed exclude each other")
    if _is_same(input_file, output_file):
        raise click.UsageError("--input-file and --output-file are the same file")
    started = time.monotonic()
    try:
        if prompt is None:
            _check_no_table(input_file, params)
            unit = "lines"
            counts = _answer_lines(config, input_file, output_file, overwrite, retry_failed)
        else:
            unit = "rows"
            job = _row_job(prompt, config, params)
            counts = _answer_rows(config, job, input_file, output_file, overwrite, retry_failed)
    except KeyboardInterrupt:
        click.echo(f"\nInterrupted; what is answered is kept. {_how_to_go_on(output_file)}", err=True)
        raise
    click.echo(counts.sentence(unit, time.monotonic() - started, output_file), err=True)
    return counts.exit_code


def _answer_lines(
    config: EngineConfig, input_file: str, output_file: str, overwrite: bool, retry_failed: bool
) -> RunCounts:
    from quire.batch.client import run_on_engine
    from quire.batch.lines import AnswerLines, LineReader, answer_line

    counts = RunCounts()
    with (
        _input(input_file) as lines,
        _output_errors(output_file),
        _output(output_file, overwrite, retry_failed) as (out, earlier),
    ):
        counts.num_failed = earlier.num_failed
        reader = LineReader(
            earlier, counts, seed=config.model.seed, max_bytes=ServerConfig().max_request_bytes
        )
        progress = Progress(_num_lines(lines), "Batch", "lines", skipped=sum(earlier.ids.values()))
        try:
            writer = AnswerLines(out, counts, progress)
            run_on_engine(config, reader.read(lines), answer_line, writer.write)
        finally:
            progress.close()
    return counts


def _output(
    path: str, overwrite: bool, retry_failed: bool
) -> AbstractContextManager[tuple[LineFile, EarlierAnswers]]:
    from quire.batch.lines import opened_output, opened_stream

    if path == "-":
        return opened_stream(cast(BinaryIO, click.open_file("-", "wb")))
    return opened_output(Path(path), overwrite=overwrite, retry_failed=retry_failed)


def _answer_rows(
    config: EngineConfig, job: RowJob, input_file: str, output_file: str, overwrite: bool, retry_failed: bool
) -> RunCounts:
    from quire.batch.client import run_on_engine
    from quire.batch.rows import opened_run
    from quire.batch.tables import format_of, open_table

    source, out = Path(input_file), Path(output_file)
    for path in (source, out):
        if str(path) == "-" or (path.exists() and not stat.S_ISREG(os.stat(path).st_mode)):
            raise ConfigError(
                f"{path}: a table is read and written as a regular file, since it is read several times"
            )
    if format_of(source) != format_of(out):
        raise ConfigError(
            f"{output_file}: the output has the format of the input, so its name ends in {source.suffix}"
        )

    def opened(path: Path) -> Any:
        return open_table(path, max_bytes=ServerConfig().max_request_bytes)

    with _input(input_file), _output_errors(output_file):
        table = opened(source)
        job.check(table)
        with opened_run(
            job, table, out.resolve(), opened, overwrite=overwrite, retry_failed=retry_failed
        ) as run:
            progress = Progress(run.num_rows, "Batch", "rows", skipped=run.counts.num_skipped)
            try:
                run_on_engine(config, run.requests(), run.answer, run.writer(progress))
            finally:
                progress.close()
        return run.counts


def _row_job(prompt: str, config: EngineConfig, params: dict[str, Any]) -> RowJob:
    from quire.batch.rows import RowJob
    from quire.batch.template import PromptTemplate

    fields = {name: params[name] for name in ("max_tokens", "temperature") if params[name] is not None}
    system = params["system"]
    return RowJob(
        PromptTemplate(prompt, "--prompt"),
        None if system is None else PromptTemplate(system, "--system"),
        raw=bool(params["raw"]),
        fields={**fields, **(params["body"] or {})},
        schema=_schema(params["schema"]),
        column=params["answer_column"] or "answer",
        seed=config.model.seed,
    )


def _schema(path: str | None) -> Any:
    if path is None:
        return None
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise click.UsageError(f"--schema {path}: {error}") from None


def _check_no_table(input_file: str, params: dict[str, Any]) -> None:
    for name in ROW_OPTIONS:
        if params[name] is not None:
            flag = "--" + name.replace("_", "-")
            raise click.UsageError(f"{flag} is about the rows of a table, which needs --prompt TEMPLATE")
    if Path(input_file).suffix.lower() in (".csv", ".tsv", ".parquet"):
        raise click.UsageError(
            f"{input_file} is a table, which needs --prompt TEMPLATE, such as 'Translate: {{text}}'"
        )


def _is_same(input_file: str, output_file: str) -> bool:
    both = os.path.exists(output_file) and os.path.exists(input_file)
    return both and os.path.samefile(input_file, output_file)


def _how_to_go_on(output_file: str) -> str:
    return "" if output_file == "-" else "The same command, without --overwrite, goes on from there."


@contextmanager
def _input(path: str) -> Iterator[BinaryIO]:
    """Open the input before the model is loaded, so that a wrong name costs no time."""
    try:
        file: Any = click.open_file(path, "rb")
    except OSError as error:
        raise click.FileError(path, error.strerror) from None
    with file:
        yield file


@contextmanager
def _output_errors(path: str) -> Iterator[None]:
    """Report what is wrong with files in one sentence."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise QuireError(f"{error.filename or path}: {error.strerror or error}") from error


def _num_lines(lines: BinaryIO) -> int | None:
    """Return the number of lines of a file, which is then at its start again; None if it can be read only once."""
    from quire.batch.lines import bounded_lines

    if not lines.seekable():
        return None
    num_lines = sum(1 for _ in bounded_lines(lines, ServerConfig().max_request_bytes))
    lines.seek(0)
    return num_lines
