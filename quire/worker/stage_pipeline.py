# SPDX-License-Identifier: Apache-2.0
"""Pipeline-parallel stage: receives hidden states, sends its own on; the last stage sends sampled tokens to all.

Invariant: all stages of a shard run the same plans in the same order, so messages need no tags. Hidden states go
forward, device to device in the order of their work. Tokens go back, host to host, and a stage waits for them only
where a step needs them. So no two stages wait for each other.
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
from quire.worker.pipeline import LanguageModel, MultiStepDecode, Pipeline
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
    """Return the pipeline that runs this stage's part of the model."""
    make = partial(device.pipeline, batch=batch, config=config, is_rehearsal=is_rehearsal)
    if stage.of == 1:
        return make(model)
    assert isinstance(model, CausalLM), "only a CausalLM is partitioned into stages"
    stack = model.stack()
    assert stack is not None, "only a CausalLM is partitioned into stages"
    shape = (config.scheduler.max_num_batched_tokens, stack.stream_size(stack.own.start))
    stream = torch.zeros(
        (0, 0) if stage.is_first else shape,
        dtype=activation_dtype(config),
        device=device.transfers.torch_device,
    )
    body = model if stage.is_first else LaterLayers(model, stream)
    return StagePipeline(make(body, samples_here=stage.is_last), stage, stream)


class LaterLayers(nn.Module):
    """Layers that start from a stream [tokens, S] at a fixed address, for graphs and recorded graphs."""

    def __init__(self, model: CausalLM, stream: Tensor) -> None:
        super().__init__()
        self.model = model
        self._stream = stream

    def forward(self, inputs: Tensor, positions: Tensor, step: StepContext) -> Tensor:
        stream = self._stream[: len(inputs)]
        hidden: Tensor = self.model.forward(inputs, positions, replace(step, intermediate={STREAM: stream}))
        return hidden


class StagePipeline:
    """Pipeline of one stage, around the device's pipeline.

    Args:
        stream: buffer of the hidden states received from the previous stage; empty in the first.
    """

    rounds: MultiStepDecode | None = None

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


class ReceivedSamples(NamedTuple):
    """`Sampled` received from the last stage: codes only."""

    codes: Tensor
    group: Group

    def moved(self, move: Callable[[Tensor], Tensor]) -> ReceivedSamples:
        """Return self: the codes arrive on the host."""
        return self

    @torch.inference_mode()
    def read(self) -> SamplerOutput:
        """Wait for the last stage and return its samples."""
        ops.recv(self.codes, self.group, self.group.size - 1)
        return Sampled.of_codes(self.codes).read()


class ReceivedSampling:
    """`Sampling` of a stage before the last, which receives the tokens."""

    def __init__(self, stage: Stage) -> None:
        self._group = stage.group

    def add_request(self, row: int, request: NewRequestData) -> None:
        """Do nothing."""

    def remove_request(self, row: int) -> None:
        """Do nothing."""

    def set_num_logprobs(self, row: int, num_logprobs: int) -> None:
        """Do nothing."""

    def reads_tokens(self, inputs: StepInputs) -> bool:
        return False

    @property
    def replays(self) -> bool:
        return False

    def sample(self, inputs: StepInputs, hidden: Tensor) -> list[ReceivedSamples]:
        num_samples = len(inputs.layout.sampling)
        return (
            [ReceivedSamples(torch.empty(num_samples, dtype=torch.int64), self._group)] if num_samples else []
        )
