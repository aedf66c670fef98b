# SPDX-License-Identifier: Apache-2.0
"""Listening Unix sockets: permissions, old sockets, paths that cannot be used."""

from __future__ import annotations

import socket
import stat
from pathlib import Path

import pytest

from quire.config import ServerConfig
from quire.entrypoints.openai.api_server import listen
from quire.errors import StartupError
from quire.unix_sockets import listen_unix


def test_listen_unix_is_for_this_user_only(tmp_path: Path) -> None:
    with listen_unix(str(tmp_path / "s")):
        assert stat.S_IMODE((tmp_path / "s").stat().st_mode) == 0o600


def test_listen_unix_replaces_a_dead_socket(tmp_path: Path) -> None:
    listen_unix(str(tmp_path / "s")).close()
    with listen_unix(str(tmp_path / "s")), socket.socket(socket.AF_UNIX) as client:
        client.connect(str(tmp_path / "s"))


@pytest.mark.parametrize("kind", ["in use", "a file", "no directory", "too long"])
def test_listen_refuses_a_path_with_a_message(tmp_path: Path, kind: str) -> None:
    path = tmp_path / {"no directory": "none/s", "too long": "s" * 120}.get(kind, "s")
    holder = listen_unix(str(path)) if kind == "in use" else None
    if kind == "a file":
        path.touch()
    with pytest.raises(StartupError, match=f"cannot listen on --uds {path}: .*choose another path"):
        listen(ServerConfig(uds=str(path)))
    if holder is not None:
        holder.close()
