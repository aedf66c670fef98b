# SPDX-License-Identifier: Apache-2.0
"""Sources of media: data URLs, base64, files below a directory, and hosts that the operator names.

Invariant: a size is checked before the bytes are there, or while they arrive. A file is read only if the file that was
opened lies below the operator's directory. Nothing is fetched but from `--allowed-media-domains` (`fetch`).
"""

from __future__ import annotations

import base64
import binascii
import errno
import os
import stat
import urllib.parse
from dataclasses import dataclass
from pathlib import Path

from quire.errors import ValidationError

MAX_ITEM_BYTES = 64 * 2**20
HTTP = ("http", "https")
WHITE_SPACE = str.maketrans("", "", " \t\r\n")
ANY_TYPE = ("", "application/octet-stream")


@dataclass(frozen=True)
class DataUrl:
    """Parts of a data URL that is not decoded yet."""

    media_type: str
    is_base64: bool
    data: str


def scheme_of(url: str) -> str:
    """Return the scheme of a URL in lower case; empty if it has none."""
    scheme, colon, _ = url[:32].partition(":")
    return scheme.strip().lower() if colon else ""


def read_data_url(url: str, where: str, kind: str = "image") -> bytes:
    """Return the bytes of a data URL.

    Raises:
        ValidationError: it is malformed, of another type, or too large.
    """
    parts = _split(url, where)
    if parts.media_type not in ANY_TYPE and not parts.media_type.startswith(f"{kind}/"):
        raise ValidationError(
            f"{where} is a data URL of the type {parts.media_type!r:.60}, which is no {kind}", param=where
        )
    if parts.is_base64:
        return read_base64(parts.data, where)
    _check_size(len(parts.data), where)
    return urllib.parse.unquote_to_bytes(parts.data)


def _split(url: str, where: str) -> DataUrl:
    head, comma, data = url.partition(",")
    if not comma or len(head) > 256:
        raise ValidationError(
            f"{where} is no data URL: it must be data:image/png;base64, and then the base64 of the file",
            param=where,
        )
    media_type, *parameters = (part.strip().lower() for part in head.partition(":")[2].split(";"))
    return DataUrl(media_type, "base64" in parameters, data)


def read_base64(text: str, where: str) -> bytes:
    """Return the bytes of base64 text; white space and missing padding are accepted.

    Raises:
        ValidationError: it is no base64, or too large.
    """
    _check_size(len(text) * 3 // 4, where)
    compact = text.translate(WHITE_SPACE).rstrip("=")
    compact += "=" * (-len(compact) % 4)
    try:
        return base64.b64decode(compact, validate=True)
    except (binascii.Error, ValueError):
        hint = (
            ": it is a data URL, of which only what follows the comma is base64"
            if scheme_of(text) == "data"
            else ""
        )
        raise ValidationError(f"{where} holds text that is not valid base64{hint}", param=where) from None


def _check_size(num_bytes: int, where: str) -> None:
    if num_bytes > MAX_ITEM_BYTES:
        raise ValidationError(
            f"{where} holds {num_bytes} bytes, the limit of one item is {MAX_ITEM_BYTES}", param=where
        )


def read_file_url(url: str, allowed: str, where: str) -> bytes:
    """Return the bytes of a file below the directory `allowed`.

    Raises:
        ValidationError: none is allowed, it lies elsewhere, or it cannot be read. All the latter say the same, so that
            no client finds out which files exist.
    """
    if not allowed:
        raise ValidationError(
            f"{where} is a file:// URL, and this server reads no files (--allowed-local-media-path); send a data URL",
            param=where,
        )
    parts = urllib.parse.urlsplit(url)
    if parts.netloc not in ("", "localhost") or parts.query or parts.fragment:
        raise ValidationError(f"{where} must be file:/// and an absolute path", param=where)
    return read_file(urllib.parse.unquote(parts.path), allowed, where)


def read_file(path: str, allowed: str, where: str) -> bytes:
    """Return the bytes of a regular file below `allowed`. Raises as `read_file_url`."""
    try:
        return _contents(path, Path(allowed).resolve(), where)
    except (OSError, ValueError):
        raise ValidationError(
            f"{where} names no readable file below the directory that the operator allows "
            "(--allowed-local-media-path)",
            param=where,
        ) from None


def read_own_file(path: str, where: str) -> bytes:
    """Return the bytes of a regular file that the caller in this process names.

    Raises:
        ValidationError: it cannot be read; says why.
    """
    try:
        return _contents(path, Path("/"), where)
    except OSError as error:
        raise ValidationError(f"{where} cannot be read: {error.strerror}", param=where) from None
    except ValueError as error:  # a path that no file can have
        raise ValidationError(f"{where!r:.80} is no path of a file: {error}", param=where) from None


def _contents(path: str, allowed: Path, where: str) -> bytes:
    """Return the bytes of a file.

    Raises:
        ValidationError: it is too large.
        OSError, ValueError: it cannot be opened, is no regular file, or lies elsewhere than below `allowed`.
    """
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    try:
        opened, facts = Path(os.readlink(f"/proc/self/fd/{fd}")), os.fstat(fd)
        if not opened.is_relative_to(allowed):
            raise OSError(errno.EACCES, "it lies elsewhere")
        if not stat.S_ISREG(facts.st_mode):
            raise OSError(errno.EINVAL, "it is no regular file")
        _check_size(facts.st_size, where)
        with os.fdopen(os.dup(fd), "rb") as file:
            content = file.read(MAX_ITEM_BYTES + 1)
    finally:
        os.close(fd)
    _check_size(len(content), where)
    return content
