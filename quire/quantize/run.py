# SPDX-License-Identifier: Apache-2.0
"""Quantization of a float checkpoint to integers, some layers at a time.

Invariant: memory holds one round's X^T X, weights and results beside the model itself; without calibration not even
the model.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from quire.config import BUNDLED_MODELS, EngineConfig
from quire.engine.startup import prepare
from quire.engine.tokenizer import Tokenizer
from quire.errors import ConfigError, UnsupportedModelError
from quire.kernels.formats.search import Steps
from quire.models.gguf.model import is_gguf
from quire.models.loader import without_weights
from quire.models.weights import CheckpointWeights, MappedCopy
from quire.progress import Progress, tracked
from quire.quantize.calibration import CHATS, GENERAL, CalibrationSet, read_sequences
from quire.quantize.files import CheckpointWriter, new_checkpoint
from quire.quantize.grid import IntegerGrid
from quire.quantize.inputs import InputStatistics
from quire.quantize.recipe import Recipe
from quire.quantize.rounding import best_scales, gptq
from quire.quantize.sites import DividedRows, QuantizationSite, find_sites, fitted, left_alone, rounds

_SHARD_BYTES = 4 * 2**30

Rounding = Callable[[Tensor, InputStatistics | None, Recipe], tuple[Tensor, Steps]]
Inputs = Mapping[tuple[str, ...], InputStatistics]


@torch.no_grad()
def quantize_checkpoint(config: EngineConfig, recipe: Recipe, output: Path) -> IntegerGrid:
    """Write a config's model, with quantized linear layers, to a new directory; return the grid that was used.

    Raises:
        StartupError: the model cannot be read, is quantized already or is no language model; groups do not divide it;
            the directory exists, or cannot be written.
    """
    if output.exists():
        raise ConfigError(f"--output {output} exists already: name a new directory")
    config = prepare(config, "offline")
    _check(config)
    source = Path(config.model_dir)
    model = without_weights(config)
    weights = CheckpointWeights(model, source, MappedCopy(), show_progress=False)
    sites = find_sites(model, weights)
    recipe = replace(recipe, grid=fitted(recipe.grid, sites))
    calibration = CalibrationSet(config, _sequences(config, recipe)) if recipe.calibrates else None
    tensors = EditedTensors(weights)
    with new_checkpoint(output) as writer:
        progress = Progress(len(sites), f"Quantizing ({recipe.method})", "layers")
        for members in rounds(sites):
            names = [site.modules for site in members if site.layer.takes_adapters]
            inputs = {} if calibration is None else calibration.inputs_of(names, "Calibrating")
            replaced = _round(members, inputs, tensors, recipe, writer, weights, progress)
            if calibration is not None and not recipe.folds:
                for site in members:
                    calibration.replace(site.modules, replaced)
        progress.close()
        quantized = {f"{name}.weight" for site in sites for name in site.modules}
        _write_rest(writer, [name for name in weights.names() if name not in quantized], tensors, weights)
        ignore = [_stored(weights, name) for name in left_alone(model, sites)]
        writer.finish(source, recipe.grid.config(ignore, reordered=recipe.orders))
    return recipe.grid


def _check(config: EngineConfig) -> None:
    if is_gguf(Path(config.model_dir)):
        raise ConfigError(
            "a GGUF file cannot be quantized: name the directory with the model's *.safetensors"
        )
    part_of = config.arch.part_of
    if part_of is not None and part_of.language_dir:
        raise ConfigError(
            f"the language model of {config.model.model} is in {part_of.language_dir}: quantize that checkpoint, and "
            "name the result as text_model_id in --hf-overrides"
        )
    if config.arch.quantization is not None:
        raise ConfigError(
            f"{config.model.model} is quantized already ({config.arch.quantization.method}): name the model in floats"
        )
    if config.pooling is not None:
        raise UnsupportedModelError(
            f"{config.model.model} generates nothing; only language models are quantized"
        )


def _sequences(config: EngineConfig, recipe: Recipe) -> list[Sequence[int]]:
    tokenizer = Tokenizer.from_dir(Path(config.model_dir))
    length = min(recipe.sequence_length, config.model.max_model_len)
    default = CHATS if config.model.model in BUNDLED_MODELS else GENERAL
    return read_sequences(recipe.calibration or default, tokenizer, recipe.num_sequences, length)


def _round(
    members: Sequence[QuantizationSite],
    inputs: Inputs,
    tensors: EditedTensors,
    recipe: Recipe,
    writer: CheckpointWriter,
    weights: CheckpointWeights,
    progress: Progress,
) -> dict[str, Tensor]:
    """Quantize and write the weights of some sites; return their dequantized values."""
    scales = _fold_scales(members, inputs, tensors, recipe, weights) if recipe.folds else {}
    results: dict[str, Tensor] = {}
    stands_for: dict[str, Tensor] = {}
    for site in members:
        known = _scaled(inputs.get(site.modules), scales.get(site.modules))
        for dtype, names in _by_dtype(site, weights).items():
            own = replace(recipe, grid=recipe.grid.stored_as(dtype))
            rows = [tensors.read(f"{name}.weight") for name in names]
            codes, steps = ROUNDINGS[recipe.method](torch.cat(rows), known, own)
            parts = [torch.split(each, [len(part) for part in rows]) for each in (codes, *steps)]
            for name, part, *part_steps in zip(names, *parts, strict=True):
                found = recipe.grid.tensors(part, Steps(*part_steps), dtype)
                results |= {f"{_stored(weights, name)}.{leaf}": each for leaf, each in found.items()}
                stands_for[f"{name}.weight"] = recipe.grid.weights(part, Steps(*part_steps))
        progress.update()
    writer.add(results)
    return stands_for


def _by_dtype(site: QuantizationSite, weights: CheckpointWeights) -> dict[torch.dtype, list[str]]:
    """Group a site's modules by the dtype of their scales; a group has the same inputs and is rounded as one."""
    names: dict[torch.dtype, list[str]] = {}
    for name in site.modules:
        names.setdefault(weights.whole(f"{name}.weight").dtype, []).append(name)
    return names


def _fold_scales(
    members: Sequence[QuantizationSite],
    inputs: Inputs,
    tensors: EditedTensors,
    recipe: Recipe,
    weights: CheckpointWeights,
) -> dict[tuple[str, ...], Tensor]:
    found = {}
    folded = [site for site in members if site.source and site.modules in inputs]
    for site in tracked(folded, "Scaling (awq)", "layers"):
        grid = recipe.grid.stored_as(weights.whole(f"{site.modules[0]}.weight").dtype)
        scales = best_scales(tensors.matrix(site), inputs[site.modules], grid)
        tensors.scale_inputs(site, scales)
        found[site.modules] = scales
    return found


def _scaled(known: InputStatistics | None, scales: Tensor | None) -> InputStatistics | None:
    return known if known is None or scales is None else known.divided(scales)


def _rtn(weight: Tensor, inputs: InputStatistics | None, recipe: Recipe) -> tuple[Tensor, Steps]:
    steps = recipe.grid.steps(weight, None if inputs is None else inputs.importance)
    return recipe.grid.codes(weight, steps), steps


def _gptq(weight: Tensor, inputs: InputStatistics | None, recipe: Recipe) -> tuple[Tensor, Steps]:
    if inputs is None:
        return _rtn(weight, inputs, recipe)
    return gptq(weight, inputs.gram / inputs.num_rows, recipe.grid, act_order=recipe.orders)


ROUNDINGS: Mapping[str, Rounding] = {"rtn": _rtn, "gptq": _gptq, "awq": _rtn, "awq-gptq": _gptq}
"""Rounding functions by the names of `recipe.METHODS`; without statistics, all of them round to nearest."""


def _write_rest(
    writer: CheckpointWriter, names: Sequence[str], tensors: EditedTensors, weights: CheckpointWeights
) -> None:
    """Write the tensors that are not quantized."""
    shard: dict[str, Tensor] = {}
    for name in names:
        tensor = tensors.final(name)
        if shard and sum(each.nbytes for each in shard.values()) + tensor.nbytes > _SHARD_BYTES:
            writer.add(shard)
            shard = {}
        shard[weights.stored_name(name)] = tensor
    writer.add(shard)


def _stored(weights: CheckpointWeights, module: str) -> str:
    """Return a module's name in the files."""
    name = f"{module}.weight"
    return weights.stored_name(name).removesuffix(".weight") if weights.has(name) else module


Edit = Callable[[Tensor], Tensor]


class EditedTensors:
    """Reader of tensors in float32, with all edits under their names applied."""

    def __init__(self, weights: CheckpointWeights) -> None:
        self._weights = weights
        self._edits: dict[str, list[Edit]] = defaultdict(list)

    def read(self, name: str) -> Tensor:
        """Return a copy of the tensor in float32."""
        tensor = self._weights.whole(name).to(torch.float32, copy=True)
        for edit in self._edits.get(name, ()):
            tensor = edit(tensor)
        return tensor

    def matrix(self, site: QuantizationSite) -> Tensor:
        """Return the concatenated weights of a site's modules: [N, K]."""
        return torch.cat([self.read(f"{name}.weight") for name in site.modules])

    def final(self, name: str) -> Tensor:
        """Return the tensor to write: the stored one where nothing was changed."""
        stored = self._weights.whole(name)
        return self.read(name).to(stored.dtype) if name in self._edits else stored

    def scale_inputs(self, site: QuantizationSite, scales: Tensor) -> None:
        """Multiply the columns of a site's weights, and divide the tensors that produce its inputs."""
        for name in site.modules:
            self._edits[f"{name}.weight"].append(lambda tensor: tensor * scales)
        for part in site.source:
            self._edits[part.tensor].append(_divided(part, scales))


def _divided(part: DividedRows, scales: Tensor) -> Edit:
    def edit(tensor: Tensor) -> Tensor:
        by = scales if tensor.dim() == 1 else scales.unsqueeze(1)
        tensor[part.rows] = (tensor[part.rows] + part.offset) / by - part.offset
        return tensor

    return edit
