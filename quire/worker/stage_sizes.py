# SPDX-License-Identifier: Apache-2.0
"""Sizes of pipeline stages, from measured layer costs; and memory of a step, measured on a short one.

Layers are timed before the model is loaded, so that stages take equally long: one layer of each kind at a time, with
arbitrary weights, so memory is that of one layer or of the head. Rows differ, so they select different experts.
Nothing is left behind, not even in the memory accounting of the worker's device.

Invariant: rank 0 decides and sends the sizes to all ranks of all stages, because others would measure differently.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import replace
from itertools import count
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from quire.config import EngineConfig
from quire.distributed.group import Group
from quire.errors import ConfigError, RankLostError
from quire.kernels.dispatch_mode import DispatchMode
from quire.kv_cache.spec import NULL_BLOCK_ID, KVCacheConfig, KVCacheSpec, RecurrentStateSpec, fit_states
from quire.layers.base import activation_dtype
from quire.layers.kv_cache import (
    CacheUser,
    allocate_kv_cache,
    bind_kv_cache,
    kv_cache_specs,
    why_not_captured,
)
from quire.layers.matrix import MatrixLayer
from quire.layers.shard import Shard
from quire.models.base import CausalLM
from quire.models.loader import with_any_weights, without_weights
from quire.models.stages import Stage, in_units, partition, stack_of
from quire.sampling_params import SamplingParams
from quire.scheduler.output import NewRequestData, ScheduledRequest
from quire.worker.calibration import rehearsed_groups
from quire.worker.devices import Device, make_device
from quire.worker.input_batch import BlockTable, InputBatch
from quire.worker.inputs import StepInputs, StepLayout, lay_out
from quire.worker.pipeline import Forward, PipelineModel
from quire.worker.stage_pipeline import LaterLayers

logger = logging.getLogger(__name__)

ARENA_SLACK = 2.0  # arena size over its live tensors; gaps of up to 0.6 of them were measured
GAPS = 1.25  # the same for large tensors alone
LOGITS_ARRAYS = 3  # logits of the model, their copy for logprobs, and the sampler's sort
FLOAT_BYTES = 4


class AllocationPeak(DispatchMode):
    """Peak bytes of live tensors created while active, on any device.

    Counts outputs of torch operations; temporary memory inside operations and kernels is small and not counted.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes = 0
        self._live = 0

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        given = {tensor.untyped_storage().data_ptr() for tensor in _tensors((args, list(kwargs.values())))}
        result = func(*args, **kwargs)
        for tensor in _tensors(result):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in given:  # else a view of an argument, or the argument itself
                self._add(storage)
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        num_bytes = storage.nbytes()
        self._live += num_bytes
        self.bytes = max(self.bytes, self._live)
        weakref.finalize(storage, self._free, num_bytes)

    def _free(self, num_bytes: int) -> None:
        self._live -= num_bytes


class ForwardPeak:
    """Peak memory of measured forward passes per token, besides weights and KV cache.

    Invariant: an upper bound. A pass allocates a constant plus a part proportional to its tokens, so the peak per
    token of a short pass is no less than that of a long one.
    """

    def __init__(self) -> None:
        self._bytes_per_token = 0

    def measured(self, forward: Forward) -> Forward:
        """Wrap a forward function to record its peak."""

        def run(inputs: StepInputs) -> Tensor:
            with AllocationPeak() as peak:
                hidden = forward(inputs)
            self._bytes_per_token = max(self._bytes_per_token, -(-peak.bytes // len(inputs.input_ids)))
            return hidden

        return run

    @property
    def is_measured(self) -> bool:
        """True once a pass has been measured."""
        return self._bytes_per_token > 0

    def bytes_of_step(self, num_tokens: int, num_logits: int) -> int:
        """Return the bytes of a step with so many tokens and concurrent logits."""
        return self._bytes_per_token * num_tokens + LOGITS_ARRAYS * num_logits * FLOAT_BYTES

    def graph_bytes(self, num_tokens: int) -> int:
        """Return the bytes that recorded passes over at most so many tokens keep."""
        return int(ARENA_SLACK * self._bytes_per_token * num_tokens)


def _tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested lists and tuples."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)


NUM_REQUESTS, CONTEXT = 16, 1024  # requests of the timed decode step, and tokens of each
TEXT = 64  # tokens of the timed step of an encoder
NUM_TIMED = 9  # timed steps, after one that may be recorded; the fastest counts
CACHES_BYTES = (
    96 * 2**20
)  # bytes read before each step to evict weights from CPU caches, as other layers would


def time_layers(
    config: EngineConfig, shard: Shard, cache: KVCacheConfig, own: range, num_layers: int
) -> float:
    """Return the seconds of a step through layers `own` of `num_layers`; through norm and head if `own` is empty.

    `cache` is the whole model's, of any size. All ranks with shards of the layers call this at once.
    """
    stage = Stage.with_layers(own, num_layers)
    model = with_any_weights(config, shard, stage)
    device = make_device(config.device.device)
    with torch.inference_mode(), device.step():
        run = _step(model, stage, config, device, cache)
        others = torch.ones(CACHES_BYTES, dtype=torch.uint8).view(
            torch.int64
        )  # not zeros, whose pages are one page
        seconds = []
        for _ in range(1 + NUM_TIMED):
            others.sum()
            shard.group.all_gather(torch.zeros(1))  # barrier: late ranks are not timed
            started = device.transfers.mark()
            hidden = run()
            if not own:
                _head(model, hidden)
            done = device.transfers.mark()
            done.wait()
            seconds.append(done.seconds_since(started))
    return min(seconds[1:])


def _head(model: CausalLM, hidden: Tensor) -> None:
    """Compute this rank's logits, if it has any."""
    if model.shared_head() is not None:
        model.own_logits(hidden)
    elif model.lm_head is not None:
        model.compute_logits(hidden)


def _step(
    model: CausalLM, stage: Stage, config: EngineConfig, device: Device, cache: KVCacheConfig
) -> Callable[[], Tensor]:
    """Return a function that computes hidden states of the same step each time."""
    if why_not_captured(model) is not None:  # logged when the model is loaded
        config = replace(config, device=replace(config.device, enforce_eager=True))
    requests = _TimedRequests.from_config(config)
    cache = replace(cache, num_blocks=requests.num_blocks(cache)).of_layers(kv_cache_specs(model))
    tensors = allocate_kv_cache(cache, device.transfers.torch_device)
    for tensor in tensors:
        tensor.zero_()
    bind_kv_cache(model, cache, tensors)
    batch = _batch(config, cache)
    layout = requests.laid_out(batch, cache, config.arch.vocab_size)
    body = _body(model, stage, config, layout.num_tokens, device)
    rehearsed = device.pipeline(body, batch, config, is_rehearsal=True)
    rehearsed.forward(rehearsed.gather(layout))  # measures the recorded graph's memory
    pipeline = device.pipeline(body, batch, config)
    inputs = pipeline.gather(layout)
    return lambda: pipeline.forward(inputs)[: layout.num_tokens]


def _body(
    model: CausalLM, stage: Stage, config: EngineConfig, num_tokens: int, device: Device
) -> PipelineModel:
    """Return the layers, with random hidden states as input of a later stage."""
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


class _TimedRequests(NamedTuple):
    """`number` requests of `length` tokens, of which all but `start` are computed now."""

    number: int
    length: int
    start: int

    @staticmethod
    def from_config(config: EngineConfig) -> _TimedRequests:
        """Return one text for an encoder or pooling model, else decoding requests."""
        limits, longest = config.scheduler, config.model.max_model_len
        if config.pooling is not None or config.arch.bidirectional:
            return _TimedRequests(1, min(TEXT, longest, limits.max_num_batched_tokens), 0)
        number = min(NUM_REQUESTS, limits.max_num_seqs, limits.max_num_batched_tokens)
        return _TimedRequests(number, min(CONTEXT, longest), min(CONTEXT, longest) - 1)

    def num_blocks(self, cache: KVCacheConfig) -> int:
        """Return the blocks needed, the null block included."""
        return 1 + self.number * sum(sum(self._have_blocks(group.spec)) for group in cache.groups)

    def laid_out(self, batch: InputBatch, cache: KVCacheConfig, vocab_size: int) -> StepLayout:
        """Add the requests to the batch and return the layout of their step."""
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
        """Return for each table entry whether it has a block. Groups may mix windows, so no window skips any."""
        num = spec.num_blocks(self.length)
        has_states = isinstance(spec, RecurrentStateSpec)
        return [not has_states or spec.needs_block(index, self.start, num) for index in range(num)]


class LayerCosts(NamedTuple):
    """Seconds of a step, by kind of layer."""

    kinds: list[tuple[list[int], float]]
    """(indices of equal layers, seconds of each)."""
    behind: float
    """Seconds of the final norm and the head."""

    def of_layers(self) -> list[float]:
        """Return seconds per layer; the last includes norm and head. The embedding takes next to nothing."""
        seconds = {number: each for numbers, each in self.kinds for number in numbers}
        *others, last = (seconds[number] for number in sorted(seconds))
        return [*others, last + self.behind]

    def __str__(self) -> str:
        layers = ", ".join(f"{len(numbers)} of {each * 1e3:.3g} ms" for numbers, each in self.kinds)
        return f"{layers}, and {self.behind * 1e3:.3g} ms for norm and head"


def layer_costs(whole: CausalLM, shard: Shard) -> LayerCosts:
    """Time the layers of a model without weights; all ranks with shards of them call this at once."""
    layers, specs = stack_of(whole).layers, fit_states(kv_cache_specs(whole))
    cache, num = KVCacheConfig(1, rehearsed_groups(specs), specs), len(layers)

    def time(own: range) -> float:
        return time_layers(whole.config, shard, cache, own, num)

    kinds = []
    for numbers in kinds_of(layers):
        one = min(
            numbers, key=lambda number: number in (0, num - 1)
        )  # not the first or last layer, if possible
        kinds.append((numbers, time(range(one, one + 1))))
    return LayerCosts(kinds, time(range(num, num)))


def why_not_measured(whole: CausalLM) -> str | None:
    """Return why the layers cannot be timed one by one, or None."""
    device = whole.config.device.device
    if device != "cpu":
        return f"layers are timed only on a CPU, and --device is {device}"
    if stack_of(whole).joined():
        return "some layers share keys and values, so they cannot be timed alone"
    return None


def resolve_stage_sizes(config: EngineConfig, shard: Shard, stage: Stage) -> Stage:
    """Return the stage of a rank with the sizes of all stages; all ranks call this at once, before loading.

    Raises:
        ConfigError: the model cannot be partitioned so.
    """
    if stage.of == 1:
        return stage
    asked = config.parallel.stage_sizes
    sizes = asked or _agreed(config, shard, stage)
    first = sum(sizes[: stage.index])
    logger.info(
        "stage %d of %d: layers %d to %d (--pipeline-partition %s)",
        *(stage.index, stage.of, first, first + sizes[stage.index] - 1, ",".join(map(str, sizes))),
    )
    return stage if asked else replace(stage, sizes=sizes)  # configured sizes are checked at partitioning


def _agreed(config: EngineConfig, shard: Shard, stage: Stage) -> tuple[int, ...]:
    """Return the sizes found by rank 0 of the first stage, which sends them to its shards, and each shard to its later
    stages.

    On failure all sizes are 0: rank 0 sends them before it raises, because the others wait for them.
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
        raise ConfigError("the first rank cannot partition the model into stages; see its log")
    return sizes


def _of_first(group: Group, sizes: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(group.all_gather(torch.tensor(sizes))[0].tolist())


def _sizes(config: EngineConfig, shard: Shard, num_stages: int) -> tuple[int, ...]:
    whole = without_weights(config, shard)
    return partition(whole, stack_of(whole), num_stages, _costs(whole, shard))


def _costs(whole: CausalLM, shard: Shard) -> list[int] | None:
    """Return measured costs of the layers; None, with a log line, if they cannot be measured."""
    why_not, started = why_not_measured(whole), time.monotonic()
    if why_not is None:
        try:
            found = layer_costs(whole, shard)
        except RankLostError:
            raise
        except Exception as error:  # a worse partition is better than none
            why_not = f"timing failed: {type(error).__name__}: {error}"
        else:
            logger.info("layer costs: %s, measured in %.2f s", found, time.monotonic() - started)
            return in_units(found.of_layers())
    logger.warning("layer costs: estimated from the bytes that a step reads: %s", why_not)
    return None


def kinds_of(layers: Iterable[nn.Module]) -> list[list[int]]:
    """Group layer numbers by kind, in the order of first occurrence.

    Layers of a kind take the same time: the same modules, with parameters of the same shapes and formats. Invariant:
    kinds are found on a model without weights, from the modules and never from names or numbers.
    """
    kinds: dict[Hashable, list[int]] = {}
    for number, layer in enumerate(layers):
        kinds.setdefault(tuple(map(_traits, *zip(*layer.named_modules(), strict=True))), []).append(number)
    return list(kinds.values())


def _traits(path: str, module: nn.Module) -> Hashable:
    """Return what determines the time of a module in a layer; its cache spec says how much of the cache it reads."""
    params = tuple((name, param.shape, param.dtype) for name, param in module.named_parameters(recurse=False))
    matrix = (type(module.method), module.method.scheme) if isinstance(module, MatrixLayer) else None
    return (
        path,
        type(module),
        params,
        matrix,
        module.kv_cache_spec() if isinstance(module, CacheUser) else None,
    )
