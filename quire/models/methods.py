# SPDX-License-Identifier: Apache-2.0
"""Quantization method of each layer of a model, for reading its weight from the checkpoint and storing it.

Invariant: decided for all layers before any has memory, from the config and the checkpoint's file headers.
"""

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path

import torch
from torch import Tensor

from quire.config import EngineConfig
from quire.config.encoding import Encoding
from quire.config.quantization import FOUR_BITS
from quire.errors import ConfigError, ModelLoadError
from quire.kernels import cpu
from quire.kernels.formats.base import BLOCK
from quire.kernels.linear import RowQuantization, WeightScheme
from quire.layers.base import Layer, device_type
from quire.layers.embedding import VocabEmbedding
from quire.layers.linear import QKVLinear
from quire.layers.matrix import MatrixLayer
from quire.layers.quantization import Float, Int4FinerValues, QuantMethod, method_of
from quire.layers.quantized.codec import Codec, codec_of
from quire.layers.quantized.merged import merged_scheme
from quire.layers.quantized.method import EncodedModule, EncodedWeights, Packed
from quire.layers.shard import ShardSpan
from quire.layers.slot import FLOATS
from quire.models.base import CausalLM
from quire.models.tensor_file import TensorFile, TensorInfo
from quire.models.weights import open_files

logger = logging.getLogger(__name__)

_FLOATS = Encoding("floats")
_MOST_BITS = 4.88
"""Bits per weight of two-level int4, on average over all layers but the head; partial blocks take more."""


def _rounds_activations(config: EngineConfig) -> bool:
    """Return whether bfloat16 weights are multiplied with bfloat16 activations.

    Raises:
        ConfigError: it is requested, and no kernel here multiplies bfloat16.
    """
    asked = config.kernels.matmul_precision
    here = device_type(config) == "cpu" and config.model.dtype == "bfloat16" and cpu.available()
    if asked == "highest" or not here:
        return False
    if cpu.multiplies_bfloat16():
        return True
    if asked == "medium":
        raise ConfigError(
            "--matmul-precision medium rounds activations to bfloat16, which pays on AVX512-BF16 or AMX alone; "
            f"here are {cpu.status()}: give highest, or auto"
        )
    return False


def log_methods(config: EngineConfig) -> None:
    """Log the automatically resolved choices."""
    if config.kernels.matmul_precision == "auto" and _rounds_activations(config):
        logger.info("matmul_precision is medium: this processor multiplies bfloat16 at twice the speed")
    says = config.arch.quantization
    for note in says.notes if says is not None else ():
        logger.info("%s", note)


def _rounding(scheme: WeightScheme, kind: str, config: EngineConfig, device: str) -> QuantMethod:
    """Return the method that quantizes weights to a kind at load time."""
    asked = config.quantization
    if kind in (*FOUR_BITS, "int8"):
        scheme = replace(scheme, group_size=asked.group_size(kind, device))
    if kind in FOUR_BITS:
        two_level = kind == "int4" and device == "cpu"
        symmetric = asked.symmetric and not two_level
        return method_of(replace(scheme, kind="int4", symmetric=symmetric, two_level=two_level))
    return method_of(replace(scheme, kind=kind))


def _with_finer_values(model: CausalLM, config: EngineConfig, scheme: WeightScheme) -> set[Layer]:
    """Return the QKV layers whose values two-level int4 keeps in int8: the last ones, up to `_MOST_BITS` on average.

    Values are few where heads share them, and their error costs most, in the last layers above all. Sizes are those of
    the whole model, and slices of one layer (--tp-invariant) count once, so all ranks choose the same. Adapters add to
    the rows of one matrix: with them, none are kept apart.
    """
    if not scheme.two_level or config.serves_adapters:
        return set()
    layers = _rounded_layers(model)
    four, eight = 4 + 16 / scheme.group_size + 32 / BLOCK, 8 + 16 / scheme.group_size
    spare = (_MOST_BITS - four) * sum(_size(layer, layer.spans) for layer in layers)
    chosen: set[Layer] = set()
    for layer in reversed(layers):
        if isinstance(layer, QKVLinear) and layer.num_value_rows:
            spare -= (eight - four) * _size(layer, layer.spans[-layer.parts :])
            if spare < 0:
                break
            chosen.add(layer)
    return chosen


def _rounded_layers(model: CausalLM) -> list[MatrixLayer]:
    """Return the layers that are rounded like most, each once."""
    layers = {
        tuple(names): layer
        for names, layer in model.checkpoint_layers()
        if isinstance(layer, MatrixLayer) and layer is not model.lm_head and not layer.only_looked_up
    }
    return list(layers.values())


def _size(layer: MatrixLayer, spans: Sequence[ShardSpan]) -> int:
    """Return the number of weights of all ranks in some spans of a layer."""
    return layer.inputs * sum(span.size for span in spans)


def quant_methods(model: CausalLM, config: EngineConfig) -> list[QuantMethod]:
    """Return each layer's method; a merged layer is not quantized if one of its parts is not.

    Raises:
        ConfigError: an ignored module does not exist, or a requested format is not available here.
        ModelLoadError: the checkpoint's files cannot be read.
    """
    asked = config.quantization
    kernels = config.kernels
    floats = WeightScheme(fast=_rounds_activations(config), invariant=kernels.batch_invariant)
    plain = method_of(floats)
    rounded = replace(floats, fast=asked.fast, per_tensor=asked.per_tensor, vendor=asked.vendor)
    device = device_type(config)
    quantized = _rounding(rounded, asked.quantization, config, device) if asked.quantization else plain
    head = _rounding(rounded, asked.head, config, device) if asked.rounds_head else plain
    finer_values = _with_finer_values(model, config, quantized.scheme)
    eight_bits = replace(quantized.scheme, kind="int8", symmetric=True, two_level=False)
    unmatched = set(asked.ignore)
    encodings = _Encodings(config, rounded)
    methods = []
    for names, layer in model.checkpoint_layers():
        is_head = layer is model.lm_head
        known_as = [*names, "lm_head"] if is_head else names
        hits = {pattern for pattern in asked.ignore for name in known_as if fnmatchcase(name, pattern + "*")}
        if hits and is_head and "head" in asked.quantization_config:
            raise ConfigError(
                f"--quantization-config: head is {asked.head!r}, but ignore leaves it alone by {min(hits)!r}"
            )
        unmatched -= hits
        method = plain if hits else head if is_head else quantized
        if method is quantized and layer in finer_values:
            method = Int4FinerValues(quantized.scheme, eight_bits)
        methods.append(encodings.method(layer, names, method))
    # A pattern may name layers of a checkpoint's other part, whose loading checks it.
    if unmatched := {pattern for pattern in unmatched if not model.leaves_out(pattern)}:
        raise ConfigError(
            f"--quantization-config: ignore names {sorted(unmatched)[0]!r}, which no layer bears"
        )
    if config.serves_adapters:
        for method in methods:
            method.quantizes_rows = False  # adapters need unquantized x
    return methods


class _Encodings:
    """Encodings of the checkpoint's quantized modules, from its tensors and quantization config.

    Weights that kernels use as stored get the options of `scheme`.
    """

    def __init__(self, config: EngineConfig, scheme: WeightScheme) -> None:
        self._says = config.arch.quantization
        self._scheme = scheme
        self._as_checkpoint = config.quantization.follows_checkpoint
        self._files: Mapping[str, TensorFile] = {}
        self._tensors: Mapping[str, Tensor] = {}
        if self._says is not None and config.load.load_format != "dummy":
            files = open_files(Path(config.model_dir), part_of=config.arch.part_of)
            self._files = {name: file for file in files for name in file.tensors}
            self._tensors = {name: _without_data(file.tensors[name]) for name, file in self._files.items()}

    def method(self, layer: Layer, names: Sequence[str], kept: QuantMethod) -> QuantMethod:
        """Return the method of a layer with the checkpoint modules `names`; floats are stored as `kept` does."""
        if not isinstance(layer, MatrixLayer):
            return kept
        names = layer.stored_modules(names)
        encodings = [self._encoding(layer, name) for name in names]
        if not any(encodings):
            return kept
        modules = [
            self._module(layer, name, each or _FLOATS) for name, each in zip(names, encodings, strict=True)
        ]
        return EncodedWeights(
            modules, kept, self._packed(layer, modules) if isinstance(kept, Float) else None
        )

    def _packed(self, layer: MatrixLayer, modules: Sequence[EncodedModule]) -> Packed | None:
        """Return the packed form that holds all modules' numbers; None if there is none."""
        whole = merged_scheme([module.scheme(layer.inputs) for module in modules])
        if whole is None or layer.rearranges:
            return None
        # On a GPU, activations for E4M3 weights are quantized, if the checkpoint specifies it.
        fast = self._scheme.fast and not (whole.kind == "fp8" and any(each.weight_only for each in modules))
        scheme = replace(
            self._scheme, kind=whole.kind, group_size=whole.group_size, symmetric=whole.symmetric, fast=fast
        )
        if not any(module.codec.reorders for module in modules):
            return Packed(scheme)
        if not layer.makes_products:
            return None
        as_they_come = torch.arange(layer.inputs, device="cpu")
        order, *others = [self._order(layer, module, as_they_come) for module in modules]
        if order is None or not all(other is not None and torch.equal(other, order) for other in others):
            return None
        return Packed(scheme, order)

    def _order(self, layer: MatrixLayer, module: EncodedModule, as_they_come: Tensor) -> Tensor | None:
        """Return a module's inputs group after group; None if its groups differ in size."""
        groups = self._groups(layer, module.name, module.codec) if module.codec.reorders else None
        return as_they_come if groups is None else module.codec.order(groups)

    def _groups(self, layer: MatrixLayer, name: str, codec: Codec) -> Tensor | None:
        """Return a module's group-index tensor; None if it has none."""
        tensor = "" if codec.groups_in is None else layer.stored_name(name, codec.groups_in)
        if tensor not in self._files:
            return None
        info = self._files[tensor].tensors[tensor]
        return layer.own(self._files[tensor].part(info, tuple(slice(0, size) for size in info.shape)))

    def _module(self, layer: MatrixLayer, name: str, encoding: Encoding) -> EncodedModule:
        codec = codec_of(encoding)
        groups = self._groups(layer, name, codec)
        codec = layer.codec_of(name, codec if groups is None else codec.by_groups(groups))
        in_files = layer.in_files(name, codec.tensors(1, 1), self._tensors)
        rounding = self._rounding(layer, name, encoding) if self._as_checkpoint else None
        return EncodedModule(name, codec, in_files, encoding.weight_only, rounding)

    def _rounding(self, layer: MatrixLayer, name: str, encoding: Encoding) -> RowQuantization | None:
        """Return a module's activation quantization.

        Raises:
            ConfigError: it is not supported here.
            ModelLoadError: its scale is missing or invalid.
        """
        said = encoding.activations
        if said is None or layer.only_looked_up:
            return None
        if said.unlike or not layer.quantizes_inputs:
            why = f"with {said.unlike}" if said.unlike else f"in {type(layer).__name__}"
            raise ConfigError(
                f"--quantization-config: mode checkpoint cannot quantize the input of {name} {why}: "
                "give precise, or fast"
            )
        how = RowQuantization(said.codes, group=said.group, symmetric=said.symmetric, bound=said.bound)
        if not said.static:
            return how
        if not self._files:  # weights are random, too
            return replace(how, scale=1.0)
        return replace(how, scale=self._scale(layer, name), zero=self._zero(layer, name))

    def _scale(self, layer: MatrixLayer, name: str) -> float:
        names = [layer.stored_name(name, each) for each in ("input_scale", "activation_scale")]
        stored = next((each for each in names if each in self._files), None)
        if stored is None:
            raise ModelLoadError(
                f"{name}: the config says that activations have a scale, but there is no {names[0]}"
            )
        return self._number(stored, positive=True)

    def _zero(self, layer: MatrixLayer, name: str) -> float:
        stored = layer.stored_name(name, "input_zero_point")
        return self._number(stored) if stored in self._files else 0.0

    def _number(self, name: str, *, positive: bool = False) -> float:
        """Return the value of a one-element tensor."""
        file = self._files[name]
        info = file.tensors[name]
        if math.prod(info.shape) != 1:
            raise ModelLoadError(
                f"{file.path}: tensor {name!r} has shape {[*info.shape]}; it must be one number"
            )
        number = float(file.part(info, tuple(slice(0, size) for size in info.shape)).float())
        if not math.isfinite(number) or (positive and number <= 0):
            raise ModelLoadError(f"{file.path}: tensor {name!r} holds {number}, which is no scale")
        return number

    def _encoding(self, layer: MatrixLayer, name: str) -> Encoding | None:
        """Return the encoding of a module by the config's rules; None if its tensors are floats."""
        possible = None if self._says is None else self._says.encoding_if_quantized(name)
        if self._says is None or possible is None:
            return None
        tensors = {"weight", *codec_of(possible).tensors(1, 1)}
        in_files = layer.in_files(name, tensors, self._tensors)
        if not in_files:
            # Tables, tied heads among them, are quantized only if their files have the tensors.
            return None if isinstance(layer, VocabEmbedding) else self._says.encoding_of(name)
        is_float = in_files.keys() == {"weight"} and in_files["weight"].dtype in FLOATS
        return None if is_float else possible


def _without_data(info: TensorInfo) -> Tensor:
    return torch.empty(info.shape, dtype=info.dtype, device="meta")
