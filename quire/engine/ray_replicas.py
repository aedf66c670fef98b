"""The process that has Ray place replicas, on as many hosts as it can: `python -m quire.engine.ray_replicas FD`."""

from __future__ import annotations

import os
import select
import socket
import sys

import msgspec

from quire.config import EngineConfig
from quire.engine.ray_host import RayReplica
from quire.executor.ray_cluster import Cluster, joined, run, tell
from quire.executor.ray_messages import Bring, Lost, Placed, Wanted
from quire.executor.wire import Wire


def place_replicas(wanted: Wanted, wire: Wire) -> None:
    """Until the server is gone, which is an EOFError."""
    config = EngineConfig.decoded(wanted.config)
    parallel = config.parallel
    num_cpus, guests = float(config.device.cpu_threads * parallel.num_ranks), parallel.guests
    with joined(wanted, wire, 0.0) as cluster:
        # Those that the server's host has by itself take their CPUs from it, and Ray spreads the others from there.
        own = cluster.own_bundle(num_cpus * parallel.num_replicas)
        bundles = [*([own] if own else []), *({"CPU": num_cpus} for _ in guests)]
        cluster.place(bundles, "SPREAD", f"{len(guests)} replicas of {num_cpus:g} CPUs each")
        first = len(bundles) - len(guests)
        tell(wire, Placed(cluster.address, cluster.hosts()[first:]))
        while True:
            if select.select([wire], [], [], 0.0)[0]:
                for frame in wire.frames():
                    _bring(
                        cluster,
                        wanted.config,
                        first - guests.start,
                        msgspec.msgpack.decode(frame, type=Bring),
                    )
            for replica, said in cluster.ended():
                tell(wire, Lost(replica, said))


def _bring(cluster: Cluster, config: bytes, first: int, bring: Bring) -> None:
    """`first`: where the place of replica 0 would be."""
    hosts, place = cluster.hosts(), first + bring.replica
    told = config, bring.replica, max(hosts.count(hosts[place]), 1), bring.address, bring.port
    cluster.start(RayReplica, replica_name(os.getpid(), bring.replica), place, bring.replica, told)


def replica_name(pid: int, replica: int) -> str:
    """What Ray calls the actor of a replica, by the process that knows Ray."""
    return f"{socket.gethostname()}.{pid}.replica{replica}"


if __name__ == "__main__":
    sys.exit(run(place_replicas))
