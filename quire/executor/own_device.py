"""Which of a host's devices a rank has: the one of its number among all ranks of all replicas there, which is the only
one that its process sees.

Invariant: a process has its device before it uses any, so no thread of it ever takes memory of another's.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping

from quire.config import EngineConfig
from quire.errors import ConfigError
from quire.platforms import GPUS


def take_own_device(config: EngineConfig, rank: int, environ: MutableMapping[str, str] = os.environ) -> None:
    """Have this process, a rank of its replica, see no other; who is alone on the host sees all, and so do CPU's.

    Raises:
        ConfigError: there are fewer devices than ranks, which all of these find alike; or it is too late.
    """
    device, parallel, share = config.device.device, config.parallel, config.share
    num_here = parallel.num_ranks // parallel.nnodes
    num_replicas, index = (1, 0) if share is None else (share.num_replicas, share.index)
    num = num_here * num_replicas
    if device == "cpu" or num == 1:
        return
    import torch

    module = torch.get_device_module(device)
    count: int = module.device_count()
    if num > count:
        raise ConfigError(
            f"{num} ranks of this host want a {device} device each, and there are {count}: --tensor-parallel-size "
            f"times --pipeline-parallel-size times --data-parallel-size may be {max(count, 1)} at most for each host"
        )
    if module.is_initialized():
        raise ConfigError(
            f"rank {rank} cannot have a {device} device of its own, since its program has used one before it made the "
            "engine; make the engine first"
        )
    names = next(platform.visibility for platform in GPUS if platform.name == device)
    name = next((name for name in names if environ.get(name)), names[0])
    shown = environ.get(name) or ",".join(map(str, range(count)))
    environ[name] = shown.split(",")[index * num_here + rank % num_here].strip()
