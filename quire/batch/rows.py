# SPDX-License-Identifier: Apache-2.0
"""Batch jobs on tables: a request for each row, and the answers as more columns."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from quire.batch.client import Ask, BatchResponse
from quire.batch.journal import FAULTY, Journal, JournalEntry, digest_of, opened_journal, write_journal
from quire.batch.line_file import lock, partial_of
from quire.batch.lines import seed_of
from quire.batch.summary import RunCounts
from quire.batch.tables import Cells, TableFile, TableRow, added_names
from quire.batch.template import PromptTemplate
from quire.errors import ConfigError, ValidationError
from quire.progress import Progress

OWN_FIELDS = (
    "messages",
    "prompt",
    "stream",
    "n",
    "response_format",
)  # Fields of a body that the job sets itself.


@dataclass(frozen=True)
class RowJob:
    """Requests and added columns of a job.

    Args:
        system: None: no system message.
        raw: complete the prompt itself, without a chat template.
        fields: further fields of each request's body.
        schema: JSON schema of the answers; None: text.
        column: name of the column for the answers.
        seed: from which the seeds of the rows are derived.

    Raises:
        ConfigError: options exclude each other, or a field is the job's own.
    """

    prompt: PromptTemplate
    system: PromptTemplate | None = None
    raw: bool = False
    fields: Mapping[str, Any] = field(default_factory=dict)
    schema: Any = None
    column: str = "answer"
    seed: int = 0

    def __post_init__(self) -> None:
        if self.raw and self.system is not None:
            raise ConfigError(
                "--raw and --system exclude each other: a prompt without a chat template is one text"
            )
        for name in OWN_FIELDS:
            if name in self.fields:
                raise ConfigError(f"--body: {name} cannot be given; a row has one answer, to --prompt")

    def check(self, table: TableFile) -> None:
        """Check the names of a table's columns.

        Raises:
            ConfigError: the templates need one that is not there, or the job adds one that is.
        """
        if not table.columns:
            return
        for template in (self.prompt, self.system):
            if template is not None:
                template.check(table.columns)
        for name in added_names(self.column):
            if name in table.columns:
                raise ConfigError(_is_taken(name))

    def request(self, number: int, row: TableRow) -> RowRequest:
        """Return the request of a row, or the row's fault."""
        prompt = system = ""
        fault = row.fault
        if not fault:
            try:
                prompt = self.prompt.render(row.cells)
                system = "" if self.system is None else self.system.render(row.cells)
            except ValidationError as error:
                fault = str(error)
        if fault:
            return RowRequest(number, FAULTY, b"", fault)
        digest = digest_of(f"{len(system)} {system}{prompt}")
        return RowRequest(number, digest, self._body(number, system, prompt), "")

    @property
    def url(self) -> str:
        return "/v1/completions" if self.raw else "/v1/chat/completions"

    def entry(self, request: RowRequest, reply: BatchResponse) -> JournalEntry:
        """Return a row's entry for the reply to its request."""
        body = msgspec.json.decode(reply.body)
        entry = JournalEntry(request.row, request.digest)
        if reply.status_code != 200:
            entry.error = f"{reply.status_code}: {body['error']['message']}"
            return entry
        (choice,) = body["choices"]
        entry.text = choice["text"] if self.raw else choice["message"]["content"]
        entry.finish_reason = choice["finish_reason"]
        entry.prompt_tokens = body["usage"]["prompt_tokens"]
        entry.completion_tokens = body["usage"]["completion_tokens"]
        if self.schema is not None and not _is_json(entry.text):
            entry.error = (
                f"the answer is not complete JSON; it ended with {entry.finish_reason!r}: raise --max-tokens"
            )
            entry.text = None
        return entry

    def _body(self, number: int, system: str, prompt: str) -> bytes:
        body: dict[str, Any] = {"seed": seed_of(self.seed, f"row {number}"), **self.fields}
        if self.raw:
            body["prompt"] = prompt
        else:
            messages = [{"role": "user", "content": prompt}]
            body["messages"] = [{"role": "system", "content": system}] * (self.system is not None) + messages
        if self.schema is not None:
            form = {"name": "answer", "schema": self.schema}
            body["response_format"] = {"type": "json_schema", "json_schema": form}
        return json.dumps(body).encode()


@dataclass(frozen=True)
class RowRequest:
    """Request of a row: number from 0, digest of the prompt, body, and the fault of a row that has none."""

    row: int
    digest: int
    body: bytes
    fault: str


def _is_taken(name: str) -> str:
    return f"there is a column {name!r} already; choose another name with --answer-column"


def _is_json(text: str | None) -> bool:
    try:
        json.loads(text or "")
    except (ValueError, RecursionError):
        return False
    return True


class RowRun:
    """Run of a job on a table, with the answers of earlier runs in its journal."""

    def __init__(self, job: RowJob, table: TableFile, journal: Journal) -> None:
        self._job, self._table, self._journal = job, table, journal
        self.counts = RunCounts(num_failed=journal.num_failed)
        self.num_rows = 0

    def check(self) -> None:
        """Count the rows, and compare those that have answers with these.

        Raises:
            ConfigError: an answer is that of another prompt, or a row has a column that the job adds.
        """
        names = added_names(self._job.column)
        for number, row in enumerate(self._table.rows()):
            for name in names:
                if name in row.cells:
                    raise ConfigError(f"row {number + 1}: {_is_taken(name)}")
            request = self._job.request(number, row)
            self.counts.num_skipped += self._journal.has(number, request.digest)
            self.num_rows += 1

    def requests(self) -> Iterator[RowRequest]:
        """Yield the requests of the rows without an answer."""
        for number, row in enumerate(self._table.rows()):
            request = self._job.request(number, row)
            if not self._journal.has(number, request.digest):
                yield request

    async def answer(self, ask: Ask, request: RowRequest) -> JournalEntry:
        """Return the entry of a row; raises QuireError once the engine has failed."""
        if request.fault:
            return JournalEntry(request.row, request.digest, error=request.fault)
        return self._job.entry(request, await ask(self._job.url, request.body))

    def writer(self, progress: Progress) -> Callable[[JournalEntry], None]:
        """Return a function that writes an entry and counts it."""

        def write(entry: JournalEntry) -> None:
            self._journal.add(entry)
            self.counts.num_answered += 1
            self.counts.num_failed += entry.error is not None
            progress.update()

        return write

    def finish(self, path: Path) -> None:
        """Write the table with the answers.

        Raises:
            QuireError: the table has changed.
            OSError: it cannot be written.
        """
        names = added_names(self._job.column)
        self._table.copy(path, names, self._journal.added(), json_answers=self._job.schema is not None)


@contextmanager
def opened_run(
    job: RowJob,
    table: TableFile,
    out: Path,
    open_output: Callable[[Path], TableFile],
    *,
    overwrite: bool = False,
    retry_failed: bool = False,
) -> Iterator[RowRun]:
    """Open the journal beside the output; the answers of a finished output become a journal first.

    The journal stays if the run ends before all rows have answers.

    Args:
        open_output: opens a table for reading.

    Raises:
        ConfigError: the output has answers of another job, or another run is writing it.
        OSError: a file cannot be read or written.
    """
    path = partial_of(out)
    with ExitStack() as stack:
        if out.exists():
            lock(stack.enter_context(open(out, "rb", buffering=0)), out)
        was_finished = not overwrite and out.exists() and not path.exists()
        if was_finished:
            write_journal(path, _entries(job, open_output(out), out))
        journal = stack.enter_context(opened_journal(path, anew=overwrite, retry_failed=retry_failed))
        run = RowRun(job, table, journal)
        try:
            run.check()
            yield run
            if run.counts.num_answered or not was_finished:
                run.finish(out)
        except BaseException:
            if journal.is_empty or (was_finished and not run.counts.num_answered):
                path.unlink()
            raise
        path.unlink()


def _entries(job: RowJob, output: TableFile, out: Path) -> Iterator[JournalEntry]:
    """Yield the answers of a finished output.

    Raises:
        ConfigError: the file is no output of this job.
    """
    names = added_names(job.column)
    for number, row in enumerate(output.rows()):
        if not set(names) <= set(row.cells):
            raise ConfigError(
                f"{out}: row {number + 1} is no answer of a batch job with {job.column!r} as the column of answers; "
                "--overwrite replaces the file once new answers are complete"
            )
        yield _entry_of(
            number, row.cells, names, has_values=output.columns is None and job.schema is not None
        )


def _entry_of(number: int, cells: Cells, names: tuple[str, ...], *, has_values: bool) -> JournalEntry:
    """Return the entry that a row of a finished output was made of.

    Args:
        has_values: the answer is a JSON value there, and not its text.
    """
    text, error, reason, num_prompt, num_completion, prompt = (cells[name] for name in names)
    try:
        digest = int(prompt, 16)
    except (TypeError, ValueError):
        raise ConfigError(
            f"row {number + 1} of the output: {names[-1]} {prompt!r} is none of a batch job"
        ) from None
    if error:
        return JournalEntry(number, digest, None, str(error))
    if has_values:
        text = json.dumps(text, ensure_ascii=False)
    return JournalEntry(number, digest, text, None, reason, _number(num_prompt), _number(num_completion))


def _number(cell: Any) -> int | None:
    return None if cell in (None, "") else int(cell)
