"""Whose share a request takes under the fair policy.

Invariant: where keys are in use the key decides, and nothing that a client writes can change it.
"""

from __future__ import annotations

import hashlib

from starlette.requests import Request

from quire.entrypoints.openai.protocol.requests import GenerationRequest


def tenant_of_key(key: bytes) -> str:
    """A name for an API key, which can be shown and written to a command line, as the key cannot."""
    return f"key-{hashlib.sha256(key).hexdigest()[:12]}"


def tenant_of(request: Request, body: GenerationRequest) -> str:
    """The key's name if the server has keys, else the field `user`."""
    return str(request.scope["state"].get("tenant") or body.user or "")
