# SPDX-License-Identifier: Apache-2.0
"""Full disks, short transfers, failing disks, directories of others, and several processes."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from quire.errors import ConfigError
from quire.kv_store.disk import reader as reader_module
from quire.kv_store.disk.opening import open_disk_store
from quire.kv_store.disk.shared import SharedDiskStore
from quire.kv_store.row_store import Namespace, RowStoreError
from tests.kv_store.disk.rows import (
    KEY,
    NAMESPACE,
    OTHER,
    blank,
    bytes_of,
    content_of,
    held,
    limit_of,
    name_of,
    opened,
    read,
    row_of,
    write,
)


@pytest.fixture
def in_umask_0() -> object:
    before = os.umask(0)
    yield
    os.umask(before)


@pytest.mark.usefixtures("in_umask_0")
def test_files_and_folders_are_private(tmp_path: Path) -> None:
    store = opened(tmp_path / "a/rows")
    write(store, 1)
    store.close()
    for path in (tmp_path / "a/rows").rglob("*"):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path
    assert stat.S_IMODE((tmp_path / "a/rows").stat().st_mode) == 0o700


@pytest.mark.parametrize("mode", [0o770, 0o702])
def test_directory_that_others_write_to_is_refused(tmp_path: Path, mode: int) -> None:
    tmp_path.chmod(mode)
    with pytest.raises(ConfigError, match="others can write to it; run chmod 700"):
        opened(tmp_path)


def test_directory_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(ConfigError, match="give a directory of this user"):
        opened(tmp_path)


def test_file_in_place_of_the_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="Not a directory"):
        opened(tmp_path / "file")


def test_namespace_that_is_a_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "rows").mkdir(mode=0o700)
    (tmp_path / "rows" / NAMESPACE.digest).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="cannot be opened as a directory"):
        opened(tmp_path / "rows")
    assert not list((tmp_path / "elsewhere").iterdir())


def test_limit_without_room_for_a_row_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="give at least"):
        open_disk_store(tmp_path, NAMESPACE, limit_of(1) - 1)


def test_other_key_is_refused_and_names_differ(tmp_path: Path) -> None:
    opened(tmp_path, key=KEY).close()
    for key in (None, bytes(32)):
        with pytest.raises(ConfigError, match="give the same key"):
            opened(tmp_path, key=key)
    with pytest.raises(ConfigError, match="must have 32 bytes, got 5"):
        opened(tmp_path, key=b"short")


def test_encrypted_files_hold_neither_rows_nor_names(tmp_path: Path) -> None:
    store = opened(tmp_path, key=KEY)
    write(store, *range(5))
    store.close()
    content = b"".join(file.read_bytes() for file in tmp_path.rglob("*.rows"))
    assert not any(name_of(n) in content or content_of(n)[:16] in content for n in range(5))


def test_moved_namespace_is_refused_with_both_values(tmp_path: Path) -> None:
    opened(tmp_path, namespace=OTHER).close()
    (tmp_path / OTHER.digest).rename(tmp_path / NAMESPACE.digest)
    with pytest.raises(ConfigError, match="model is 'other' there and 'm' here"):
        opened(tmp_path)


def test_short_transfers_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real_read, real_write = os.preadv, os.pwritev

    def short(buffers: Sequence[memoryview]) -> list[memoryview]:
        return [memoryview(buffers[0])[: max(1, len(buffers[0]) // 2)]]

    monkeypatch.setattr(os, "preadv", lambda fd, buffers, at: real_read(fd, short(buffers), at))
    monkeypatch.setattr(os, "pwritev", lambda fd, buffers, at: real_write(fd, short(buffers), at))
    store = opened(tmp_path)
    assert write(store, *range(8)) == 8
    assert read(store, *range(8)) == [True] * 8
    store.close()
    assert held(opened(tmp_path)) == list(range(8))


def test_rows_of_more_parts_than_one_call_takes(tmp_path: Path) -> None:
    namespace = Namespace({}, 2500)
    store = open_disk_store(tmp_path, namespace, 1 << 20)
    content = content_of(1, 2500)
    assert store.write([name_of(1)], [row_of(content, 2500)]) == 1
    into = row_of(bytes(2500), 2500)
    assert store.read([name_of(1)], [into]) == [True]
    assert b"".join(into) == content
    store.close()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_full_disk_evicts_own_rows_and_recovers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, code: int
) -> None:
    """Slots that were written before have blocks; the first write to any other fails, as does a new file."""
    real, full = os.pwritev, False
    backed: set[tuple[int, int]] = set()

    def write_to_full_disk(fd: int, buffers: Sequence[memoryview], at: int) -> int:
        place = (os.fstat(fd).st_ino, at)
        if full and at >= 8192 and place not in backed:
            raise OSError(code, os.strerror(code))
        backed.add(place)
        return real(fd, buffers, at)

    monkeypatch.setattr(os, "pwritev", write_to_full_disk)
    store = opened(tmp_path)
    assert write(store, *range(5)) == 5
    full = True
    assert write(store, 10, 11) == 2
    assert held(store) == [0, 1, 2, 10, 11]
    assert write(store, *range(20, 40)) == 5  # no more than it had
    assert held(store) == [20, 21, 22, 23, 24]
    assert read(store, *range(20, 25)) == [True] * 5
    assert len([one for one in caplog.messages if "has no room for more" in one]) == 1
    full = False
    assert write(store, *range(30, 36)) == 6
    store.close()
    assert held(opened(tmp_path)) == [*range(20, 25), *range(30, 36)]


def test_a_disk_that_turns_read_only_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As many file systems do after an error of the disk: no row is lost, and saving goes on once it is mended."""
    real = os.pwritev
    store = opened(tmp_path)
    num_rows = write(store, *range(40))
    before = held(store)

    def refuse(*_: object) -> int:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(os, "pwritev", refuse)
    assert read(store, *before) == [True] * num_rows
    assert write(store, 50, 51) == 0
    assert held(store) == before
    assert caplog.text.count("is read-only: its KV cache rows are read, and none is saved for 60 s") == 1
    for numbers in ((50, 51), (52,)):
        store._read_only_until = 0.0  # a minute later
        assert write(store, *numbers) == 0
    assert len(held(store)) == num_rows - 2, "what was evicted for the first try has room for the second"
    monkeypatch.setattr(os, "pwritev", real)
    store._read_only_until = 0.0
    assert write(store, 50, 51) == 2
    left = held(store)
    store.close()
    store = opened(tmp_path)
    assert held(store) == left
    assert read(store, *left) == [True] * len(left)
    store.close()


def test_a_read_only_directory_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows in an image, or after a restart on a file system that has become read-only; new folders are refused."""
    engines = [SharedDiskStore(tmp_path, NAMESPACE, limit_of(100)) for _ in range(2)]
    for at, engine in enumerate(engines):
        engine.write([name_of(at)], [row_of(content_of(at))])
    for engine in engines:
        engine.close()
    real_open, real_mkdir = os.open, os.mkdir

    def open_to_read(path: str, flags: int, *rest: int, **options: int) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        return real_open(path, flags, *rest, **options)

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(os, "open", open_to_read)
    monkeypatch.setattr(os, "mkdir", refuse)
    store = SharedDiskStore(tmp_path, NAMESPACE, limit_of(100))
    assert not store.is_writable
    rows = [blank(), blank()]
    assert store.read([name_of(0), name_of(1)], rows) == [True, True]
    assert [*map(bytes_of, rows)] == [content_of(0), content_of(1)]
    assert store.write([name_of(2)], [row_of(content_of(2))]) == 0
    store.close()
    with pytest.raises(ConfigError, match="Read-only file system"):
        SharedDiskStore(tmp_path, OTHER, limit_of(100))
    monkeypatch.setattr(os, "mkdir", real_mkdir)
    monkeypatch.setattr(os, "open", real_open)
    store = SharedDiskStore(tmp_path, NAMESPACE, limit_of(100))
    assert store.is_writable
    store.close()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KiB in memory, which is made as root only."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k,mode=0700", "quire-test", str(place)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("file systems cannot be mounted here")
    yield place
    subprocess.run(["umount", "--lazy", str(place)], check=True)


@pytest.mark.parametrize("key", [None, KEY])
def test_a_file_system_that_fills_keeps_its_rows(small_disk: Path, key: bytes | None) -> None:
    """No injected error: the limit promises more than there is, and another user of the disk takes the rest."""
    store = opened(small_disk, 400, key=key)
    for start in range(0, 60, 6):
        write(store, *range(start, start + 6))
    there = held(store, 60)
    assert 20 < len(there) < 60
    assert read(store, *there) == [True] * len(there)
    with (small_disk / "other").open("wb") as other, contextlib.suppress(OSError):
        for _ in range(256):
            os.write(other.fileno(), bytes(1024))
    assert write(store, *range(100, 104)) == 4, "in the place of rows of its own"
    store.close()
    store = opened(small_disk, 400, key=key)
    assert store.is_writable
    assert read(store, *range(100, 104)).count(True) > 0
    kept = held(store, 60)
    assert read(store, *kept) == [True] * len(kept)
    late = opened(small_disk, 400, OTHER)
    assert (late.is_writable, write(late, 1)) == (True, 0)
    store.close()
    shutil.rmtree(small_disk / NAMESPACE.digest)
    late._grow_at = 0.0  # some seconds later
    assert write(late, 1) == 1
    late.close()
    late = opened(small_disk, 400, OTHER)
    assert read(late, 1) == [True]
    assert (small_disk / OTHER.digest / "namespace.json").exists()
    late.close()


def test_folders_named_as_segments_are_left_alone(tmp_path: Path) -> None:
    opened(tmp_path).close()
    folder = tmp_path / NAMESPACE.digest / "00000001.rows"
    (folder / "of the user").mkdir(parents=True)
    store = opened(tmp_path)
    assert write(store, *range(4)) == 4
    store.close()
    store = opened(tmp_path)
    assert held(store) == [0, 1, 2, 3]
    store.close()
    assert (folder / "of the user").exists()


def test_segments_of_another_layout_are_skipped_and_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A later version, and integers in the other byte order."""
    store = opened(tmp_path)
    write(store, *range(20))
    store.close()
    files = sorted((tmp_path / NAMESPACE.digest).glob("*.rows"))
    for file, version in zip(files, (2, 1 << 24), strict=False):
        with file.open("r+b") as segment:
            segment.seek(8)
            segment.write(version.to_bytes(4, "little"))
    store = opened(tmp_path)
    for version in (2, 1 << 24):
        assert f"it has version {version}, this quire reads version 1" in caplog.text
    left = held(store)
    assert len(left) < 8
    assert read(store, *left) == [True] * len(left)
    assert write(store, *range(20, 24)) == 4
    store.close()


@pytest.mark.parametrize("call", ["preadv", "pwritev"])
def test_failing_disk_is_an_error_of_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    store = opened(tmp_path)
    write(store, *range(4))

    def fail(*_: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, call, fail)
        with pytest.raises(RowStoreError, match="does not work: Input/output error"):
            read(store, 0) if call == "preadv" else write(store, 9)
    assert write(store, 9) == 1  # and once it works again
    assert read(store, 0, 9) == [True, True]
    store.close()
    assert held(opened(tmp_path)) == [0, 1, 2, 3, 9]


def test_closed_store_is_an_error_of_the_store(tmp_path: Path) -> None:
    store = opened(tmp_path)
    write(store, 1)
    store.close()
    assert held(store) == []
    with pytest.raises(RowStoreError, match="closed"):
        read(store, 1)


def test_second_process_reads_what_the_first_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader_module, "REFRESH_S", 0.0)
    writer = opened(tmp_path)
    reader = opened(tmp_path)
    assert (writer.is_writable, reader.is_writable) == (True, False)
    for start in (0, 3, 30):
        write(writer, *range(start, start + 12))
        for file in tmp_path.rglob("*.rows"):  # another time than before, however coarse the clock
            os.utime(file, (start + 1, start + 1))
        assert held(reader) == held(writer)
        assert read(reader, *held(reader)) == [True] * len(held(writer))
    assert sorted(reader.pop_removed()) == sorted(writer.pop_removed())
    assert reader.stats().num_corrupt == 0
    writer.close()
    assert not reader.is_writable
    assert read(reader, 30) == [True]
    later = opened(tmp_path)
    assert later.is_writable
    later.close()
    reader.close()


def test_reused_slot_is_a_miss_for_a_reader(tmp_path: Path) -> None:
    writer, reader = opened(tmp_path), None
    write(writer, *range(16))
    reader = opened(tmp_path)
    write(writer, *range(20, 36))
    assert read(reader, *range(16)) == [False] * 16
    assert reader.stats().num_corrupt == 0
    reader.close()
    writer.close()


def test_unused_namespaces_make_room_oldest_first(tmp_path: Path) -> None:
    namespaces = [Namespace({"model": str(number)}, NAMESPACE.row_bytes) for number in range(4)]
    for age, namespace in enumerate(namespaces):
        store = opened(tmp_path, 8, namespace)
        write(store, *range(8))
        store.close()
        for file in (tmp_path / namespace.digest).iterdir():
            os.utime(file, (age, age))
    in_use = opened(tmp_path, 8, namespaces[0])
    store = open_disk_store(tmp_path, NAMESPACE, limit_of(8, 8, 8))
    assert write(store, *range(8)) == 8
    there = [namespace.digest for namespace in namespaces if (tmp_path / namespace.digest).exists()]
    assert there == [namespaces[0].digest, namespaces[3].digest]
    store.close()
    in_use.close()


def test_smaller_limit_drops_least_recently_used_segments(tmp_path: Path) -> None:
    store = open_disk_store(tmp_path, NAMESPACE, limit_of(8, 8, 8))
    assert write(store, *range(24)) == 24
    for start in (16, 0, 8):
        read(store, *range(start, start + 8))
    store.close()
    store = open_disk_store(tmp_path, NAMESPACE, limit_of(8))
    assert held(store) == list(range(8, 16))
    store.close()


def test_two_writers_in_one_directory_share_the_limit(tmp_path: Path) -> None:
    first = open_disk_store(tmp_path, NAMESPACE, limit_of(8, 8))
    second = open_disk_store(tmp_path, OTHER, limit_of(8, 8))
    assert write(first, *range(16)) == 16
    assert write(second, *range(16)) == 8
    assert write(first, *range(16)) == 8
    assert sum(file.stat().st_size for file in tmp_path.rglob("*.rows")) <= limit_of(8, 8)
    first.close()
    second.close()
