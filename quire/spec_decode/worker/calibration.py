# SPDX-License-Identifier: Apache-2.0
"""Calibration of the draft cost model by steps before the first request, and clocks that ranks agree on.

The steps leave nothing behind: their requests are unknown to the scheduler, and the blocks belong to no request.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import count, islice

import torch

from quire.config import EngineConfig
from quire.distributed.group import Group
from quire.kv_cache.spec import KVCacheConfig
from quire.models.stages import Stage
from quire.sampling_params import SamplingParams
from quire.scheduler.output import NewRequestData, ScheduledRequest, SchedulerOutput
from quire.spec_decode.step_costs import WIDEST, OwnClock, StepClocks, StepCosts


class AgreedClocks(OwnClock):
    """Clocks of a group: every rank measures, and the first rank's measurement counts for all.

    One small all-gather per step. Ranks that exchange drafts must draft alike.
    """

    def __init__(self, group: Group) -> None:
        self._group = group

    def agreed(self, seconds: Sequence[float]) -> list[float]:
        first: list[float] = self._group.all_gather(torch.tensor(seconds, dtype=torch.float64))[0].tolist()
        return first


def make_clocks(config: EngineConfig, group: Group) -> StepClocks:
    """Return agreed clocks if drafts cross ranks or each rank makes its own plans, else this process's."""
    crosses = config.draft is not None or config.parallel.plans_on_each_rank
    return group_clocks(group) if crosses else OwnClock()


def group_clocks(group: Group) -> StepClocks:
    """Return clocks of a group whose ranks all measure: they agree on every duration."""
    return AgreedClocks(group) if group.size > 1 else OwnClock()


BUDGET_S = 0.3  # no further step is started after so many seconds
NUM_TIMED = 2  # timed steps of each shape, after one that may be recorded; the fastest counts
FEW_REQUESTS = 8  # requests of steps with several requests
_PARAMS = SamplingParams(seed=0, max_tokens=1)

Shape = tuple[int, int]
"""(requests of a step, drafts of each request)"""
Run = Callable[[SchedulerOutput], float]
"""Runs a plan and returns its seconds, equal on all ranks."""


def is_calibrated(config: EngineConfig, stage: Stage) -> bool:
    """Return whether a model alone can time steps without side effects.

    A pipeline stage waits for others, and so does a replica with shared experts. Custom logits processors would see
    requests that nobody sent.
    """
    return stage.of == 1 and not config.parallel.shares_experts and not config.model.logits_processors


def shapes_of(config: EngineConfig) -> list[Shape]:
    """Return one request without drafts, with most and with fewer drafts; then, more coarsely, several requests."""
    limits, most = config.scheduler, config.speculative.settings.most_drafts
    most = min(most, config.model.max_model_len - 1)
    few = min(FEW_REQUESTS, limits.max_num_seqs)
    alone = [0, *(most >> shift for shift in range(most.bit_length()))]
    shapes = [(1, drafts) for drafts in alone]
    if few > 1:
        shapes += [(few, drafts) for drafts in dict.fromkeys((0, min(most, 1), min(most, 4)))]
    widest = min(WIDEST, limits.max_num_batched_tokens)
    return [shape for shape in shapes if _width(shape) <= widest]


class Calibration:
    """Timing of a few steps of some shapes, before the first request.

    Invariant: nothing is left behind but durations and recorded steps. The number of steps depends only on durations
    that all ranks agree on.

    Args:
        shapes: most useful first.
        kv_config: cache config; no request holds a block. Shapes that need more blocks are skipped.
    """

    def __init__(self, shapes: Sequence[Shape], kv_config: KVCacheConfig) -> None:
        self._block_sizes = [group.spec.block_size for group in kv_config.groups]
        room = kv_config.num_blocks - 1
        self._shapes = [shape for shape in shapes if self._num_blocks(shape) <= room]

    def run(self, run: Run, costs: StepCosts, budget_s: float = BUDGET_S) -> None:
        """Pass the durations of steps to `costs`: each shape once, and again while there is time."""
        names: list[str] = []
        fastest: dict[int, float] = {}
        step_id = 0
        for step_id, (shape, counts) in enumerate(self._steps(), 1):
            if budget_s <= 0:
                break
            removed, names = names, [f"{step_id}, {index}" for index in range(shape[0])]
            seconds = run(self._plan(step_id, names, shape[1], removed))
            budget_s -= seconds
            if counts:
                width = _width(shape)
                fastest[width] = min(seconds, fastest.get(width, seconds))
        costs.expect(fastest)
        run(SchedulerOutput(step_id + 1, [], [], names))

    def _steps(self) -> Iterator[tuple[Shape, bool]]:
        """Yield shapes, and whether the duration counts."""
        for number in range(NUM_TIMED):
            for shape in self._shapes:
                if number == 0:
                    yield shape, False
                yield shape, True

    def _plan(self, step_id: int, names: list[str], num_drafts: int, removed: list[str]) -> SchedulerOutput:
        """Plan new one-token requests, so that the step only decodes."""
        new, scheduled, unused = [], [], count(1)
        for name in names:
            block_ids = [list(islice(unused, -(-(1 + num_drafts) // size))) for size in self._block_sizes]
            new.append(NewRequestData(name, [0], 1, _PARAMS, block_ids, 0))
            width = 1 + num_drafts
            scheduled.append(ScheduledRequest(name, 0, width, width, [], [0] * num_drafts))
        return SchedulerOutput(step_id, new, scheduled, removed)

    def _num_blocks(self, shape: Shape) -> int:
        num_requests, num_drafts = shape
        return num_requests * sum(-(-(1 + num_drafts) // size) for size in self._block_sizes)


def _width(shape: Shape) -> int:
    num_requests, num_drafts = shape
    return num_requests * (1 + num_drafts)
