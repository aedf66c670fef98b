# SPDX-License-Identifier: Apache-2.0
"""Model loader: the network of a prepared config, with weights loaded one layer after the other.

Invariant: a layer's weights exist in the checkpoint's form only until they are in their final one, so loading takes
hardly more memory than the loaded model.
"""

import logging
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from quire.config import EngineConfig
from quire.errors import ConfigError, ModelLoadError
from quire.features import POOLING_MODEL
from quire.kernels import ops
from quire.kernels.cpu.linear import packed_layout
from quire.layers.attention import attention_backends
from quire.layers.base import Layer, device_type, model_dtype
from quire.layers.shard import WHOLE, Shard
from quire.layers.sliced_linear import slice_sums
from quire.models.base import CausalLM, construct
from quire.models.bounded_directory import GIB, BoundedDirectory
from quire.models.cache_scales import load_cache_scales
from quire.models.methods import log_methods, quant_methods
from quire.models.packed_cache import SUFFIX, PackedCache, packed_key
from quire.models.random_weights import AnyWeights, RandomWeights
from quire.models.registry import ModelRegistry
from quire.models.sharding import SHARED, SLICED, apply_shards, check_ranks, check_shared
from quire.models.staged_copy import GpuCopyStream, StagedCopy
from quire.models.stages import ALL, Stage, apply_stage
from quire.models.weights import CheckpointWeights, MappedCopy, NoteBytes, TensorReader, Weights
from quire.plugins import import_place

logger = logging.getLogger(__name__)

_ALIGNMENT = 64
"""Alignment in bytes of tensors in shared memory."""


@torch.no_grad()
def load_model(
    config: EngineConfig,
    shard: Shard = WHOLE,
    stage: Stage = ALL,
    *,
    prefix: str = "",
    note: NoteBytes | None = None,
) -> CausalLM:
    """Return the model of a prepared config, without its KV cache: a stage's layers, a rank's shard of each.

    `prefix`, with its dot, precedes the names of its layers if an engine has several models. `note` receives the bytes
    read so far and altogether.

    Raises:
        UnsupportedModelError: the architecture is not registered.
        ModelLoadError: the checkpoint does not fit the config, is corrupt, or does not fit into memory.
        ConfigError: a layer that is not to be quantized does not exist, or one cannot be sharded for so many ranks.
    """
    model = without_weights(config, shard, stage, prefix=prefix)
    log_methods(config)
    logger.info("attention_backend = %s", ", ".join(attention_backends(model)) or "none: no layer attends")
    cache = _cache(model)
    tensors = cache.read() if cache is not None else None
    if tensors is None:
        _fill(model, _weights(model, config, note))
        if cache is not None:
            cache.write(_final_tensors(model))
    else:
        _restore(model, tensors)
    load_cache_scales(model, shard)
    model.eval().loaded()
    return model


@torch.no_grad()
def load_part(model: CausalLM) -> None:
    """Load a part of a checkpoint beside the language model, made on the meta device; its config says which files.

    Raises:
        ModelLoadError: the checkpoint does not fit the config, is corrupt, or does not fit into memory.
    """
    for (_, layer), method in zip(model.checkpoint_layers(), quant_methods(model, model.config), strict=True):
        layer.create_weights(method)
    _fill(model, _weights(model, model.config))
    model.eval()


@torch.no_grad()
def with_any_weights(config: EngineConfig, shard: Shard, stage: Stage) -> CausalLM:
    """Return the model with arbitrary weights, available at once, for timing only."""
    model = without_weights(config, shard, stage)
    _fill(model, AnyWeights())
    return model.eval()


def without_weights(
    config: EngineConfig, shard: Shard = WHOLE, stage: Stage = ALL, *, prefix: str = ""
) -> CausalLM:
    """Return the model; its parameters have shapes and dtypes, but no memory yet."""
    model_cls = ModelRegistry.resolve_model_cls(config.arch.architecture, config.model_class)
    with torch.device("meta"):
        model = construct(model_cls, config, prefix)
        if config.pooling is not None:
            model = import_place(POOLING_MODEL)(model, config.pooling)
        if shard.group.size > 1:
            check_ranks(model, f"--tensor-parallel-size {shard.of}")
        parallel = config.parallel
        if parallel.tp_invariant:
            check_shared(model, "--tp-invariant", SHARED if parallel.enable_expert_parallel else SLICED)
            slice_sums(model, shard)
        methods = quant_methods(model, config)
        for (_, layer), method in zip(model.checkpoint_layers(), methods, strict=True):
            layer.create_weights(method, shard)
        if shard.group.size > 1 or shard.experts.size > 1:
            apply_shards(model, shard)
        if stage.of > 1:
            apply_stage(model, stage)
    return model


def _fill(model: CausalLM, weights: Weights) -> None:
    """Load every layer's weights in their final form."""
    num_bytes = sum(param.nbytes for param in model.parameters())
    device = torch.device(device_type(model.config))
    staging = _Staging(device)
    for names, layer in model.checkpoint_layers():
        try:
            staging.allocate(layer)
        except RuntimeError as error:
            raise ModelLoadError(
                f"not enough memory for the weights ({num_bytes / 2**30:.1f} GiB)"
            ) from error
        weights.fill(layer.slots(names))
        layer.finish_loading()
        weights.end_layer()
    model.to(device)  # computed tensors, such as tables of angles, were made on the host


def _cache(model: CausalLM) -> PackedCache | None:
    config, load = model.config, model.config.load
    if load.packed_weights_cache is None or not load.enable_packed_weights_cache:
        return None
    if device_type(config) != "cpu":
        raise ConfigError(
            f"--packed-weights-cache keeps weights as CPU kernels read them; --device is {device_type(config)}"
        )
    packs = ops.pack_weight.supporting("cpu", model_dtype(config))
    key = packed_key(model, packed_layout() if packs else "plain")
    path, limit = Path(load.packed_weights_cache).expanduser(), int(load.packed_weights_cache_gib * GIB)
    return PackedCache(BoundedDirectory(path, SUFFIX, limit), Path(config.model_dir).name, key)


def _places(model: CausalLM) -> Iterator[tuple[str, Layer]]:
    """Yield each layer with a unique name: several may hold parts of one checkpoint module."""
    for index, (names, layer) in enumerate(model.checkpoint_layers()):
        yield f"{index}:{names[0]}", layer


def _final_tensors(model: CausalLM) -> dict[str, Tensor]:
    return {
        f"{place}/{name}": tensor
        for place, layer in _places(model)
        for name, tensor in layer.tensors().items()
    }


def _restore(model: CausalLM, tensors: Mapping[str, Tensor]) -> None:
    """Restore the layers from the tensors of `_final_tensors`."""
    by_layer: dict[str, dict[str, Tensor]] = defaultdict(dict)
    for path, tensor in tensors.items():
        layer_name, _, name = path.rpartition("/")
        by_layer[layer_name][name] = tensor
    for place, layer in _places(model):
        layer.restore(by_layer[place])


def _weights(model: CausalLM, config: EngineConfig, note: NoteBytes | None = None) -> Weights:
    if config.load.load_format == "dummy":
        return RandomWeights(config.model.seed)
    show_progress = config.observability.enable_progress
    reader = tensor_reader(torch.device(device_type(config)))
    return CheckpointWeights(model, Path(config.model_dir), reader, show_progress=show_progress, note=note)


def tensor_reader(device: torch.device) -> TensorReader:
    """Return the fastest reader from a file to a device."""
    return MappedCopy() if device.type == "cpu" else StagedCopy(GpuCopyStream(device))


class _Staging:
    """Memory to fill one layer after the other.

    Tensors that a finished layer replaces lie in memory that the next layer reuses. If freed, it would leave holes
    between the final weights, and fresh pages take longer to get than to fill.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._reused = self._memory(0)

    def allocate(self, layer: Layer) -> None:
        """Allocate uninitialized memory for each parameter of a layer."""
        replaced = layer.replaced(self._device.type)
        params = list(layer.named_parameters(recurse=False))
        passing = iter(self._again([param.nbytes for name, param in params if name in replaced]))
        for name, param in params:
            memory = next(passing) if name in replaced else self._memory(param.nbytes)
            tensor = memory.view(param.dtype).view(param.shape)
            setattr(layer, name, nn.Parameter(tensor, requires_grad=False))

    def _again(self, nums_bytes: list[int]) -> list[Tensor]:
        """Return adjacent tensors in the memory of the last layer."""
        wholes = [-(-num_bytes // _ALIGNMENT) * _ALIGNMENT for num_bytes in nums_bytes]
        if len(self._reused) < sum(wholes):
            self._reused = self._memory(sum(wholes))
        places = self._reused[: sum(wholes)].split(wholes)
        return [place[:num_bytes] for place, num_bytes in zip(places, nums_bytes, strict=True)]

    def _memory(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
