"""Builds the network a prepared config describes and gives it its weights."""

from pathlib import Path

import torch
from torch import nn

from quire.config import EngineConfig
from quire.errors import ModelLoadError
from quire.layers.base import Layer
from quire.models.base import CausalLM
from quire.models.registry import ModelRegistry
from quire.models.weights import fill_with_random_weights, load_weights


def load_model(config: EngineConfig) -> CausalLM:
    """The model of a prepared config, ready for its KV cache to be bound.

    The module tree is first made without memory; each parameter is allocated once, in its final dtype.

    Raises:
        UnsupportedModelError: nobody registered the architecture.
        ModelLoadError: the checkpoint does not fit the config, is corrupt, or does not fit into memory.
    """
    model_cls = ModelRegistry.resolve_model_cls(config.arch.architecture)
    with torch.device("meta"):
        model = model_cls(config=config)
    _allocate(model, torch.device("cpu"))
    if config.load.load_format == "dummy":
        fill_with_random_weights(model, seed=config.model.seed)
    else:
        load_weights(model, Path(config.model_dir), show_progress=config.observability.enable_progress)
    for module in model.modules():
        if isinstance(module, Layer):
            module.finish_loading()
    return model.eval()


def _allocate(model: nn.Module, device: torch.device) -> None:
    num_bytes = sum(param.nbytes for param in model.parameters())
    try:
        for module in model.modules():
            for name, param in module.named_parameters(recurse=False):
                memory = torch.empty_like(param, device=device)
                setattr(module, name, nn.Parameter(memory, requires_grad=False))
    except RuntimeError as error:
        raise ModelLoadError(f"not enough memory for the weights ({num_bytes / 2**30:.1f} GiB)") from error
