# SPDX-License-Identifier: Apache-2.0
"""Store of adapters in host memory, read by a background thread; and their slots on the device."""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from quire.adapters import LoRARequest
from quire.config.model import LoRAConfig
from quire.errors import StartupError, ValidationError
from quire.kernels.low_rank import LowRankStacks, SlotMemory
from quire.layers.adapter_rows import AdapterEmbeddingRows, AdapterOutputRows
from quire.lora.checkpoint import Adapter, read_adapter
from quire.lora.peft_config import adapter_content, adapter_fingerprint, directory_of
from quire.lora.targets import Targets

logger = logging.getLogger(__name__)

NICENESS = 10  # added nice value of the loader thread: a tenth of a step thread's share of a contended core


class AdapterSlots:
    """Slots for adapters in all layers that support one; initially empty. Each row of a step names a slot.

    Invariant: a slot's memory keeps its address, so recorded steps work for every adapter. A slot changes only between
    steps.

    Args:
        targets: targets of the loaded model, whose layers get the slots.
        num_slots: most adapters in one step.
        max_rank: largest rank.
        dtype: dtype of the LoRA weights, where layers support it.
        upload: copies a host tensor to the device, in the order of the device's work.
        max_rows: most replaced rows of an adapter in each table.
        row_dtype: dtype of these rows; None: `dtype`.
    """

    def __init__(
        self,
        targets: Targets,
        num_slots: int,
        max_rank: int,
        dtype: torch.dtype,
        device: torch.device,
        upload: Callable[[Tensor], Tensor] = lambda tensor: tensor,
        *,
        max_rows: int = 0,
        row_dtype: torch.dtype | None = None,
    ) -> None:
        self._upload = upload
        self._layers = targets.layers
        self._stacks: dict[int, LowRankStacks] = {}
        self._filled: list[set[int]] = [
            set() for _ in range(num_slots)
        ]  # layers that a slot's adapter changes
        self._rows: dict[int, AdapterEmbeddingRows | AdapterOutputRows] = {}
        memory = SlotMemory(device)
        for index, own in enumerate(self._layers):
            if not own.is_here:
                continue
            self._stacks[index] = own.allocate(num_slots, max_rank, own.kept(dtype), memory)
            rows = own.allocate_rows(num_slots, max_rows, row_dtype or dtype, device) if max_rows else None
            if rows is not None:
                self._rows[index] = rows

    def put(self, slot: int, adapter: Adapter) -> None:
        """Load an adapter into a slot, replacing what it held. All ranks call this at once."""
        adapter.finish_norms()
        left, self._filled[slot] = self._filled[slot], {*adapter.layers}
        for index in sorted(left | self._filled[slot]):
            own, stacks = self._layers[index], self._stacks[index]
            source, blocks = adapter.layers.get(index), slice(slot * own.blocks, (slot + 1) * own.blocks)
            if source is None:
                stacks.ranks[blocks] = 0
                stacks.affine[blocks] = 0
                if stacks.input_factors is not None:
                    stacks.input_factors[blocks] = 1.0
                continue
            rank = source.b.shape[1]
            stacks.a[blocks, ..., :rank] = self._upload(source.a)
            if own.is_table:  # lookups read all ranks of a row, and a NaN would spread
                stacks.a[blocks, ..., rank:] = 0.0
            stacks.b[blocks, :rank] = self._upload(source.b)
            stacks.scales[blocks, :, :rank] = self._upload(source.scales)
            stacks.ranks[blocks] = self._upload(source.ranks)
            stacks.affine[blocks] = self._upload(source.affine)
            if stacks.input_factors is not None and source.input_factors is not None:
                stacks.input_factors[blocks] = self._upload(source.input_factors)
            if source.affine.any():
                stacks.factors[blocks] = self._upload(source.factors)
                stacks.offsets[blocks] = self._upload(source.offsets)
        for index, rows in self._rows.items():
            rows.put(slot, adapter.rows.get(index), self._upload)

    def launch(self) -> None:
        """Launch each layer's kernel over a row without an adapter, so that it gets compiled."""
        for index, stacks in self._stacks.items():
            row = torch.full((1,), -1, dtype=torch.int32, device=stacks.a.device)
            self._layers[index].launch(stacks, row)
        for rows in self._rows.values():
            rows.launch(row)

    @property
    def nbytes(self) -> int:
        """Bytes of all slots."""
        return sum(part.nbytes for part in (*self._stacks.values(), *self._rows.values()))


class AdapterStore:
    """Adapters of one model on the host.

    Invariant: one thread reads, and only requests that need its result wait for it. The core decides what is kept
    (`quire.lora.holds`): an adapter stays until it is dropped.

    Args:
        max_rank: largest rank.
        dtype: dtype of the LoRA weights.
        row_dtype: dtype of table rows, the model's; None: `dtype`.
        max_rows: most replaced rows of an adapter in each table.
        max_added: most added rows among them.
        base_model: name of the model; an adapter trained on another is logged.
        settings: options of adapters, which their contents depend on.
    """

    def __init__(
        self,
        max_rank: int,
        dtype: torch.dtype,
        *,
        row_dtype: torch.dtype | None = None,
        max_rows: int,
        max_added: int,
        base_model: str = "",
        settings: LoRAConfig | None = None,
    ) -> None:
        self._base_model = base_model
        self._settings = settings or LoRAConfig()
        self._max_rank = max_rank
        self._row_dtype = row_dtype
        self._rows = {"max_rows": max_rows, "max_added": max_added}
        self._dtype = dtype
        self._targets: Targets | None = None
        self._kept: dict[str, Adapter] = {}
        self._thread: ThreadPoolExecutor | None = None

    def use_targets(self, targets: Targets) -> None:
        """Set the model's targets; they are the same after a reload."""
        self._targets = targets

    def prepare(self, request: LoRARequest) -> Future[None]:
        """Read an adapter in the background; a failure is a ValidationError, and nothing is kept."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "quire-adapters", initializer=_lower_priority)
        return self._thread.submit(self._read, request)

    def get(self, request: LoRARequest) -> Adapter:
        """Return an adapter that was prepared and not dropped."""
        return self._kept[request.key]

    def drop(self, key: str) -> None:
        """Drop an adapter, if it was read."""
        self._kept.pop(key, None)

    def close(self) -> None:
        """Stop reading; idempotent."""
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)
        self._kept.clear()

    def _read(self, request: LoRARequest) -> None:
        assert self._targets is not None, "use_targets before prepare"
        directory = directory_of(request.lora_path)
        try:
            adapter = read_adapter(
                directory, self._targets, self._max_rank, self._dtype, row_dtype=self._row_dtype, **self._rows
            )
        except StartupError as error:
            problem = str(error).replace(f"{directory}/", "")  # clients must not see the path
        except Exception:  # fails the requests for this adapter, not the core
            logger.exception("adapter %r could not be read", request.lora_name)
            problem = "it could not be read; the server's log says why"
        else:
            if self._has_changed(request, directory):
                raise ValidationError(
                    f"adapter {request.lora_name!r}: its files have changed since it was loaded; "
                    "load it again, in place",
                    param="lora_request",
                )
            self._kept[request.key] = adapter
            if _end_of(adapter.base_model) not in ("", _end_of(self._base_model)):
                logger.warning(
                    "adapter %r was trained on %r, but the model is %r",
                    request.lora_name,
                    adapter.base_model,
                    self._base_model,
                )
            return
        raise ValidationError(f"adapter {request.lora_name!r}: {problem}", param="lora_request")

    def _has_changed(self, request: LoRARequest, directory: Path) -> bool:
        """Return whether the files that were read are others than those that the request was made for."""
        if request.fingerprint not in ("", adapter_fingerprint(directory)):
            return True
        return bool(request.content) and request.content != adapter_content(directory, self._settings)


def _lower_priority() -> None:
    """Lower the priority of this thread and those that it starts."""
    if sys.platform == "linux":  # elsewhere nice values are per process
        own = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, own, os.getpriority(os.PRIO_PROCESS, own) + NICENESS)


def _end_of(model: str) -> str:
    """Return a model's name without owner or path."""
    return model.rstrip("/").rpartition("/")[2].lower()
