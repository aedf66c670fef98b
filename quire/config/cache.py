# SPDX-License-Identifier: Apache-2.0
"""KV cache and KV events (see kv_events.md)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from quire.config.fields import Config, option
from quire.errors import ConfigError

AtLeastOne = Annotated[int, msgspec.Meta(ge=1)]


class KVEventsSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Keys of `--kv-events-config`, named as vLLM's.

    Args:
        enable_kv_cache_events: whether there are events at all.
        publisher: "zmq"; "null" is the same as no events.
        endpoint: ZeroMQ address of the PUB socket.
        replay_endpoint: ZeroMQ address of the ROUTER socket for replays; None: no replay.
        buffer_steps: batches kept for replay.
        hwm: batches queued for a slow subscriber before some are dropped.
        topic: first part of every message.
        int_block_hashes: identify blocks by the low 64 bits of their hashes; false: by all 32 bytes.
    """

    enable_kv_cache_events: bool = False
    publisher: Literal["zmq", "null"] = "zmq"
    endpoint: str = "tcp://127.0.0.1:5557"
    replay_endpoint: str | None = None
    buffer_steps: AtLeastOne = 10_000
    hwm: AtLeastOne = 100_000
    topic: str = ""
    int_block_hashes: bool = True

    def of_replica(self, number: int) -> KVEventsSettings:
        """Return the settings of a replica, with addresses of its own: TCP ports count up from the first replica's."""
        replay = self.replay_endpoint and _address_of(self.replay_endpoint, number)
        return msgspec.structs.replace(
            self, endpoint=_address_of(self.endpoint, number), replay_endpoint=replay
        )


@dataclass(frozen=True)
class KVEventsConfig(Config):
    """Events that inform a router about the prefix cache (see kv_events.md)."""

    kv_events_config: dict[str, Any] = option(
        {},
        'JSON object such as {"enable_kv_cache_events": true}; all keys are in kv_events.md. Default: no events.',
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        _parse(self.kv_events_config)

    def with_absolute_paths(self, directory: Path) -> dict[str, Any]:
        """Return the settings as given, with sockets of relative paths (ipc://PATH) in this directory."""
        given = dict(self.kv_events_config)
        for key in ("endpoint", "replay_endpoint"):
            address = given.get(key)
            if isinstance(address, str) and address.startswith("ipc://") and address[6:7] not in ("/", "@"):
                given[key] = f"ipc://{directory / address[6:]}"
        return given

    @property
    def settings(self) -> KVEventsSettings:
        """Parsed keys with their types and defaults."""
        return _parse(self.kv_events_config)

    @property
    def enabled(self) -> bool:
        """True if events are collected and published."""
        return self.settings.enable_kv_cache_events and self.settings.publisher != "null"

    def check(self, *, enable_prefix_caching: bool, replicas: range = range(1)) -> None:
        """Reject events without a prefix cache, and replicas with colliding addresses.

        Raises:
            ConfigError: names both flags, or the addresses.
        """
        if not self.enabled:
            return
        if not enable_prefix_caching:
            raise ConfigError(
                "--kv-events-config enables events of the prefix cache, which --no-enable-prefix-caching turns off"
            )
        own = [self.settings.of_replica(number) for number in replicas]
        addresses = [one for each in own for one in (each.endpoint, each.replay_endpoint) if one is not None]
        if len(set(addresses)) < len(addresses):
            raise ConfigError(
                f"--kv-events-config: each of {len(replicas)} replicas adds its number to the ports, so those of "
                f"endpoint ({self.settings.endpoint}) and replay_endpoint ({self.settings.replay_endpoint}) must be at "
                "least as far apart"
            )


def _parse(value: dict[str, Any]) -> KVEventsSettings:
    try:
        return msgspec.convert(value, KVEventsSettings)
    except msgspec.ValidationError as error:
        raise ConfigError(f"--kv-events-config: {error}") from None


def _address_of(endpoint: str, number: int) -> str:
    if number == 0:
        return endpoint
    base, _, port = endpoint.rpartition(":")
    is_tcp = endpoint.startswith("tcp://") and port.isdigit()
    return f"{base}:{int(port) + number}" if is_tcp else f"{endpoint}_dp{number}"


GIB = 2**30
MAX_SHARE = 0.92  # Default fraction of the memory; the rest is for untracked allocations.


@dataclass(frozen=True)
class CacheConfig(Config):
    """Size and sharing of the KV cache."""

    block_size: int = option(16, "Tokens per KV cache block.", ge=1, le=1024)
    gpu_memory_utilization: float | None = option(
        None,
        "Fraction of a GPU's memory, weights included (default: 0.92), or on a CPU of what is free after loading "
        "(default: 0.5).",
        gt=0.0,
        le=1.0,
    )
    kv_cache_memory_bytes: int = option(0, "Exact size of the KV cache in bytes; 0: measured.", ge=0)
    num_gpu_blocks_override: int = option(0, "Exact number of KV cache blocks; 0: measured.", ge=0)
    enable_prefix_caching: bool = option(True, "Reuse the cache of a common prefix between requests.")
    disable_hybrid_kv_cache_manager: bool = option(
        False,
        "Keep blocks outside the sliding window in models that have layers with and without one; uses more memory.",
    )
    kv_cache_dtype: str = option(
        "auto",
        "Precision of the KV cache; auto: that of the activations; int8 (CPU): with a scale for each token and head; "
        "fp8 (GPU): E4M3.",
        choices=("auto", "float32", "float16", "bfloat16", "int8", "fp8"),
    )
    swap_space: float = option(
        0.0,
        "GiB of host memory for blocks of preempted requests and of evicted prefixes; 0: none. "
        "Of little use on a CPU.",
        ge=0.0,
        metavar="GIB",
    )
    preemption_mode: str = option(
        "auto",
        "Handling of a preempted request's blocks: swap: copied to --swap-space if there is room; "
        "recompute: dropped; auto: the faster one.",
        choices=("auto", "swap", "recompute"),
    )

    @property
    def memory_share(self) -> float:
        """Largest fraction of the memory that may be used."""
        return MAX_SHARE if self.gpu_memory_utilization is None else self.gpu_memory_utilization

    @property
    def swap_space_bytes(self) -> int:
        """Host memory for swapped blocks, in bytes."""
        return int(self.swap_space * GIB)

    def check(self) -> None:
        """Reject contradictory options.

        Raises:
            ConfigError: names the options.
        """
        if self.preemption_mode == "swap" and not self.swap_space:
            raise ConfigError("--preemption-mode swap needs --swap-space")
