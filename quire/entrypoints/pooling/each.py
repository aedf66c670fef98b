"""What is pooled of each input of a request, as a whole or in windows.

Invariant: one list of outputs for all inputs goes through the engine, whatever they are cut into.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quire.engine.pooling_inputs import PoolingInputs, TextOptions
from quire.engine.prompt_forms import TokenizedPrompt, parts_of
from quire.entrypoints.openai.protocol.requests import EngineRequest
from quire.entrypoints.pooling.run import Job, Pooled, check_count
from quire.entrypoints.pooling.windows import Windows, is_normalized
from quire.pooling_params import PoolingParams

Inputs = Sequence[str | list[int]]


@dataclass(frozen=True)
class Found:
    """What was pooled of inputs, or of the windows of each."""

    pooled: list[Pooled]
    windows: Windows | None
    is_normalized: bool

    def numbers(self) -> list[NDArray[np.float32]]:
        """Those of each input."""
        if self.windows is None:
            return [one.outputs.data for one in self.pooled]
        return self.windows.joined(self.pooled, normalized=self.is_normalized)


async def embed_each(
    job: Job, inputs: Inputs, options: TextOptions, params: PoolingParams, *, in_windows: bool
) -> Found:
    """What is pooled of each input; with `in_windows`, of one that is too long the mean of its windows.

    Raises:
        QuireError: as `Job.run`, and if options cut what has windows.
    """
    normalized = is_normalized(job.inputs.spec, params.use_activation)
    if not in_windows:
        return Found(await run_each(job, inputs, options, params), None, normalized)
    windows = Windows(job.inputs, options, check_count)
    pooled = await job.run(params, num_chars(inputs), lambda: windows.prompts(inputs))
    return Found(pooled, windows, normalized)


def cuts_by_default(body: EngineRequest, *fields: str, in_windows: bool) -> bool:
    """Whether a request of a service that cuts long texts by itself has them cut: windows take that away, unless one of
    its fields says so, too.
    """
    return not in_windows or bool(body.model_fields_set & {*fields})


async def run_each(job: Job, inputs: Inputs, options: TextOptions, params: PoolingParams) -> list[Pooled]:
    """What is pooled of each input. Raises as `Job.run` does."""
    return await job.run(params, num_chars(inputs), lambda: tokenize_each(job.inputs, inputs, options))


def tokenize_each(pooling: PoolingInputs, inputs: Inputs, options: TextOptions) -> list[TokenizedPrompt]:
    return [pooling.tokenize(parts_of(one), options) for one in inputs]


def num_chars(inputs: Inputs) -> int:
    """Of the texts among them, which take time to be tokenized."""
    return sum(len(one) for one in inputs if isinstance(one, str))
