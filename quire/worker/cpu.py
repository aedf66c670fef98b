"""What the worker has to know of a CPU: how many threads to use and how much memory is left.

Invariant: a container is believed over its host. Limits of control groups (versions 1 and 2) bound what the
kernel says of the whole machine.
"""

from __future__ import annotations

import logging
import math
import mmap
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from ctypes import c_int64
from pathlib import Path

import torch
from torch import Tensor

from quire.config import EngineConfig
from quire.errors import ConfigError
from quire.kernels.cpu import library
from quire.layers.kv_cache import why_not_captured
from quire.worker.block_copies import Moves, copy_on_host
from quire.worker.devices import Mark
from quire.worker.input_batch import InputBatch
from quire.worker.pipeline import HostPipeline, LanguageModel, Pipeline, eager_forward
from quire.worker.step_memory import ForwardPeak
from quire.worker.taped_forward import TapedForward

logger = logging.getLogger(__name__)

GIB = 2**30
MIB = 2**20
DEFAULT_CACHE_BYTES = 4 * GIB
LOGITS_ELEMENTS = 1 << 23
"""32 MiB of float32."""


class HostMark:
    """A moment."""

    def __init__(self) -> None:
        self._time = time.perf_counter()

    def wait(self) -> None:
        """It has passed."""

    def seconds_since(self, earlier: Mark) -> float:
        assert isinstance(earlier, HostMark), "marks of one device"
        return self._time - earlier._time


class CpuDevice:
    """The host's processor.

    Args:
        root: where /proc and /sys are; tests put their own there.
    """

    torch_device = torch.device("cpu")
    is_asynchronous = False
    default_cache_bytes: int | None = DEFAULT_CACHE_BYTES
    warm_up_tokens = 32
    warm_up_seqs = 0  # recording tapes is for the first request that needs one
    logits_elements = LOGITS_ELEMENTS

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root
        self._forward_peak = ForwardPeak()

    def start(self, config: EngineConfig) -> None:
        """Set the number of compute threads of this process."""
        asked = config.device.cpu_threads
        threads, reason = (asked, "as --cpu-threads says") if asked else self._default_threads()
        torch.set_num_threads(threads)
        logger.info("cpu_threads = %d: %s", threads, reason)
        if config.device.cpu_pin_threads:
            self._pin(threads)

    def available_bytes(self) -> int:
        """Memory that this process can still take without pushing anyone out, nor its own mapped weights."""
        return max(0, min([self._host_available(), *self._group_available()]) - self._mapped())

    def rehearsal(self) -> AbstractContextManager[None]:
        """The pipeline of a rehearsal measures its forward passes itself."""
        return nullcontext()

    def usable_bytes(self, config: EngineConfig) -> tuple[int, str]:
        """Of what is free after loading and not kept for the swap space, which is the same memory."""
        share, limits = config.cache.gpu_memory_utilization, config.scheduler
        free = max(0, self.available_bytes() - config.cache.swap_space_bytes)
        num_logits = min(limits.max_num_seqs * config.arch.vocab_size, self.logits_elements)
        step = self._forward_peak.bytes_of_step(limits.max_num_batched_tokens, num_logits)
        reason = (
            f"{share:.0%} of the {free / MIB:.0f} MiB that are free after loading, less "
            f"{step / MIB:.0f} MiB for a step of {limits.max_num_batched_tokens} tokens"
        )
        return max(0, int(share * free) - step), reason

    def host_memory(self, shape: tuple[int, ...]) -> Tensor:
        """Untouched pages cost no memory."""
        return torch.empty(shape, dtype=torch.uint8)

    def copy_blocks(self, sources: Sequence[Tensor], targets: Sequence[Tensor], moves: Moves) -> None:
        copy_on_host(sources, targets, moves)

    def upload(self, tensor: Tensor) -> Tensor:
        return tensor

    def download(self, tensor: Tensor) -> Tensor:
        return tensor

    def mark(self) -> Mark:
        return HostMark()

    def pipeline(
        self, model: LanguageModel, batch: InputBatch, config: EngineConfig, *, is_rehearsal: bool = False
    ) -> Pipeline:
        """Steps that only decode are played from tapes, unless --enforce-eager."""
        if is_rehearsal:
            return HostPipeline(batch, self._forward_peak.measured(eager_forward(model)))
        if config.device.enforce_eager or why_not_captured(model) is not None:
            return HostPipeline(batch, eager_forward(model))
        widths = tuple(table.block_ids.shape[1] for table in batch.block_tables)
        return HostPipeline(batch, TapedForward(model, batch.max_num_seqs, widths))

    def _default_threads(self) -> tuple[int, str]:
        if os.environ.get("OMP_NUM_THREADS"):
            return torch.get_num_threads(), "as OMP_NUM_THREADS says"
        cores, quota = self._num_cores(), self._cpu_quota()
        if quota < cores:
            return max(
                1, math.floor(quota)
            ), f"the control group allows {quota:g} processors of {cores} cores"
        return cores, "one per physical core that this process may use"

    def _pin(self, num_threads: int) -> None:
        """Keep this thread's team on cores of their own.

        Raises:
            ConfigError: there are too few cores, no C++ kernels, or the system does not let us.
        """
        cpus, loaded = self._cpus(), library.loaded()
        if loaded is None or num_threads > len(cpus):
            have = f"there are {len(cpus)}" if loaded is not None else library.status()
            raise ConfigError(f"--cpu-pin-threads needs a core for each of {num_threads} threads; {have}")
        own = cpus[:num_threads]
        if loaded.pin_threads((c_int64 * num_threads)(*own), num_threads):
            raise ConfigError(
                f"--cpu-pin-threads: the system refuses to keep threads on processors {own[1:]}"
            )
        logger.info("compute threads other than the first are pinned to processors %s", own[1:])

    def _num_cores(self) -> int:
        return len(self._cpus())

    def _cpus(self) -> list[int]:
        """One processor of each physical core that this process may use."""
        first_of_core: dict[str, int] = {}
        for cpu in sorted(os.sched_getaffinity(0)):
            first_of_core.setdefault(self._core_of(cpu), cpu)
        return list(first_of_core.values())

    def _core_of(self, cpu: int) -> str:
        topology = self._root / f"sys/devices/system/cpu/cpu{cpu}/topology"
        siblings = [_read(topology / name) for name in ("physical_package_id", "core_id")]
        return f"{siblings[0]}.{siblings[1]}" if None not in siblings else f"cpu{cpu}"

    def _cpu_quota(self) -> float:
        """Processors' worth of time that control groups grant; infinite if none limits it."""
        quotas = [math.inf]
        for folder in self._groups(""):
            limit, _, period = (_read(folder / "cpu.max") or "max").partition(" ")
            if limit != "max":
                quotas.append(int(limit) / int(period))
        for folder in self._groups("cpu"):
            limit, period = (
                _read(folder / "cpu.cfs_quota_us") or "-1",
                _read(folder / "cpu.cfs_period_us") or "1",
            )
            if int(limit) > 0:
                quotas.append(int(limit) / int(period))
        return min(quotas)

    def _host_available(self) -> int:
        fields = _fields((self._root / "proc/meminfo").read_text())
        return fields["MemAvailable:"] * 1024

    def _mapped(self) -> int:
        """Bytes of files in this process's memory: available as the kernel sees it, but in use."""
        _, _, pages, *_ = (_read(self._root / "proc/self/statm") or "0 0 0").split()
        return int(pages) * mmap.PAGESIZE

    def _group_available(self) -> Iterator[int]:
        """What is left under each memory limit; cached file pages, which the kernel drops first, do not count."""
        for controller, limit_file, usage_file, cache_field in (
            ("", "memory.max", "memory.current", "inactive_file"),
            ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ):
            for folder in self._groups(controller):
                limit, usage = _read(folder / limit_file), _read(folder / usage_file)
                if limit is None or usage is None or limit == "max":
                    continue
                cached = _fields(_read(folder / "memory.stat") or "").get(cache_field, 0)
                yield max(0, int(limit) - int(usage) + cached)

    def _groups(self, controller: str) -> Iterator[Path]:
        """Folders of this process's control group and its parents: version 2 for "", else a version 1
        controller.

        Inside a container the named folder may not be visible while the mounted root is its own group.
        """
        base = self._root / "sys/fs/cgroup" / controller
        for line in (_read(self._root / "proc/self/cgroup") or "").splitlines():
            _, controllers, path = line.split(":", 2)
            if controller in controllers.split(","):
                own = Path(path.lstrip("/"))
                yield from (base / folder for folder in (own, *own.parents) if folder != Path())
        yield base


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:  # not there, or not for us to see: it then limits nothing that we can know of
        return None


def _fields(text: str) -> dict[str, int]:
    """Lines of the form "name number [unit]"."""
    return {name: int(value) for name, value, *_ in map(str.split, text.splitlines())}
