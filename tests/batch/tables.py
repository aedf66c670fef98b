# SPDX-License-Identifier: Apache-2.0
"""Tables of each format, written without quire, and runs of jobs on them with a stub in place of a model."""

from __future__ import annotations

import asyncio
import csv
import itertools
import json
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from quire.batch.client import BatchResponse, answer_all
from quire.batch.rows import RowJob, opened_run
from quire.batch.summary import RunCounts
from quire.batch.tables import open_table
from quire.batch.template import PromptTemplate
from quire.progress import Progress

SUFFIXES = (".csv", ".tsv", ".jsonl", ".parquet")
MAX_BYTES = 2**16


def write_table(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    """Rows with the same columns; the values are text."""
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(list(rows)), path)
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    else:
        with path.open("w", encoding="utf-8", newline="") as file:
            delimiter = "\t" if path.suffix == ".tsv" else ","
            writer = csv.DictWriter(file, list(rows[0]), delimiter=delimiter, quoting=csv.QUOTE_ALL)
            writer.writeheader()
            writer.writerows(rows)
    return path


def read_table(path: Path) -> list[dict[str, Any]]:
    """The rows of an output; what a CSV file leaves empty is None."""
    if path.suffix == ".parquet":
        rows: list[dict[str, Any]] = pq.read_table(path).to_pylist()
        return rows
    if path.suffix == ".jsonl":
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file, delimiter="\t" if path.suffix == ".tsv" else ","))


class Stub:
    """Model that answers with the prompt in capitals, refuses the prompts of `refused`, and dies after `life`.

    It remembers the last requests.
    """

    def __init__(self, life: int | None = None, refused: Sequence[str] = ()) -> None:
        self.bodies: deque[dict[str, Any]] = deque(maxlen=100)
        self.refused = refused
        self._left = itertools.repeat(None) if life is None else iter([None] * life)

    async def ask(self, url: str, body: bytes) -> BatchResponse:
        request = msgspec.json.decode(body)
        self.bodies.append(request)
        if next(self._left, self) is self:
            raise ZeroDivisionError("the process is killed")
        prompt = request["prompt"] if "prompt" in request else request["messages"][-1]["content"]
        await asyncio.sleep(0)
        if prompt in self.refused:
            return BatchResponse(400, "r", msgspec.Raw(b'{"error": {"message": "no"}}'))
        text = json.dumps({"a": prompt}, indent=1) if "response_format" in request else prompt.upper()
        choice = {"text": text, "message": {"content": text}, "finish_reason": "stop"}
        usage = {"prompt_tokens": len(prompt), "completion_tokens": len(text)}
        return BatchResponse(
            200, "r", msgspec.Raw(msgspec.json.encode({"choices": [choice], "usage": usage}))
        )


def run_job(
    source: Path,
    out: Path,
    prompt: str = "{text}",
    *,
    stub: Stub | None = None,
    job: RowJob | None = None,
    window: int = 4,
    **flags: bool,
) -> RunCounts:
    job = replace(job or RowJob(PromptTemplate("", "")), prompt=PromptTemplate(prompt, "--prompt"))
    stub = stub or Stub()
    table = open_table(source, max_bytes=MAX_BYTES)
    job.check(table)
    with opened_run(job, table, out, lambda path: open_table(path, max_bytes=MAX_BYTES), **flags) as run:
        write = run.writer(Progress(run.num_rows, "Batch", "rows"))
        asyncio.run(answer_all(run.requests(), lambda one: run.answer(stub.ask, one), write, window=window))
    return run.counts
