"""Which layers of a model take the same time: those of the same modules, on parameters of the same shapes and formats.

Invariant: a kind is told from a model without weights, by what layers are and never by their names or numbers.
"""

from collections.abc import Hashable, Iterable

from torch import nn

from quire.layers.kv_cache import CacheUser
from quire.layers.matrix import MatrixLayer


def kinds_of(layers: Iterable[nn.Module]) -> list[list[int]]:
    """Numbers of the layers of each kind, in the order of their first ones."""
    kinds: dict[Hashable, list[int]] = {}
    for number, layer in enumerate(layers):
        kinds.setdefault(tuple(map(_traits, *zip(*layer.named_modules(), strict=True))), []).append(number)
    return list(kinds.values())


def _traits(path: str, module: nn.Module) -> Hashable:
    """What a part of a layer is, and where in it; what it keeps of a request says how much of that it reads."""
    params = tuple((name, param.shape, param.dtype) for name, param in module.named_parameters(recurse=False))
    matrix = (type(module.method), module.method.scheme) if isinstance(module, MatrixLayer) else None
    return (
        path,
        type(module),
        params,
        matrix,
        module.kv_cache_spec() if isinstance(module, CacheUser) else None,
    )
