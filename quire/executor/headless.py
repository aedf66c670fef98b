"""A host without an engine: it brings its ranks to the engine of another one, and ends with it.

Invariant: this process only starts and watches. Its ranks speak to the engine themselves.
"""

from __future__ import annotations

import logging
import signal
import time

from quire.config import EngineConfig
from quire.executor.host_share import config_of_rank
from quire.executor.gate import Hello, join
from quire.executor.rank_processes import RankProcesses
from quire.processes import exit_reason

logger = logging.getLogger(__name__)

LOOK_S = 0.2


def run_headless(config: EngineConfig) -> int:
    """Serve with this host's ranks until the engine, one of them or a signal ends them; returns the exit code.

    Raises:
        StartupError: the engine is not there, or does not want these ranks.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    parallel = config.parallel
    ranks = parallel.ranks_of(parallel.node_rank)
    processes = RankProcesses(config_of_rank(config, len(ranks)))
    try:
        for rank in ranks:
            way = join((parallel.master_addr, parallel.master_port), Hello.of(parallel, rank))
            processes.hand_over(rank, way.getsockname()[0], way)
        logger.info("ranks %d to %d have joined %s", ranks[0], ranks[-1], parallel.master_addr)
        while not (ended := processes.ended()):
            time.sleep(LOOK_S)
    except KeyboardInterrupt:
        return 0
    finally:
        processes.close()
    for rank, code in ended.items():
        logger.info("rank %d has ended: %s", rank, exit_reason(code))
    return max(map(abs, ended.values())) and 1
