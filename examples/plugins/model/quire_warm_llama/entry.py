# SPDX-License-Identifier: Apache-2.0
"""Entry of this package that quire reads at start-up, in processes without torch; it names everything else."""

from __future__ import annotations

from dataclasses import replace

from quire.config import ModelArch
from quire.models.families.llama import read_llama
from quire.models.json_object import JsonObject
from quire.models.registry import ArchitectureEntry


def read_warm_llama(architecture: str, config: JsonObject) -> ModelArch:
    """config.json has Llama's keys, and `temperature`."""
    temperature = config.number("temperature", 1.0, low=1e-3)
    return replace(read_llama(architecture, config), logits_multiplier=1.0 / temperature)


ENTRY = ArchitectureEntry("quire_warm_llama.model:WarmLlamaForCausalLM", read_warm_llama)
