"""How long a step takes through some of a model's layers alone, as a pipeline stage computes them.

Weights and what the step reads of the cache mean nothing; rows differ, so that they ask different experts.

Invariant: nothing is left behind, not even in what is counted of the worker's device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import count
from typing import NamedTuple

import torch
from torch import Tensor

from quire.config import EngineConfig
from quire.kv_cache.spec import NULL_BLOCK_ID, KVCacheConfig, KVCacheSpec, RecurrentStateSpec
from quire.layers.base import activation_dtype
from quire.layers.kv_cache import allocate_kv_cache, bind_kv_cache, kv_cache_specs, why_not_captured
from quire.layers.shard import Shard
from quire.models.base import CausalLM
from quire.models.loader import with_any_weights
from quire.models.stages import Stage, stack_of
from quire.sampling_params import SamplingParams
from quire.scheduler.output import NewRequestData, ScheduledRequest
from quire.worker.block_table import BlockTable
from quire.worker.devices import Device, make_device
from quire.worker.input_batch import InputBatch
from quire.worker.inputs import StepLayout, lay_out
from quire.worker.pipeline import Body
from quire.worker.stage_pipeline import LaterLayers

NUM_REQUESTS, CONTEXT = 16, 1024
"""Of a step that generates: its requests, and the tokens of each."""
TEXT = 64
"""Tokens of the step of a model that reads texts and generates none."""
NUM_TIMED = 9
"""Steps that count, behind one that may be recorded; the fastest says what a step takes."""
CACHES_BYTES = 96 * 2**20
"""What is read before each step, so that no weight is still in a cache: in a whole model other layers come between."""


def seconds_alone(
    config: EngineConfig, shard: Shard, cache: KVCacheConfig, own: range, num_layers: int
) -> float:
    """Of a step through some of so many layers; through none of them, behind the last: through norm and head.

    `cache` is the whole model's, of whatever size. All ranks that have shares of the layers call this at once.
    """
    stage = Stage.with_layers(own, num_layers)
    model = with_any_weights(config, shard, stage)
    device = make_device(config.device.device)
    with torch.inference_mode(), device.step():
        run = _step(model, stage, config, device, cache)
        others = torch.ones(CACHES_BYTES, dtype=torch.uint8).view(torch.int64)  # of zeros all pages are one
        seconds = []
        for _ in range(1 + NUM_TIMED):
            others.sum()
            shard.group.all_gather(torch.zeros(1))  # whoever comes late is waited for here
            started = device.transfers.mark()
            hidden = run()
            if not own:
                _head(model, hidden)
            done = device.transfers.mark()
            done.wait()
            seconds.append(done.seconds_since(started))
    return min(seconds[1:])


def _head(model: CausalLM, hidden: Tensor) -> None:
    """Compute this rank's logits, if there are any."""
    if model.shared_head() is not None:
        model.own_logits(hidden)
    elif model.lm_head is not None:
        model.compute_logits(hidden)


def _step(
    model: CausalLM, stage: Stage, config: EngineConfig, device: Device, cache: KVCacheConfig
) -> Callable[[], Tensor]:
    """Computes hidden states of a step, as often as it is called."""
    if why_not_captured(model) is not None:  # which is said once, when the model is loaded
        config = replace(config, device=replace(config.device, enforce_eager=True))
    requests = _Requests.of(config)
    cache = replace(cache, num_blocks=requests.num_blocks(cache)).of_layers(kv_cache_specs(model))
    tensors = allocate_kv_cache(cache, device.transfers.torch_device)
    for tensor in tensors:
        tensor.zero_()
    bind_kv_cache(model, cache, tensors)
    batch = _batch(config, cache)
    layout = requests.laid_out(batch, cache, config.arch.vocab_size)
    body = _body(model, stage, config, layout.num_tokens, device)
    rehearsed = device.pipeline(body, batch, config, is_rehearsal=True)
    rehearsed.forward(rehearsed.gather(layout))  # tells what a tape takes
    pipeline = device.pipeline(body, batch, config)
    inputs = pipeline.gather(layout)
    return lambda: pipeline.forward(inputs)[: layout.num_tokens]


def _body(model: CausalLM, stage: Stage, config: EngineConfig, num_tokens: int, device: Device) -> Body:
    """The layers, with rows to go on from where a stage before has made them."""
    if stage.is_first:
        return model
    stack = stack_of(model)
    shape = (config.scheduler.max_num_batched_tokens, stack.stream_size(stack.own.start))
    stream = torch.zeros(shape, dtype=activation_dtype(config), device=device.transfers.torch_device)
    stream[:num_tokens] = torch.randn((num_tokens, shape[1]), generator=torch.Generator().manual_seed(0))
    return LaterLayers(model, stream)


def _batch(config: EngineConfig, cache: KVCacheConfig) -> InputBatch:
    max_num_seqs, max_model_len = config.scheduler.max_num_seqs, config.model.max_model_len
    tables = tuple(
        BlockTable(max_num_seqs, max_model_len, group.spec, cache.num_blocks, cache.parts_per_block(group))
        for group in cache.groups
    )
    return InputBatch(max_num_seqs, max_model_len, tables, rolls_back=cache.rolls_back)


class _Requests(NamedTuple):
    """So many, of `length` tokens each, of which all but `start` are computed now."""

    number: int
    length: int
    start: int

    @staticmethod
    def of(config: EngineConfig) -> _Requests:
        """Each generates a token; an encoder, or a model that is pooled, reads a text."""
        limits, longest = config.scheduler, config.model.max_model_len
        if config.pooling is not None or config.arch.bidirectional:
            return _Requests(1, min(TEXT, longest, limits.max_num_batched_tokens), 0)
        number = min(NUM_REQUESTS, limits.max_num_seqs, limits.max_num_batched_tokens)
        return _Requests(number, min(CONTEXT, longest), min(CONTEXT, longest) - 1)

    def num_blocks(self, cache: KVCacheConfig) -> int:
        """That they take, the null block included."""
        return 1 + self.number * sum(sum(self._have_blocks(group.spec)) for group in cache.groups)

    def laid_out(self, batch: InputBatch, cache: KVCacheConfig, vocab_size: int) -> StepLayout:
        """Give them their rows and the blocks of a cache: the step that they want."""
        unused, scheduled = count(NULL_BLOCK_ID + 1), []
        for number in range(self.number):
            name, tokens = str(number), [number % vocab_size] * self.length
            blocks = [
                [next(unused) if has_one else NULL_BLOCK_ID for has_one in self._have_blocks(group.spec)]
                for group in cache.groups
            ]
            batch.add(NewRequestData(name, tokens, self.length, SamplingParams(), blocks, self.start))
            scheduled.append(ScheduledRequest(name, self.start, self.length - self.start, 1, []))
        return lay_out(batch, scheduled)

    def _have_blocks(self, spec: KVCacheSpec) -> list[bool]:
        """Of the entries of a request's table. Layers of several windows may share one, so no window leaves any out."""
        num = spec.num_blocks(self.length)
        has_states = isinstance(spec, RecurrentStateSpec)
        return [not has_states or spec.needs_block(index, self.start, num) for index in range(num)]
