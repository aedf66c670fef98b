# SPDX-License-Identifier: Apache-2.0
"""Constructors of models from elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from quire.config import CacheConfig, ModelArch
from quire.errors import ModelLoadError
from quire.models.base import construct
from quire.models.decoder import DecoderForCausalLM
from tests.models.harness import prepared_config


class OldStyle(DecoderForCausalLM):
    """Takes parts of the configuration."""

    def __init__(
        self, config: ModelArch, cache_config: CacheConfig, quant_config: Any = None, **rest: Any
    ) -> None:
        nn.Module.__init__(self)
        self.given = (config, cache_config, quant_config, rest)


class Demanding(DecoderForCausalLM):
    """Wants what nobody has."""

    def __init__(self, config: ModelArch, cache_config: CacheConfig, weather: str) -> None:
        raise AssertionError("is not called")


def test_an_old_style_constructor_gets_the_parts_that_it_names(
    tiny_model: Callable[[str], Path], caplog: pytest.LogCaptureFixture
) -> None:
    config = prepared_config(tiny_model("llama"))
    model = construct(OldStyle, config)
    assert isinstance(model, OldStyle)
    assert model.given == (config.arch, config.cache, config.quantization, {})
    assert model.config is config
    assert "OldStyle has an old-style constructor" in caplog.text


def test_unexpected_constructor_argument_is_named(tiny_model: Callable[[str], Path]) -> None:
    with pytest.raises(ModelLoadError, match="Demanding wants weather; a model is made by"):
        construct(Demanding, prepared_config(tiny_model("llama")))
