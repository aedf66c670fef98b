# SPDX-License-Identifier: Apache-2.0
"""TLS of the HTTP server: checks of the files before the model loads, and renewal of the certificate.

Invariant: a renewed pair of certificate and key is used only if it fits together; until then the old one is kept.
"""

from __future__ import annotations

import asyncio
import logging
import os
import ssl
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from quire.config import ServerConfig
from quire.errors import ConfigError

logger = logging.getLogger(__name__)

POLL_S = 10.0  # Interval of the look at the files.
FIELDS = ("ssl_certfile", "ssl_keyfile", "ssl_ca_certs")


def checked_tls(config: ServerConfig) -> ServerConfig:
    """Return the config with absolute paths, since other processes have another working directory.

    Raises:
        ConfigError: an option needs another one, a file cannot be read, is no certificate or key, or key and
            certificate do not fit together.
    """
    config.check_tls()
    if not config.ssl_certfile:
        return config
    given = {field: getattr(config, field) for field in FIELDS}
    paths: dict[str, Any] = {
        field: str(Path(path).expanduser().absolute()) for field, path in given.items() if path
    }
    config = replace(config, **paths)
    flags = " and ".join(f"--{field.replace('_', '-')} {path}" for field, path in given.items() if path)
    try:
        context = _loaded(config)
        if config.ssl_ca_certs:
            context.load_verify_locations(config.ssl_ca_certs)
        if config.ssl_ciphers:
            context.set_ciphers(config.ssl_ciphers)
    except OSError as error:  # ssl.SSLError is one
        reason = error.strerror if isinstance(error, FileNotFoundError | PermissionError) else error
        raise ConfigError(f"{flags}: {reason}") from None
    return config


def tls_options(config: ServerConfig) -> dict[str, Any]:
    """Return uvicorn's settings; empty without TLS."""
    if not config.ssl_certfile:
        return {}
    return {
        "ssl_certfile": config.ssl_certfile,
        "ssl_keyfile": config.ssl_keyfile,
        "ssl_ca_certs": config.ssl_ca_certs,
        "ssl_cert_reqs": config.ssl_cert_reqs,
        "ssl_ciphers": config.ssl_ciphers,
    }


class CertificateRenewal:
    """Loads the certificate and key into a context again when their files change."""

    def __init__(self, config: ServerConfig, context: ssl.SSLContext) -> None:
        self._config = config
        self._context = context
        self._states = self._read_states()

    async def run(self) -> None:
        """Look at the files until cancelled."""
        while True:
            await asyncio.sleep(POLL_S)
            self.refresh()

    def refresh(self) -> bool:
        """Load the files if they changed, and return whether new connections use them."""
        states = self._read_states()
        if states == self._states:
            return False
        try:
            _loaded(self._config)
            _load_into(self._context, self._config)
        except OSError as error:  # one of two files is written, or none can be read
            logger.warning("the changed TLS certificate is not used yet: %s", error)
            return False
        self._states = states
        logger.info("TLS certificate renewed from %s", self._config.ssl_certfile)
        return True

    def _read_states(self) -> list[tuple[int, int, int] | None]:
        paths = (self._config.ssl_certfile, self._config.ssl_keyfile)
        return [_state(path) for path in paths if path]


def _loaded(config: ServerConfig) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    _load_into(context, config)
    return context


def _load_into(context: ssl.SSLContext, config: ServerConfig) -> None:
    # Without a password function, OpenSSL would ask for one on the terminal.
    context.load_cert_chain(str(config.ssl_certfile), config.ssl_keyfile, password=_no_password)


_no_password: Callable[[], str] = str


def _state(path: str) -> tuple[int, int, int] | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_mtime_ns, status.st_ino, status.st_size
