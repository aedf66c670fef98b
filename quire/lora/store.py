"""Adapters in the host's memory, read beside the steps.

Invariant: one thread reads, and nobody waits for it but those who need what it reads. What is kept is for the core to
say (`quire.engine.adapter_holds`): an adapter stays until it is dropped.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from quire.errors import StartupError, ValidationError
from quire.lora.checkpoint import Adapter, read_adapter
from quire.lora.directory import adapter_fingerprint, directory_of
from quire.lora.targets import Targets
from quire.lora_request import LoRARequest

NICENESS = 10
"""Of who reads, more than that of others: a tenth of what a thread of the steps gets where both want the same core."""
logger = logging.getLogger(__name__)


class AdapterStore:
    """The adapters of one model.

    Args:
        max_rank: the largest that they may have.
        dtype: of their matrices.
        row_dtype: of rows of tables, which is the model's; None: that of matrices.
        max_rows: rows of its own that one may have in each table.
        max_added: of these, those behind the table's.
        base_model: what the model is called; an adapter that was trained on another is logged.
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
    ) -> None:
        self._base_model = base_model
        self._max_rank = max_rank
        self._row_dtype = row_dtype
        self._rows = {"max_rows": max_rows, "max_added": max_added}
        self._dtype = dtype
        self._targets: Targets | None = None
        self._kept: dict[str, Adapter] = {}
        self._thread: ThreadPoolExecutor | None = None

    def use_targets(self, targets: Targets) -> None:
        """What adapters may change; of a model that was loaded again, the same."""
        self._targets = targets

    def prepare(self, request: LoRARequest) -> Future[None]:
        """Read an adapter in the background; the result may be a ValidationError, and nothing is kept then."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "quire-adapters", initializer=_give_way)
        return self._thread.submit(self._read, request)

    def get(self, request: LoRARequest) -> Adapter:
        """One that was prepared, and not dropped since."""
        return self._kept[request.key]

    def drop(self, key: str) -> None:
        """Let go of an adapter, if it could be read."""
        self._kept.pop(key, None)

    def close(self) -> None:
        """Read nothing more; calling it twice is fine."""
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)
        self._kept.clear()

    def _read(self, request: LoRARequest) -> None:
        assert self._targets is not None, "the model is loaded first"
        directory = directory_of(request.lora_path)
        try:
            adapter = read_adapter(
                directory,
                self._targets,
                self._max_rank,
                self._dtype,
                row_dtype=self._row_dtype,
                **self._rows,
            )
        except StartupError as error:
            problem = str(error).replace(f"{directory}/", "")  # where it lies is for the operator alone
        except Exception:  # costs those who want this adapter, and no core
            logger.exception("the adapter %r could not be read", request.lora_name)
            problem = "it could not be read; the server's log says why"
        else:
            if request.fingerprint not in ("", adapter_fingerprint(directory)):
                raise ValidationError(
                    f"adapter {request.lora_name!r}: its files have changed since it was loaded; "
                    "load it again, in place",
                    param="lora_request",
                )
            self._kept[request.key] = adapter
            if _end_of(adapter.base_model) not in ("", _end_of(self._base_model)):
                logger.warning(
                    "adapter %r says that it was trained on %r, and the model is %r",
                    request.lora_name,
                    adapter.base_model,
                    self._base_model,
                )
            return
        raise ValidationError(f"adapter {request.lora_name!r}: {problem}", param="lora_request")


def _give_way() -> None:
    """Let this thread, and those that it starts, compute when others have nothing to do, or little at a time."""
    if sys.platform == "linux":  # elsewhere it would be all of the process
        own = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, own, os.getpriority(os.PRIO_PROCESS, own) + NICENESS)


def _end_of(model: str) -> str:
    """A model's name without whose it is, or where."""
    return model.rstrip("/").rpartition("/")[2].lower()
