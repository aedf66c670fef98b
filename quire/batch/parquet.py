# SPDX-License-Identifier: Apache-2.0
"""Parquet tables, with pyarrow."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

from quire.batch.line_file import replacement
from quire.batch.tables import AddedValues, TableFile, TableRow
from quire.errors import ConfigError

try:
    import pyarrow as pa
    import pyarrow.parquet as pq
except ImportError as error:
    raise ConfigError(
        f"Parquet files need pyarrow, which cannot be imported ({error}); install the extra 'parquet'"
    ) from error

BATCH_ROWS = 1024  # Rows in memory at a time; pyarrow also holds the compressed pages of one row group.
# Of the fields of `Added`.
_ADDED_TYPES = (pa.string(), pa.string(), pa.string(), pa.int64(), pa.int64(), pa.string())


class ParquetTable(TableFile):
    """Parquet file; a copy has the columns with their types and the schema's metadata."""

    def __init__(self, path: Path, *, max_bytes: int) -> None:
        super().__init__(path, max_bytes=max_bytes)
        try:
            with pq.ParquetFile(path) as file:
                self._schema = file.schema_arrow
        except pa.ArrowException as error:
            raise ConfigError(f"{path} is no Parquet file: {error}") from None
        self.columns = tuple(self._schema.names)
        repeated = {name for name in self.columns if self.columns.count(name) > 1}
        if repeated:
            raise ConfigError(f"{path}: it has the columns {', '.join(sorted(map(repr, repeated)))} twice")

    def rows(self) -> Iterator[TableRow]:
        for batch in self._batches():
            for cells in batch.to_pylist():
                yield TableRow(cells)

    def copy(
        self, path: Path, names: Sequence[str], added: Iterator[AddedValues], *, json_answers: bool
    ) -> None:
        fields = [
            *self._schema,
            *(pa.field(name, kind) for name, kind in zip(names, _ADDED_TYPES, strict=True)),
        ]
        schema = pa.schema(fields, metadata=self._schema.metadata)
        with replacement(path) as out, pq.ParquetWriter(out, schema) as writer:
            for batch in self._batches():
                more = list(itertools.islice(added, batch.num_rows))
                columns = zip(*more, strict=True)
                arrays = list(batch.columns)
                arrays += [pa.array(values, kind) for values, kind in zip(columns, _ADDED_TYPES, strict=True)]
                writer.write_batch(pa.record_batch(arrays, schema=schema))

    def _batches(self) -> Iterator[pa.RecordBatch]:
        try:
            with pq.ParquetFile(self._path) as file:
                yield from file.iter_batches(batch_size=BATCH_ROWS)
        except pa.ArrowException as error:
            raise ConfigError(f"{self._path} cannot be read as Parquet: {error}") from None
