# SPDX-License-Identifier: Apache-2.0
"""Reader of config.json and generation_config.json into a `ModelArch`, and report of unread keys.

Invariant: torch-free, and the only reader of these files. A family's keys are interpreted in its file in `families/`.
A key is read by a family, which honors or refuses it, known to have no effect at inference, or named in the log; all
refused keys are reported at once. Tests check that the first two hold for every key that transformers reads.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.adapters import MODULES_FLAG
from quire.config.arch import ModelArch, Multimodal
from quire.errors import ModelLoadError, StartupError, UnsupportedModelError
from quire.models.architectures import architecture_kind
from quire.models.built_in import ALSO_CALLED
from quire.models.checkpoint_files import has_file
from quire.models.companions import FindModel, assemble
from quire.models.config_overrides import TEXT, with_overrides
from quire.models.generation_config import (
    SEQ2SEQ_KEYS,
    SPEECH_KEYS,
    generation_file,
    read_generation_config,
    token_ids,
)
from quire.models.json_object import JsonObject, read_json_object
from quire.models.multimodal import language_model_of
from quire.models.quantized.reader import as_stored, read_quantization
from quire.models.registry import ModelRegistry
from quire.models.tied_head import TIE, with_stored_head
from quire.models.weight_files import INDEX_NAME, SINGLE_NAME, StoredTensors

if TYPE_CHECKING:
    from quire.models.registry import ConfigReader


logger = logging.getLogger(__name__)

HARMLESS = re.compile(
    "|".join(
        (
            # training
            r".*(drop|jitter|loss|aux|init|pretraining|z_coef|label_smoothing).*|w_init.*|.*_std(_dev)?|rescale_.*",
            r"altup_coef_clip|embedding_fraction|time_step_(min|max|floor|scale|rank)|lambda_std_dev",
            # tasks other than generation, and keys that pooling reads itself
            r".*label.*|num_classes|problem_type|summary_.*|classifier_.*|.*matryoshka.*|sbert_.*|sentence_.*|method",
            r"finetuning_task|task_specific_params|prompt_.*|sep_token.*|cls_token.*|mask_token.*|.*_token_ids?",
            r".*_token_index|tokenizer_class|decoder_start.*|forced_.*|suppress_tokens|begin_suppress_tokens",
            # outputs, caches and implementations
            r"output_.*|return_.*|use_return_dict|(no_)?use_cache|use_(mamba_kernels|mambapy|associative_scan)",
            r"use_mem_eff_path|use_flash.*|use_bfloat16|torchscript|(mamba_)?chunk_size|chunk_size_feed_forward",
            r"num_logits_to_keep|(moe|mamba)_\w*(overlap|cache_dtype)|init_device|.*_implementation|gradient_.*",
            r"reorder_and_upcast_attn|(scale_)?attention_softmax_in_fp32|residual_in_fp32|slow_but_exact|block_size",
            r"is_decoder|tie_encoder_decoder|attn_config|cache_implementation|ep_size|masked_softmax_fusion",
            # generation defaults, which generation_config.json has
            r"max_length|min_length|do_sample|num_beams\w*|diversity_penalty|length_penalty|temperature|top_[kp]",
            r"typical_p|repetition_penalty|no_repeat_ngram_size|\w*_no_repeat_ngram_size|bad_words_ids|early_stopping",
            r"num_return_sequences|exponential_decay_\w+|remove_invalid_values|begin_\w+|encoder_\w+|cross_\w+",
            # sizes and biases, which tensors confirm, and keys without effect by themselves
            r"(qk_|attention_)?head_dim|attention_hidden_size|hybrid_layer_ids|kv_channels|mamba_headdim|n_ctx",
            r"num_(query_groups|kv_heads|key_value_heads|ln_in_parallel_attn|experts_per_tok|local_experts)",
            r"(attention|mlp|decoder|use)_bias|intermediate_size|multi_query|attention_layers|linear_\w+",
            r"rope_\w+|original_max_position_embeddings|layer_types|max_window_layers|(use_)?sliding_window(_pattern)?",
            r"mamba_norm_before_gate|learned_pos_emb|tie_word_embeddings|sinusoidal_pos_embds|sparse_\w+|deterministic_\w+",
            # other parts of the checkpoint
            r"(vision|audio|image|video|speech|mm|projector|text)_.*|.*(vision|audio|image|video)_config|mtp_.*",
            r"num_(mtp|nextn_predict)_layers|.*_nextn_.*|(multimodal_)?projector_.*|spatial_\w+|quantization_config",
            # authorship
            r"_.*|model_type|architectures|auto_map|transformers_\w+|torch_dtype|dtype|unsloth_\w+|.*_version|name",
        )
    )
)
"""Keys without effect here, whatever their value."""
_MAX_NAMED = 12


def report_unread(config: JsonObject, overrides: Collection[str]) -> None:
    """Log the keys of a fully read config that no reader used and that are not known to be harmless.

    Args:
        overrides: keys of --hf-overrides, logged as a warning; the file's are logged as info.
    """
    unread = sorted(
        key
        for key, value in config.values.items()
        if key not in config.asked and value not in (None, {}, []) and not HARMLESS.fullmatch(key)
    )
    given = [key for key in unread if key in overrides]
    if given:
        logger.warning("--hf-overrides: %s: unknown keys for %s, ignored", ", ".join(given), config.where)
    rest = [key for key in unread if key not in overrides]
    if rest:
        more = "" if len(rest) <= _MAX_NAMED else f" and {len(rest) - _MAX_NAMED} more"
        logger.info("%s: not read: %s%s", config.where, ", ".join(rest[:_MAX_NAMED]), more)


_ADAPTER = "adapter_config.json"
# Option -> values without effect here; a family that reads the option overrides this.
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
        _report_adapter(model_dir, path)
    elif not has_file(path):
        raise ModelLoadError(f"{path}: no such file; {_contents(model_dir)}")
    file = read_json_object(path)
    return JsonObject(file.where, with_overrides(file.values, overrides))


def _contents(directory: Path) -> str:
    """Return the words for a directory that is no model: the models inside, or else its files."""
    inside = sorted(
        str(path.parent)
        for pattern in ("*", "snapshots/*")
        for path in directory.glob(f"{pattern}/config.json")
    )
    if inside:
        return f"a model is in {', '.join(inside[:_MAX_NAMED])}"
    names = sorted(path.name for path in directory.glob("*"))
    return f"the directory has {', '.join(names[:_MAX_NAMED]) or 'no files'}{', ...' if names[_MAX_NAMED:] else ''}"


def _report_adapter(model_dir: Path, path: Path) -> None:
    """Log an adapter's config, which is used where it is served as an adapter only."""
    if path.is_file():
        logger.warning("%s: the adapter is not applied; serve it with %s", model_dir / _ADAPTER, MODULES_FLAG)
        return
    base = read_json_object(model_dir / _ADAPTER).get("base_model_name_or_path")
    raise ModelLoadError(
        f"{model_dir} has {_ADAPTER} and no config.json: it is an adapter, of "
        f"{base or 'a model that it does not name'}; give that as the model, and the adapter with "
        f"{MODULES_FLAG} NAME={model_dir}"
    )


def only_here(name: str) -> Path:
    """Return a model's directory by its path. Raises ModelLoadError if there is none."""
    if not Path(name).is_dir():
        raise ModelLoadError(f"model {name!r} is not a directory")
    return Path(name)


def read_hf_config(
    model_dir: Path, overrides: dict[str, Any], model_impl: str = "auto", find: FindModel = only_here
) -> ModelArch:
    """Return the arch of the model in `model_dir`; `overrides` replace top-level keys of config.json.

    `model_impl` as in `ModelConfig`. The architecture is that of the language model that computes the hidden states.
    `find` is asked for other checkpoints that parts of the model are in.

    Raises:
        ModelLoadError: a file is missing or malformed; the message names file, key, value and what is allowed.
        UnsupportedModelError: quire does not implement the architecture or an option.
    """
    file = config_json(model_dir, overrides)
    config = JsonObject(file.where, file.values, refused=[])
    architecture = architecture_of(config)
    whole = assemble(architecture, config, overrides, model_dir, find)
    config, part_of = language_model_of(architecture, whole.config, overrides)
    part_of, language_dir = whole.placed(part_of), Path(whole.language_dir or model_dir)
    quantization = read_quantization(config, language_dir)
    arch = read_config(config, model_impl)
    if not arch.foreign_config:
        inside = overrides.get(TEXT)
        report_unread(config, {*overrides, *(inside if isinstance(inside, dict) else ())})
    more = token_ids(generation_file(model_dir), "eos_token_id", arch.vocab_size)
    arch = replace(
        arch,
        eos_token_ids=tuple(dict.fromkeys(arch.eos_token_ids + more)),
        generation=read_generation_config(model_dir, read_elsewhere=_keys_read_elsewhere(part_of)),
        quantization=quantization,
        part_of=part_of,
    )
    stored = StoredTensors(language_dir)
    if (model_dir / SINGLE_NAME).is_file() and (model_dir / INDEX_NAME).is_file():
        logger.warning("%s: %s is loaded, and %s is not read", model_dir, SINGLE_NAME, INDEX_NAME)
    said = JsonObject(file.where, whole.config.values)
    may_be_tied = part_of is not None and (said.flag(TIE, False) or said.child(TEXT).flag(TIE, False))
    return with_stored_head(as_stored(arch, stored.names), stored, may_be_tied=may_be_tied)


def _keys_read_elsewhere(part_of: Multimodal | None) -> frozenset[str]:
    """Return the keys of generation_config.json that a model with an encoder follows by other means."""
    if part_of is None or not part_of.encoder_length:
        return frozenset()
    return SEQ2SEQ_KEYS if part_of.is_prompted else SPEECH_KEYS


def read_config(config: JsonObject, model_impl: str) -> ModelArch:
    """Read an object with config.json's keys with its family's reader; raises as `read_hf_config` does."""
    architecture = architecture_kind(architecture_of(config), model_impl).served_as
    return read_fully(architecture, config, ModelRegistry.resolve_config_reader(architecture, model_impl))


def read_fully(architecture: str, config: JsonObject, reader: ConfigReader) -> ModelArch:
    """Read config.json with a reader, and report all refusals together.

    Raises:
        ModelLoadError: values are malformed; the message includes unsupported options.
        UnsupportedModelError: it asks for something unsupported; the message names all of it.
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
            refused.append(error)  # otherwise it may be a consequence of a malformed value's fallback
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
    """Return the architecture that config.json names, by its name in the table."""
    names = config.texts("architectures")
    if not names:
        raise config.wrong("architectures", "a list with one name")
    name = names[0]
    return name if ModelRegistry.has_row(name) else ALSO_CALLED.get(name, name)
