"""One of several pipeline stages: hidden states come from the stage before and go on to the next; what the last one
samples goes back to all others.

Invariant: all stages of a share run the same plans in the same order, so what arrives needs no name. Hidden states go
forward, between devices in the order of their work, and tokens go back from host to host; a stage waits for these only
where a step needs them. So nobody waits for a stage that waits for it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from quire.config import EngineConfig
from quire.distributed.group import Group
from quire.kernels import ops
from quire.layers.base import activation_dtype
from quire.layers.step import StepContext
from quire.models.base import CausalLM
from quire.models.stack import STREAM
from quire.models.stages import Stage
from quire.scheduler.output import NewRequestData
from quire.worker.devices import Device
from quire.worker.input_batch import InputBatch
from quire.worker.inputs import StepInputs, StepLayout
from quire.worker.pipeline import LanguageModel, Pipeline, Rounds
from quire.worker.sampler import Sampled, SamplerOutput


def pipeline_of(
    stage: Stage,
    model: LanguageModel,
    batch: InputBatch,
    config: EngineConfig,
    device: Device,
    *,
    is_rehearsal: bool,
) -> Pipeline:
    """How a device runs a stage, of which the model has its part."""
    make = partial(device.pipeline, batch=batch, config=config, is_rehearsal=is_rehearsal)
    if stage.of == 1:
        return make(model)
    assert isinstance(model, CausalLM), "others are not cut"
    stack = model.stack()
    assert stack is not None, "others are not cut"
    shape = (config.scheduler.max_num_batched_tokens, stack.stream_size(stack.own.start))
    stream = torch.zeros(
        (0, 0) if stage.is_first else shape,
        dtype=activation_dtype(config),
        device=device.transfers.torch_device,
    )
    body = model if stage.is_first else LaterLayers(model, stream)
    return StagePipeline(make(body, samples_here=stage.is_last), stage, stream)


class LaterLayers(nn.Module):
    """Layers that go on from a stream [tokens, S], which stands where graphs and tapes may read it."""

    def __init__(self, model: CausalLM, stream: Tensor) -> None:
        super().__init__()
        self.model = model
        self._stream = stream

    def forward(self, inputs: Tensor, positions: Tensor, step: StepContext) -> Tensor:
        """See `Body`."""
        stream = self._stream[: len(inputs)]
        hidden: Tensor = self.model.forward(inputs, positions, replace(step, intermediate={STREAM: stream}))
        return hidden


class StagePipeline:
    """A device's pipeline, of one stage.

    Args:
        stream: where its layers find what the stage before hands on; empty in the first.
    """

    rounds: Rounds | None = None

    def __init__(self, pipeline: Pipeline, stage: Stage, stream: Tensor) -> None:
        self._pipeline = pipeline
        self._stage = stage
        self._stream = stream
        self.reads_host_tokens = pipeline.reads_host_tokens
        self.room = pipeline.room if stage.is_last else None

    def gather(self, layout: StepLayout) -> StepInputs:
        return self._pipeline.gather(layout)

    def forward(self, inputs: StepInputs) -> Tensor:
        stage, num_tokens = self._stage, inputs.layout.num_tokens
        if not stage.is_first:
            ops.recv(self._stream[:num_tokens], stage.group, stage.index - 1)
        hidden = self._pipeline.forward(inputs)
        if not stage.is_last:
            ops.send(hidden[:num_tokens], stage.group, stage.index + 1)
        return hidden

    def keep(self, codes: list[Tensor]) -> None:
        self._pipeline.keep(codes)
        if self._stage.is_last:
            sampled = torch.cat(codes).cpu()
            for other in range(self._stage.index):
                ops.send(sampled, self._stage.group, other)

    def prepare(self) -> None:
        self._pipeline.prepare()


class AwaitedSamples(NamedTuple):
    """`Sampled` where the last stage samples: codes only, once they are read."""

    codes: Tensor
    group: Group

    def moved(self, move: Callable[[Tensor], Tensor]) -> AwaitedSamples:
        """They come to the host."""
        return self

    @torch.inference_mode()
    def read(self) -> SamplerOutput:
        """Wait for the last stage."""
        ops.recv(self.codes, self.group, self.group.size - 1)
        return Sampled.of_codes(self.codes).read()


class SampledElsewhere:
    """In a stage before the last, in the place of `RowSampling`."""

    def __init__(self, stage: Stage) -> None:
        self._group = stage.group

    def add_request(self, row: int, request: NewRequestData) -> None:
        """Nothing has to be known of it."""

    def remove_request(self, row: int) -> None:
        """Nothing is."""

    def reads_tokens(self, inputs: StepInputs) -> bool:
        return False

    @property
    def replays(self) -> bool:
        return False

    def sample(self, inputs: StepInputs, hidden: Tensor) -> list[AwaitedSamples]:
        num_samples = len(inputs.layout.sampling)
        return (
            [AwaitedSamples(torch.empty(num_samples, dtype=torch.int64), self._group)] if num_samples else []
        )
