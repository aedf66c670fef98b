"""Which of a host's devices a rank has: the one of its number, which is the only one that its process sees.

Invariant: a process has its device before it uses any, so no thread of it ever takes memory of another's.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping

from quire.errors import ConfigError
from quire.platforms import GPUS


def take_own_device(
    device: str, rank: int, num_ranks: int, environ: MutableMapping[str, str] = os.environ
) -> None:
    """Have this process, of so many ranks of this host the one of this number, see no other; on the CPU all share it.

    Raises:
        ConfigError: there are fewer devices than ranks, which all of these find alike; or it is too late.
    """
    if device == "cpu":
        return
    import torch

    module = torch.get_device_module(device)
    count: int = module.device_count()
    if num_ranks > count:
        raise ConfigError(
            f"{num_ranks} ranks of this host want a {device} device each, and there are {count}: "
            f"--tensor-parallel-size times --pipeline-parallel-size may be {max(count, 1)} at most for each of --nnodes"
        )
    if module.is_initialized():
        raise ConfigError(
            f"rank {rank} cannot have a {device} device of its own, since its program has used one before it made the "
            "engine; make the engine first"
        )
    names = next(platform.visibility for platform in GPUS if platform.name == device)
    name = next((name for name in names if environ.get(name)), names[0])
    shown = environ.get(name) or ",".join(map(str, range(count)))
    environ[name] = shown.split(",")[rank].strip()
