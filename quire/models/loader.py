"""Builds the network a prepared config describes and gives it its weights, one layer after the other.

Invariant: a layer's weights exist in the checkpoint's form only until they are in their final one, so loading takes
hardly more memory than the loaded model.
"""

import logging
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path

import torch
from torch import nn

from quire.config import EngineConfig
from quire.errors import ConfigError, ModelLoadError
from quire.kernels.linear import Kind, WeightScheme
from quire.layers.attention import attention_backends
from quire.layers.base import device_type
from quire.models.base import CausalLM
from quire.models.registry import ModelRegistry
from quire.models.weights import CheckpointWeights, RandomWeights, Weights

logger = logging.getLogger(__name__)

_KINDS: dict[str, Kind] = {"int8": "int8", "int4": "int4", "fp8": "fp8"}


@torch.no_grad()
def load_model(config: EngineConfig) -> CausalLM:
    """The model of a prepared config, ready for its KV cache to be bound.

    Raises:
        UnsupportedModelError: nobody registered the architecture.
        ModelLoadError: the checkpoint does not fit the config, is corrupt, or does not fit into memory.
        ConfigError: a layer that is not to be quantised does not exist.
    """
    model_cls = ModelRegistry.resolve_model_cls(config.arch.architecture)
    with torch.device("meta"):
        model = model_cls(config=config)
    logger.info("attention_backend = %s", ", ".join(attention_backends(model)))
    schemes = _schemes(model, config)
    num_bytes = sum(param.nbytes for param in model.parameters())
    weights, device = _weights(model, config), torch.device(device_type(config))
    for (names, layer), scheme in zip(model.checkpoint_layers(), schemes, strict=True):
        try:
            _allocate(layer, device)
        except RuntimeError as error:
            raise ModelLoadError(
                f"not enough memory for the weights ({num_bytes / 2**30:.1f} GiB)"
            ) from error
        for name, slot in layer.slots(names):
            weights.fill(name, slot)
        layer.finish_loading(scheme)
    # What is computed and not loaded, such as tables of angles, was made on the host.
    return model.to(device).eval()


def _weights(model: CausalLM, config: EngineConfig) -> Weights:
    if config.load.load_format == "dummy":
        return RandomWeights(config.model.seed)
    show_progress = config.observability.enable_progress
    return CheckpointWeights(model, Path(config.model_dir), show_progress=show_progress)


def _allocate(module: nn.Module, device: torch.device) -> None:
    for name, param in module.named_parameters(recurse=False):
        memory = torch.empty_like(param, device=device)
        setattr(module, name, nn.Parameter(memory, requires_grad=False))


def _schemes(model: CausalLM, config: EngineConfig) -> list[WeightScheme]:
    """How each of the model's layers keeps its weight; a merged layer is left alone if one of its parts is."""
    asked = config.quantization
    plain = WeightScheme(invariant=config.kernels.batch_invariant)
    if asked.quantization is None:
        return [plain for _ in model.checkpoint_layers()]
    quantized = replace(
        plain,
        kind=_KINDS[asked.quantization],
        group_size=asked.group_size,
        symmetric=asked.symmetric,
        fast=asked.fast,
        per_tensor=asked.per_tensor,
        vendor=asked.vendor,
    )
    unmatched = set(asked.ignore)
    schemes = []
    for names, layer in model.checkpoint_layers():
        names = [*names, "lm_head"] if layer is model.lm_head else names
        hits = {pattern for pattern in asked.ignore for name in names if fnmatchcase(name, pattern + "*")}
        unmatched -= hits
        schemes.append(plain if hits else quantized)
    if unmatched:
        raise ConfigError(
            f"--quantization-config: ignore names {sorted(unmatched)[0]!r}, which no layer bears"
        )
    return schemes
