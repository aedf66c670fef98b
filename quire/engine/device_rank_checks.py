"""What several ranks cannot do yet where each has a device of its own."""

from __future__ import annotations

from collections.abc import Mapping

from quire.config import EngineConfig
from quire.errors import ConfigError


def check_device_ranks(config: EngineConfig) -> None:
    """Raises ConfigError: names the option, and why it is not for devices."""
    device, parallel = config.device.device, config.parallel
    if device == "cpu":
        return
    if parallel.tp_invariant:
        raise ConfigError(
            f"--tp-invariant wants --device cpu, not {device}: there libraries and tiles are chosen by the shapes of "
            "products, which are others for every number of ranks"
        )
    num = parallel.num_ranks * parallel.data_parallel_size
    if num == 1:
        return
    executor = parallel.distributed_executor_backend
    wants = {
        f"--distributed-executor-backend mp or external_launcher, not {executor}: it knows nothing of devices": executor
        not in ("mp", "external_launcher", "uni", "null"),
        "no --enable-expert-parallel: devices share out the features of experts": parallel.enable_expert_parallel,
    }
    require(wants, f"--device is {device}, with {num} ranks")


def require(wants: Mapping[str, bool], what: str) -> None:
    """Raises ConfigError: something is not as it is wanted."""
    for wanted, lacks in wants.items():
        if lacks:
            raise ConfigError(f"{what}, which wants {wanted}")
