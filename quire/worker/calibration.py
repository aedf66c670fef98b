# SPDX-License-Identifier: Apache-2.0
"""Rehearsal: steps run at startup before memory is measured.

They leave nothing behind: the requests are unknown to the scheduler, and the blocks belong to no request.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from itertools import count, islice

from quire.config import EngineConfig
from quire.kv_cache.spec import KVCacheGroup, KVCacheSpec, RecurrentStateSpec
from quire.pooling_params import PoolingParams
from quire.sampling_params import SamplingParams
from quire.scheduler.output import NewRequestData, ScheduledRequest, SchedulerOutput

_EVERYTHING = SamplingParams(
    seed=0, temperature=0.9, top_k=2, top_p=0.9, repetition_penalty=1.1, logprobs=1, max_tokens=1
)
_GREEDY = SamplingParams(temperature=0.0, max_tokens=1)
_RANDOM = SamplingParams(seed=0, max_tokens=1, logprobs=20)
_SCORED = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1)

_SMALL: tuple[tuple[list[int], SamplingParams], ...] = (
    ([1], _GREEDY),
    ([1, 1], _RANDOM),
    *(([length], _SCORED) for length in (9, 20, 40, 80, 300)),
)
"""Small steps as (tokens of each request, params): few rows use other kernel tiles than many."""


def rehearsed_groups(specs: Mapping[str, KVCacheSpec]) -> tuple[KVCacheGroup, ...]:
    """Return one group of all layers if one kind of metadata suffices, ignoring windows; else one per kind."""
    will_do = len({(isinstance(spec, RecurrentStateSpec), spec.planes) for spec in specs.values()}) == 1
    kinds: dict[Hashable, list[str]] = {}
    for name, spec in specs.items():
        kinds.setdefault(None if will_do else (spec.kind, spec.block_bytes), []).append(name)
    return tuple(KVCacheGroup(tuple(names), specs[names[0]]) for names in kinds.values())


class Rehearsal:
    """Largest prefill step, largest decode step and, for compiled kernels, small steps of other kinds.

    Invariant: they use as many tokens and requests as the limits allow, and launch every kernel variant that a plan
    can reach. Their output is meaningless.

    Args:
        max_num_tokens: most tokens of the prefill step.
        max_num_seqs: most requests of the decode step; 0: no decode step.
        groups: KV cache groups; each gets its own blocks.
        every_variant: add small steps for every kernel variant.
    """

    def __init__(
        self,
        config: EngineConfig,
        max_num_tokens: int,
        max_num_seqs: int,
        groups: Sequence[KVCacheGroup],
        *,
        every_variant: bool = False,
    ) -> None:
        limits = config.scheduler
        num_tokens = min(max_num_tokens, limits.max_num_batched_tokens)
        longest = max(config.model.max_model_len - 1, 1)
        prompt = min(num_tokens, longest)
        self._pooled = None if config.pooling is None else PoolingParams()
        self._block_size = groups[0].spec.block_size
        self._num_groups = len(groups)
        num_decodes = min(max_num_seqs, limits.max_num_seqs)
        self._steps = [([prompt] * min(max(num_tokens // prompt, 1), limits.max_num_seqs), _EVERYTHING)]
        if num_decodes:
            self._steps.append(([1] * num_decodes, _EVERYTHING))
        if every_variant and config.pooling is None:
            self._steps += (s for s in _SMALL if max(s[0]) <= prompt and len(s[0]) <= limits.max_num_seqs)

    @property
    def num_blocks(self) -> int:
        """Blocks needed, the null block included."""
        most = max(sum(map(self._blocks_of, lengths)) for lengths, _ in self._steps)
        return 1 + self._num_groups * most

    def plans(self) -> list[SchedulerOutput]:
        """Return the plans, for a runner with as many groups."""
        steps: list[SchedulerOutput] = []
        names: list[str] = []
        for step_id, (lengths, params) in enumerate(self._steps, 1):
            before, names = names, [f"{step_id}, {index}" for index in range(len(lengths))]
            steps.append(self._plan(step_id, dict(zip(names, lengths, strict=True)), params, before))
        return steps

    def _plan(
        self, step_id: int, lengths: dict[str, int], params: SamplingParams, removed: list[str]
    ) -> SchedulerOutput:
        new, scheduled, unused = [], [], count(1)
        for name, length in lengths.items():
            block_ids = [list(islice(unused, self._blocks_of(length))) for _ in range(self._num_groups)]
            pools = self._pooled is not None
            new.append(
                NewRequestData(name, [0] * length, length, params, block_ids, 0, pooling_params=self._pooled)
            )
            scheduled.append(
                ScheduledRequest(
                    name,
                    start=0,
                    num_tokens=length,
                    num_samples=int(not pools),
                    new_block_ids=[],
                    pools=pools,
                )
            )
        return SchedulerOutput(step_id, new, scheduled, removed)

    def _blocks_of(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)
