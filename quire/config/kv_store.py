# SPDX-License-Identifier: Apache-2.0
"""Store of KV cache blocks outside the process (see kv_store.md)."""

from __future__ import annotations

import logging
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.config.cache import CacheConfig
from quire.config.device import ParallelConfig
from quire.config.fields import Config, option
from quire.config.kv_transfer import FLAG, KVTransferSettings, parse_transfer_config
from quire.errors import ConfigError

logger = logging.getLogger(__name__)
GIB = 2**30
KEY_BYTES = 32
_MOST_KEY_FILE_BYTES = 1024
BUFFER_BYTES = GIB
PEER_SCHEMES = ("unix:", "tcp://")


def read_key(path: str, option_name: str) -> bytes:
    """Read a key file. One that others can read is warned of, and no more: mounted secrets are such files.

    Raises:
        ConfigError: the file cannot be read, others can write to it, or it has no key. The message does not quote it.
    """
    try:
        with Path(path).open("rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            digits = file.read(_MOST_KEY_FILE_BYTES).decode("ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{option_name}: cannot read {path}: {error}") from None
    if mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ConfigError(
            f"{option_name}: {path} has mode {mode:04o}, so others can replace the key; run chmod 600 {path}"
        )
    if mode & (stat.S_IRGRP | stat.S_IROTH):
        logger.warning(
            "%s: %s has mode %04o, so others can read the key; run chmod 600 %s",
            option_name,
            path,
            mode,
            path,
        )
    if len(digits) != 2 * KEY_BYTES or not set(digits.lower()) <= set("0123456789abcdef"):
        raise ConfigError(
            f"{option_name}: {path} must have {2 * KEY_BYTES} hex digits and nothing else; "
            f"make one with: openssl rand -hex {KEY_BYTES}"
        )
    return bytes.fromhex(digits)


@dataclass(frozen=True)
class KVStoreConfig(Config):
    """Prefix cache that outlives the process (see kv_store.md)."""

    kv_store: str | None = option(
        None,
        "Directory, or unix:/PATH or tcp://HOST:PORT of `quire kv-store serve`, that keeps computed KV cache blocks.",
        metavar="PLACE",
    )
    kv_store_gb: float = option(10.0, "GiB on disk that --kv-store may take.", gt=0.0, metavar="GIB")
    kv_store_key_file: str | None = option(
        None,
        "File with 64 hex digits: the key that encrypts a directory, or that a server asks for.",
        metavar="FILE",
    )

    kv_transfer_config: dict[str, Any] = option(
        {},
        'JSON object such as {"kv_connector": "RowServerConnector", "kv_role": "kv_both"}; see kv_store.md.',
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        parse_transfer_config(self.kv_transfer_config)

    @property
    def transfer(self) -> KVTransferSettings | None:
        """Parsed `--kv-transfer-config`; None without one."""
        return parse_transfer_config(self.kv_transfer_config)

    @property
    def moves_rows(self) -> bool:
        """True if blocks leave the engine, and so pass through the host tier."""
        return self.kv_store is not None or bool(self.kv_transfer_config)

    @property
    def max_bytes(self) -> int:
        """Limit of the directory, in bytes."""
        return int(self.kv_store_gb * GIB)

    @property
    def is_peer(self) -> bool:
        """True if the store is another process."""
        return self.kv_store is not None and self.kv_store.startswith(PEER_SCHEMES)

    def key(self) -> bytes | None:
        """Read the key; None without one. Raises ConfigError as `read_key`."""
        return (
            None
            if self.kv_store_key_file is None
            else read_key(self.kv_store_key_file, "--kv-store-key-file")
        )

    def check(self, cache: CacheConfig, parallel: ParallelConfig) -> None:
        """Reject options that contradict each other.

        Raises:
            ConfigError: names the options.
        """
        if self.kv_store is None and self.kv_store_key_file is not None:
            raise ConfigError("--kv-store-key-file needs --kv-store")
        if not self.moves_rows:
            return
        option_name = FLAG if self.kv_store is None else "--kv-store"
        if not cache.enable_prefix_caching:
            raise ConfigError(
                f"{option_name} keeps cached prefixes, which --no-enable-prefix-caching turns off"
            )
        if parallel.plans_on_each_rank:
            raise ConfigError(
                f"{option_name}: with external_launcher each rank plans by itself, and the times of loads would part "
                "them; give --distributed-executor-backend mp"
            )
        self._check_ports(parallel)

    def _check_ports(self, parallel: ParallelConfig) -> None:
        """Check that each rank and replica has a port for its offers."""
        transfer = self.transfer
        if transfer is None or not transfer.offers:
            return
        num_ports = parallel.num_ranks * parallel.data_parallel_size
        if transfer.kv_port == 0 and num_ports > 1:
            raise ConfigError(
                f"{FLAG}: kv_port 0 is for one rank, and there are {num_ports}; give the first port"
            )
        if transfer.kv_port + num_ports > 65536:
            raise ConfigError(
                f"{FLAG}: {num_ports} ranks take the ports from kv_port on; {transfer.kv_port} leaves no room for them"
            )
