# SPDX-License-Identifier: Apache-2.0
"""Transfer of KV cache blocks between a prefill engine and a decode engine: keys of `--kv-transfer-config`.

Keys and roles are vLLM's. A request's part in a transfer is in `quire.kv_transfer_params`.
"""

from __future__ import annotations

import ipaddress
from pathlib import Path
from typing import Annotated, Any, TypeVar
from urllib.parse import urlsplit

import msgspec

from quire.errors import ConfigError

FLAG = "--kv-transfer-config"
BUILT_IN = "RowServerConnector"
ROLES = ("kv_producer", "kv_consumer", "kv_both")
POLICIES = ("recompute", "fail")
FOREIGN = ("nixl", "lmcache", "mooncake", "p2pnccl", "offloading", "multi", "sharedstorage", "example")
MAX_PEERS = 256
T = TypeVar("T")

Seconds = Annotated[float, msgspec.Meta(gt=0, le=600)]
Port = Annotated[int, msgspec.Meta(ge=0, le=65535)]


class KVTransferExtra(msgspec.Struct, frozen=True):
    """Keys of `kv_connector_extra_config`.

    Args:
        peers: prefill engines that requests may name, each "HOST:PORT"; no other address is ever dialed.
        key_file: file with 64 hex digits that both sides have; needed beyond loopback.
        lease_s: seconds for which offered blocks are kept after the last renewal.
        pull_timeout_s: longest wait of a request for the blocks of its prompt, in seconds.
    """

    peers: list[str] = []
    key_file: str | None = None
    lease_s: Seconds = 30.0
    pull_timeout_s: Seconds = 10.0


class KVTransferSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Keys of `--kv-transfer-config`, named as vLLM's.

    Args:
        kv_connector: a row of the connector table.
        kv_role: kv_producer offers blocks, kv_consumer pulls them, kv_both does both.
        engine_id: name in replies; None: a new one at each start.
        kv_ip: address of this engine on which it offers blocks, and which replies name.
        kv_port: its port; each rank has the next one.
        kv_buffer_size: most bytes of offered blocks on a rank.
        kv_connector_extra_config: see `KVTransferExtra`, and keys of plug-ins.
        kv_load_failure_policy: what becomes of a request whose pull failed: "recompute", or "fail" with an error.
        kv_buffer_device, kv_rank, kv_parallel_size, enable_permute_local_kv: accepted, without meaning here.
        kv_connector_module_path: refused; connectors are plug-ins of installed packages.
    """

    kv_connector: str
    kv_role: str
    engine_id: Annotated[str, msgspec.Meta(min_length=1, max_length=128)] | None = None
    kv_ip: str = "127.0.0.1"
    kv_port: Port = 14579
    kv_buffer_size: Annotated[float, msgspec.Meta(ge=1)] = 1e9
    kv_connector_extra_config: dict[str, Any] = {}
    kv_load_failure_policy: str = "recompute"
    kv_buffer_device: str | None = None
    kv_rank: int | None = None
    kv_parallel_size: int = 1
    enable_permute_local_kv: bool = False
    kv_connector_module_path: str | None = None

    @property
    def offers(self) -> bool:
        """True if blocks are kept for other engines."""
        return self.kv_role != "kv_consumer"

    @property
    def pulls(self) -> bool:
        """True if blocks of other engines are loaded."""
        return self.kv_role != "kv_producer"

    def port_of(self, replica: int, num_ranks: int) -> int:
        """Return the port of the first rank of a replica; 0: any."""
        return self.kv_port and self.kv_port + replica * num_ranks

    @property
    def extra(self) -> KVTransferExtra:
        """Keys of `kv_connector_extra_config` that all connectors have."""
        return _converted(
            self.kv_connector_extra_config, KVTransferExtra, f"{FLAG}: kv_connector_extra_config"
        )

    @property
    def peers(self) -> list[str]:
        """Addresses of the engines that may be pulled from, as `place_of` writes them."""
        return [_peer(text) for text in self.extra.peers]


def place_of(host: str, port: int) -> str:
    """Return the address "tcp://HOST:PORT" in its one form: an IPv6 host in brackets, names in lower case."""
    host = host.lower()
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def parse_transfer_config(value: dict[str, Any]) -> KVTransferSettings | None:
    """Parse the option's value; None if it is empty.

    Raises:
        ConfigError: names the key, its value and what is allowed.
    """
    if not value:
        return None
    for key in ("kv_connector", "kv_role"):
        if value.get(key) is None:
            raise ConfigError(
                f'{FLAG} needs "{key}"; e.g. {{"kv_connector": "{BUILT_IN}", "kv_role": "kv_both"}}'
            )
    settings = _converted(value, KVTransferSettings, FLAG)
    _check(settings)
    return settings


def with_absolute_key_file(value: dict[str, Any], directory: Path) -> dict[str, Any]:
    """Return the option's value with the path of its key file, if it has one, relative to `directory`."""
    settings = parse_transfer_config(value)
    if settings is None or settings.extra.key_file is None:
        return value
    path = str(directory / Path(settings.extra.key_file).expanduser())
    return {**value, "kv_connector_extra_config": {**settings.kv_connector_extra_config, "key_file": path}}


def _check(settings: KVTransferSettings) -> None:
    if settings.kv_role not in ROLES:
        raise ConfigError(f"{FLAG}: kv_role must be one of {', '.join(ROLES)}, got {settings.kv_role!r}")
    if settings.kv_connector.lower().startswith(FOREIGN):
        raise ConfigError(
            f"{FLAG}: {settings.kv_connector} is a connector of vLLM and moves its GPU blocks; "
            f"quire's own is {BUILT_IN}, and others are plug-ins (see kv_store.md)"
        )
    if settings.kv_connector_module_path is not None:
        raise ConfigError(
            f"{FLAG}: kv_connector_module_path would run code from a path; "
            "install a package that offers the connector as a plug-in (see plugins.md)"
        )
    if settings.kv_load_failure_policy not in POLICIES:
        raise ConfigError(
            f"{FLAG}: kv_load_failure_policy must be one of {', '.join(POLICIES)}, "
            f"got {settings.kv_load_failure_policy!r}"
        )
    known = KVTransferExtra.__struct_fields__
    unknown = [key for key in settings.kv_connector_extra_config if key not in known]
    if unknown and settings.kv_connector == BUILT_IN:
        raise ConfigError(
            f"{FLAG}: kv_connector_extra_config has the unknown key {unknown[0]!r}; valid are {', '.join(known)}"
        )
    _check_addresses(settings)


def _check_addresses(settings: KVTransferSettings) -> None:
    if not _can_be_dialed(settings.kv_ip):
        raise ConfigError(
            f"{FLAG}: kv_ip is {settings.kv_ip!r}; give the address of this host that the other engines dial"
        )
    if len(settings.peers) > MAX_PEERS:
        raise ConfigError(f"{FLAG}: there are {len(settings.peers)} peers; at most {MAX_PEERS} are allowed")
    if settings.kv_role == "kv_consumer" and not settings.peers:
        raise ConfigError(
            f"{FLAG}: a kv_consumer needs the prefill engines that it may pull from; give "
            '"kv_connector_extra_config": {"peers": ["HOST:PORT"]}'
        )


def _can_be_dialed(host: str) -> bool:
    try:
        return not ipaddress.ip_address(host).is_unspecified
    except ValueError:  # a name
        return host not in ("", "*")


def _peer(text: str) -> str:
    try:
        parts = urlsplit(f"tcp://{text.removeprefix('tcp://')}")
        if parts.hostname and parts.port and not parts.path and "@" not in parts.netloc:
            return place_of(parts.hostname, parts.port)
    except ValueError:  # a port or brackets that are none: refused below
        pass
    raise ConfigError(f"{FLAG}: the peer {text!r} must be HOST:PORT, with an IPv6 address in brackets")


def _converted(value: dict[str, Any], kind: type[T], name: str) -> T:
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{name}: {error}") from None
