# SPDX-License-Identifier: Apache-2.0
"""Construction of model objects, including classes with an old-style constructor."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from typing import Any

from quire.config import EngineConfig
from quire.errors import ModelLoadError
from quire.models.base import CausalLM

logger = logging.getLogger(__name__)

_OLD_STYLE: dict[str, Callable[[EngineConfig], Any]] = {
    "config": lambda config: config.arch,
    "model_config": lambda config: config.model,
    "cache_config": lambda config: config.cache,
    "quant_config": lambda config: config.quantization,
    "scheduler_config": lambda config: config.scheduler,
    "parallel_config": lambda config: config.parallel,
    "lora_config": lambda config: config.lora if config.lora.enable_lora else None,
}
"""Old-style constructor parameter -> the part of the configuration that it gets."""


_REST = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)


def construct(model_cls: type[CausalLM], config: EngineConfig, prefix: str = "") -> CausalLM:
    """Return a model object, constructed by `(*, config: EngineConfig, prefix="")` or by old-style parameter names.

    An old-style constructor takes `ModelArch` as `config`, and is recognized by its other parameters, from
    `_OLD_STYLE`.
    Such a class calls `torch.nn.Module.__init__`, and its `config` is set afterwards.

    Raises:
        ModelLoadError: the constructor has other required parameters.
    """
    parameters = inspect.signature(model_cls).parameters
    named: dict[str, Any] = {"prefix": prefix} if "prefix" in parameters else {}
    beside = parameters.keys() & _OLD_STYLE.keys() - {"config"}
    if not beside:
        return model_cls(config=config, **named)
    needed = {name for name, one in parameters.items() if one.default is one.empty and one.kind not in _REST}
    unknown = sorted(needed - _OLD_STYLE.keys() - {"prefix"})
    if unknown:
        raise ModelLoadError(
            f"{model_cls.__module__}:{model_cls.__qualname__} wants {', '.join(unknown)}; a model is made by "
            "(*, config: EngineConfig, prefix: str)"
        )
    logger.warning(
        "%s has an old-style constructor; give it (*, config: EngineConfig, prefix)", model_cls.__name__
    )
    given: dict[str, Any] = {name: _OLD_STYLE[name](config) for name in parameters if name in _OLD_STYLE}
    model: Any = model_cls(**given, **named)
    model.config = config
    return model
