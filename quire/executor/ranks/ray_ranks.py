# SPDX-License-Identifier: Apache-2.0
"""Ray driver process for an engine's ranks: `python -m quire.executor.ranks.ray_ranks FD`.

`RankActor` launches one rank process and dies with it. `watch_actor` is the rank's watchdog: a stopped actor can
neither end its rank nor be ended by Ray, so the rank kills it, which Ray reports to the engine.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
import time

import msgspec

from quire.config import EngineConfig
from quire.executor.rank_placement import rank_config
from quire.executor.ranks.gate import RankHello
from quire.executor.ranks.multiproc import run_ranks
from quire.executor.ranks.ray_cluster import (
    Lost,
    Placed,
    PlacementRequest,
    StartRanks,
    joined,
    run,
    send_message,
)
from quire.executor.ranks.wire import RankWire
from quire.logging_setup import configure_logging
from quire.processes import STOPPED, why_silent

logger = logging.getLogger(__name__)


class RankActor:
    """Ray actor class of a rank; arguments are bytes, numbers and text."""

    def run(self, encoded: bytes, rank: int, num_here: int, address: str, port: int, key: str) -> str:
        """Run one of `num_here` ranks on this host for the engine; returns how it ended.

        Raises:
            StartupError: the engine is unreachable or refuses it.
        """
        config = EngineConfig.decoded(encoded)
        configure_logging(config.observability.log_level, config.observability.log_format)
        hello = RankHello.create(config.parallel, rank, key)
        return run_ranks(rank_config(config, num_here), [hello], (address, port))[rank]


POLL_S = 0.5
STOPPED_POLLS = 10  # Consecutive polls after which a stopped actor is killed.


def watch_actor() -> None:
    """Start a watchdog of this process's parent, an actor, for as long as it is the parent."""
    threading.Thread(target=_watch, args=(os.getppid(),), name="quire-actor-watch", daemon=True).start()


def _watch(actor: int) -> None:
    num_polls = 0
    while os.getppid() == actor:
        num_polls = num_polls + 1 if why_silent(actor) == STOPPED else 0
        if num_polls >= STOPPED_POLLS:
            logger.error("the actor of this rank, process %d, is stopped; it is killed", actor)
            os.kill(actor, signal.SIGKILL)
            return
        time.sleep(POLL_S)


def place_ranks(wanted: PlacementRequest, wire: RankWire) -> None:
    """Place and start ranks, and report losses until the engine is gone (EOFError)."""
    config = EngineConfig.decoded(wanted.config)
    size, num_cpus = config.parallel.num_ranks, float(config.device.cpu_threads or 1)
    with joined(wanted, wire, num_cpus * size) as cluster:
        cluster.place([{"CPU": num_cpus}] * size, "PACK", f"{size} ranks of {num_cpus:g} CPUs each")
        nodes = cluster.hosts()
        order = sorted(range(size), key=lambda index: (nodes[index], index))
        hosts = [nodes[index] for index in order]
        send_message(wire, Placed(cluster.address, hosts))
        come = msgspec.msgpack.decode(wire.recv(), type=StartRanks)
        for rank, index in enumerate(order):
            arguments = wanted.config, rank, hosts.count(hosts[rank]), come.address, come.port, come.key
            cluster.start(RankActor, actor_name(os.getpid(), rank), index, rank, arguments)
        while True:
            for rank, said in cluster.ended():
                send_message(wire, Lost(rank, said))


def actor_name(pid: int, rank: int) -> str:
    """Return the name of a rank's Ray actor, derived from the Ray driver process."""
    return f"{socket.gethostname()}.{pid}.rank{rank}"


if __name__ == "__main__":
    sys.exit(run(place_ranks))
