"""The version that responses carry."""

from __future__ import annotations

from quire import __version__

FINGERPRINT = f"quire-{__version__}"
