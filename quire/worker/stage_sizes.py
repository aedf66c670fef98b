"""How many layers each pipeline stage has.

Invariant: the first rank says it, and all ranks of all stages have its word: others would measure something else.
"""

from __future__ import annotations

import logging
import time
from dataclasses import replace

import torch

from quire.config import EngineConfig
from quire.distributed.group import Group
from quire.errors import ConfigError, RankLostError
from quire.layers.shard import Shard
from quire.models.base import CausalLM
from quire.models.loader import without_weights
from quire.models.partition import in_units, partition
from quire.models.stages import Stage, stack_of
from quire.worker.layer_costs import layer_costs, why_not_measured

logger = logging.getLogger(__name__)


def with_sizes(config: EngineConfig, shard: Shard, stage: Stage) -> Stage:
    """The stage of a rank, with the layers of all; all ranks call this at once, before they load.

    Raises:
        ConfigError: the model cannot be cut so; the message says why.
    """
    if stage.of == 1:
        return stage
    asked = config.parallel.stage_sizes
    sizes = asked or _agreed(config, shard, stage)
    first = sum(sizes[: stage.index])
    logger.info(
        "stage %d of %d: layers %d to %d, as by --pipeline-partition %s",
        *(stage.index, stage.of, first, first + sizes[stage.index] - 1, ",".join(map(str, sizes))),
    )
    return stage if asked else replace(stage, sizes=sizes)  # what is asked for is checked where it is done


def _agreed(config: EngineConfig, shard: Shard, stage: Stage) -> tuple[int, ...]:
    """Those of the first share of the first stage: it tells the other shares, and each the later stages.

    Who fails says so before it raises, for the others wait for its word: no stage has layers then.
    """
    sizes, failure = (0,) * stage.of, None
    if stage.is_first:
        try:
            sizes = _sizes(config, shard, stage.of)
        except RankLostError:
            raise
        except Exception as error:
            failure = error
    sizes = _of_first(stage.group, _of_first(shard.group, sizes))
    if failure is not None:
        raise failure
    if not any(sizes):
        raise ConfigError("the first rank cannot cut the model into stages, and says why")
    return sizes


def _of_first(group: Group, sizes: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(group.all_gather(torch.tensor(sizes))[0].tolist())


def _sizes(config: EngineConfig, shard: Shard, num_stages: int) -> tuple[int, ...]:
    whole = without_weights(config, shard)
    return partition(whole, stack_of(whole), num_stages, _costs(whole, shard))


def _costs(whole: CausalLM, shard: Shard) -> list[int] | None:
    """What layers cost, as measured; None, with a line of the log, where that cannot be."""
    why_not, started = why_not_measured(whole), time.monotonic()
    if why_not is None:
        try:
            found = layer_costs(whole, shard)
        except RankLostError:
            raise
        except Exception as error:  # stages that are cut less well are better than none
            why_not = f"to time them failed: {type(error).__name__}: {error}"
        else:
            logger.info("layers of stages: %s, measured in %.2f s", found, time.monotonic() - started)
            return in_units(found.of_layers())
    logger.warning("layers of stages: by the bytes that a step reads of them: %s", why_not)
    return None
