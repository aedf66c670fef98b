"""API keys as they are kept: hashed, from when they are read."""

from __future__ import annotations

import hashlib

from quire.errors import ConfigError

HASHED = "sha256:"
"""What a hashed key begins with, before 64 hex digits."""


def hashed_key(key: str, of: str = "--api-key") -> str:
    """The hash of a key; one that is hashed already is itself.

    Args:
        of: where it stands, for the error.

    Raises:
        ConfigError: it is no key. The message does not quote it.
    """
    if not key.startswith(HASHED):
        if not key or key != key.strip():
            raise ConfigError(f"{of}: a key is empty, or begins or ends with white space")
        return HASHED + hashlib.sha256(key.encode()).hexdigest()
    digits = key.removeprefix(HASHED).lower()
    if len(digits) != 64 or not set(digits) <= set("0123456789abcdef"):
        raise ConfigError(f"{of}: a key begins with {HASHED}, but 64 hex digits do not follow")
    return HASHED + digits


def digest_of(hashed: str) -> bytes:
    """The SHA-256 that a hashed key is."""
    return bytes.fromhex(hashed.removeprefix(HASHED))
