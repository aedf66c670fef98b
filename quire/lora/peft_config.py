# SPDX-License-Identifier: Apache-2.0
"""adapter_config.json of PEFT, and the files of an adapter.

Invariant: torch-free. An option that changes what the adapter computes is honored or refused by name; an unknown
option is refused unless its value disables it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from math import sqrt
from pathlib import Path

from quire.adapters import LoRARequest
from quire.config import ASSETS
from quire.config.model import LoRAConfig
from quire.errors import ModelLoadError, ValidationError
from quire.models.bounded_directory import user_cache
from quire.models.checkpoint_files import TEMPLATE_FOLDER
from quire.models.file_digests import FileDigests, files_fingerprint
from quire.models.json_object import JsonObject, read_json_object

CONFIG_NAME, WEIGHTS_NAME = "adapter_config.json", "adapter_model.safetensors"
TEXT_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.json",
    "chat_template.jinja",
    TEMPLATE_FOLDER,
)
"""Tokenizer and chat template files that an adapter may have."""
BUNDLED_ADAPTERS = ("quire-demo-pirate", "quire-demo-json")
"""Adapters bundled with quire for its demo model."""


def directory_of(path: str) -> Path:
    """Return the directory of an adapter, given by path or by the name of a bundled one."""
    directory = Path(os.path.expanduser(path))  # unknown users are left as they are
    if path in BUNDLED_ADAPTERS and not directory.exists():
        return ASSETS / path
    return directory


def adapter_fingerprint(directory: Path) -> str:
    """Return a digest of the adapter's files, which identifies their content; empty: no files."""
    paths = (directory / name for name in (CONFIG_NAME, WEIGHTS_NAME, *TEXT_FILES))
    files = [path for path in paths if path.is_file()]
    return files_fingerprint(files).hex() if files else ""


def adapter_content(directory: Path, settings: LoRAConfig) -> str:
    """Return a digest over an adapter's files and the options that move its bits; empty: files are missing.

    Raises:
        OSError: a file cannot be read.
    """
    paths = [directory / CONFIG_NAME, directory / WEIGHTS_NAME]
    if not all(path.is_file() for path in paths):
        return ""
    digests = FileDigests(user_cache())
    parts = [settings.lora_dtype, str(settings.max_lora_rank), *map(digests.digest_of, paths)]
    return sha256("\n".join(parts).encode()).hexdigest()[:CONTENT_DIGITS]


def adapter_request(name: str, number: int, path: str) -> LoRARequest:
    """Return the request for an adapter as it is on disk now: with an absolute path and a fingerprint of its files.

    Raises:
        ValidationError: the path is relative and the working directory was deleted, or the path cannot be read.
    """
    try:
        directory = directory_of(path).absolute()
        fingerprint = adapter_fingerprint(directory)
    except FileNotFoundError:
        raise ValidationError(
            "lora_path is relative to the server's working directory, which was deleted; give an absolute path",
            param="lora_path",
        ) from None
    except OSError as error:  # a name too long, a directory of another user
        raise ValidationError(f"lora_path cannot be read: {error.strerror}", param="lora_path") from None
    return LoRARequest(name, number, str(directory), fingerprint)


CONTENT_DIGITS = 32
MAX_FILE_RANK = 4096

_OF_TRAINING = frozenset(
    {
        "auto_mapping", "corda_config", "eva_config",
        "exclude_modules", "fan_in_fan_out", "inference_mode", "layers_pattern", "layers_to_transform",
        "loftq_config", "lora_bias", "lora_dropout", "megatron_config", "megatron_core", "modules_to_save",
        "peft_version", "qalora_group_size", "revision", "runtime_config", "target_modules", "target_parameters",
        "task_type",
    }
)  # fmt: skip
"""Keys that describe the training; the adapted modules follow from the tensors."""

_INITIALIZED = (True, False, "gaussian", "orthogonal", "eva")
"""Initializations that do not change the base model's weights."""


@dataclass(frozen=True, slots=True)
class PeftConfig:
    """Rank and alpha of an adapter, and those of modules with their own."""

    rank: int
    alpha: float
    ranks: Mapping[str, int]
    alphas: Mapping[str, float]
    is_stabilized: bool
    """True if alpha is divided by the root of the rank (rsLoRA; D. Kalajdzievski, 2023, arXiv:2312.03732)."""
    is_dora: bool
    """True for DoRA: products change directions, norms are given (S. Liu et al., 2024, arXiv:2402.09353)."""
    tokens: Mapping[str, tuple[int, ...]]
    """Token ids of trained rows, by suffix of the module name; "": the embedding."""
    where: str
    base_model: str = ""
    """Base model as given to PEFT; empty: not given."""

    def trained_tokens(self, module: str) -> tuple[int, ...]:
        """Return the token ids of a module's trained rows, in their order."""
        ends = (end for end in self.tokens if not end or f".{module}".endswith(f".{end}"))
        return next((self.tokens[end] for end in ends), ())

    def rank_of(self, module: str) -> int:
        """Return the configured rank of a module."""
        return next((rank for key, rank in self.ranks.items() if _names(key, module)), self.rank)

    def scale_of(self, module: str, rank: int) -> float:
        """Return the scale of a module's product."""
        alpha = next((alpha for key, alpha in self.alphas.items() if _names(key, module)), self.alpha)
        return alpha / (sqrt(rank) if self.is_stabilized else rank)


def read_peft_config(directory: Path) -> PeftConfig:
    """Return the config of an adapter's directory.

    Raises:
        ModelLoadError: it is missing or malformed.
        UnsupportedModelError: it has an option that quire does not support.
    """
    values = read_json_object(directory / CONFIG_NAME)
    values.choice("peft_type", ["LORA"])
    values.only("bias", "none", "lora_only", "all")
    values.only("init_lora_weights", *_INITIALIZED)
    config = PeftConfig(
        rank=values.integer("r", 8, high=MAX_FILE_RANK),
        alpha=values.number("lora_alpha", 8.0),
        ranks={
            key: values.child("rank_pattern").integer(key, high=MAX_FILE_RANK)
            for key in _patterns(values, "rank_pattern")
        },
        alphas={key: values.child("alpha_pattern").number(key) for key in _patterns(values, "alpha_pattern")},
        is_stabilized=values.flag("use_rslora", False),
        is_dora=values.flag("use_dora", False),
        tokens=_trained_tokens(values),
        where=values.where,
        base_model=values.text("base_model_name_or_path", ""),
    )
    for key in sorted(values.values.keys() - values.asked - _OF_TRAINING):
        values.only(key, False, [], {})
    return config


def _trained_tokens(values: JsonObject) -> dict[str, tuple[int, ...]]:
    """Return `trainable_token_indices`: one list, or one per module."""
    found = values.get("trainable_token_indices")
    lists = {"": found} if isinstance(found, list) else values.child("trainable_token_indices").values
    for tokens in lists.values():
        is_list = isinstance(tokens, list) and all(type(token) is int and token >= 0 for token in tokens)
        if not is_list or len({*tokens}) < len(tokens):
            raise values.wrong("trainable_token_indices", "lists of distinct token ids")
    return {end: tuple(tokens) for end, tokens in lists.items()}


def _patterns(values: JsonObject, key: str) -> list[str]:
    """Return the regular expressions that name modules in an option."""
    patterns = list(values.child(key).values)
    for pattern in patterns:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ModelLoadError(
                f"{values.where}: {key} has {pattern!r}, which is not a regular expression: {error}"
            ) from None
    return patterns


def _names(pattern: str, module: str) -> bool:
    """Return whether an expression matches a module: its whole path, or its end from a dot on."""
    return re.match(rf"(?:.*\.)?(?:{pattern})$", module) is not None
