# SPDX-License-Identifier: Apache-2.0
"""HTTP data models: pydantic for requests, msgspec structs for responses."""

from typing import TYPE_CHECKING

from quire.vllm_names.imports import attributes_of

if not TYPE_CHECKING:
    __getattr__ = attributes_of(__name__)  # vLLM's names that are elsewhere
