"""Which heads are to guess for a model by its hidden states."""

from __future__ import annotations

import dataclasses

from quire.config import EngineConfig
from quire.config.lora import LoRAConfig
from quire.config.quantization import QuantizationConfig
from quire.config.speculative import SpeculativeConfig
from quire.models.checkpoint import resolve_model_dir
from quire.models.draft_heads.reader import HEADS, read_draft_heads


def with_draft_heads(config: EngineConfig) -> EngineConfig:
    """A prepared config, and in it that of the heads, which have everything but their shape and weights from it.

    Raises:
        ConfigError: they do not fit the model.
        ModelLoadError: they cannot be found or read.
        UnsupportedModelError: they are of a kind that quire does not know.
    """
    settings = config.speculative.settings
    method, model = settings.method, settings.model
    assert method is not None, "it was checked"
    assert model is not None, "it was checked"
    model_dir = resolve_model_dir(model, None, config.load.download_dir)
    heads = dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, model=model, revision=None),
        model_dir=str(model_dir),
        model_arch=read_draft_heads(method, model_dir, config.arch),
        model_class=HEADS[method].model,
        quantization=QuantizationConfig(settings.quantization),
        lora=LoRAConfig(),
        speculative=SpeculativeConfig(),
    )
    return dataclasses.replace(config, draft=heads)
