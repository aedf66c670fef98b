"""A host without an engine: it brings its ranks to the engine of another one, and ends with it.

Invariant: this process only starts and watches. Its ranks speak to the engine themselves.
"""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Sequence

from quire.config import EngineConfig
from quire.executor.gate import Hello, join
from quire.executor.host_share import config_of_rank
from quire.executor.rank_placement import places_of_ranks
from quire.executor.rank_processes import RankProcesses
from quire.processes import exit_reason

logger = logging.getLogger(__name__)

LOOK_S = 0.2
LOOKS_AT_STOPPED = 25
"""A rank that was seen to be stopped so often in turn is ended: nobody who waits for it can see it."""


def run_headless(config: EngineConfig) -> int:
    """Serve with this host's ranks until the engine, one of them or a signal ends them; returns the exit code.

    Raises:
        StartupError: the engine is not there, or does not want these ranks.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    parallel = config.parallel
    ranks = parallel.ranks_of(parallel.node_rank)
    place = parallel.master_addr, parallel.master_port
    hellos = [Hello.of(parallel, rank) for rank in ranks]
    try:
        ended = bring(config_of_rank(config, len(ranks)), hellos, place)
    except KeyboardInterrupt:
        return 0
    for rank, how in ended.items():
        logger.info("rank %d has ended: %s", rank, how)
    return int(any(how != exit_reason(0) for how in ended.values()))


def bring(config: EngineConfig, hellos: Sequence[Hello], place: tuple[str, int]) -> dict[int, str]:
    """Have ranks of this host join an engine; once one of them has ended, end all and say how those ended.

    Raises:
        StartupError: the engine is not there, or does not want these ranks.
    """
    places = places_of_ranks(config, [hello.rank for hello in hellos])
    processes, stopped = RankProcesses(config, places=places), 0
    try:
        for hello in hellos:
            way = join(place, hello)
            processes.hand_over(hello.rank, way.getsockname()[0], way)
        logger.info("joined %s with ranks %s", place[0], ", ".join(str(hello.rank) for hello in hellos))
        while not (ended := processes.ended()):
            time.sleep(LOOK_S)
            stopped = stopped + 1 if processes.stopped() else 0
            if stopped >= LOOKS_AT_STOPPED:
                return processes.stopped()
    finally:
        processes.close()
    return {rank: exit_reason(code) for rank, code in ended.items()}
