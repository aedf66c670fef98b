# SPDX-License-Identifier: Apache-2.0
"""Adapter of a request under the core's name for it.

The core knows that an adapter has a key, which separates prefixes and counts against the limit per step, and hands the
rest to `quire.lora`. Clients know the same class as `quire.lora_request.LoRARequest`, vLLM's name.
"""

from __future__ import annotations

from typing import Protocol

from quire.lora_request import LoRARequest, name_in, outlives_engine

__all__ = ["AdapterContents", "AdapterRequest", "name_in", "outlives_engine"]

AdapterRequest = LoRARequest


class AdapterContents(Protocol):
    """Digests of the contents of adapters; safe between threads."""

    def is_complete(self, request: AdapterRequest) -> bool:
        """Return whether `completed` reads no files."""

    def completed(self, request: AdapterRequest) -> AdapterRequest:
        """Return an adapter with the digest of its content, if that can be read."""
