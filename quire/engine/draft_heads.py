"""Which heads are to guess for a model by its hidden states."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from quire.config import EngineConfig
from quire.config.lora import LoRAConfig
from quire.config.quantization import QuantizationConfig
from quire.config.speculative import MEDUSA, SpeculativeConfig
from quire.engine.draft_model import whole_on_each_rank
from quire.engine.file_states import states_of
from quire.errors import ConfigError
from quire.models.built_in import DECODER
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
    method, model, quantization = settings.method, settings.model, settings.quantization
    assert method is not None, "it was checked"
    if model is None:  # they are in the model's own checkpoint
        model_dir, quantization = Path(config.model_dir), quantization or config.quantization.quantization
    else:
        model_dir = resolve_model_dir(model, None, config.load.download_dir)
    if method != MEDUSA and config.model_class != f"quire.models.{DECODER}":
        raise ConfigError(
            f"{method} reads embeddings and layers, which those of {config.arch.architecture} do not show"
        )
    shape = read_draft_heads(method, model_dir, config.arch)
    assert shape.draft is not None, "heads are read"
    heads = dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, model=model or config.model.model, revision=None),
        model_dir=str(model_dir),
        model_arch=shape,
        model_class=HEADS[method].model,
        parallel=whole_on_each_rank(config.parallel),
        quantization=QuantizationConfig(quantization),
        lora=LoRAConfig(),
        speculative=SpeculativeConfig(),
    )
    heads = dataclasses.replace(heads, files=states_of(heads))
    arch = dataclasses.replace(config.arch, kept_layers=shape.draft.reads)
    return dataclasses.replace(config, model_arch=arch, draft=heads)
