"""The model runner: carries out one plan.

Invariant: plan -> batch -> gather -> forward -> sample -> append -> result, each a call to the part that owns
it; what a request may ask for lives in those parts and never as a branch here. A request that fails costs
itself alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.config import EngineConfig
from quire.errors import EngineError
from quire.kernels.attention_metadata import StepMetadata
from quire.kv_cache.spec import KVCacheConfig
from quire.scheduler.output import ModelRunnerOutput, NewRequestData, SchedulerOutput, TokenLogprobs
from quire.worker.block_table import BlockTable
from quire.worker.input_batch import InputBatch
from quire.worker.inputs import StepInputs, gather_inputs
from quire.worker.prompt_logprobs import PromptLogprobs
from quire.worker.sampler import NON_FINITE, Sampler
from quire.worker.validation import why_unusable

# Bounds the logits that exist at once (elements, 32 MiB).
_LOGITS_ELEMENTS = 1 << 23


class LanguageModel(Protocol):
    """What the runner needs of a model."""

    def forward(self, input_ids: Tensor, positions: Tensor, metadata: StepMetadata) -> Tensor:
        """[T] int64 ids and positions -> hidden states [T, H]."""

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """[N, H] -> [N, V] float32, a tensor the caller may change."""


Forward = Callable[[StepInputs], Tensor]
"""Hidden states [T, H] of a step, which the next step may overwrite."""


def eager_forward(model: LanguageModel) -> Forward:
    """Calls the model as it is, each time."""
    return lambda inputs: model.forward(inputs.input_ids, inputs.positions, inputs.metadata)


class _Sampled(NamedTuple):
    """What the requests of a step got; keyed by their index in the step."""

    indices: NDArray[np.int64]
    token_ids: NDArray[np.int64]
    logprobs: dict[int, TokenLogprobs]
    failed: dict[int, str]


class ModelRunner:
    """Owns the batch and everything kept per row.

    Args:
        model: loaded, its KV cache bound.
        config: prepared.
        kv_config: the cache that was allocated.
        device: where the model and its cache are.
        forward: the device's way to run the model.
    """

    def __init__(
        self,
        model: LanguageModel,
        config: EngineConfig,
        kv_config: KVCacheConfig,
        device: torch.device,
        forward: Forward,
    ) -> None:
        max_num_seqs, max_model_len = config.scheduler.max_num_seqs, config.model.max_model_len
        tables = tuple(
            BlockTable(
                max_num_seqs,
                max_model_len,
                group.spec,
                kv_config.num_blocks,
                kv_config.parts_per_block(group),
            )
            for group in kv_config.groups
        )
        self._model = model
        self._forward = forward
        self._device = device
        self._max_model_len = max_model_len
        self._vocab_size = config.arch.vocab_size
        self._slice_size = max(1, _LOGITS_ELEMENTS // self._vocab_size)
        self.batch = InputBatch(max_num_seqs, max_model_len, tables)
        self._sampler = Sampler(self.batch, self._vocab_size)
        self._prompt_logprobs = PromptLogprobs(self.batch, model.compute_logits, self._slice_size)
        self._unusable: dict[str, str] = {}

    @torch.inference_mode()
    def execute_model(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        """Run one step.

        Raises:
            EngineError: the plan contradicts itself or the batch, which is a bug of ours.
        """
        failed = self._update_batch(plan)
        ids = [request_id for request_id in plan.num_scheduled_tokens if request_id not in failed]
        if not ids:
            return ModelRunnerOutput(plan.step_id, {}, failed=failed)
        started = time.perf_counter()
        inputs = self._gather(plan, ids)
        hidden = self._forward(inputs)
        forwarded = time.perf_counter()
        prompt_logprobs, bad_prompts = self._prompt_logprobs.compute(inputs, hidden)
        sampled = self._sample(inputs, hidden)
        failures = sampled.failed | dict.fromkeys(bad_prompts, NON_FINITE)
        tokens = dict(zip(sampled.indices.tolist(), sampled.token_ids.tolist(), strict=True))
        return ModelRunnerOutput(
            step_id=plan.step_id,
            sampled_token_ids={ids[i]: [token] for i, token in tokens.items() if i not in failures},
            logprobs={ids[i]: [entry] for i, entry in sampled.logprobs.items() if i not in failures},
            prompt_logprobs={ids[i]: entries for i, entries in prompt_logprobs.items() if i not in failures},
            failed=failed | {ids[i]: reason for i, reason in failures.items()},
            forward_s=forwarded - started,
            sample_s=time.perf_counter() - forwarded,
        )

    def _update_batch(self, plan: SchedulerOutput) -> dict[str, str]:
        """Bring the rows in line with the plan; returns requests that cannot have one, with the reason.

        These are remembered, because plans made before the scheduler hears of it still name them.
        """
        for request_id in plan.removed_request_ids:
            self._remove(request_id)
        for request in plan.new_requests:
            reason = why_unusable(request, self._vocab_size, self._max_model_len)
            if reason is None:
                self._add(request)
            else:
                self._unusable[request.request_id] = reason
        for update in plan.cached_requests:
            if update.request_id not in self._unusable:
                self.batch.update(update)
        planned = self._unusable.keys() & plan.num_scheduled_tokens.keys() if self._unusable else ()
        return {request_id: self._unusable[request_id] for request_id in planned}

    def _add(self, request: NewRequestData) -> None:
        row = self.batch.add(request)
        self._sampler.add_request(row, request)
        self._prompt_logprobs.add_request(row, request)

    def _remove(self, request_id: str) -> None:
        if self._unusable.pop(request_id, None) is None:
            row = self.batch.remove(request_id)
            self._sampler.remove_request(row)
            self._prompt_logprobs.remove_request(row)

    def _gather(self, plan: SchedulerOutput, ids: list[str]) -> StepInputs:
        rows = np.array([self.batch.row(request_id) for request_id in ids], dtype=np.int64)
        num_scheduled = np.array(
            [plan.num_scheduled_tokens[request_id] for request_id in ids], dtype=np.int64
        )
        return gather_inputs(self.batch, rows, num_scheduled, self._device)

    def _sample(self, inputs: StepInputs, hidden: Tensor) -> _Sampled:
        """Sample for the requests that reached their last known token, and append what they got to their rows."""
        rows = inputs.rows[inputs.sampling]
        token_ids = np.zeros(len(rows), dtype=np.int64)
        logprobs: dict[int, TokenLogprobs] = {}
        failed: dict[int, str] = {}
        last = torch.from_numpy(inputs.logits_indices).to(self._device)
        for part in self._slices(len(rows)):
            logits = self._model.compute_logits(hidden.index_select(0, last[part])).contiguous()
            if logits.shape[1] != self._vocab_size:
                raise EngineError(f"the model gave {logits.shape[1]} logits for {self._vocab_size} tokens")
            output = self._sampler.sample(logits, self._sampler.stage(rows[part]))
            indices = inputs.sampling[part].tolist()
            token_ids[part] = output.token_ids
            logprobs |= {indices[i]: entry for i, entry in output.logprobs.items()}
            failed |= {indices[i]: reason for i, reason in output.failed.items()}
        self.batch.append_tokens(rows, token_ids)
        return _Sampled(inputs.sampling, token_ids, logprobs, failed)

    def _slices(self, count: int) -> Iterator[slice]:
        return (slice(i, i + self._slice_size) for i in range(0, count, self._slice_size))
