"""Which of our layers computes what a module of transformers does: found by asking both, not by their names."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from quire.config import EngineConfig
from quire.kernels import reference
from quire.layers.activation import PLAIN
from quire.layers.base import Layer, activation_dtype
from quire.layers.norm import LayerNorm, RMSNorm

_ROWS = 3
_ACTIVATION_MODULES = ("torch.nn.modules.activation", "transformers.activations")


class ActivationOf(nn.Module):
    """One of our activation functions as a module."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self._function = function

    def forward(self, x: Tensor) -> Tensor:
        """Element by element, any shape."""
        return self._function(x.contiguous())


def as_activation(module: nn.Module) -> ActivationOf | None:
    """Our module for an activation function; None if we have none that agrees."""
    if type(module).__module__ not in _ACTIVATION_MODULES or any(True for _ in module.parameters()):
        return None
    x = _numbers(_ROWS, 64)
    for function in PLAIN.values():
        if _agree(module(x), function(x)):
            return ActivationOf(function)
    return None


def as_norm(module: nn.Module, name: str, config: EngineConfig) -> Layer | None:
    """Our layer for a norm of the last dimension; None if we have none that agrees."""
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
    """Whether it is called with one thing; a gated norm is called with its gate, too."""
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
    """What an embedding multiplies its rows with.

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
        raise ValueError("its rows are not those of its table, times a number")
    return None if scale == 1.0 else scale


def _with_parameters(module: nn.Module, params: dict[str, Tensor | None]) -> Any:
    """A module like this one with other parameters, of those that it knows."""
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
