# SPDX-License-Identifier: Apache-2.0
"""Discovery and loading of the C++ kernel library, float mode and number of threads.

Invariant: torch and the kernels use equally many threads, separate ones; idle ones sleep. On load the count is
torch's, afterwards that of `set_num_threads`. Kernels round to nearest and support subnormal numbers, on every thread,
whatever mode other libraries have set in the caller.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from ctypes import c_char_p, c_int64, c_void_p
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from struct import Struct
from typing import Any, NamedTuple

import torch

from quire.errors import StartupError
from quire.kernels.cpu.instruction_sets import PATH, asked_for, chosen_isa, missing_of_isas
from quire.kernels.cpu.signatures import SIGNATURES
from quire.kernels.formats import FLOAT_CODES

logger = logging.getLogger(__name__)

ABI_VERSION, WEIGHT_LAYOUT = 15, "panels-8"
"""Required version and layout of the library; both are also in csrc/cpu/quire_cpu.h."""

DTYPE_CODES = FLOAT_CODES
"""Dtypes that all kernels support, with their codes."""
CACHE_DTYPE_CODES = DTYPE_CODES | {torch.int8: 3}
"""Codes of KV cache dtypes."""


class Kernel(NamedTuple):
    """Function that takes packed arguments: ctypes is slower with twenty arguments than most kernels are for a token.

    The first packed number is the required alignment of all addresses; a misaligned call is refused.
    """

    function: Callable[[bytes], int]
    pack: Callable[..., bytes]
    address: int


class NativeCall(ctypes.Structure):
    """Recorded call, as `QuireCpuCall` in csrc/cpu/quire_cpu.h."""

    _fields_ = (("function", c_void_p), ("arguments", c_char_p))


SHARED_BODY = ctypes.CFUNCTYPE(None, c_void_p, c_int64, c_int64)
"""Callback of `CpuLibrary.share` for each range: context, begin, end."""


@dataclass(frozen=True, slots=True)
class CpuLibrary:
    """Opened library with the kernels of one instruction set."""

    isa: str
    reason: str
    missing: Mapping[str, str | None]
    """Why this machine lacks each instruction set that kernels are written for, best first; None: supported."""
    kernels: Mapping[str, Kernel]
    set_threads: Callable[[int], int]
    """Sets the number of threads of this process's kernels, and returns the actual number."""
    pin_threads: Callable[[ctypes.Array[c_int64], int], int]
    """Pins thread i of the team to processor i of an array, except thread 0; returns the number of failures."""
    play: Callable[[ctypes.Array[NativeCall], int], int]
    """Replays recorded calls in order and returns the number of those before the first refused one."""
    play_timed: Callable[[ctypes.Array[NativeCall], int, ctypes.Array[c_int64]], int]
    """Does the same as `play`, and writes the nanoseconds of each call."""
    take_float_mode: Callable[[], int]
    """Sets this thread's float mode to the kernels'; returns the previous mode."""
    set_float_mode: Callable[[int], None]
    """Restores such a mode."""
    share: Callable[[int, int, Any, None], None]
    """Runs a body on ranges of a loop, on the threads of the team."""
    prefer_huge_pages: Callable[[int, int], None]
    """Requests huge pages for memory at an address, of that many bytes."""
    shuffle: Callable[[int], None]
    """Parallelizes (for tests) all loops, however short, and in another order; 0 restores the default."""


@cache
def loaded() -> CpuLibrary | None:
    """Return the library, opened on the first call; None, with one log line, if it was not built."""
    if not PATH.exists():
        logger.warning("%s", _missing())
        return None
    return open_library(PATH, asked_for())


def supported_isas() -> tuple[str, ...]:
    """Return the instruction sets that the library was built for and this processor supports, best first."""
    if not PATH.exists():
        return ()
    handle = ctypes.CDLL(str(PATH))
    _check_version(handle, PATH)
    missing = missing_of_isas(handle)
    return tuple(name for name, reason in missing.items() if reason is None)


def status() -> str:
    """Return what was loaded and why, or why nothing was."""
    library = loaded()
    return _missing() if library is None else f"C++ kernels for {library.isa} ({library.reason})"


def open_library(path: Path, requested_isa: str) -> CpuLibrary:
    """Open the library at `path` with the kernels of `requested_isa` ("auto" = the best this CPU supports).

    Raises:
        ConfigError: the instruction set is unknown or unsupported.
        StartupError: the library belongs to another version of quire.
    """
    try:
        handle = ctypes.CDLL(str(path))
    except OSError as error:
        raise StartupError(f"{path} cannot be loaded: {error}: reinstall quire") from error
    _check_version(handle, path)
    missing = missing_of_isas(handle)
    isa = chosen_isa(missing, requested_isa)
    index = list(missing).index(isa)
    reason = "the best this CPU runs" if requested_isa == "auto" else f"QUIRE_CPU_ISA={requested_isa}"
    kernels = {name: _kernel(handle, index, name) for name in SIGNATURES}
    functions = {name: _function(handle, name, *types) for name, types in _FUNCTIONS.items()}
    functions["set_threads"](torch.get_num_threads())
    return CpuLibrary(isa, reason, missing, kernels, **functions)


_FUNCTIONS: Mapping[str, tuple[Any, ...]] = {
    "set_threads": (c_int64, c_int64),
    "pin_threads": (c_int64, ctypes.POINTER(c_int64), c_int64),
    "play": (c_int64, ctypes.POINTER(NativeCall), c_int64),
    "play_timed": (c_int64, ctypes.POINTER(NativeCall), c_int64, ctypes.POINTER(c_int64)),
    "take_float_mode": (c_int64,),
    "set_float_mode": (None, c_int64),
    "share": (None, c_int64, c_int64, SHARED_BODY, c_void_p),
    "prefer_huge_pages": (None, c_void_p, c_int64),
    "shuffle": (None, c_int64),
}
"""Other exports of the library: the types of the result and of the arguments."""


def _function(handle: ctypes.CDLL, name: str, result: Any, *arguments: Any) -> Any:
    function = getattr(handle, f"quire_cpu_{name}")
    function.restype, function.argtypes = result, arguments
    return function


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


def _kernel(handle: ctypes.CDLL, isa_index: int, name: str) -> Kernel:
    handle.quire_cpu_kernel.restype, handle.quire_cpu_signature.restype = c_void_p, c_char_p
    handle.quire_cpu_kernel.argtypes = handle.quire_cpu_signature.argtypes = (c_int64, c_char_p)
    address = handle.quire_cpu_kernel(isa_index, name.encode())
    if not address:
        raise StartupError(f"{PATH.name} has no kernel {name!r}: reinstall quire")
    passed = _passed(name)
    taken = handle.quire_cpu_signature(isa_index, name.encode()).decode()
    if taken != passed:
        raise StartupError(
            f"{PATH.name}: the kernel {name!r} takes {taken}, quire passes {passed}: reinstall quire"
        )
    return Kernel(ctypes.CFUNCTYPE(c_int64, c_char_p)(address), _record(name).pack, address)


def _passed(name: str) -> str:
    tensors, numbers = SIGNATURES[name]
    return "P" * len(tensors.split()) + numbers


def _record(name: str) -> Struct:
    return Struct("q" + _passed(name))


def unpacked(name: str, arguments: bytes) -> tuple[Any, ...]:
    """Return addresses and numbers of a call's packed arguments."""
    return _record(name).unpack(arguments)[1:]


@contextmanager
def as_in_kernels() -> Iterator[None]:
    """Use the kernels' float mode for this thread's other computations in this context."""
    library = loaded()
    if library is None:
        yield
        return
    before = library.take_float_mode()
    try:
        yield
    finally:
        library.set_float_mode(before)


def set_num_threads(count: int) -> None:
    """Set the number of threads for the whole process: all its engines share the kernels' threads."""
    torch.set_num_threads(count)
    library = loaded()
    if library is not None:
        library.set_threads(count)
