# SPDX-License-Identifier: Apache-2.0
"""GPUs through torch: `cuda` (NVIDIA and AMD) and `xpu` (Intel); rows on the device, steps by graphs.

Invariant: all work goes to one stream in order. Nothing here waits for it except `Mark.wait` and startup code. Host
memory of a copy in flight is pinned, and torch's pinned allocator does not reuse it before the copy is done.
"""

from __future__ import annotations

import gc
import logging
import subprocess
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.config import EngineConfig
from quire.errors import ConfigError, StartupError
from quire.kernels.attention_metadata import GroupMetadata
from quire.kernels.triton import batch as kernels
from quire.kernels.triton.batch import StagedStep, copy_blocks
from quire.kernels.triton.launch import watch_compiles
from quire.layers.kv_cache import why_not_captured
from quire.layers.step import StepContext
from quire.worker.block_copies import Moves
from quire.worker.graphs import (
    CapturingDevice,
    GraphCache,
    GraphMemory,
    GraphShape,
    ShapeTable,
    row_variant,
    shapes_of,
)
from quire.worker.input_batch import BlockTable, InputBatch
from quire.worker.inputs import (
    StepInputs,
    StepLayout,
    gather_adapter_slots,
    gather_media,
    gather_token_types,
    group_metadata,
    has_token_types,
)
from quire.worker.pipeline import MultiStepDecode, Pipeline, PipelineModel
from quire.worker.transfers import Mark, Transfers

logger = logging.getLogger(__name__)


class _Segments(NamedTuple):
    """Segments of host rows that the device does not have yet."""

    rows: NDArray[np.int64]
    starts: NDArray[np.int64]
    ends: NDArray[np.int64]
    source: NDArray[np.int32]
    """Host rows."""

    def numbers(self, first_value: int) -> list[NDArray[np.int32]]:
        """Return the format of `kernels.write_segments`: four numbers per segment, then the values, from `first_value`
        on.
        """
        lengths = self.ends - self.starts
        begins = first_value + lengths.cumsum() - lengths
        places = np.concatenate((self.rows, self.starts, begins, lengths)).astype(np.int32)
        pieces = zip(self.rows.tolist(), self.starts.tolist(), self.ends.tolist(), strict=True)
        return [places, *(self.source[row, start:end] for row, start, end in pieces)]

    @property
    def size(self) -> int:
        return 4 * len(self.rows) + int((self.ends - self.starts).sum())

    @property
    def longest(self) -> int:
        return int((self.ends - self.starts).max(initial=0))


class _CacheGroup:
    """KV cache group: block tables by row, and the tables and slots [tokens] of the step."""

    def __init__(self, table: BlockTable, slots: Tensor) -> None:
        self.table = table
        self.slots = slots
        self.rows = torch.zeros(table.block_ids.shape, dtype=torch.int32, device=slots.device)
        self.tables = torch.zeros_like(self.rows)
        self._num_blocks: NDArray[np.int64] = np.zeros(len(table.block_ids), dtype=np.int64)

    def new_segments(self, rows: NDArray[np.int64], is_new: NDArray[np.bool_]) -> _Segments:
        """Return the blocks added to these rows since their last step; all blocks of a new row."""
        known = np.where(is_new, 0, self._num_blocks[rows])
        now = self.table.num_blocks[rows]
        self._num_blocks[rows] = now
        grown = now > known
        return _Segments(rows[grown], known[grown], now[grown], self.table.block_ids)

    def metadata(
        self,
        starts: Tensor,
        lengths: Tensor,
        num_requests: int,
        num_tokens: int,
        max_query_len: int,
        longest: int,
        kept_lens: Tensor,
    ) -> GroupMetadata:
        return group_metadata(
            self.table,
            query_start_loc=starts[: num_requests + 1],
            seq_lens=lengths[:num_requests],
            block_tables=self.tables[:num_requests],
            slots=self.slots[:num_tokens],
            max_query_len=max_query_len,
            max_seq_len=longest,
            kept_lens=kept_lens[:num_requests],
        )


class DeviceBatch:
    """Device copy of an `InputBatch`, and the inputs of a step made from it.

    Invariant: the device's rows differ from the host's only by what the next step uploads, and by tokens sampled on
    the device. A step's uploads are one block of int32 numbers in one copy. Tensors that a step reads keep their
    addresses, so graphs may read them; work runs in order, so they are read before they change.

    Args:
        batch: the host's rows; if another device batch has their tokens, this one reads them there.
        max_num_tokens: most tokens of a step, padding included.
        samples_here: True if sampled tokens come by `keep`; else they are in the host's rows before a step reads them.
    """

    def __init__(
        self, batch: InputBatch, max_num_tokens: int, transfers: Transfers, *, samples_here: bool = True
    ) -> None:
        on = transfers.torch_device
        self._batch = batch
        self._transfers = transfers
        self._samples_here = samples_here
        self._max_seq_len = batch.max_model_len
        self._has_tokens = batch.device_tokens is None
        if batch.device_tokens is None:
            batch.device_tokens = torch.zeros(batch.token_ids.shape, dtype=torch.int32, device=on)
        self._tokens = batch.device_tokens
        # Ids, positions and slots of each group in one tensor: one launch writes padding. Rows are 16-byte aligned.
        places = (2 + len(batch.block_tables), max_num_tokens + max_num_tokens % 2)
        self._of_tokens = torch.zeros(places, dtype=torch.int64, device=on)
        self._input_ids, self._positions, *slots = self._of_tokens.unbind()
        self._padding = torch.tensor([[0], [0], *([-1] for _ in slots)], device=on)
        self._groups = [_CacheGroup(*pair) for pair in zip(batch.block_tables, slots, strict=True)]
        self._generations: NDArray[np.int64] = np.full(batch.max_num_seqs, -1, dtype=np.int64)
        self._starts = torch.zeros(batch.max_num_seqs + 1, dtype=torch.int32, device=on)
        self._one_each = torch.arange(batch.max_num_seqs + 1, dtype=torch.int32, device=on)
        self._lengths = torch.zeros(batch.max_num_seqs, dtype=torch.int32, device=on)
        self._kept = torch.zeros_like(self._lengths)
        """Tokens after which requests leave their states, for state layers: all but drafts."""
        self._adapter_rows = torch.full((max_num_tokens,), -1, dtype=torch.int32, device=on)
        self._step = StagedStep(torch.zeros(1, dtype=torch.int32, device=on), 0, 0)

    def gather(self, layout: StepLayout, graph: GraphShape | None = None) -> StepInputs:
        """Upload what is new and make the inputs of a step, padded to the shape of `graph` if given."""
        slots = self._padded_slots(layout, graph)
        num_padded = len(layout.rows) if graph is None else graph.num_requests
        # Decode kernels recognize padding by its index; elsewhere padding is requests without tokens.
        num_requests = len(layout.rows) if graph is None or graph.is_decode else num_padded
        self._step, writes = self._upload(layout, num_requests, slots)
        adapts, num_sampling = slots is not None, len(layout.sampling)
        if slots is not None:
            self._adapter_rows[: len(slots)].copy_(self._step.numbers[-len(slots) :])
        for target, first_segment, segments in writes:
            kernels.write_segments(
                target, self._step.numbers, first_segment, len(segments.rows), segments.longest
            )
        self._prepare(num_padded, layout.max_query_len, layout.max_seq_len)
        self._add_deltas(layout)
        self._set_kept_lengths(layout, num_padded)
        first = 3 * num_requests + 1 + num_sampling
        logits_indices = self._step.numbers[first : first + num_sampling]
        if graph is not None:
            if not graph.is_decode:
                self._make_padding(layout.num_tokens, graph.num_tokens)
            ids, positions, step = self.fixed_inputs(graph, adapts=adapts)
            return StepInputs(layout, ids, positions, logits_indices, step, graph)
        ids, positions = self._input_ids[: layout.num_tokens], self._positions[: layout.num_tokens]
        shapes = (num_requests, layout.num_tokens, layout.max_query_len, layout.max_seq_len)
        types = gather_token_types(self._batch, layout)
        token_types = None if types is None else self._transfers.upload(types)
        step = self._context(*shapes, adapts=adapts, token_types=token_types)
        media = gather_media(self._batch, layout)
        if media is not None:
            step = media.moved(self._transfers.upload).added_to(step)
        return StepInputs(layout, ids, positions, logits_indices, step)

    def fixed_inputs(self, shape: GraphShape, *, adapts: bool = False) -> tuple[Tensor, Tensor, StepContext]:
        """Return ids, positions and context of any step of a shape, at fixed addresses.

        They do not depend on the step, so launches with them can be captured.
        """
        step = self._context(*shape, self._max_seq_len, adapts=adapts)
        return self._input_ids[: shape.num_tokens], self._positions[: shape.num_tokens], step

    def blank(self, shape: GraphShape) -> None:
        """Fill a shape with padding."""
        starts = self._starts[: shape.num_requests + 1]
        starts.zero_()
        if shape.is_decode:
            starts.copy_(self._one_each[: len(starts)])
        self._lengths[: shape.num_requests].zero_()
        self._kept[: shape.num_requests].zero_()
        self._adapter_rows[: shape.num_tokens].fill_(-1)
        self._make_padding(0, shape.num_tokens)

    def is_unlike_graphs(self, layout: StepLayout) -> bool:
        """Return whether a step has token types or media, which no graph reads."""
        media = self._batch.media
        return has_token_types(self._batch, layout) or (media is not None and media.are_in(layout))

    def has_adapters(self, layout: StepLayout) -> bool:
        """Return whether a token of the step has an adapter."""
        return gather_adapter_slots(self._batch, layout) is not None

    def keep(self, codes: Tensor) -> None:
        """Write the samples of the last step to the rows, for the next step."""
        kernels.keep_sampled(self._tokens, codes, self._step)

    def _add_deltas(self, layout: StepLayout) -> None:
        """Add to positions what separates them from those in the cache, for requests with media."""
        media = self._batch.media
        if media is None or not media.deltas[layout.rows].any():
            return
        deltas = media.deltas[layout.rows].repeat(layout.ends - layout.starts)
        self._positions[: len(deltas)].add_(self._transfers.upload(torch.from_numpy(deltas)))

    def _set_kept_lengths(self, layout: StepLayout, num_padded: int) -> None:
        """Exclude drafts from what state layers keep."""
        if any(group.table.has_states for group in self._groups):
            self._kept[:num_padded].copy_(self._lengths[:num_padded])
            if layout.num_drafts is not None:
                num_drafts = torch.from_numpy(layout.num_drafts.astype(np.int32))
                self._kept[: len(num_drafts)].sub_(self._transfers.upload(num_drafts))

    def _make_padding(self, first: int, end: int) -> None:
        """Turn tokens from `first` to `end` into padding."""
        if first < end:
            self._of_tokens[:, first:end].copy_(self._padding)

    def _padded_slots(self, layout: StepLayout, graph: GraphShape | None) -> NDArray[np.int32] | None:
        """Return adapter slots of tokens and padding (-1); None: no token has an adapter."""
        slots = gather_adapter_slots(self._batch, layout)
        if slots is None or graph is None:
            return slots
        return np.pad(slots, (0, graph.num_tokens - layout.num_tokens), constant_values=-1)

    def _upload(
        self, layout: StepLayout, num_requests: int, adapter_slots: NDArray[np.int32] | None
    ) -> tuple[StagedStep, list[tuple[Tensor, int, _Segments]]]:
        """Upload the step, padded to `num_requests`, and the adapter slots, if any, as the last numbers."""
        rows, sampling = layout.rows, layout.sampling
        none = np.zeros(num_requests - len(rows), dtype=np.int64)
        parts: list[NDArray[np.generic]] = [rows, none, layout.starts, none]
        parts += [layout.query_start_loc, none + layout.num_tokens, sampling, layout.logits_indices]
        is_new = self._generations[rows] != self._batch.generations[rows]
        self._generations[rows] = self._batch.generations[rows]
        pieces = [(self._tokens, self._new_tokens(layout, is_new))]
        pieces += [(group.rows, group.new_segments(rows, is_new)) for group in self._groups]
        sizes = [sum(map(len, parts)), *(segments.size for _, segments in pieces)]
        writes = []
        for (target, segments), first in zip(pieces, accumulate(sizes), strict=False):
            parts += segments.numbers(first + 4 * len(segments.rows))
            writes.append((target, first, segments))
        if adapter_slots is not None:
            parts.append(adapter_slots)
        numbers = np.concatenate(parts).astype(np.int32, copy=False)
        return StagedStep(
            self._transfers.upload(torch.from_numpy(numbers)), num_requests, len(sampling)
        ), writes

    def _new_tokens(self, layout: StepLayout, is_new: NDArray[np.bool_]) -> _Segments:
        """Return the tokens to upload: new rows, drafts, and tokens of the step sampled elsewhere.

        Nothing if another device batch uploads them.
        """
        known = self._batch.num_tokens[layout.rows]
        starts = np.where(is_new, 0, known if self._samples_here else np.minimum(layout.starts, known))
        ends = known if layout.num_drafts is None else known + layout.num_drafts
        has_some = (ends > starts) & self._has_tokens
        return _Segments(layout.rows[has_some], starts[has_some], ends[has_some], self._batch.token_ids)

    def _prepare(self, num_padded: int, max_query_len: int, max_seq_len: int) -> None:
        tokens = (self._input_ids, self._positions, self._starts, self._lengths)
        kernels.prepare_tokens(*tokens, self._step, self._tokens, num_padded, max_query_len)
        for group in self._groups:
            kernels.prepare_blocks(
                group.slots,
                group.tables,
                self._step,
                group.rows,
                group.table.block_size,
                num_padded,
                max_query_len,
                max_seq_len,
            )

    def _context(
        self,
        num_requests: int,
        num_tokens: int,
        max_query_len: int,
        longest: int,
        *,
        adapts: bool,
        token_types: Tensor | None = None,
    ) -> StepContext:
        shapes = (num_requests, num_tokens, max_query_len, longest)
        groups = tuple(
            group.metadata(self._starts, self._lengths, *shapes, self._kept) for group in self._groups
        )
        adapter_rows = self._adapter_rows[:num_tokens] if adapts else None
        return StepContext(groups, adapter_rows, token_types=token_types)


_LONG_QUERIES = 128  # from this query length on, attention uses the same tiles for any group of heads


class _Pass(NamedTuple):
    """Key of a forward graph.

    With adapters there are two per shape, so that steps without adapters skip their kernels.
    """

    shape: GraphShape
    adapts: bool

    @property
    def variant(self) -> Hashable:
        shape = self.shape
        longest = min(shape.max_query_len, _LONG_QUERIES)
        return row_variant(shape.num_requests), row_variant(shape.num_tokens), longest, self.adapts


class DevicePipeline:
    """`Pipeline` of an asynchronous device; nothing here waits for it.

    Args:
        capturer: captures graphs; None: every step is launched kernel by kernel.
        is_rehearsal: True if `prepare` captures graphs only to measure their memory.
        samples_here: True if tokens are sampled on this device.
    """

    rounds: MultiStepDecode | None = None

    def __init__(
        self,
        model: PipelineModel,
        batch: InputBatch,
        config: EngineConfig,
        transfers: Transfers,
        capturer: CapturingDevice | None,
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
        self._adapts = (True, False) if config.serves_adapters else (False,)
        self._shapes = shapes_of(config) if capturer is not None else ()
        self._table = ShapeTable(self._shapes)
        self._gathered: StepInputs | None = None
        self._room: GraphMemory | None = None
        self._graphs: GraphCache[_Pass] | None = None
        if capturer is not None and self._shapes:
            most = max(shape.num_tokens for shape in self._shapes)
            self._room = GraphMemory(capturer, most, replays=not is_rehearsal)
            self._graphs = GraphCache(self._room, self._launch, lambda key: key.variant, self._room.hidden)
            self._room.add(self._capture_all)

    @property
    def room(self) -> GraphMemory | None:
        """See `Pipeline`."""
        return self._room

    def gather(self, layout: StepLayout) -> StepInputs:
        self._gathered = self._rows.gather(layout, self._captured_shape(layout))
        return self._gathered

    def forward(self, inputs: StepInputs) -> Tensor:
        """Replay the graph of these inputs, or run eagerly if they are from elsewhere or have no graph."""
        if inputs.graph is None or inputs is not self._gathered or self._graphs is None:
            return self._model.forward(inputs.input_ids, inputs.positions, inputs.step)
        return self._graphs.replay(_Pass(inputs.graph, inputs.step.adapter_rows is not None))

    def keep(self, codes: list[Tensor]) -> None:
        if not self.reads_host_tokens:
            self._rows.keep(codes[0] if len(codes) == 1 else torch.cat(codes))

    def prepare(self) -> None:
        """Capture all graphs, unless they are captured on demand; later kernel compilations are logged.

        A rehearsal of on-demand capture captures the largest graph of each kind, which determines the shared memory.
        """
        if self._room is not None and (self._captures_at_start or self._is_rehearsal):
            self._room.capture_all(only_largest=not self._captures_at_start)
        if not self._is_rehearsal:
            watch_compiles(_warn_late_compile)

    def _captured_shape(self, layout: StepLayout) -> GraphShape | None:
        """Return the shape of the step's graph, captured now if needed; None: the step runs eagerly."""
        if self._graphs is None or self._is_rehearsal or self._rows.is_unlike_graphs(layout):
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


def _warn_late_compile(kernel: str) -> None:
    logger.warning("kernel %s was compiled during a step; it was not covered by the warm-up", kernel)


MIB = 2**20
_UNLIMITED = 1 << 40
LOGITS_ELEMENTS = 1 << 26  # 256 MiB of float32: 512 rows of a vocabulary of 128k


class GpuMark:
    """Event of the stream."""

    def __init__(self, event: Any) -> None:
        self._event = event
        event.record()

    def wait(self) -> None:
        self._event.synchronize()

    def seconds_since(self, earlier: Mark) -> float:
        assert isinstance(earlier, GpuMark), "marks must be of one device"
        milliseconds: float = earlier._event.elapsed_time(self._event)
        return milliseconds / 1000


class GpuMemory:
    """Memory of one device, as torch's device module counts it."""

    warm_up_tokens = _UNLIMITED
    warm_up_seqs = _UNLIMITED

    def __init__(self, module: Any) -> None:
        self._module = module
        self._rehearsed_bytes = 0

    @contextmanager
    def rehearsal(self) -> Iterator[None]:
        self._module.empty_cache()
        self._module.reset_peak_memory_stats()
        before, beside = self._module.memory_reserved(), self._bytes_beside()
        try:
            yield
        except torch.OutOfMemoryError as error:
            raise StartupError(f"not enough memory on the device for the largest step: {error}") from error
        self._module.synchronize()
        self._rehearsed_bytes += self._module.max_memory_reserved() - before
        self._rehearsed_bytes += max(self._bytes_beside() - beside, 0)

    def _bytes_beside(self) -> int:
        """Return bytes in use outside torch's allocator: graphs, kernel code and other processes."""
        free, total = self._module.mem_get_info()
        in_use: int = total - free
        return in_use - int(self._module.memory_reserved())

    def usable_bytes(self, config: EngineConfig) -> tuple[int, str]:
        share = config.cache.memory_share
        gc.collect()  # a rehearsed runner and its graphs form a reference cycle
        self._module.empty_cache()
        free, total = self._module.mem_get_info()
        used, rehearsed = total - free, self._rehearsed_bytes
        reason = (
            f"{share:.0%} of the device's {total / MIB:.0f} MiB, less {used / MIB:.0f} MiB in use after loading and "
            f"{rehearsed / MIB:.0f} MiB for the largest steps"
        )
        return max(int(share * total) - used - rehearsed, 0), reason

    def unasked_bytes(self, config: EngineConfig) -> int | None:
        """Return None: the KV cache may take all usable memory of a GPU."""
        return None

    def give_back(self) -> None:
        self._module.empty_cache()

    def discard(self, tensors: Sequence[Tensor]) -> bool:
        return False


class GpuTransfers:
    """Transfers through pinned memory, on the single stream."""

    def __init__(self, torch_device: torch.device, module: Any) -> None:
        self.torch_device = torch_device
        self._module = module

    def upload(self, tensor: Tensor) -> Tensor:
        return tensor.pin_memory().to(self.torch_device, non_blocking=True)

    def download(self, tensor: Tensor) -> Tensor:
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return host.copy_(tensor, non_blocking=True)

    def mark(self) -> Mark:
        return GpuMark(self._module.Event(enable_timing=True))

    def host_memory(self, shape: tuple[int, ...]) -> Tensor:
        return torch.empty(shape, dtype=torch.uint8, pin_memory=True)

    def copy_blocks(self, sources: Sequence[Tensor], targets: Sequence[Tensor], moves: Moves) -> None:
        """Copy by a kernel that accesses pinned host memory directly, so nothing waits."""
        copy_by_kernel(sources, targets, self.upload(torch.tensor(moves)))


class GpuDevice:
    """GPU driven by torch's device module of its type."""

    is_asynchronous = True
    parks_weights = True
    compiles_kernels = True
    logits_elements = LOGITS_ELEMENTS

    def __init__(self, device_type: str) -> None:
        self._type = device_type
        self._torch_device = torch.device(device_type, 0)
        self._module: Any = torch.get_device_module(device_type)
        self.memory = GpuMemory(self._module)
        self.transfers = GpuTransfers(self._torch_device, self._module)

    def start(self, config: EngineConfig) -> None:
        if not self._module.is_available():
            raise ConfigError(
                f"--device {self._type}: torch {torch.__version__} finds no such device; use --device cpu, or check "
                f"the driver and install a build of torch for {self._type} (https://pytorch.org/get-started/locally)"
            )
        self._module.set_device(self._torch_device)
        watch_compiles(None)
        check_compiler(self._torch_device)
        asked = config.kernels.matmul_precision
        torch.set_float32_matmul_precision("highest" if asked == "auto" else asked)
        free, total = self._module.mem_get_info()
        name = self._module.get_device_name()
        logger.info("%s: %s, %.0f of %.0f MiB free", self._type, name, free / MIB, total / MIB)

    def step(self) -> AbstractContextManager[None]:
        return nullcontext()

    def pipeline(
        self,
        model: PipelineModel,
        batch: InputBatch,
        config: EngineConfig,
        *,
        is_rehearsal: bool = False,
        samples_here: bool = True,
    ) -> Pipeline:
        return DevicePipeline(
            model,
            batch,
            config,
            self.transfers,
            self._capturer(model),
            is_rehearsal=is_rehearsal,
            samples_here=samples_here,
        )

    def _capturer(self, model: PipelineModel) -> CapturingDevice | None:
        """Return the graph capturer of this device, if it has one."""
        return None


def check_compiler(torch_device: torch.device) -> None:
    """Compile and launch the smallest kernel.

    Raises:
        StartupError: Triton cannot compile here.
    """
    blocks = torch.zeros(2, 8, dtype=torch.uint8, device=torch_device)
    try:
        copy_by_kernel([blocks], [blocks], torch.tensor([[0, 1]], device=torch_device))
    except (RuntimeError, OSError, subprocess.CalledProcessError) as error:
        raise StartupError(
            "Triton cannot compile kernels on this machine. Install a C compiler (gcc, clang, or the one named by CC) "
            f"and Python's headers (usually the package python3-dev): {error}"
        ) from error


def copy_by_kernel(sources: Sequence[Tensor], targets: Sequence[Tensor], moves: Tensor) -> None:
    """Copy blocks of tensors [blocks, bytes]; moves [N, 2] int64."""
    for source, target in zip(sources, targets, strict=True):
        copy_blocks(_words(target), _words(source), moves)


def _words(blocks: Tensor) -> Tensor:
    """Return bytes [blocks, n] as the widest integer type that divides n."""
    fitting = (dtype for dtype in (torch.int64, torch.int32) if blocks.shape[1] % dtype.itemsize == 0)
    return blocks.view(next(fitting, torch.uint8))


class XpuDevice(GpuDevice):
    """Intel GPU."""

    def __init__(self) -> None:
        super().__init__("xpu")


class CudaDevice(GpuDevice):
    """NVIDIA or AMD GPU, with graph capture."""

    def __init__(self) -> None:
        super().__init__("cuda")

    def graph_pool(self) -> Any:
        return torch.cuda.graph_pool_handle()

    def capture(self, run: Callable[[], Tensor], pool: Any) -> tuple[Callable[[], None], Tensor]:
        graph = torch.cuda.CUDAGraph()
        # Only calls of this thread invalidate the capture; other threads may continue.
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            result = run()
        return graph.replay, result

    def reserved_bytes(self) -> int:
        return torch.cuda.memory_reserved()

    def _capturer(self, model: PipelineModel) -> CapturingDevice | None:
        reason = why_not_captured(model)
        if reason is not None:
            logger.info("no CUDA graphs: %s", reason)
        return None if reason is not None else self
