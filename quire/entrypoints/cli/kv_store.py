# SPDX-License-Identifier: Apache-2.0
"""`quire kv-store`: the KV cache rows that engines have left on a disk."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from quire.entrypoints.cli.options import FiniteRange
from quire.errors import StartupError

if TYPE_CHECKING:
    from quire.kv_store.disk.maintenance import NamespaceCheck, NamespaceState

DIRECTORY = click.argument("directory", metavar="DIR", type=click.Path(path_type=Path))
GIB = 2**30


@click.group("kv-store")
def kv_store() -> None:
    """List, check and shrink a directory of KV cache rows."""


@kv_store.command("ls")
@DIRECTORY
@click.option("--json", "as_json", is_flag=True, help="Print a JSON array.")
def ls(directory: Path, as_json: bool) -> None:
    """List what is stored in DIR, last used first: rows, size when full, last use, and what rows depend on."""
    import msgspec

    from quire.kv_store.disk.maintenance import list_namespaces

    with _disk_errors(directory):
        states = list_namespaces(directory)
    if as_json:
        click.echo(msgspec.json.encode(states))
        return
    for state in states:
        click.echo("\n".join(_lines(state)))
    click.echo(f"{len(states)} namespaces, {sum(state.num_bytes for state in states) / GIB:.2f} GiB")


@kv_store.command("check")
@DIRECTORY
def check(directory: Path) -> int:
    """Read every row in DIR; damaged ones are removed unless an engine writes there, and the exit code is 1.

    An engine that starts meanwhile with a directory under check can only read it.
    """
    from tqdm import tqdm

    from quire.kv_store.disk.maintenance import check_namespaces

    num_rows = num_damaged = 0
    with (
        _disk_errors(directory),
        tqdm(unit=" rows", leave=False, disable=not sys.stderr.isatty()) as progress,
    ):
        for result in check_namespaces(directory, progress.update):
            num_rows += result.num_rows
            num_damaged += result.num_damaged_rows + len(result.damaged_files)
            click.echo(_verdict(result))
    click.echo(f"{num_rows} rows checked")
    return int(num_damaged > 0)


@kv_store.command("gc")
@DIRECTORY
@click.option("--max-gb", type=FiniteRange(min=0), required=True, help="GiB to keep.")
def gc(directory: Path, max_gb: float) -> None:
    """Remove the least recently used rows from DIR until the rest fits; those of running engines stay."""
    from quire.kv_store.disk.maintenance import collect

    with _disk_errors(directory):
        collected = collect(directory, int(max_gb * GIB))
    for digest in collected.skipped:
        click.echo(f"{digest} is in use: left alone")
    click.echo(f"{collected.num_bytes / GIB:.2f} GiB left")


def _lines(state: NamespaceState) -> Iterator[str]:
    used = time.strftime("%Y-%m-%d %H:%M", time.localtime(state.last_use))
    marks = ", encrypted" * state.is_encrypted + ", in use" * state.is_in_use
    yield f"{state.digest}  {state.num_rows} rows, {state.num_bytes / GIB:.2f} GiB, last used {used}{marks}"
    values = {**state.values, "row_bytes": str(state.row_bytes)}
    yield from (f"    {name}: {value}" for name, value in values.items())


def _verdict(result: NamespaceCheck) -> str:
    if not result.num_damaged_rows and not result.damaged_files:
        return f"{result.digest}: {result.num_rows} rows, all whole"
    done = "removed" if result.is_repaired else "left for the engine that has them in use"
    files = "".join(f", file {file}" for file in result.damaged_files)
    return f"{result.digest}: {result.num_rows} rows, damaged: {result.num_damaged_rows} rows{files}: {done}"


@kv_store.command("serve")
@click.argument("address", metavar="ADDRESS")
@click.option("--dir", "directory", type=click.Path(path_type=Path), help="Keep rows in this directory.")
@click.option(
    "--max-gb",
    type=FiniteRange(min=0, min_open=True),
    default=10.0,
    show_default=True,
    help="GiB that rows may take.",
)
@click.option("--key-file", help="File with 64 hex digits that clients must have, too (--kv-store-key-file).")
def serve(address: str, directory: Path | None, max_gb: float, key_file: str | None) -> None:
    """Serve rows at ADDRESS (unix:/PATH or tcp://HOST:PORT) to engines with --kv-store ADDRESS, until SIGTERM.

    Rows are in memory unless --dir is given. They travel unencrypted: use a trusted network.
    """
    from quire.config.kv_store import read_key
    from quire.kv_store.disk.shared import SharedDiskStore
    from quire.kv_store.memory import MemoryStore, RowMemory
    from quire.kv_store.row_store import Namespace, RowStore
    from quire.kv_store.server import serve as serve_rows
    from quire.logging_setup import configure_logging

    configure_logging()
    max_bytes = int(max_gb * GIB)
    memory = RowMemory(max_bytes)

    def open_store(namespace: Namespace) -> RowStore:
        if directory is None:
            return MemoryStore(namespace, memory)
        return SharedDiskStore(directory, namespace, max_bytes)

    serve_rows(address, open_store, None if key_file is None else read_key(key_file, "--key-file"))


@contextmanager
def _disk_errors(directory: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StartupError(f"{directory} cannot be read: {error.strerror or error}") from error
