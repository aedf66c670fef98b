# SPDX-License-Identifier: Apache-2.0
"""Weights of a model that are quantized, and tensors of the checkpoint that absorb the scales of their inputs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from quire.errors import ConfigError, UnsupportedModelError
from quire.layers.base import Layer
from quire.layers.linear import ExactLinear, GateUpLinear, Linear
from quire.layers.matrix import MatrixLayer
from quire.layers.norm import RMSNorm
from quire.models.base import CausalLM
from quire.models.weights import CheckpointWeights
from quire.quantize.grid import AUTO, GROUP_SIZES, IntegerGrid

_FEWEST_OUTPUTS = 16
"""Least outputs to quantize: a gate of a few saves nothing, and other engines want it in floats."""
_ROUND_BYTES = 2 * 2**30
_MOST_NAMED = 4
_PRODUCTS = ("silu", "gelu", "gelu_new", "gelu_pytorch_tanh")
"""Activations of a gated MLP whose output is proportional to up."""


@dataclass(frozen=True)
class DividedRows:
    """Rows of a tensor that can be divided by the scales of a layer's inputs; `offset` is added to them first."""

    tensor: str
    rows: slice
    offset: float = 0.0


@dataclass(frozen=True)
class QuantizationSite:
    """Linear layer and the checkpoint's modules that it holds."""

    layer: Linear
    modules: tuple[str, ...]
    source: tuple[DividedRows, ...] = ()
    """Tensors that produce its inputs and no other layer's; empty: none can absorb scales."""

    @property
    def num_bytes(self) -> int:
        """Bytes of X^T X, which is kept during calibration, and of the weight in float32."""
        outputs = sum(span.size for span in self.layer.spans)
        return 4 * self.layer.inputs * (self.layer.inputs * self.layer.takes_adapters + outputs)


def find_sites(model: CausalLM, weights: CheckpointWeights) -> list[QuantizationSite]:
    """Return the linear layers whose weights the checkpoint has as floats [N, K], each in a module of its own.

    Raises:
        UnsupportedModelError: there are none.
    """
    layers = [(tuple(names), layer) for names, layer in model.checkpoint_layers()]
    names_of = {layer: names for names, layer in layers}
    holders = Counter(name for names, _ in layers for name in names)
    linear = {
        layer: names
        for names, layer in layers
        if _is_quantized(layer)
        and all(holders[name] == 1 and weights.has(f"{name}.weight") for name in names)
    }
    if not linear:
        raise UnsupportedModelError(
            f"{type(model).__name__} has no linear layer with a matrix [N, K] of its own in the checkpoint"
        )
    return [
        QuantizationSite(layer, names, tuple(_source(layer, linear, names_of, weights)))
        for layer, names in linear.items()
        if isinstance(layer, Linear)
    ]


def left_alone(model: CausalLM, sites: Sequence[QuantizationSite]) -> list[str]:
    """Return the modules with other matmul weights, named as readers of the checkpoint expect."""
    quantized = {name for site in sites for name in site.modules}
    others = [
        name
        for names, layer in model.checkpoint_layers()
        if isinstance(layer, MatrixLayer) and not layer.only_looked_up
        for name in names
        if name not in quantized
    ]
    return list(dict.fromkeys(["lm_head", *others]))


def fitted(grid: IntegerGrid, sites: Sequence[QuantizationSite]) -> IntegerGrid:
    """Return the grid with its group size; `AUTO` becomes the largest that divides all layers' inputs.

    Raises:
        ConfigError: the inputs of some layers are not a whole number of groups.
    """
    if grid.group_size == AUTO:
        divides = (size for size in GROUP_SIZES if not any(site.layer.inputs % size for site in sites))
        grid = replace(grid, group_size=next(divides, min(GROUP_SIZES)))
    check_groups(sites, grid)
    return grid


def check_groups(sites: Sequence[QuantizationSite], grid: IntegerGrid) -> None:
    """Raise ConfigError if the inputs of some layers are not a whole number of groups."""
    wrong = [site for site in sites if site.layer.inputs % grid.group_size]
    if wrong:
        named = ", ".join(f"{site.modules[0]} ({site.layer.inputs} inputs)" for site in wrong[:_MOST_NAMED])
        more = f" and {len(wrong) - _MOST_NAMED} more" if len(wrong) > _MOST_NAMED else ""
        raise ConfigError(f"--group-size {grid.group_size} does not divide {named}{more}")


def rounds(sites: Sequence[QuantizationSite]) -> Iterator[list[QuantizationSite]]:
    """Yield sites in order, as many at a time as fit the memory budget; an MLP's two stay together."""
    taken: list[QuantizationSite] = []
    for site in sites:
        full = sum(each.num_bytes for each in (*taken, site)) > _ROUND_BYTES
        source: object = site.layer.source
        if taken and full and source is not taken[-1].layer:
            yield taken
            taken = []
        taken.append(site)
    yield taken


def _is_quantized(layer: Layer) -> bool:
    if not isinstance(layer, Linear) or isinstance(layer, ExactLinear) or layer.transposed:
        return False
    return sum(span.size for span in layer.spans) >= _FEWEST_OUTPUTS


def _source(
    layer: Layer,
    linear: dict[Layer, tuple[str, ...]],
    names_of: dict[Layer, tuple[str, ...]],
    weights: CheckpointWeights,
) -> Iterator[DividedRows]:
    source = layer.source if isinstance(layer, Linear) else None
    if isinstance(source, RMSNorm) and weights.has(f"{names_of[source][0]}.weight"):
        yield DividedRows(f"{names_of[source][0]}.weight", slice(None), source.offset)
    if isinstance(source, GateUpLinear) and source in linear and source.activation in _PRODUCTS:
        modules, size = linear[source], source.spans[1].size
        first = 0 if len(modules) > 1 or source.up_first else size
        for leaf in ("weight", "bias"):
            if weights.has(f"{modules[-1]}.{leaf}"):
                yield DividedRows(f"{modules[-1]}.{leaf}", slice(first, first + size))
