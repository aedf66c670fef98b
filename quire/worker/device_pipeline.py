"""How an asynchronous device makes a step's inputs and runs the model: rows on the device, decode steps by graphs.

Invariant: nothing here waits for the device.
"""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from quire.config import EngineConfig
from quire.kernels.triton import compiles
from quire.worker.device_batch import DeviceBatch
from quire.worker.devices import Transfers
from quire.worker.graphs import Capturer, DecodeGraphs, default_sizes
from quire.worker.input_batch import InputBatch
from quire.worker.inputs import StepInputs, StepLayout
from quire.worker.pipeline import LanguageModel

logger = logging.getLogger(__name__)


class DevicePipeline:
    """See `Pipeline`.

    Args:
        capturer: records graphs; None: every step is launched kernel by kernel.
    """

    reads_host_tokens = False

    def __init__(
        self,
        model: LanguageModel,
        batch: InputBatch,
        config: EngineConfig,
        transfers: Transfers,
        capturer: Capturer | None,
    ) -> None:
        self._model = model
        self._rows = DeviceBatch(batch, config.scheduler.max_num_batched_tokens, transfers)
        self._captures_at_start = config.device.cuda_graph_capture == "start"
        sizes = _sizes(config)
        self._graphs = (
            DecodeGraphs(sizes, self._run_decode, capturer, adapts=config.lora.enable_lora)
            if capturer and sizes
            else None
        )

    def gather(self, layout: StepLayout) -> StepInputs:
        fits_graph = self._graphs is not None and layout.is_one_token_each
        size = self._graphs.size_for(len(layout.rows)) if self._graphs and fits_graph else 0
        return self._rows.gather(layout, size)

    def forward(self, inputs: StepInputs) -> Tensor:
        if inputs.graph_size and self._graphs is not None:
            return self._graphs.replay(inputs.graph_size, inputs.step.adapter_rows is not None)
        return self._model.forward(inputs.input_ids, inputs.positions, inputs.step)

    def keep(self, codes: list[Tensor]) -> None:
        self._rows.keep(codes[0] if len(codes) == 1 else torch.cat(codes))

    def prepare(self) -> None:
        """Capture all graphs, unless each is to wait until it is needed; no kernel is to be compiled from then on."""
        if self._graphs is not None and self._captures_at_start:
            self._rows.blank(self._graphs.largest)
            self._graphs.capture_all()
        compiles.watch(_say_late)

    def _run_decode(self, num_requests: int, adapts: bool) -> Tensor:
        return self._model.forward(*self._rows.decode_inputs(num_requests, adapts=adapts))


def _say_late(kernel: str) -> None:
    logger.warning("the kernel %s was not ready when a step wanted it, and had to be compiled", kernel)


def _sizes(config: EngineConfig) -> tuple[int, ...]:
    """Sizes that are asked for and can occur."""
    most = config.scheduler.max_num_seqs
    asked = config.device.cudagraph_capture_sizes or default_sizes(most)
    return () if config.device.enforce_eager else tuple(size for size in asked if size <= most)
