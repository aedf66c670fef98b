# SPDX-License-Identifier: Apache-2.0
"""Reader of generation_config.json: default sampling parameters and further end-of-sequence tokens.

Invariant: torch-free; a directory without the file has no defaults.
"""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Container, Mapping
from pathlib import Path
from typing import Any

from quire.models.checkpoint_files import has_file
from quire.models.json_object import JsonObject, optional_json_object

logger = logging.getLogger(__name__)
GENERATION = "generation_config.json"

# Sampling default -> (low, high); the names are those of `SamplingParams`.
_SAMPLING: Mapping[str, tuple[float, float]] = {
    "temperature": (0.0, 2.0),
    "top_p": (math.nextafter(0.0, 1.0), 1.0),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (math.nextafter(0.0, 1.0), 1e6),
}

_INTEGERS = {"top_k": -1, "max_new_tokens": 1}  # name -> least value
_NOT_DONE: Mapping[str, tuple[Any, ...]] = {
    "do_sample": (True,),
    "num_beams": (1,),
    "num_beam_groups": (1,),
    "penalty_alpha": (0,),
    "typical_p": (1,),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "top_h": (1,),
    "no_repeat_ngram_size": (0,),
    "encoder_no_repeat_ngram_size": (0,),
    "encoder_repetition_penalty": (1,),
    "diversity_penalty": (0,),
    "length_penalty": (1,),
    "exponential_decay_length_penalty": (),
    "guidance_scale": (1,),
    "min_length": (0,),
    "min_new_tokens": (0,),
    "max_length": (20,),
    "bad_words_ids": (),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "suppress_tokens": ([],),
    "begin_suppress_tokens": ([],),
    "sequence_bias": ({},),
    "stop_strings": ([],),
    "watermarking_config": (),
    "max_time": (),
    "num_return_sequences": (1,),
    "renormalize_logits": (False,),
    "token_healing": (False,),
    "force_words_ids": (),
    "remove_invalid_values": (False,),
    "dola_layers": (),
}
"""Keys with which transformers changes its output, and the values with which they have no effect."""

_HARMLESS = re.compile(
    r"_.*|.*_version|(bos|eos|pad|sep|cls|decoder_start)_token_id|.*cache.*|output_\w+|return_dict_in_generate|early_stopping|low_memory|trust_remote_code"
    r"|prompt_lookup_\w+|assistant_\w+|num_assistant_\w+|is_assistant|max_matching_\w+|target_lookbehind|compile_config"
    r"|disable_compile|prefill_chunk_size|generation_kwargs|chat_format|max_window_size|user_token_id|model_type"
)
"""Keys without effect here, whatever their value."""
_USUAL: Mapping[str, Any] = {
    "do_sample": False, "temperature": 1.0, "top_k": 50, "top_p": 1.0, "min_p": None, "repetition_penalty": 1.0,
}  # fmt: skip
"""Defaults of transformers' config classes: if config.json has them, they carry no information."""


SEQ2SEQ_KEYS = frozenset(
    {"num_beams", "length_penalty", "min_length", "max_length", "no_repeat_ngram_size", "bad_words_ids"}
    | {"forced_bos_token_id", "forced_eos_token_id", "suppress_tokens"}
)
"""Keys that `quire.seq2seq.settings` reads."""
SPEECH_KEYS = frozenset(
    {"suppress_tokens", "begin_suppress_tokens", "max_initial_timestamp_index", "is_multilingual"}
    | {"alignment_heads", "no_timestamps_token_id", "prev_sot_token_id", "lang_to_id", "task_to_id"}
    | {"return_timestamps", "forced_decoder_ids", "max_length", "language", "task"}
)
"""Keys that `quire.speech.vocabulary` reads, or finds in the tokenizer, or that a request states."""


def read_generation_config(
    directory: Path, *, read_elsewhere: Container[str] = frozenset()
) -> dict[str, float]:
    """Return the default sampling parameters in a directory's generation_config.json.

    Keys that are `read_elsewhere` are not reported as left out.
    Without that file those of config.json are used, where files from before 2023 have them, as in transformers.

    Raises:
        ModelLoadError: the file is malformed or a value is out of range.
    """
    file = generation_file(directory)
    if not has_file(directory / GENERATION):
        file = _of_config(directory)
    ignored = [
        key
        for key, neutral in _NOT_DONE.items()
        if key in file and file.get(key) not in neutral and key not in read_elsewhere
    ]
    if ignored:
        shown = ", ".join(f"{key} = {json.dumps(file.get(key)):.100}" for key in ignored)
        logger.warning("%s: not applied, requests say it themselves: %s", file.where, shown)
    known = {*_NOT_DONE, *_SAMPLING, *_INTEGERS}
    unknown = [
        key
        for key in file.values
        if key not in known and key not in read_elsewhere and not _HARMLESS.fullmatch(key)
    ]
    if unknown:
        logger.warning("%s: not read: %.200s", file.where, ", ".join(sorted(unknown)))
    return sampling_defaults(file)


def _of_config(directory: Path) -> JsonObject:
    """Return the sampling keys of config.json if it has `do_sample`; without it `top_k` may be of experts."""
    config = optional_json_object(directory / "config.json")
    if config.get("do_sample") is not True:
        return JsonObject(config.where, {}, refused=[])
    names = (*_SAMPLING, "top_k", "do_sample", "num_beams", "typical_p", "no_repeat_ngram_size")
    values = {name: config.get(name) for name in names if name in config}
    said = {name: value for name, value in values.items() if value != _USUAL.get(name, ...)}
    return JsonObject(config.where, said, refused=[])


def sampling_defaults(file: JsonObject) -> dict[str, float]:
    """Return the defaults from an object with generation_config.json's keys; raises as
    `read_generation_config` does."""
    found = {
        name: file.number(name, low=low, high=high) for name, (low, high) in _SAMPLING.items() if name in file
    }
    return found | {name: file.integer(name, low=low) for name, low in _INTEGERS.items() if name in file}


def generation_file(directory: Path) -> JsonObject:
    """Return the file's object, an empty one if there is no such file; raises as `read_json_object` does."""
    return optional_json_object(directory / GENERATION)


def token_ids(file: JsonObject, key: str, vocab_size: int) -> tuple[int, ...]:
    """Return one id or a list of them; ids outside the vocabulary, which no model can produce, are skipped with a
    warning.

    Raises:
        ModelLoadError: the value is something else.
    """
    value = file.get(key)
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(item, int) and not isinstance(item, bool) and item >= 0 for item in ids):
        raise file.wrong(key, "a token id or a list of token ids")
    outside = [item for item in ids if item >= vocab_size]
    if outside:
        logger.warning("%s: %s %s left out: the vocabulary has %d", file.where, key, outside, vocab_size)
    return tuple(item for item in ids if item < vocab_size)
