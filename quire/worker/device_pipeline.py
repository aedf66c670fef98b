"""How an asynchronous device makes a step's inputs and runs the model: rows on the device, steps by graphs.

Invariant: nothing here waits for the device.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable
from typing import NamedTuple

import torch
from torch import Tensor

from quire.config import EngineConfig
from quire.kernels.triton import compiles
from quire.worker.device_batch import DeviceBatch
from quire.worker.devices import Transfers
from quire.worker.graph_shapes import GraphShape, ShapeTable, shapes_of
from quire.worker.graphs import Capturer, GraphRoom, Graphs, row_variant
from quire.worker.input_batch import InputBatch
from quire.worker.inputs import StepInputs, StepLayout
from quire.worker.pipeline import Body, Rounds

logger = logging.getLogger(__name__)

_LONG_QUERIES = 128
"""From so many on, attention has the same tiles for all lengths; below, its group of heads decides from which on."""


class _Pass(NamedTuple):
    """What forward passes of one graph have in common.

    Where adapters are served there are two of each shape: one adds what rows have of them, and steps without any are
    spared that.
    """

    shape: GraphShape
    adapts: bool

    @property
    def variant(self) -> Hashable:
        shape = self.shape
        longest = min(shape.max_query_len, _LONG_QUERIES)
        return row_variant(shape.num_requests), row_variant(shape.num_tokens), longest, self.adapts


class DevicePipeline:
    """See `Pipeline`.

    Args:
        capturer: records graphs; None: every step is launched kernel by kernel.
        is_rehearsal: whether `prepare` is to make graphs only to see what they take.
        samples_here: whether the device has the tokens first.
    """

    rounds: Rounds | None = None

    def __init__(
        self,
        model: Body,
        batch: InputBatch,
        config: EngineConfig,
        transfers: Transfers,
        capturer: Capturer | None,
        *,
        is_rehearsal: bool = False,
        samples_here: bool = True,
    ) -> None:
        self._model = model
        self.reads_host_tokens = not samples_here
        self._rows = DeviceBatch(
            batch, config.scheduler.max_num_batched_tokens, transfers, samples_here=samples_here
        )
        self._captures_at_start = config.device.cuda_graph_capture == "start"
        self._is_rehearsal = is_rehearsal
        self._adapts = (True, False) if config.lora.enable_lora else (False,)
        self._shapes = shapes_of(config) if capturer is not None else ()
        self._table = ShapeTable(self._shapes)
        self._gathered: StepInputs | None = None
        self._room: GraphRoom | None = None
        self._graphs: Graphs[_Pass] | None = None
        if capturer is not None and self._shapes:
            most = max(shape.num_tokens for shape in self._shapes)
            self._room = GraphRoom(capturer, most, replays=not is_rehearsal)
            self._graphs = Graphs(self._room, self._launch, lambda key: key.variant, self._room.hidden)
            self._room.add(self._capture_all)

    @property
    def room(self) -> GraphRoom | None:
        """See `Pipeline`."""
        return self._room

    def gather(self, layout: StepLayout) -> StepInputs:
        self._gathered = self._rows.gather(layout, self._captured_shape(layout))
        return self._gathered

    def forward(self, inputs: StepInputs) -> Tensor:
        """By a graph if that is for these inputs: they are those of another pipeline, or something in their place."""
        if inputs.graph is None or inputs is not self._gathered or self._graphs is None:
            return self._model.forward(inputs.input_ids, inputs.positions, inputs.step)
        return self._graphs.replay(_Pass(inputs.graph, inputs.step.adapter_rows is not None))

    def keep(self, codes: list[Tensor]) -> None:
        if not self.reads_host_tokens:
            self._rows.keep(codes[0] if len(codes) == 1 else torch.cat(codes))

    def prepare(self) -> None:
        """Capture all graphs, unless each is to wait until it is needed; no kernel is to be compiled from then on.

        Of a rehearsal, where graphs are to wait, the largest of each kind: what they share is known by it.
        """
        if self._room is not None and (self._captures_at_start or self._is_rehearsal):
            self._room.capture_all(only_largest=not self._captures_at_start)
        if not self._is_rehearsal:
            compiles.watch(_say_late)

    def _captured_shape(self, layout: StepLayout) -> GraphShape | None:
        """The shape of the graph for a step, which is captured now if it is not yet; None: there is none."""
        if self._graphs is None or self._is_rehearsal or self._rows.has_token_types(layout):
            return None
        shape = self._table.fitting(len(layout.rows), layout.num_tokens, layout.max_query_len)
        if shape is not None:
            self._capture(_Pass(shape, self._rows.has_adapters(layout)))
        return shape

    def _capture_all(self, only_largest: bool) -> int:
        assert self._graphs is not None
        for shape in reversed(self._shapes):
            for adapts in self._adapts:
                self._capture(_Pass(shape, adapts))
            if only_largest:
                break
        return len(self._graphs)

    def _capture(self, key: _Pass) -> None:
        assert self._graphs is not None
        if key not in self._graphs:
            self._rows.blank(key.shape)
            self._graphs.capture(key)

    def _launch(self, key: _Pass) -> Tensor:
        return self._model.forward(*self._rows.fixed_inputs(key.shape, adapts=key.adapts))


def _say_late(kernel: str) -> None:
    logger.warning("the kernel %s was not ready when a step wanted it, and had to be compiled", kernel)
