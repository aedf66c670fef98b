# SPDX-License-Identifier: Apache-2.0
"""Decoders fine-tuned as bidirectional encoders (GTE-Qwen2, embedding models from Llama).

Invariant: torch-free. Sources: LLM2Vec (BehnamGhader et al., 2024, arXiv:2404.05961), GTE (Li et al., 2023,
arXiv:2308.03281).
"""

from __future__ import annotations

from dataclasses import replace
from functools import wraps
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from quire.config import ModelArch
    from quire.models.json_object import JsonObject

    Reader = Callable[[str, JsonObject], ModelArch]


def with_bidirectional(reader: Reader) -> Reader:
    """Return a family's reader that also reads `is_causal`; refused with windows, whose bidirectional width is
    undefined.
    """

    @wraps(reader)
    def read(architecture: str, config: JsonObject) -> ModelArch:
        arch = reader(architecture, config)
        if config.flag("is_causal", True):
            return arch
        if arch.sliding_window is not None:
            config.refuse("is_causal", "true where layers have windows")
        return replace(arch, bidirectional=True)

    return read
