"""Finding, loading, probing and calling the C++ kernel library.

Invariant: torch is imported before the library is opened, so both use torch's OpenMP runtime and its thread
settings.
"""

import ctypes
import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from ctypes import c_char_p, c_int64, c_void_p
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from struct import Struct
from struct import error as StructError
from typing import NamedTuple

import torch
from torch import Tensor

from quire.errors import ConfigError, StartupError
from quire.kernels import cpu

logger = logging.getLogger(__name__)

ABI_VERSION, WEIGHT_LAYOUT = 6, "panels-3"
"""What the library must say of itself; both stand in csrc/cpu/quire_cpu.h, too."""
PATH = cpu.PATH

DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""The codes of `enum DType` in csrc/cpu/quire_cpu.h that all kernels compute on."""
CACHE_DTYPE_CODES = DTYPE_CODES | {torch.int8: 3}
"""The codes that a KV cache may have."""

_P, _I, _F = "P", "q", "d"
SIGNATURES: Mapping[str, tuple[str, ...]] = {
    "rms_norm": (_P, _P, _P, _I, _I, _I, _I, _I, _F, _I, _I),
    "fused_add_rms_norm": (_P, _P, _P, _P, _P, _I, _I, _F, _I, _I),
    "silu_and_mul": (_P, _P, _I, _I, _I),
    "rotary_embedding": (_P, _P, _P, _P, *(_I,) * 11),
    "pack_weight": (_P, _P, _P, _P, *(_I,) * 6),
    "packed_linear": (*(_P,) * 7, *(_I,) * 9),
    "packed_embedding": (*(_P,) * 5, *(_I,) * 6),
    "layer_norm": (_P, _P, _P, _P, _I, _I, _I, _I, _I, _F, _I, _I),
    "gelu_and_mul": (_P, _P, _I, _I, _I, _I),
    "embedding": (_P, _P, _P, _I, _I, _I),
    "write_kv": (_P, _P, _P, _P, _P, *(_I,) * 11),
    "rotary_and_write_kv": (*(_P,) * 10, *(_I,) * 15, _F, _I, _I, _I),
    "paged_attention": (*(_P,) * 8, *(_I,) * 11, _F, _F, _I, _I),
    "non_finite_rows": (_P, _P, _I, _I),
    "apply_penalties": (_P, _P, _P, _P, _I, _I),
    "philox_uniform": (_P, _P, _P, _I),
    "sample_tokens": (_P, _P, _P, _P, _I, _I),
    "token_logprobs": (_P, _P, _P, _P, _P, _I, _I, _I),
    "peak_fma": (_P, _I),
    "read_memory": (_P, _P, _I),
}
"""Argument types of each kernel, as declared in csrc/cpu/table.cpp, by their `struct` codes: an address, an int64, and
a float, which is passed as a double. Every kernel returns an int64 status."""


class Kernel(NamedTuple):
    """A function of packed arguments: ctypes takes longer over twenty than most kernels take over a token."""

    function: Callable[[bytes], int]
    pack: Callable[..., bytes]
    address: int


class Call(ctypes.Structure):
    """A recorded call, as `QuireCpuCall` in csrc/cpu/quire_cpu.h."""

    _fields_ = (("function", c_void_p), ("arguments", c_char_p))


RecordedCall = tuple[int, bytes]
"""Address and packed arguments of a kernel call."""


class _Recording(threading.local):
    """Who hears of this thread's kernel calls."""

    listener: Callable[[RecordedCall], None] | None = None

    @contextmanager
    def into(self, listener: Callable[[RecordedCall], None]) -> Iterator[None]:
        """Tell `listener` of each call, once it is done."""
        assert self.listener is None, "one recording at a time"
        self.listener = listener
        try:
            yield
        finally:
            self.listener = None


recording = _Recording()


@dataclass(frozen=True, slots=True)
class CpuLibrary:
    """The opened library with the kernels of one instruction set."""

    isa: str
    reason: str
    kernels: Mapping[str, Kernel]
    max_threads: Callable[[], int]
    """Threads a parallel kernel would use if called from this thread."""
    pin_threads: Callable[[ctypes.Array[c_int64], int], int]
    """Keeps thread i of this thread's team on processor i of an array, but for thread 0; counts the refusals."""
    play: Callable[[ctypes.Array[Call], int], int]
    """Runs recorded calls in order and counts those before the first that is refused."""


@cache
def loaded() -> CpuLibrary | None:
    """The library, opened on the first call; None, with one log line, when it was not built."""
    if not PATH.exists():
        logger.warning("%s", _missing())
        return None
    return open_library(PATH, os.environ.get("QUIRE_CPU_ISA", "auto"))


def supported_isas() -> tuple[str, ...]:
    """The instruction sets that the library was built for and this processor runs, best first."""
    return tuple(_supported_isas(ctypes.CDLL(str(PATH)))) if PATH.exists() else ()


def status() -> str:
    """What was loaded and why, or why nothing was."""
    library = loaded()
    return _missing() if library is None else f"C++ kernels for {library.isa} ({library.reason})"


def open_library(path: Path, requested_isa: str) -> CpuLibrary:
    """Open the library at `path` with the kernels of `requested_isa` ("auto" = the best this CPU runs).

    Raises ConfigError for an unknown or unsupported instruction set, StartupError for a library of another quire.
    """
    try:
        handle = ctypes.CDLL(str(path))
    except OSError as error:
        raise StartupError(f"{path} cannot be loaded: {error}: reinstall quire") from error
    _check_version(handle, path)
    index, isa = _choose_isa(_supported_isas(handle), requested_isa)
    reason = "the best this CPU runs" if requested_isa == "auto" else f"QUIRE_CPU_ISA={requested_isa}"
    kernels = {name: _kernel(handle, index, name) for name in SIGNATURES}
    for function in (handle.quire_cpu_max_threads, handle.quire_cpu_pin_threads, handle.quire_cpu_play):
        function.restype = c_int64
    handle.quire_cpu_pin_threads.argtypes = (ctypes.POINTER(c_int64), c_int64)
    handle.quire_cpu_play.argtypes = (ctypes.POINTER(Call), c_int64)
    pin_threads, play = handle.quire_cpu_pin_threads, handle.quire_cpu_play
    return CpuLibrary(isa, reason, kernels, handle.quire_cpu_max_threads, pin_threads, play)


def _missing() -> str:
    return f"{PATH.name} was not built (no C++ compiler at install): slower torch kernels are used"


def _check_version(handle: ctypes.CDLL, path: Path) -> None:
    handle.quire_cpu_abi_version.restype = c_int64
    version = handle.quire_cpu_abi_version()
    if version != ABI_VERSION:
        raise StartupError(f"{path} has ABI version {version}, quire needs {ABI_VERSION}: reinstall quire")
    handle.quire_cpu_weight_layout.restype = c_char_p
    layout = handle.quire_cpu_weight_layout().decode()
    if layout != WEIGHT_LAYOUT:
        raise StartupError(f"{path} packs weights as {layout}, quire as {WEIGHT_LAYOUT}: reinstall quire")


def _supported_isas(handle: ctypes.CDLL) -> dict[str, int]:
    """The instruction sets this processor runs, best first, with their index in the library."""
    handle.quire_cpu_isa_name.restype = c_char_p
    handle.quire_cpu_isa_name.argtypes = handle.quire_cpu_isa_supported.argtypes = (c_int64,)
    isas: dict[str, int] = {}
    index = 0
    while name := handle.quire_cpu_isa_name(index):
        if handle.quire_cpu_isa_supported(index):
            isas[name.decode()] = index
        index += 1
    return isas


def _choose_isa(supported: Mapping[str, int], requested: str) -> tuple[int, str]:
    name = next(iter(supported)) if requested == "auto" else requested
    if name not in supported:
        choices = ", ".join(["auto", *supported])
        raise ConfigError(f"QUIRE_CPU_ISA is {requested!r}; this build on this CPU supports: {choices}")
    return supported[name], name


def _kernel(handle: ctypes.CDLL, isa_index: int, name: str) -> Kernel:
    handle.quire_cpu_kernel.restype = c_void_p
    handle.quire_cpu_kernel.argtypes = (c_int64, c_char_p)
    address = handle.quire_cpu_kernel(isa_index, name.encode())
    if not address:
        raise StartupError(f"{PATH.name} has no kernel {name!r}: reinstall quire")
    function = ctypes.CFUNCTYPE(c_int64, c_char_p)(address)
    return Kernel(function, Struct("".join(SIGNATURES[name])).pack, address)


_NO_MEMORY = -2


def call(name: str, *arguments: float) -> int:
    """Run a kernel on addresses and numbers; returns its status, 0 unless it refuses some of its input.

    Raises:
        ValueError: a number does not fit into 64 bits.
        MemoryError: there is none for scratch space.
        RuntimeError: the library does not know a code that it was given.
    """
    library = loaded()
    assert library is not None, "the table of ops asks supports() before it loads a kernel"
    function, pack, address = library.kernels[name]
    try:
        packed = pack(*arguments)
    except StructError as cause:
        raise ValueError(f"{name}: a size does not fit into 64 bits: {arguments}") from cause
    status = function(packed)
    if status >= 0:
        if recording.listener is not None:
            recording.listener((address, packed))
        return status
    if status == _NO_MEMORY:
        raise MemoryError(f"{name}: no memory for the kernel's scratch space")
    raise RuntimeError(f"{name}: the kernel library refuses the call ({status}): reinstall quire")


def _poisoned(like: Tensor, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
    """NaN, or for integers a number that is no token, row or weight."""
    out = like.new_empty(shape, dtype=dtype)
    if out.is_floating_point() or out.dtype is torch.bool:
        return out.fill_(torch.nan)
    limits = torch.iinfo(out.dtype)
    return out.fill_(limits.min or limits.max)


def _empty() -> Callable[..., Tensor]:
    value = os.environ.get("QUIRE_DEBUG_KERNELS", "0")
    if value not in ("0", "1"):
        raise ConfigError(f"QUIRE_DEBUG_KERNELS is {value!r}; it must be '0' or '1'")
    return _poisoned if value == "1" else Tensor.new_empty


empty = _empty()
"""`empty(like, *shape, dtype=None)`: the memory of an output. With QUIRE_DEBUG_KERNELS=1 it is filled first with what
is no result, so that an element that a kernel does not write shows."""
