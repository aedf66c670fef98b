"""A Ray actor is to a rank what another host is to several: it starts it, watches it, and ends with it."""

from __future__ import annotations

from quire.config import EngineConfig
from quire.executor.gate import Hello
from quire.executor.headless import bring
from quire.executor.host_share import config_of_rank
from quire.logging_setup import configure_logging


class RayHost:
    """The actor's class. What it is told comes from Ray, so it is bytes, numbers and text."""

    def run(self, encoded: bytes, rank: int, num_here: int, address: str, port: int, key: str) -> str:
        """Have a rank, of so many on this host, join the engine there; returns how it ended.

        Raises:
            StartupError: the engine is not there, or does not want it.
        """
        config = EngineConfig.decoded(encoded)
        configure_logging(config.observability.log_level, config.observability.log_format)
        hello = Hello.of(config.parallel, rank, key)
        return bring(config_of_rank(config, num_here), [hello], (address, port))[rank]
