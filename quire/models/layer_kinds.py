# SPDX-License-Identifier: Apache-2.0
"""Kinds of the layers of a model: layers of a kind take the same time."""

from __future__ import annotations

from collections.abc import Hashable, Iterable

from torch import nn

from quire.layers.kv_cache import CacheUser
from quire.layers.matrix import MatrixLayer


def kinds_of(layers: Iterable[nn.Module]) -> list[list[int]]:
    """Group layer numbers by kind, in the order of first occurrence.

    Layers of a kind take the same time: the same modules, with parameters of the same shapes and formats. Invariant:
    kinds are found on a model without weights, from the modules and never from names or numbers.
    """
    kinds: dict[Hashable, list[int]] = {}
    for number, layer in enumerate(layers):
        kinds.setdefault(tuple(map(_traits, *zip(*layer.named_modules(), strict=True))), []).append(number)
    return list(kinds.values())


def _traits(path: str, module: nn.Module) -> Hashable:
    """Return what determines the time of a module in a layer; its cache spec says how much of the cache it reads."""
    params = tuple((name, param.shape, param.dtype) for name, param in module.named_parameters(recurse=False))
    matrix = (type(module.method), module.method.scheme) if isinstance(module, MatrixLayer) else None
    return (
        path,
        type(module),
        params,
        matrix,
        module.kv_cache_spec() if isinstance(module, CacheUser) else None,
    )
