"""What verifying guesses costs, read from a few steps before the first request.

Invariant: nothing is left behind but what steps took, and steps that are recorded now and not when somebody waits.
They are steps of requests that nobody knows of and that are gone when the last one ends; what they write into the
cache is in blocks that are nobody's; and noise has no state. How many are run follows from durations on which all ranks
agree.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import count, islice

from quire.config import EngineConfig
from quire.kv_cache.spec import KVCacheConfig
from quire.models.stages import Stage
from quire.sampling_params import SamplingParams
from quire.scheduler.output import NewRequestData, ScheduledRequest, SchedulerOutput
from quire.spec_decode.step_costs import WIDEST, StepCosts

BUDGET_S = 0.3
"""No further step is begun once they have taken so long."""
NUM_TIMED = 2
"""Steps of each shape that count, behind one that may be recorded; the fastest says what such a step takes."""
FEW_REQUESTS = 8
"""Requests of the steps that are not of one alone."""
_PARAMS = SamplingParams(seed=0, max_tokens=1)

Shape = tuple[int, int]
"""Requests of a step, and guesses for each of them."""
Run = Callable[[SchedulerOutput], float]
"""Runs a plan -> the seconds that it took, for all ranks the same."""


def is_calibrated(config: EngineConfig, stage: Stage) -> bool:
    """Whether steps can be timed by a model alone, without anybody's noticing.

    A stage waits for others, as a replica does that shares experts; and an operator's logits processors would be asked
    about requests that nobody made.
    """
    return stage.of == 1 and not config.parallel.shares_experts and not config.model.logits_processors


def shapes_of(config: EngineConfig) -> list[Shape]:
    """One request without guesses, with the most, and with fewer; then the same, more roughly, of several."""
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
    """Times steps of some shapes.

    Args:
        shapes: in the order of what they are worth.
        kv_config: of the cache, in which no request has a block; shapes that need more than it has are left out.
    """

    def __init__(self, shapes: Sequence[Shape], kv_config: KVCacheConfig) -> None:
        self._block_sizes = [group.spec.block_size for group in kv_config.groups]
        room = kv_config.num_blocks - 1
        self._shapes = [shape for shape in shapes if self._num_blocks(shape) <= room]

    def run(self, run: Run, costs: StepCosts, budget_s: float = BUDGET_S) -> None:
        """Tell `costs` what steps take; all shapes once, and again while there is time."""
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
        """Shapes, and whether what the step takes counts."""
        for number in range(NUM_TIMED):
            for shape in self._shapes:
                if number == 0:
                    yield shape, False
                yield shape, True

    def _plan(self, step_id: int, names: list[str], num_drafts: int, removed: list[str]) -> SchedulerOutput:
        """New requests of a token each, so that a step that generates is all that there is to them."""
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
