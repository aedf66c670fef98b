# SPDX-License-Identifier: Apache-2.0
"""Process that has Ray place replicas on its hosts: `python -m quire.engine.replicas.ray_process FD`."""

from __future__ import annotations

import os
import select
import socket
import sys

import msgspec

from quire.config import EngineConfig
from quire.engine.replicas.ray_replicas import ReplicaActor
from quire.executor.ranks.ray_cluster import (
    Lost,
    Placed,
    PlacementRequest,
    RayCluster,
    StartReplica,
    joined,
    run,
    send_message,
)
from quire.executor.ranks.wire import RankWire


def place_replicas(wanted: PlacementRequest, wire: RankWire) -> None:
    """Place and restart replicas until the server is gone (EOFError)."""
    config = EngineConfig.decoded(wanted.config)
    parallel = config.parallel
    num_cpus, remote = float(config.device.cpu_threads * parallel.num_ranks), parallel.remote_replicas
    with joined(wanted, wire, 0.0) as cluster:
        # The server's own replicas reserve CPUs of its host, and Ray spreads the others.
        own = cluster.own_bundle(num_cpus * parallel.num_replicas)
        bundles = [*([own] if own else []), *({"CPU": num_cpus} for _ in remote)]
        cluster.place(bundles, "SPREAD", f"{len(remote)} replicas of {num_cpus:g} CPUs each")
        first = len(bundles) - len(remote)
        send_message(wire, Placed(cluster.address, cluster.hosts()[first:]))
        while True:
            if select.select([wire], [], [], 0.0)[0]:
                for frame in wire.frames():
                    _bring(
                        cluster,
                        wanted.config,
                        first - remote.start,
                        msgspec.msgpack.decode(frame, type=StartReplica),
                    )
            for replica, said in cluster.ended():
                send_message(wire, Lost(replica, said))


def _bring(cluster: RayCluster, config: bytes, first: int, bring: StartReplica) -> None:
    """Start a replica; `first` is the bundle index that replica 0 would have."""
    hosts, place = cluster.hosts(), first + bring.replica
    arguments = config, bring.replica, max(hosts.count(hosts[place]), 1), bring.address, bring.port
    cluster.start(ReplicaActor, replica_name(os.getpid(), bring.replica), place, bring.replica, arguments)


def replica_name(pid: int, replica: int) -> str:
    """Return the name of a replica's Ray actor, derived from the Ray driver process."""
    return f"{socket.gethostname()}.{pid}.replica{replica}"


if __name__ == "__main__":
    sys.exit(run(place_replicas))
