# SPDX-License-Identifier: Apache-2.0
"""Collective communication between the ranks of one model."""

from typing import TYPE_CHECKING

from quire.vllm_names.imports import attributes_of

if not TYPE_CHECKING:
    __getattr__ = attributes_of(__name__)  # vLLM's names that are elsewhere
