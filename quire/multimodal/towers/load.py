# SPDX-License-Identifier: Apache-2.0
"""Loading of a checkpoint's tower."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from quire.config import EngineConfig
from quire.layers.base import activation_dtype
from quire.models.json_object import JsonObject
from quire.models.loader import load_part
from quire.models.transformers_backend.reader import transformers_has
from quire.models.vision_rows import SWIN
from quire.multimodal.families import FAMILIES, HOSTED
from quire.multimodal.towers.base import NO_STEP, PatchLinear, Tower, TowerNames, sequences
from quire.multimodal.towers.block import SlicedBlock
from quire.plugins import import_place

_ROWS = 32


def has_tower(config: EngineConfig) -> bool:
    """Return whether the checkpoint has a tower that quire computes and that is not switched off."""
    whole = config.arch.part_of
    if whole is None or config.multimodal.language_model_only:
        return False
    family = FAMILIES.get(whole.architecture)
    if family is HOSTED:
        return transformers_has(whole.architecture)
    return family is not None and bool(family.tower)


def load_tower(config: EngineConfig) -> Tower:
    """Return the tower of a prepared config's checkpoint, with weights in the model's dtype.

    Raises:
        ModelLoadError: the checkpoint's tensors or its config do not fit.
        UnsupportedModelError: the tower has an option that quire does not compute.
    """
    arch = config.arch
    assert arch.part_of is not None, "has_tower() says so"
    values: Mapping[str, Any] = json.loads(arch.part_of.config)
    whole = JsonObject(f"{config.model_dir}/config.json", dict(values))
    names = TowerNames(
        arch.part_of.architecture,
        {},
        (),
        encoder_length=arch.part_of.encoder_length,
        encoder_dir=arch.part_of.encoder_dir,
    )
    own = replace(
        config,
        model_dir=arch.part_of.projector or config.model_dir,
        model_arch=replace(arch, part_of=names, quantization=None, tie_word_embeddings=False),
    )
    kind = import_place(place_of(arch.part_of.architecture, whole))
    with torch.device("meta"):
        tower: Tower = kind(config=own, whole=whole)
    load_part(tower)
    return tower


def place_of(architecture: str, whole: JsonObject) -> str:
    """Return the tower's class; LLaVA's and that of `VisionEncoderDecoderModel` are chosen by the encoder inside."""
    if whole.child("encoder").get("model_type") == SWIN:
        return "quire.multimodal.towers.swin:SwinTower"
    if whole.child("vision_config").get("model_type") == "pixtral" and architecture.startswith("Llava"):
        return "quire.multimodal.towers.pixtral:PixtralTower"
    return FAMILIES[architecture].tower


@torch.inference_mode()
def warm_up(tower: Tower) -> None:
    """Run one layer of each kind on a few rows, so that no client's item waits for what is made on first use."""
    device, dtype = tower.device, activation_dtype(tower.config)
    patch = next((layer for layer in tower.modules() if isinstance(layer, PatchLinear)), None)
    if patch is not None:
        patch(torch.zeros(_ROWS, math.prod(patch.patch), device=device, dtype=dtype), NO_STEP)
    block = next((layer for layer in tower.modules() if isinstance(layer, SlicedBlock)), None)
    if block is not None:
        rows = torch.zeros(_ROWS, block.shape.channels, device=device, dtype=dtype)
        angles = torch.zeros(_ROWS, block.shape.head_dim, device=device)
        for _ in block.slices(rows, sequences([_ROWS], device), angles):
            pass
