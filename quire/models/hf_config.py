"""Reads a Hugging Face model directory's config.json and generation_config.json into a `ModelArch`.

Invariant: torch-free, and the only reader of these files. What a family's keys mean is in its file in `families/`; a
key that asks for something we do not compute is an error, never ignored, and all such keys are named at once.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.config.arch import ModelArch
from quire.errors import ModelLoadError, StartupError, UnsupportedModelError
from quire.models.built_in import ALSO_CALLED
from quire.models.config_overrides import TEXT, with_overrides
from quire.models.generation_config import generation_file, read_generation_config, token_ids
from quire.models.json_object import JsonObject, read_json_object
from quire.models.multimodal import language_model_of
from quire.models.pooling.architectures import made_for
from quire.models.quantized.experts import as_stored
from quire.models.quantized.reader import read_quantization
from quire.models.registry import ModelRegistry
from quire.models.tied_head import TIE, with_stored_head
from quire.models.unread_keys import report_unread
from quire.models.weight_files import INDEX_NAME, SINGLE_NAME, StoredTensors

if TYPE_CHECKING:
    from quire.models.registry import ConfigReader

logger = logging.getLogger(__name__)

_ADAPTER = "adapter_config.json"
# Option -> values under which it changes nothing that we compute; a family that reads it knows better.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "is_encoder_decoder": (False,),
    "per_layer_config": ({},),
    "add_cross_attention": (False,),
    "alibi": (False,),
    "use_alibi": (False,),
    "position_embedding_type": ("absolute", "rope"),
    "pruned_heads": ({},),
    "use_bidirectional_attention": (False,),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "layer_norm_elementwise_affine": (True,),
}


def config_json(model_dir: Path, overrides: dict[str, Any]) -> JsonObject:
    """Return the config.json in `model_dir`, merged with `overrides` as `with_overrides` says.

    Raises:
        ModelLoadError: it is missing or malformed.
    """
    path = model_dir / "config.json"
    if (model_dir / _ADAPTER).is_file():
        _say_adapter(model_dir, path)
    file = read_json_object(path)
    return JsonObject(file.where, with_overrides(file.values, overrides))


def _say_adapter(model_dir: Path, path: Path) -> None:
    """Report an adapter's config, which is read with --lora-modules only."""
    if path.is_file():
        logger.warning("%s: the adapter is not applied; serve it with --lora-modules", model_dir / _ADAPTER)
        return
    base = read_json_object(model_dir / _ADAPTER).get("base_model_name_or_path")
    raise ModelLoadError(
        f"{model_dir} has {_ADAPTER} and no config.json: it is an adapter, of "
        f"{base or 'a model that it does not name'}; give that as the model, and the adapter with "
        f"--lora-modules NAME={model_dir}"
    )


def read_hf_config(model_dir: Path, overrides: dict[str, Any], model_impl: str = "auto") -> ModelArch:
    """The shape and options of the model in `model_dir`; `overrides` replace top-level keys of config.json.

    `model_impl` is that of `ModelConfig`. The architecture is that of the language model whose hidden states it has.

    Raises:
        ModelLoadError: a file is missing or malformed; the message names file, key, value and what is allowed.
        UnsupportedModelError: the architecture or an option is one that quire does not implement.
    """
    file = config_json(model_dir, overrides)
    config = JsonObject(file.where, file.values, refused=[])
    config, part_of = language_model_of(architecture_of(config), config, overrides)
    quantization = read_quantization(config, model_dir)
    arch = read_config(config, model_impl)
    if not arch.foreign_config:
        inside = overrides.get(TEXT)
        report_unread(config, {*overrides, *(inside if isinstance(inside, dict) else ())})
    more = token_ids(generation_file(model_dir), "eos_token_id", arch.vocab_size)
    arch = replace(
        arch,
        eos_token_ids=tuple(dict.fromkeys(arch.eos_token_ids + more)),
        generation=read_generation_config(model_dir),
        quantization=quantization,
        part_of=part_of,
    )
    stored = StoredTensors(model_dir)
    if (model_dir / SINGLE_NAME).is_file() and (model_dir / INDEX_NAME).is_file():
        logger.warning("%s: %s is loaded, and %s is not read", model_dir, SINGLE_NAME, INDEX_NAME)
    may_be_tied = part_of is not None and (file.flag(TIE, False) or file.child(TEXT).flag(TIE, False))
    return with_stored_head(as_stored(arch, stored.names), stored, may_be_tied=may_be_tied)


def read_config(config: JsonObject, model_impl: str) -> ModelArch:
    """What an object with the keys of config.json says, as its family reads it; raises as `read_hf_config` does."""
    architecture = made_for(architecture_of(config), model_impl).served_as
    return read_fully(architecture, config, ModelRegistry.resolve_config_reader(architecture, model_impl))


def read_fully(architecture: str, config: JsonObject, reader: ConfigReader) -> ModelArch:
    """What a reader makes of config.json.

    Raises:
        ModelLoadError: values are malformed; these and what is said below are named at once.
        UnsupportedModelError: it asks for something that quire does not do; all that is so is named at once.
    """
    refused: list[StartupError] = []
    try:
        arch = reader(architecture, config)
        if "is_causal" not in config.asked:
            config.only("is_causal", not arch.bidirectional)
    except UnsupportedModelError as error:
        refused.append(error)
    except ModelLoadError as error:
        if not any(isinstance(one, ModelLoadError) for one in config.refused or ()):
            refused.append(error)  # else it may be of what stands in for a malformed value
    for key in _NEUTRAL.keys() - config.asked:
        config.only(key, *_NEUTRAL[key])
    refused += config.refused or []
    if refused:
        kind = (
            ModelLoadError
            if any(isinstance(one, ModelLoadError) for one in refused)
            else UnsupportedModelError
        )
        raise kind("; ".join(sorted({*map(str, refused)})))
    return arch


def architecture_of(config: JsonObject) -> str:
    """The architecture that config.json names, as it is called in the table."""
    names = config.texts("architectures")
    if not names:
        raise config.wrong("architectures", "a list with one name")
    name = names[0]
    return name if ModelRegistry.has_row(name) else ALSO_CALLED.get(name, name)
