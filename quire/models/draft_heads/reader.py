"""What config.json says of heads that guess by the hidden states of another model, their target, and whether they fit.

Invariant: torch-free. What the file leaves open is as in the target.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

from quire.config.arch import DraftArch, ModelArch
from quire.config.speculative import MEDUSA
from quire.errors import ConfigError
from quire.models.families.fields import MAX_HEADS, MAX_LAYERS
from quire.models.hf_config import config_json, read_fully
from quire.models.json_object import JsonObject
from quire.models.quantized.reader import read_quantization


class HeadKind(NamedTuple):
    """How heads of a method are read and served."""

    reader: Callable[[ModelArch, str, JsonObject], ModelArch]
    """Target, method and config.json -> shape of the heads."""
    model: str
    """Their class, "module:Name"."""


def read_draft_heads(method: str, model_dir: Path, target: ModelArch) -> ModelArch:
    """The shape of the heads in a directory.

    Raises:
        ModelLoadError: config.json is missing or malformed.
        UnsupportedModelError: it asks for something that quire does not do.
        ConfigError: they are not for such a target.
    """
    file = config_json(model_dir, {})
    config = JsonObject(file.where, file.values, refused=[])
    arch = read_fully(method, config, partial(HEADS[method].reader, target))
    return replace(arch, quantization=read_quantization(config, model_dir))


def read_medusa(target: ModelArch, method: str, config: JsonObject) -> ModelArch:
    """Medusa (Cai et al., 2024, arXiv:2401.10774), under its authors' keys or those of servers."""
    is_numbered = "medusa_num_heads" in config
    if is_numbered:
        config = config.with_aliases(
            {"num_heads": "medusa_num_heads", "num_hidden_layers": "medusa_num_layers"}
        )
    elif "num_heads" not in config:
        raise ConfigError(
            f"{config.where} has neither medusa_num_heads nor num_heads: these are no Medusa heads"
        )
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


def same(config: JsonObject, key: str, size: int) -> int:
    """A size that the target has as well.

    Raises:
        ConfigError: it has another.
    """
    found = config.integer(key, size)
    if found != size:
        raise ConfigError(f"{key} is {found}, and that of the model that is guessed for {size}")
    return size


HEADS: Mapping[str, HeadKind] = {
    MEDUSA: HeadKind(read_medusa, "quire.models.draft_heads.medusa:MedusaHeads"),
}
"""By method."""
