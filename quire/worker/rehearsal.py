"""Plans for the largest steps that can come, to be run before memory is measured.

Invariant: they use as many tokens and requests as the limits allow, and every part of sampling that has kernels of its
own. What they compute means nothing.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from itertools import count, islice

from quire.config import EngineConfig
from quire.kv_cache.spec import KVCacheGroup, KVCacheSpec, RecurrentStateSpec
from quire.sampling_params import SamplingParams
from quire.scheduler.output import NewRequestData, ScheduledRequest, SchedulerOutput

_PARAMS = SamplingParams(
    seed=0, temperature=0.9, top_k=2, top_p=0.9, repetition_penalty=1.1, logprobs=1, max_tokens=1
)


def rehearsed_groups(specs: Mapping[str, KVCacheSpec]) -> tuple[KVCacheGroup, ...]:
    """One group of all layers if one kind of metadata will do, whatever their windows; else one for each kind."""
    will_do = len({(isinstance(spec, RecurrentStateSpec), spec.planes) for spec in specs.values()}) == 1
    kinds: dict[Hashable, list[str]] = {}
    for name, spec in specs.items():
        kinds.setdefault(None if will_do else (spec.kind, spec.block_bytes), []).append(name)
    return tuple(KVCacheGroup(tuple(names), specs[names[0]]) for names in kinds.values())


class Rehearsal:
    """A step of prompts, and a step of one token each.

    Args:
        max_num_tokens: most tokens of the first.
        max_num_seqs: most requests of the second; 0: there is none.
        num_groups: KV cache groups, each of which gets blocks of its own.
    """

    def __init__(
        self, config: EngineConfig, max_num_tokens: int, max_num_seqs: int, num_groups: int = 1
    ) -> None:
        limits = config.scheduler
        num_tokens = min(max_num_tokens, limits.max_num_batched_tokens)
        longest = max(config.model.max_model_len - 1, 1)
        prompt = min(num_tokens, longest)
        self._block_size = config.cache.block_size
        self._num_groups = num_groups
        self._prompts = [prompt] * min(max(num_tokens // prompt, 1), limits.max_num_seqs)
        self._decodes = [1] * min(max_num_seqs, limits.max_num_seqs)

    @property
    def num_blocks(self) -> int:
        """Blocks that it takes, the null block included."""
        most = max(sum(map(self._blocks_of, lengths)) for lengths in (self._prompts, self._decodes))
        return 1 + self._num_groups * most

    def plans(self) -> list[SchedulerOutput]:
        """For a runner with that many groups."""
        prompts = [f"prompt {index}" for index in range(len(self._prompts))]
        decodes = [f"decode {index}" for index in range(len(self._decodes))]
        steps = [self._plan(1, dict(zip(prompts, self._prompts, strict=True)), [])]
        if decodes:
            steps.append(self._plan(2, dict(zip(decodes, self._decodes, strict=True)), prompts))
        return steps

    def _plan(self, step_id: int, lengths: dict[str, int], removed: list[str]) -> SchedulerOutput:
        new, scheduled, unused = [], [], count(1)
        for name, length in lengths.items():
            block_ids = [list(islice(unused, self._blocks_of(length))) for _ in range(self._num_groups)]
            new.append(NewRequestData(name, [0] * length, length, _PARAMS, block_ids, 0))
            scheduled.append(
                ScheduledRequest(name, start=0, num_tokens=length, num_samples=1, new_block_ids=[])
            )
        return SchedulerOutput(step_id, new, scheduled, removed)

    def _blocks_of(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)
