"""Finding, probing and opening the C++ kernel library.

Invariant: torch is imported before the library is opened, so both use torch's OpenMP runtime and its thread
settings.
"""

import ctypes
import logging
import os
from collections.abc import Callable, Mapping
from ctypes import c_char_p, c_int64, c_void_p
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from struct import Struct
from typing import NamedTuple

import torch

from quire.errors import ConfigError, StartupError
from quire.kernels import cpu

logger = logging.getLogger(__name__)

ABI_VERSION, WEIGHT_LAYOUT = 7, "panels-4"
"""What the library must say of itself; both stand in csrc/cpu/quire_cpu.h, too."""
PATH = cpu.PATH

DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""The codes of `enum DType` in csrc/cpu/quire_cpu.h that all kernels compute on."""
CACHE_DTYPE_CODES = DTYPE_CODES | {torch.int8: 3}
"""The codes that a KV cache may have."""

_I, _F = "q", "d"
SIGNATURES: Mapping[str, tuple[str, str]] = {
    "rms_norm": ("out x weight", 5 * _I + _F + 2 * _I),
    "fused_add_rms_norm": ("out total x residual weight", 2 * _I + _F + 2 * _I),
    "activate": ("out x", 3 * _I),
    "silu_and_mul": ("out x", 3 * _I),
    "rotary_embedding": ("q k positions cos_sin_cache", 11 * _I),
    "pack_weight": ("data scales zeros weight", 6 * _I),
    "packed_linear": ("out x data scales zeros bias scratch", 9 * _I),
    "packed_embedding": ("out ids data scales zeros", 6 * _I),
    "layer_norm": ("out x weight bias", 5 * _I + _F + 2 * _I),
    "gelu_and_mul": ("out x", 4 * _I),
    "embedding": ("out ids weight", 3 * _I),
    "write_kv": ("k v k_cache v_cache slot_mapping", 11 * _I),
    "rotary_and_write_kv": (
        "q k v k_cache v_cache positions cos_sin_cache slot_mapping q_norm k_norm",
        15 * _I + _F + 3 * _I,
    ),
    "paged_attention": (
        "out q k_cache v_cache query_start_loc seq_lens block_tables alibi_slopes",
        11 * _I + 2 * _F + 2 * _I,
    ),
    "unusable_rows": ("out logits", 2 * _I),
    "apply_penalties": ("logits indices repetition subtracted", 2 * _I),
    "philox_uniform": ("out seeds positions", _I),
    "sample_tokens": ("out logits settings numbers", 2 * _I),
    "token_logprobs": ("ids logprobs ranks logits chosen", 3 * _I),
    "peak_fma": ("out", _I),
    "read_memory": ("out data", _I),
}
"""Arguments of each kernel, as declared in csrc/cpu/table.cpp: the names of its tensors, which come first, and the
`struct` codes of its numbers: an int64, and a float, which is passed as a double. Every kernel returns an int64
status."""


class Kernel(NamedTuple):
    """A function of packed arguments: ctypes takes longer over twenty than most kernels take over a token.

    Packed first is what all addresses must be a multiple of; a call with another one is refused.
    """

    function: Callable[[bytes], int]
    pack: Callable[..., bytes]
    address: int


class Call(ctypes.Structure):
    """A recorded call, as `QuireCpuCall` in csrc/cpu/quire_cpu.h."""

    _fields_ = (("function", c_void_p), ("arguments", c_char_p))


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
    tensors, numbers = SIGNATURES[name]
    record = Struct(_I + "P" * len(tensors.split()) + numbers)
    return Kernel(function, record.pack, address)
