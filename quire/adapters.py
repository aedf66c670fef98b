# SPDX-License-Identifier: Apache-2.0
"""Adapter of a request, under vLLM's name and under the core's.

The core names the class `AdapterRequest`, knows that an adapter has a key, which separates prefixes and counts against
the limit per step, and passes the rest to `quire.lora`.

Invariant: name and number together identify one set of weights for as long as the engine runs, since cached prefixes
use them as key; name and content do so for ever. It is a msgspec struct, so it crosses process borders as is.
"""

from __future__ import annotations

from typing import Any, Protocol

import msgspec

from quire.errors import ValidationError
from quire.vllm_names.parameters import KeywordCheck

MAX_NAME_CHARS = 256
ENABLE_FLAG, MODULES_FLAG, LIMIT_FLAG = "--enable-lora", "--lora-modules", "--max-loras"
_KEYWORD = "lora_request"
_BY_CONTENT = "sha256-"


class LoRARequest(msgspec.Struct, metaclass=KeywordCheck, frozen=True, forbid_unknown_fields=True):
    """LoRA adapter; names and order of the fields are vLLM's.

    Args:
        lora_name: name of the adapter.
        lora_int_id: positive number; weights that change under a name get another one.
        lora_path: its directory, with adapter_config.json and adapter_model.safetensors, on the machine of the engine.
        fingerprint: of its files (`quire.lora.peft_config`); an adapter with another one is refused; empty: any.
        content: digest over all bytes of its files, set by the engine where cached blocks outlive the process; an
            adapter with another one is refused; empty: any.

    Raises:
        ValidationError: a value is of the wrong type or out of range; `param` names it.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str
    fingerprint: str = ""
    content: str = ""

    def __post_init__(self) -> None:
        name, number = self.lora_name, self.lora_int_id
        if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME_CHARS:
            raise ValidationError(f"lora_name must be 1 to {MAX_NAME_CHARS} characters", param="lora_name")
        if not isinstance(number, int) or isinstance(number, bool) or not 1 <= number < 2**63:
            raise ValidationError(
                f"lora_int_id must be an integer from 1 to 2**63 - 1, got {number!r}", param="lora_int_id"
            )
        if not isinstance(self.lora_path, str) or not self.lora_path:
            raise ValidationError("lora_path must be a directory's path", param="lora_path")

    @property
    def name(self) -> str:
        return self.lora_name

    @property
    def number(self) -> int:
        return self.lora_int_id

    @property
    def key(self) -> str:
        """Identifier of its weights for as long as the engine runs."""
        return f"{self.lora_int_id}:{self.lora_name}"

    @property
    def cache_key(self) -> str:
        """Identifier in the names of cached blocks: by content, which outlives the engine, if that is known."""
        return f"{_BY_CONTENT}{self.content}:{self.lora_name}" if self.content else self.key


def name_in(key: str) -> str:
    """Return the adapter's name from its key, of either kind."""
    return key.partition(":")[2]


def outlives_engine(cache_key: str) -> bool:
    """Return whether a cache key names an adapter by its content."""
    return cache_key.startswith(_BY_CONTENT)


AdapterRequest = LoRARequest


class AdapterContents(Protocol):
    """Digests of the contents of adapters; safe between threads."""

    def is_complete(self, request: AdapterRequest) -> bool:
        """Return whether `completed` reads no files."""

    def completed(self, request: AdapterRequest) -> AdapterRequest:
        """Return an adapter with the digest of its content, if that can be read."""


def adapter_terms(adapter: AdapterRequest | None) -> dict[str, Any]:
    """Return the keyword argument with which an engine's public methods take an adapter."""
    return {_KEYWORD: adapter}


def adapter_error(message: str) -> ValidationError:
    """Return the error of a request whose adapter cannot be used."""
    return ValidationError(message, param=_KEYWORD)
