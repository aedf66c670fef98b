# SPDX-License-Identifier: Apache-2.0
"""Flags of a model's server, from those of the router, the model's entry and its estimated memory."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any

from quire.config import ModelRouterConfig, ServerConfig
from quire.config.fields import flag_of
from quire.entrypoints.openai.keys import api_keys
from quire.errors import ConfigError
from quire.model_router.memory import Estimate
from quire.model_router.models_file import ModelEntry

ROUTER_ONLY = {
    "host", "port", "uds", "api-key", "api-key-file", "admin-api-key", "root-path", "allowed-origins",
    "allowed-hosts", "allow-unauthenticated-metrics", "max-connections", "disable-uvicorn-access-log",
    "uvicorn-log-level",
}  # fmt: skip
"""Flags of `quire serve` that say how clients reach the router."""
SHARED = ("max-request-bytes", "max-receiving-bytes", "read-timeout", "write-timeout", "shutdown-timeout")
"""Flags that hold for the router and for each model's server."""
SET_HERE = {
    "model": "the key 'model' of the entry",
    "served-model-name": "the entry's name and the key 'aliases'",
    "kv-cache-memory-bytes": "the key 'kv_cache' of the entry",
    "headless": "a server without --models",
    "config": "the command line",
}
"""Flags that the router sets or that make no sense below it -> where to say it."""


def check_names(options: Iterable[str], known: Iterable[str]) -> None:
    """Check the names of a model's options.

    Raises:
        ConfigError: an option does not exist, or belongs elsewhere.
    """
    own = {flag_of(field.name).removeprefix("--") for field in fields(ModelRouterConfig)}
    names = {name.replace("_", "-") for name in known}
    for option in options:
        if option in SET_HERE:
            raise ConfigError(f"{option} belongs elsewhere: {SET_HERE[option]}")
        if option in ROUTER_ONLY | own:
            raise ConfigError(f"{option} is an option of the router: give it on the command line")
        if option not in names:
            near = difflib.get_close_matches(option, names, n=1)
            hint = f"did you mean {near[0]!r}?" if near else "`quire serve --help` lists them"
            raise ConfigError(f"unknown option {option!r}; {hint}")


def inherited_flags(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the flags of the command line that hold for every model, with dashes.

    Args:
        given: parameter name -> value, of flags that were given.

    Raises:
        ConfigError: a flag makes no sense for several models.
    """
    names = {name.replace("_", "-"): value for name, value in given.items()}
    for name in names:
        if name in SET_HERE:
            raise ConfigError(f"--{name} is for one model; with --models use {SET_HERE[name]}")
    own = {flag_of(field.name).removeprefix("--") for field in fields(ModelRouterConfig)}
    return {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in names.items()
        if name not in ROUTER_ONLY | own
    }


def server_flags(entry: ModelEntry, estimate: Estimate, config: ServerConfig) -> dict[str, Any]:
    """Return the flags of a model's server, but for its socket."""
    keys: dict[str, Any] = {"api-key": list(entry.api_keys)}
    if not entry.api_keys:
        keys = {"api-key": list(api_keys(config)), "api-key-file": config.api_key_file}
    flags = {
        "max-model-len": "auto",  # as much as the KV cache holds
        **{flag: getattr(config, flag.replace("-", "_")) for flag in SHARED},
        **entry.options,
        **keys,
        "model": entry.model,
        "served-model-name": [entry.name, *entry.aliases],
        "kv-cache-memory-bytes": estimate.kv_cache_bytes,
        "disable-uvicorn-access-log": True,
    }
    return {name: value for name, value in flags.items() if value is not None and value != []}
