"""What an adapter's adapter_config.json says, as PEFT writes it.

Invariant: torch-free. An option that changes what the adapter computes is honoured or refused by name; so is one that
nobody here has heard of, unless its value switches it off.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import sqrt
from pathlib import Path

from quire.errors import ModelLoadError
from quire.lora.directory import CONFIG_NAME
from quire.models.json_object import JsonObject, read_json_object

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
"""Keys that say how an adapter was trained, or where; what is adapted, its tensors say."""

_INITIALIZED = (True, False, "gaussian", "orthogonal", "eva")
"""Beginnings that leave the base model's weights as they were."""


@dataclass(frozen=True, slots=True)
class PeftConfig:
    """The numbers of an adapter: r and alpha, and those of modules that have others."""

    rank: int
    alpha: float
    ranks: Mapping[str, int]
    alphas: Mapping[str, float]
    is_stabilized: bool
    """Whether ranks divide by their root (D. Kalajdzievski, 2023, arXiv:2312.03732)."""
    is_dora: bool
    """Whether products change directions only, and lengths are given (S. Liu et al., 2024, arXiv:2402.09353)."""
    tokens: Mapping[str, tuple[int, ...]]
    """Those of which rows were trained, by the ends of modules' names; "": of the embedding."""
    where: str
    base_model: str = ""
    """What it was trained on, as PEFT was told; empty: it does not say."""

    def trained_tokens(self, module: str) -> tuple[int, ...]:
        """Whose rows the file has of a module, in their order."""
        ends = (end for end in self.tokens if not end or f".{module}".endswith(f".{end}"))
        return next((self.tokens[end] for end in ends), ())

    def rank_of(self, module: str) -> int:
        """The rank that the config gives a module."""
        return next((rank for key, rank in self.ranks.items() if _names(key, module)), self.rank)

    def scale_of(self, module: str, rank: int) -> float:
        """What the product of a module's two matrices is multiplied by."""
        alpha = next((alpha for key, alpha in self.alphas.items() if _names(key, module)), self.alpha)
        return alpha / (sqrt(rank) if self.is_stabilized else rank)


def read_peft_config(directory: Path) -> PeftConfig:
    """The config of an adapter's directory.

    Raises:
        ModelLoadError: it is missing or malformed.
        UnsupportedModelError: it asks for what quire does not do.
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
    """`trainable_token_indices`: a list, or one for each of some modules."""
    found = values.get("trainable_token_indices")
    lists = {"": found} if isinstance(found, list) else values.child("trainable_token_indices").values
    for tokens in lists.values():
        is_list = isinstance(tokens, list) and all(type(token) is int and token >= 0 for token in tokens)
        if not is_list or len({*tokens}) < len(tokens):
            raise values.wrong("trainable_token_indices", "lists of different token ids")
    return {end: tuple(tokens) for end, tokens in lists.items()}


def _patterns(values: JsonObject, key: str) -> list[str]:
    """The expressions that name modules in an option."""
    patterns = list(values.child(key).values)
    for pattern in patterns:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ModelLoadError(
                f"{values.where}: {key} has {pattern!r}, which is no expression: {error}"
            ) from None
    return patterns


def _names(pattern: str, module: str) -> bool:
    """Whether an expression stands for a module: all of its path, or its end from a dot on."""
    return re.match(rf"(?:.*\.)?(?:{pattern})$", module) is not None
