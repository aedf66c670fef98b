"""`--pooler-config`: what a user says over what a checkpoint does."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from quire.config.pooling import CLASS_TASKS, POOLINGS, PoolingSpec
from quire.errors import ConfigError
from quire.pooling_params import CLASSIFY, EMBED, TOKEN_CLASSIFY, TOKEN_EMBED, PoolingParams

_OF_TOKENS = ("all", "step")


def overridden(spec: PoolingSpec, pooler_config: dict[str, Any]) -> PoolingSpec:
    """The spec with what a user says of it.

    Raises:
        ConfigError: a key is unknown, or its value is none that it may have.
    """
    for key, value in pooler_config.items():
        if key not in _KEYS:
            raise ConfigError(f"--pooler-config: {key!r} is unknown; known are {', '.join(_KEYS)}")
        spec = _KEYS[key](spec, key, value)
    return spec


def _pooling(spec: PoolingSpec, key: str, value: Any) -> PoolingSpec:
    """Of whole texts or of tokens: a model is made for either."""
    pooling = str(value).lower()
    if pooling not in POOLINGS:
        raise _wrong(key, value, f"one of {', '.join(name.upper() for name in POOLINGS)}")
    if spec.weighs_vocabulary:
        raise ConfigError(f"--pooler-config: {key} cannot be changed of a model that weighs words")
    if len(spec.poolings) > 1:
        raise ConfigError(f"--pooler-config: {key} cannot be changed, because the model joins {spec.pooling}")
    classifies = spec.tasks[0] in CLASS_TASKS
    if pooling in _OF_TOKENS:
        tasks: tuple[str, ...] = (TOKEN_CLASSIFY if classifies else TOKEN_EMBED,)
    else:
        tasks = (CLASSIFY,) if classifies else (EMBED, TOKEN_EMBED)
    return replace(spec, pooling=pooling, tasks=tasks)


def _activation(spec: PoolingSpec, key: str, value: Any) -> PoolingSpec:
    if not isinstance(value, bool):
        raise _wrong(key, value, "true or false")
    return replace(spec, activation=spec.activation_of(PoolingParams(use_activation=value)))


def _step(spec: PoolingSpec, key: str, value: Any) -> PoolingSpec:
    if not _is_index(value):
        raise _wrong(key, value, "a token id")
    return replace(spec, step_token_id=value)


def _returned(spec: PoolingSpec, key: str, value: Any) -> PoolingSpec:
    classes = spec.size if spec.tasks[0] in CLASS_TASKS else 0
    if not (isinstance(value, list) and value and all(_is_index(one) and one < classes for one in value)):
        raise _wrong(key, value, f"a list of classes, of which the model has {classes}")
    return replace(spec, returned_token_ids=tuple(value))


def _matryoshka(spec: PoolingSpec, key: str, value: Any) -> PoolingSpec:
    sizes: list[Any] = value if isinstance(value, list) else []
    if not sizes or not all(_is_index(size) and 0 < size <= spec.size for size in sizes):
        raise _wrong(key, value, f"a list of sizes of 1 to {spec.size}")
    return replace(spec, matryoshka=tuple(sorted(sizes)))


_KEYS: dict[str, Callable[[PoolingSpec, str, Any], PoolingSpec]] = {
    "pooling_type": _pooling,
    "seq_pooling_type": _pooling,
    "tok_pooling_type": _pooling,
    "use_activation": _activation,
    "normalize": _activation,
    "softmax": _activation,
    "step_tag_id": _step,
    "returned_token_ids": _returned,
    "matryoshka_dimensions": _matryoshka,
}


def _is_index(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _wrong(key: str, value: Any, allowed: str) -> ConfigError:
    return ConfigError(f"--pooler-config: {key} must be {allowed}, got {json.dumps(value, default=repr)}")
