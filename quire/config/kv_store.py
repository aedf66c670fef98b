"""Store of KV cache blocks outside the process (see kv_store.md)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from quire.config.cache import CacheConfig
from quire.config.device import ParallelConfig
from quire.config.fields import Config, option
from quire.errors import ConfigError

GIB = 2**30
KEY_BYTES = 32
BUFFER_BYTES = GIB
PEER_SCHEMES = ("unix:", "tcp://")


def read_key(path: str, option_name: str) -> bytes:
    """Read a key file.

    Raises:
        ConfigError: the file cannot be read or has no key. The message does not quote it.
    """
    try:
        digits = Path(path).read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{option_name}: cannot read {path}: {error}") from None
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
        if self.kv_store is None:
            if self.kv_store_key_file is not None:
                raise ConfigError("--kv-store-key-file needs --kv-store")
            return
        if not cache.enable_prefix_caching:
            raise ConfigError("--kv-store keeps cached prefixes, which --no-enable-prefix-caching turns off")
        if parallel.plans_on_each_rank:
            raise ConfigError(
                "--kv-store: with external_launcher each rank plans by itself, and the times of loads would part them; "
                "give --distributed-executor-backend mp"
            )
