"""Caches and specs as plain data that msgspec can write: a spec goes with its name.

Invariant: what is decoded equals what was encoded, its class included.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import msgspec

from quire.errors import ConfigError
from quire.kv_cache.spec import (
    ChunkedLocalSpec,
    EncoderOnlySpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroup,
    KVCacheSpec,
    LatentAttentionSpec,
    RecurrentStateSpec,
    SlidingWindowSpec,
)

NamedSpec = tuple[str, dict[str, Any]]

SPECS: dict[str, type[KVCacheSpec]] = {
    spec.__name__: spec
    for spec in (
        FullAttentionSpec,
        LatentAttentionSpec,
        SlidingWindowSpec,
        ChunkedLocalSpec,
        RecurrentStateSpec,
        EncoderOnlySpec,
    )
}


def encode_specs(specs: Mapping[str, KVCacheSpec]) -> dict[str, NamedSpec]:
    """Layer name -> its spec as plain data."""
    return {name: _encode_spec(spec) for name, spec in specs.items()}


def decode_specs(plain: Mapping[str, NamedSpec]) -> dict[str, KVCacheSpec]:
    """The inverse of `encode_specs`; raises KeyError or msgspec.ValidationError where there is no such spec."""
    return {name: _decode_spec(spec) for name, spec in plain.items()}


def encode_kv_config(kv_config: KVCacheConfig) -> dict[str, Any]:
    """A cache as plain data, in which each spec has its name."""
    plain: dict[str, Any] = msgspec.to_builtins(dataclasses.replace(kv_config, groups=(), layer_specs={}))
    plain["groups"] = [(group.layer_names, _encode_spec(group.spec)) for group in kv_config.groups]
    plain["layer_specs"] = encode_specs(kv_config.layer_specs)
    return plain


def decode_kv_config(plain: Mapping[str, Any]) -> KVCacheConfig:
    """The cache that `encode_kv_config` was given.

    Raises:
        ConfigError: there is no such cache.
    """
    try:
        base = msgspec.convert({**plain, "groups": [], "layer_specs": {}}, KVCacheConfig)
        groups = tuple(KVCacheGroup(tuple(names), _decode_spec(spec)) for names, spec in plain["groups"])
        layer_specs = decode_specs(plain["layer_specs"])
    except (msgspec.ValidationError, KeyError, ValueError) as error:
        raise ConfigError(f"the recorded KV cache is unknown: {error!r}") from None
    return dataclasses.replace(base, groups=groups, layer_specs=layer_specs)


def _encode_spec(spec: KVCacheSpec) -> NamedSpec:
    return type(spec).__name__, msgspec.to_builtins(spec)


def _decode_spec(named: NamedSpec) -> KVCacheSpec:
    name, fields = named
    return msgspec.convert(fields, SPECS[name])
