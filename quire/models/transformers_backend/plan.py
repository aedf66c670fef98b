# SPDX-License-Identifier: Apache-2.0
"""Sharding plan of a transformers model, and detection of modules that equal one of our layers.

A plan names modules and parameters, with `*` for numbers, and their partition. Two kinds partition a weight: by outputs
and by inputs. With the others a rank has all of it. Equality of modules is tested by computing both, not by name.
"""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from quire.config import EngineConfig
from quire.kernels import reference
from quire.layers.activation import PLAIN
from quire.layers.base import Layer, activation_dtype
from quire.layers.norm import LayerNorm, RMSNorm
from quire.layers.shard import Partition, ShardSpan

_ROWS = 3
_ACTIVATION_MODULES = ("torch.nn.modules.activation", "transformers.activations")


class ActivationOf(nn.Module):
    """One of our activation functions as a module."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self._function = function

    def forward(self, x: Tensor) -> Tensor:
        """x of any shape -> the same shape, elementwise."""
        return self._function(x.contiguous())


def as_activation(module: nn.Module) -> ActivationOf | None:
    """Return our module for an activation function; None if none computes the same."""
    if type(module).__module__ not in _ACTIVATION_MODULES or any(True for _ in module.parameters()):
        return None
    x = _numbers(_ROWS, 64)
    for function in PLAIN.values():
        if _agree(module(x), function(x)):
            return ActivationOf(function)
    return None


def as_norm(module: nn.Module, name: str, config: EngineConfig) -> Layer | None:
    """Return our layer for a norm of the last dimension; None if none computes the same."""
    params = {key: param for key, param in module._parameters.items() if param is not None}
    if "Norm" not in type(module).__name__ or any(True for _ in module.children()) or not params:
        return None
    weight, eps = params.get("weight"), _eps(module)
    if weight is None or weight.dim() != 1 or eps is None or params.keys() - {"weight", "bias"}:
        return None
    if not _takes_rows_alone(module):
        return None
    size, dtype = len(weight), activation_dtype(config)
    make: dict[str, Callable[[], Layer]] = {
        "rms": partial(RMSNorm, size=size, eps=eps, dtype=dtype, name=name),
        "rms of weight + 1": partial(RMSNorm, size=size, eps=eps, dtype=dtype, offset=1.0, name=name),
        "layer": partial(LayerNorm, size=size, eps=eps, dtype=dtype, has_bias="bias" in params, name=name),
    }
    kind = _kind_of_norm(module, params.keys(), size, eps)
    return None if kind is None else make[kind]()


def _takes_rows_alone(module: nn.Module) -> bool:
    """Return whether its forward takes one argument; a gated norm takes its gate, too."""
    parameters = inspect.signature(module.forward).parameters.values()
    needed = (
        param.kind <= param.POSITIONAL_OR_KEYWORD and param.default is param.empty for param in parameters
    )
    return sum(needed) == 1


def _kind_of_norm(module: nn.Module, params: Any, size: int, eps: float) -> str | None:
    x, w, b = _numbers(_ROWS, size), _numbers(size), _numbers(size)
    bias = b if "bias" in params else None
    theirs = _with_parameters(module, {"weight": w, "bias": bias})(x)
    ours = {"layer": reference.layer_norm(x, w, bias, eps)}
    if bias is None:
        ours |= {"rms": reference.rms_norm(x, w, eps), "rms of weight + 1": reference.rms_norm(x, w + 1, eps)}
    return next((kind for kind, rows in ours.items() if _agree(theirs, rows)), None)


def embedding_scale(module: nn.Embedding) -> float | None:
    """Return the factor by which an embedding scales its rows.

    Raises:
        ValueError: it does something else with them.
    """
    table = _numbers(4, module.embedding_dim)
    like = _with_parameters(module, {"weight": table})
    like.padding_idx = None
    ids = torch.arange(4, device="cpu")
    rows = like(ids[None])[0]
    scale = float((rows[0, 0] / table[0, 0]).item())
    if not _agree(rows, table * scale):
        raise ValueError("its embedding does not return rows of its table times one factor")
    return None if scale == 1.0 else scale


def _with_parameters(module: nn.Module, params: dict[str, Tensor | None]) -> Any:
    """Return a copy of the module with other parameters, limited to those it has."""
    like = copy.copy(module)
    like.__dict__["_parameters"] = {key: params.get(key) for key in module._parameters}
    return like


def _eps(module: nn.Module) -> float | None:
    names = ("variance_epsilon", "eps", "epsilon", "norm_eps")
    found = (getattr(module, name, None) for name in names)
    return next((value for value in found if isinstance(value, float)), None)


def _numbers(*shape: int) -> Tensor:
    generator = torch.Generator("cpu").manual_seed(1)
    return torch.randn(*shape, generator=generator, device="cpu") * 2.0


def _agree(one: Any, other: Tensor) -> bool:
    return isinstance(one, Tensor) and one.shape == other.shape and torch.allclose(one, other, 1e-5, 1e-6)


_BY_OUTPUT, _BY_INPUT = {"colwise", "packed_colwise"}, {"rowwise"}
_WHOLE = {
    "colwise_gather_output",
    "colwise_rep",
    "embedding_colwise",
    "embedding_rowwise",
    "local_params",
    "mla_kv_a_proj",
    "moe_identity_expert",
    "moe_tp_experts",
    "replicate",
    "replicated_with_grad_allreduce",
    "rowwise_rep",
    "rowwise_split_input",
}
"""Plan entries with complete inputs and outputs, or of modules without tensors of their own."""


class ShardingPlan:
    """Partition of each weight of one model.

    `attends` has the key-value heads of each attention module, by path, once they are found: the projections of such a
    module are sharded by them, so that queries stay with their keys.
    """

    def __init__(self, ways: Mapping[str, str]) -> None:
        self._ways = dict(ways)
        self.attends: dict[str, int] = {}
        self._cut: set[str] = set()

    @staticmethod
    def of(model: PreTrainedModel) -> ShardingPlan:
        """Return the plan of the installed version."""
        return ShardingPlan(model.tp_plan or {})

    def partition(self, path: str) -> Partition:
        """Return the partition of a module's weight, or of a parameter; the caller must apply it."""
        way = self._ways.get(_generic(path))
        if way in _BY_OUTPUT | _BY_INPUT:
            self._cut.add(_generic(path))
        return "output" if way in _BY_OUTPUT else "input" if way in _BY_INPUT else "whole"

    def spans(self, path: str, spans: Sequence[ShardSpan]) -> list[ShardSpan]:
        """Return the outputs of a weight in units that stay together."""
        heads = next((self.attends[parent] for parent in _parents(path) if parent in self.attends), 1)
        if heads == 1 or self.partition(path) != "output":
            return list(spans)
        return [ShardSpan(heads, span.size // heads) if span.size % heads == 0 else span for span in spans]

    def shares_heads(self, path: str) -> bool:
        """Return whether an attention module's heads are sharded."""
        inside = f"{_generic(path)}."
        return any(name.startswith(inside) and way in _BY_OUTPUT for name, way in self._ways.items())

    def why_not(self, held: Collection[str]) -> str | None:
        """Return why the plan cannot be followed with these parameters kept whole, as a phrase for users; None if it
        can.
        """
        if not self._ways:
            return "the installed version has no tensor-parallel plan for it"
        known = _BY_OUTPUT | _BY_INPUT | _WHOLE
        unknown = sorted({way for way in self._ways.values() if way not in known})
        if unknown:
            return f"its plan has unknown kinds of partition: {', '.join(unknown)}"
        whole = sorted({_generic(name) for name in held if self._is_cut(name)} - self._cut)
        if whole:
            return f"its plan shards modules that are not quire's linear layers: {', '.join(whole)}"
        return None

    def _is_cut(self, name: str) -> bool:
        """Return whether the plan shards it; separately computed experts may stay whole."""
        module = name.rpartition(".")[0]
        ways = {self._ways.get(_generic(path)) for path in (name, module)}
        return bool(ways & (_BY_OUTPUT | _BY_INPUT)) and "moe_tp_experts" not in ways


def _generic(path: str) -> str:
    return re.sub(r"\d+", "*", path)


def _parents(path: str) -> list[str]:
    """Return the paths of the modules around one, innermost first."""
    parts = path.split(".")
    return [".".join(parts[:end]) for end in range(len(parts) - 1, 0, -1)]
