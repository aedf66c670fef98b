# SPDX-License-Identifier: Apache-2.0
"""Reads config.json of draft heads and checks that they match the target.

Invariant: torch-free. Missing settings are the target's.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

from quire.config.arch import DraftArch, ModelArch
from quire.config.speculative import EAGLE, EAGLE3, MEDUSA, MTP
from quire.errors import ConfigError
from quire.models.families.fields import MAX_HEADS, MAX_LAYERS, read_llama
from quire.models.hf_config import config_json, read_fully
from quire.models.json_object import JsonObject
from quire.models.quantized.reader import read_quantization
from quire.models.weight_files import StoredTensors

logger = logging.getLogger(__name__)

_MOST_PADDING = 1024  # most rows by which tables of the same tokens may differ


class HeadKind(NamedTuple):
    """Reader and class of a method's heads."""

    reader: Callable[[ModelArch, str, JsonObject], ModelArch]
    """Maps target, method and config.json to the shape of the heads."""
    model: str
    """Class as "module:Name"."""


def read_draft_heads(method: str, model_dir: Path, target: ModelArch) -> ModelArch:
    """Return the shape of the heads in a directory.

    Raises:
        ModelLoadError: config.json is missing or malformed.
        UnsupportedModelError: it has a setting that quire does not support.
        ConfigError: they do not match the target.
    """
    file = config_json(model_dir, {})
    config = JsonObject(file.where, file.values, refused=[])
    arch = read_fully(method, config, partial(HEADS[method].reader, target))
    if method in (EAGLE, EAGLE3):
        names = StoredTensors(model_dir).names
        shared = "embed_tokens" if method == EAGLE3 else "embed_tokens|lm_head"
        copies = [name for name in names if re.fullmatch(rf"(.*\.)?({shared})\.weight", name)]
        if copies:
            logger.warning("%s: %s ignored; the target's are used", model_dir, ", ".join(copies))
        arch = _with_stored_head(arch, target, names) if method == EAGLE3 else arch
    return replace(arch, quantization=read_quantization(config, model_dir))


def read_medusa(target: ModelArch, method: str, config: JsonObject) -> ModelArch:
    """Read Medusa (Cai et al., 2024, arXiv:2401.10774), with the authors' keys or those of inference servers."""
    is_numbered = "medusa_num_heads" in config
    if is_numbered:
        config = config.with_aliases(
            {"num_heads": "medusa_num_heads", "num_hidden_layers": "medusa_num_layers"}
        )
    elif "num_heads" not in config:
        raise ConfigError(f"{config.where} has neither medusa_num_heads nor num_heads: not Medusa heads")
    config.only("original_lm_head", False)
    config.only("truncated_vocab_size", target.vocab_size)
    return ModelArch(
        architecture="MedusaModel",
        model_type=method,
        vocab_size=same(config, "vocab_size", target.vocab_size),
        hidden_size=same(config, "hidden_size", target.hidden_size),
        intermediate_size=target.hidden_size,
        num_layers=config.integer("num_hidden_layers", 1, high=MAX_LAYERS),
        num_heads=1,
        num_kv_heads=1,
        head_dim=target.hidden_size,
        max_position_embeddings=target.max_position_embeddings,
        draft=DraftArch(
            method,
            count=config.integer("num_heads", high=MAX_HEADS),
            bias=config.flag("medusa_fc_bias", is_numbered),
            is_numbered=is_numbered,
        ),
    )


def read_eagle(target: ModelArch, method: str, config: JsonObject) -> ModelArch:
    """Read EAGLE (Li et al., 2024, arXiv:2401.15077): one or a few Llama layers."""
    config.integer("num_hidden_layers", high=MAX_LAYERS)
    same(config, "hidden_size", target.hidden_size)
    if abs(config.integer("vocab_size") - target.vocab_size) > _MOST_PADDING:
        same(config, "vocab_size", target.vocab_size)
    config.only("add_para_norm", False)
    draft = DraftArch(method, bias=config.flag("bias", True))
    positions = target.max_position_embeddings
    return read_llama("EagleLlamaForCausalLM", config, max_position_embeddings=positions, draft=draft)


def read_eagle3(target: ModelArch, method: str, config: JsonObject) -> ModelArch:
    """Read EAGLE-3 (Li et al., 2025, arXiv:2503.01840): inputs of three layers are read; the vocabulary may be smaller.

    The paper has one layer; several are as in vLLM and the Speculators library. Embeddings are the target's, so the
    table's padding may differ.
    """
    arch = read_eagle(target, method, config)
    config.only("target_hidden_size", target.hidden_size)
    vocab_size = config.integer("draft_vocab_size", arch.vocab_size, high=arch.vocab_size)
    has_offsets = vocab_size < arch.vocab_size
    reads = _read_layers(config.child("eagle_config"), target.num_layers)
    adds_normed = config.flag("norm_before_residual", False)
    draft = DraftArch(
        method, reads=reads, vocab_size=vocab_size, has_offsets=has_offsets, adds_normed=adds_normed
    )
    return replace(arch, draft=draft, attention_in_size=2 * arch.hidden_size)


def _with_stored_head(arch: ModelArch, target: ModelArch, names: Sequence[str]) -> ModelArch:
    """Return the shape of EAGLE-3 heads, which share the target's output head if none is stored."""
    assert arch.draft is not None, "draft heads have a DraftArch"
    has_head = not names or any(re.match(r"(.*\.)?lm_head\.", name) for name in names)
    draft = arch.draft if has_head else replace(arch.draft, vocab_size=0, has_offsets=False)
    return replace(arch, vocab_size=target.vocab_size, draft=draft)


def read_mtp(target: ModelArch, method: str, config: JsonObject) -> ModelArch:
    """Read MTP (DeepSeek-V3, 2024, arXiv:2412.19437, and others): one layer like the last one, as `target.mtp` says."""
    mtp = target.mtp
    if mtp.is_counted and not config.integer("num_nextn_predict_layers", 0, low=0, high=MAX_LAYERS):
        raise ConfigError(f"{config.where} has no num_nextn_predict_layers: the model has no MTP layer")
    last, paths = target.num_layers - 1, mtp.paths(target.num_layers)
    names = replace(target.names, renamed={**target.names.renamed, **paths}, unused=("",))
    experts = target.experts

    def moved(layers: tuple[int, ...]) -> tuple[int, ...]:
        return (0,) if last in layers else ()

    return replace(
        target,
        num_layers=1,
        names=names,
        layer_types=target.layer_types[-1:] if mtp.mixer is None else (mtp.mixer,),
        first_block=None,
        unrotated_layers=moved(target.unrotated_layers),
        unnormed_layers=moved(target.unnormed_layers),
        experts=None if experts is None else replace(experts, layers=moved(experts.layers)),
        draft=DraftArch(method, reads=(target.num_layers,) if mtp.reads_sums else ()),
    )


def _read_layers(config: JsonObject, num_layers: int) -> tuple[int, ...]:
    """Return the layers whose inputs are read: the named ones, else one near the start, the middle and the end."""
    config.only("use_aux_hidden_state", True)
    key = "eagle_aux_hidden_state_layer_ids"
    named = config.numbers(key) if config.get(key) else (2, num_layers // 2, num_layers - 3)
    layers = tuple(sorted({int(layer) for layer in named}))
    if len(layers) != len(named) or not 0 <= layers[0] <= layers[-1] < num_layers:
        raise ConfigError(f"layers {[*map(int, named)]} are read, but the target has {num_layers} layers")
    return layers


def same(config: JsonObject, key: str, size: int) -> int:
    """Return a size that must equal the target's.

    Raises:
        ConfigError: the sizes differ.
    """
    found = config.integer(key, size)
    if found != size:
        raise ConfigError(f"{key} is {found}, but the target's is {size}")
    return size


HEADS: Mapping[str, HeadKind] = {
    MEDUSA: HeadKind(read_medusa, "quire.spec_decode.models.eagle:MedusaHeads"),
    EAGLE: HeadKind(read_eagle, "quire.spec_decode.models.eagle:EagleHead"),
    EAGLE3: HeadKind(read_eagle3, "quire.spec_decode.models.eagle:Eagle3Head"),
    MTP: HeadKind(read_mtp, "quire.spec_decode.models.eagle:MTPHead"),
}  # by method
