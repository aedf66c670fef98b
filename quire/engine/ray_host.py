"""A Ray actor is to a replica what another host is: it brings the replica to the server, and starts its core again."""

from __future__ import annotations

from dataclasses import replace

from quire.config import EngineConfig
from quire.config.device import HostShare
from quire.engine.guest_host import GuestHost
from quire.engine.replica_wire import facts_of
from quire.logging_setup import configure_logging
from quire.platforms import Host


class RayReplica:
    """The actor's class. What it is told comes from Ray, so it is bytes, numbers and text."""

    def run(self, encoded: bytes, replica: int, num_here: int, address: str, port: int) -> str:
        """Serve as a replica, of so many on this host, until the server has no more use for it.

        Raises:
            QuireError: the server is not there, or does not want it, or its core cannot start or dies too often.
        """
        config = EngineConfig.decoded(encoded).evolve(
            data_parallel_size_local=1,
            data_parallel_start_rank=replica,
            data_parallel_address=address,
            data_parallel_rpc_port=port,
        )
        configure_logging(config.observability.log_level, config.observability.log_format)
        share = HostShare(num_here, Host().available_bytes() // num_here)
        GuestHost(replace(config, share=share), facts_of(config)).run()
        return "the server has ended"
