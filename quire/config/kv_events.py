"""Events of the prefix cache (see kv_events.md)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from quire.config.fields import Config, option
from quire.errors import ConfigError

AtLeastOne = Annotated[int, msgspec.Meta(ge=1)]


class KVEventsSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The keys of `--kv-events-config`, named as vLLM's.

    Args:
        enable_kv_cache_events: whether there are events at all.
        publisher: "zmq"; "null" is the same as no events.
        endpoint: ZeroMQ address of the PUB socket.
        replay_endpoint: ZeroMQ address of the ROUTER socket that answers with past batches; None: there is none.
        buffer_steps: batches that are kept for replay.
        hwm: batches that wait for a slow subscriber before it loses some.
        topic: first part of every message.
        int_block_hashes: name blocks by the low 64 bits of their hashes; false: by all 32 bytes.
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
        """Each replica publishes at addresses of its own: TCP ports count up from the first one's."""
        replay = self.replay_endpoint and _address_of(self.replay_endpoint, number)
        return msgspec.structs.replace(
            self, endpoint=_address_of(self.endpoint, number), replay_endpoint=replay
        )


@dataclass(frozen=True)
class KVEventsConfig(Config):
    """Events that tell a router what is in the prefix cache (see kv_events.md)."""

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
        """The keys with their types and defaults."""
        return _parse(self.kv_events_config)

    @property
    def enabled(self) -> bool:
        """Whether events are collected and published."""
        return self.settings.enable_kv_cache_events and self.settings.publisher != "null"

    def check(self, *, enable_prefix_caching: bool, replicas: range = range(1)) -> None:
        """Refuse events of a cache that is not there, and replicas that would have an address in common.

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
                f"--kv-events-config: each of {len(replicas)} replicas counts its ports up by its number, so those of "
                f"endpoint ({self.settings.endpoint}) and replay_endpoint ({self.settings.replay_endpoint}) must be as "
                "far apart"
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
