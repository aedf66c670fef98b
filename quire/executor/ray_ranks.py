"""The process that has Ray place the ranks of an engine: `python -m quire.executor.ray_ranks FD`."""

from __future__ import annotations

import os
import socket
import sys

import msgspec

from quire.config import EngineConfig
from quire.executor.ray_cluster import joined, run, tell
from quire.executor.ray_host import RayHost
from quire.executor.ray_messages import Come, Lost, Placed, Wanted
from quire.executor.wire import Wire


def place_ranks(wanted: Wanted, wire: Wire) -> None:
    """Until the engine is gone, which is an EOFError."""
    config = EngineConfig.decoded(wanted.config)
    size, num_cpus = config.parallel.num_ranks, float(config.device.cpu_threads or 1)
    with joined(wanted, wire, num_cpus * size) as cluster:
        cluster.place([{"CPU": num_cpus}] * size, "PACK", f"{size} ranks of {num_cpus:g} CPUs each")
        nodes = cluster.hosts()
        order = sorted(range(size), key=lambda index: (nodes[index], index))
        hosts = [nodes[index] for index in order]
        tell(wire, Placed(cluster.address, hosts))
        come = msgspec.msgpack.decode(wire.recv(), type=Come)
        for rank, index in enumerate(order):
            told = wanted.config, rank, hosts.count(hosts[rank]), come.address, come.port, come.key
            cluster.start(RayHost, actor_name(os.getpid(), rank), index, rank, told)
        while True:
            for rank, said in cluster.ended():
                tell(wire, Lost(rank, said))


def actor_name(pid: int, rank: int) -> str:
    """What Ray calls the actor of a rank of an engine, by the process that knows Ray."""
    return f"{socket.gethostname()}.{pid}.rank{rank}"


if __name__ == "__main__":
    sys.exit(run(place_ranks))
