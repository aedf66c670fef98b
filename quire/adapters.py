# SPDX-License-Identifier: Apache-2.0
"""Adapter of a request under the core's name for it.

The core knows that an adapter has a key, which separates prefixes and counts against the limit per step, and hands the
rest to `quire.lora`. Clients know the same class as `quire.lora_request.LoRARequest`, vLLM's name.
"""

from __future__ import annotations

from quire.lora_request import LoRARequest, name_in

__all__ = ["AdapterRequest", "name_in"]

AdapterRequest = LoRARequest
