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


@dataclass(frozen=True)
class KVStoreConfig(Config):
    """Prefix cache that outlives the process (see kv_store.md)."""

    kv_store: str | None = option(
        None,
        "Directory that keeps computed KV cache blocks, so that a prefix is computed once, also after a restart.",
        metavar="DIR",
    )
    kv_store_gb: float = option(10.0, "GiB on disk that --kv-store may take.", gt=0.0, metavar="GIB")
    kv_store_key_file: str | None = option(
        None, "File with 64 hex digits, the key with which --kv-store encrypts blocks.", metavar="FILE"
    )

    @property
    def max_bytes(self) -> int:
        """Limit of the directory, in bytes."""
        return int(self.kv_store_gb * GIB)

    def key(self) -> bytes | None:
        """Read the encryption key; None without one.

        Raises:
            ConfigError: the file cannot be read or has no key. The message does not quote it.
        """
        if self.kv_store_key_file is None:
            return None
        try:
            digits = Path(self.kv_store_key_file).read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--kv-store-key-file: cannot read {self.kv_store_key_file}: {error}") from None
        if len(digits) != 2 * KEY_BYTES or not set(digits.lower()) <= set("0123456789abcdef"):
            raise ConfigError(
                f"--kv-store-key-file: {self.kv_store_key_file} must have {2 * KEY_BYTES} hex digits and nothing else; "
                f"make one with: openssl rand -hex {KEY_BYTES}"
            )
        return bytes.fromhex(digits)

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
