"""One of several pipeline stages: hidden states come from the stage before and go on to the next; what the last one
samples goes back to all others.

Invariant: all stages of a share run the same plans in the same order, so what arrives needs no name. Nobody waits for
whom it sends to; a stage waits for sampled tokens only where a step needs them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from quire.config import EngineConfig
from quire.distributed.group import Group
from quire.kernels import ops
from quire.layers.base import activation_dtype
from quire.models.base import CausalLM
from quire.models.stack import STREAM
from quire.models.stages import Stage
from quire.scheduler.output import NewRequestData
from quire.worker.inputs import StepInputs, StepLayout
from quire.worker.pipeline import LanguageModel, Pipeline
from quire.worker.sampler import Sampled, SamplerOutput


def staged(pipeline: Pipeline, stage: Stage, model: LanguageModel, config: EngineConfig) -> Pipeline:
    """A device's pipeline as that of a stage, of which the model has its part."""
    if stage.of == 1:
        return pipeline
    assert isinstance(model, CausalLM), "others are not cut"
    stack = model.stack()
    assert stack is not None, "others are not cut"
    return StagePipeline(pipeline, stage, stack.stream_size(stack.own.start), activation_dtype(config))


class StagePipeline:
    """A device's pipeline, of one stage.

    Args:
        stream_size: of what the stage before hands on for a token.
    """

    def __init__(self, pipeline: Pipeline, stage: Stage, stream_size: int, dtype: torch.dtype) -> None:
        self._pipeline = pipeline
        self._stage = stage
        self._stream = torch.empty(0, stream_size, dtype=dtype)
        self.reads_host_tokens = pipeline.reads_host_tokens
        self.room = pipeline.room if stage.is_last else None

    def gather(self, layout: StepLayout) -> StepInputs:
        return self._pipeline.gather(layout)

    def forward(self, inputs: StepInputs) -> Tensor:
        stage = self._stage
        if not stage.is_first:
            stream = self._stream.new_empty(len(inputs.input_ids), self._stream.shape[1])
            ops.recv(stream, stage.group, stage.index - 1)
            inputs = replace(inputs, step=replace(inputs.step, intermediate={STREAM: stream}))
        hidden = self._pipeline.forward(inputs)
        if not stage.is_last:
            ops.send(hidden, stage.group, stage.index + 1)
        return hidden

    def keep(self, codes: list[Tensor]) -> None:
        self._pipeline.keep(codes)
        if self._stage.is_last:
            sampled = torch.cat(codes)
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

    def sample(self, inputs: StepInputs, hidden: Tensor) -> list[AwaitedSamples]:
        num_samples = len(inputs.layout.sampling)
        return (
            [AwaitedSamples(torch.empty(num_samples, dtype=torch.int64), self._group)] if num_samples else []
        )
