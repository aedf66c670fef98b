# SPDX-License-Identifier: Apache-2.0
"""Key files of the KV store."""

from __future__ import annotations

from pathlib import Path

import pytest

from quire.config.kv_store import read_key
from quire.errors import ConfigError
from tests.fixtures.folded import folded

DIGITS = "ab" * 32
FLAG = "--kv-store-key-file"


@pytest.mark.parametrize(
    ("mode", "is_warned_of"), [(0o600, False), (0o400, False), (0o640, True), (0o644, True)]
)
def test_a_key_that_others_can_read_is_warned_of(
    mode: int, is_warned_of: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "key"
    file.write_text(f"{DIGITS}\n")
    file.chmod(mode)
    assert read_key(str(file), FLAG) == b"\xab" * 32
    warning = f"{FLAG}: {file} has mode {mode:04o}, so others can read the key; run chmod 600 {file}"
    assert (warning in caplog.text) == is_warned_of
    assert DIGITS not in caplog.text


@folded("mode", [0o620, 0o602, 0o666])
def test_a_key_that_others_can_replace_is_refused(mode: int, tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text(DIGITS)
    file.chmod(mode)
    with pytest.raises(
        ConfigError, match=f"has mode {mode:04o}, so others can replace the key; run chmod 600"
    ):
        read_key(str(file), FLAG)


@folded(
    "content",
    [
        b"",
        b"ab" * 31,
        b"ab" * 33,
        b"ab" * 10_000,
        b"xy" * 32,
        b"0x" + b"ab" * 31,
        b"ab" * 16 + b" " + b"ab" * 16,
    ],
)
def test_a_file_without_a_key_is_refused_unquoted(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "key").write_bytes(content)
    with pytest.raises(ConfigError, match="must have 64 hex digits and nothing else") as refused:
        read_key(str(tmp_path / "key"), FLAG)
    assert not content or content.decode() not in str(refused.value)


@folded("place", ["missing", "folder", "binary"])
def test_a_key_that_cannot_be_read_is_refused(place: str, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "binary").write_bytes(b"\xff" * 32)
    with pytest.raises(ConfigError, match=f"{FLAG}: cannot read"):
        read_key(str(tmp_path / place), FLAG)
