# SPDX-License-Identifier: Apache-2.0
"""AES-256-GCM over rows, and names that cannot be probed.

A sealed row is nonce (12 bytes), ciphertext, tag (16 bytes). Nonces are random, so one key is good for 2^32 rows. The
namespace and the name are authenticated with the row. A name on disk is a keyed hash: without the key nobody can test
whether a prompt was seen.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os

from quire.errors import ConfigError
from quire.kv_store.row_store import NAME_BYTES, Row
from quire.version import install_command

KEY_BYTES = 32
_NONCE_BYTES = 12
OVERHEAD_BYTES = _NONCE_BYTES + 16
"""Bytes by which a sealed row is longer."""


class Sealer:
    """Encryption under one key.

    Raises:
        ConfigError: the key has another length, or the package `cryptography` is missing.
    """

    def __init__(self, key: bytes, digest: str) -> None:
        if len(key) != KEY_BYTES:
            raise ConfigError(f"the key of the KV cache on disk must have {KEY_BYTES} bytes, got {len(key)}")
        if importlib.util.find_spec("cryptography") is None:
            raise ConfigError(
                "a key for the KV cache on disk needs the package cryptography: "
                + install_command("encryption")
            )
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        self._digest = digest.encode()
        self._names = _derive(key, b"names")
        self._cipher = AESGCM(_derive(key, b"rows"))
        self.fingerprint = _derive(key, b"fingerprint").hex()[:16]

    def hide(self, name: bytes) -> bytes:
        """Return the name on disk."""
        return hashlib.blake2b(name, key=self._names, digest_size=NAME_BYTES).digest()

    def seal(self, hidden: bytes, row: Row) -> memoryview:
        """Return an encrypted copy of a row."""
        nonce = os.urandom(_NONCE_BYTES)
        return memoryview(nonce + self._cipher.encrypt(nonce, b"".join(row), self._digest + hidden))

    def open(self, hidden: bytes, sealed: memoryview, row: Row) -> bool:
        """Decrypt into a row; False: it is not what `seal` made under this key, name and namespace."""
        from cryptography.exceptions import InvalidTag

        nonce, rest = sealed[:_NONCE_BYTES], sealed[_NONCE_BYTES:]
        try:
            plain = memoryview(self._cipher.decrypt(nonce, rest, self._digest + hidden))
        except InvalidTag:
            return False
        for part in row:
            part[:], plain = plain[: len(part)], plain[len(part) :]
        return True


def _derive(key: bytes, purpose: bytes) -> bytes:
    return hashlib.blake2b(key=key, person=b"quire " + purpose[:10], digest_size=KEY_BYTES).digest()
