"""Finding, probing and opening the C++ kernel library.

Invariant: its threads are as many as torch has when it is opened, and then as many as `threads.set_num_threads` says.
"""

import ctypes
import logging
from collections.abc import Callable, Mapping
from ctypes import c_char_p, c_int64, c_void_p
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from struct import Struct
from typing import Any, NamedTuple

import torch

from quire.errors import StartupError
from quire.kernels import cpu
from quire.kernels.cpu.instruction_sets import asked_for, chosen_isa, missing_of_isas
from quire.kernels.formats import FLOAT_CODES

logger = logging.getLogger(__name__)

ABI_VERSION, WEIGHT_LAYOUT = 15, "panels-7"
"""What the library must say of itself; both stand in csrc/cpu/quire_cpu.h, too."""
PATH = cpu.PATH

DTYPE_CODES = FLOAT_CODES
"""The dtypes that all kernels compute on, with their codes."""
CACHE_DTYPE_CODES = DTYPE_CODES | {torch.int8: 3}
"""The codes that a KV cache may have."""

SIGNATURES: dict[str, tuple[str, str]] = {
    "rms_norm": ("out x weight", "qqqqqdqq"),
    "fused_add_rms_norm": ("out total x residual weight", "qqdqq"),
    "activate": ("out x", "qqq"),
    "silu_and_mul": ("out x", "qqq"),
    "round_rows": ("out x", "qqqqddddq"),
    "rotary_embedding": ("q k positions cos_sin_cache", "qqqqqqqqqqq"),
    "pack_weight": ("data scales zeros weight", "qqqqqqqq"),
    "packed_linear": ("out x data scales zeros bias scratch", "qqqqqqqqqqq"),
    "rounded_linear": ("out x data scales code_sums bias scratch", "qqqqqqqqddddq"),
    "lora_linear": ("out x adapter_rows adapters scratch", "qq"),
    "experts": ("out x chosen weights table adapter_rows adapters scratch", "qqqqqqqqqqqqqqqqqqq"),
    "add_choices": ("out rows chosen weights", "qqq"),
    "route": ("chosen weights logits bias", "qqqqqqqqddq"),
    "causal_conv": ("out x weight bias states query_start_loc seq_lens kept_lens block_tables", "qqqqqqqqqq"),
    "selective_scan": (
        "out x dt a b c skip gate states query_start_loc seq_lens kept_lens block_tables",
        "qqqqqqqqqqqqq",
    ),
    "ssd_scan": (
        "out x dt a b c skip dt_bias gate states query_start_loc seq_lens kept_lens block_tables",
        "qqqqqqqqqqqqqqqdd",
    ),
    "gated_delta": (
        "out qkv ba rates dt_bias states gates decays query_start_loc seq_lens kept_lens block_tables",
        "qqqqqqqqqqqdd",
    ),
    "rg_lru": (
        "out x weights bias rates states gates query_start_loc seq_lens kept_lens block_tables",
        "qqqqqqqq",
    ),
    "rwkv7": (
        "out r w k v a of_heads states scratch query_start_loc seq_lens kept_lens block_tables",
        "qqqqqqqqd",
    ),
    "packed_embedding": ("out ids data scales zeros", "qqqqqqqq"),
    "layer_norm": ("out x weight bias", "qqqqqdqq"),
    "fused_add_layer_norm": ("out total x residual weight bias", "qqdqq"),
    "accumulate": ("vectors x chunks", "qqqqqqq"),
    "gelu_and_mul": ("out x", "qqqq"),
    "embedding": ("out ids weight", "qqq"),
    "write_kv": ("k v k_cache v_cache slot_mapping scales", "qqqqqqqqqqq"),
    "rotary_and_write_kv": (
        "q k v k_cache v_cache positions cos_sin_cache slot_mapping scales q_norm k_norm",
        "qqqqqqqqqqqqqqqdqqq",
    ),
    "paged_attention": (
        "out q k_cache v_cache query_start_loc seq_lens block_tables alibi_slopes sinks",
        "qqqqqqqqqqqqddqq",
    ),
    "bidirectional_attention": (
        "out q k v query_start_loc seq_lens alibi_slopes relative_bias",
        "qqqqqqqqqqqqqdq",
    ),
    "per_head_linear": ("out x data scales zeros scratch", "qqqqqqqqqqqq"),
    "write_latents": ("q rows norm positions cos_sin_cache cache slot_mapping", "qqqqqqqqqqdqqq"),
    "latent_attention": ("out q q_rope cache query_start_loc seq_lens block_tables", "qqqqqqqqqqqqdqq"),
    "all_reduce": ("out x segment", "qqq"),
    "all_gather": ("out x segment", "qqq"),
    "all_to_all": ("out x segment counts", "qq"),
    "unusable_rows": ("out logits", "qq"),
    "mask_logits": ("logits rows words", "qqq"),
    "apply_penalties": ("logits indices repetition subtracted", "qq"),
    "philox_uniform": ("out seeds positions", "q"),
    "sample_tokens": ("out logits settings numbers", "qq"),
    "token_logprobs": ("ids logprobs ranks logits chosen", "qqq"),
    "peak_fma": ("out", "q"),
    "read_memory": ("out data", "q"),
}
"""Arguments of each kernel: the names of its tensors, which come first, and the `struct` codes of its numbers, an int64
("q") and a float, which is passed as a double ("d"). The library says what they are too, and is not loaded if it says
otherwise. Every kernel returns an int64 status."""


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


SHARED_BODY = ctypes.CFUNCTYPE(None, c_void_p, c_int64, c_int64)
"""What `CpuLibrary.share` calls for each range: context, begin, end."""


@dataclass(frozen=True, slots=True)
class CpuLibrary:
    """The opened library with the kernels of one instruction set."""

    isa: str
    reason: str
    missing: Mapping[str, str | None]
    """What keeps this machine from each instruction set that kernels are written for, best first; None: nothing."""
    kernels: Mapping[str, Kernel]
    set_threads: Callable[[int], int]
    """Sets how many threads the kernels of this process use, and says how many it took."""
    pin_threads: Callable[[ctypes.Array[c_int64], int], int]
    """Keeps thread i of the team on processor i of an array, but for thread 0; counts the refusals."""
    play: Callable[[ctypes.Array[Call], int], int]
    """Runs recorded calls in order and counts those before the first that is refused."""
    play_timed: Callable[[ctypes.Array[Call], int, ctypes.Array[c_int64]], int]
    """The same, and writes how many nanoseconds each took."""
    take_float_mode: Callable[[], int]
    """Has this thread compute with floats as kernels do; returns the mode that it was in."""
    set_float_mode: Callable[[int], None]
    """Sets such a mode again."""
    share: Callable[[int, int, Any, None], None]
    """Runs a body on ranges of a loop, on the threads of the team."""
    prefer_huge_pages: Callable[[int, int], None]
    """Asks for large pages under the memory at an address, of so many bytes."""
    shuffle: Callable[[int], None]
    """For tests: all loops are shared, however short, and taken in another order; 0 is as usual."""


@cache
def loaded() -> CpuLibrary | None:
    """The library, opened on the first call; None, with one log line, when it was not built."""
    if not PATH.exists():
        logger.warning("%s", _missing())
        return None
    return open_library(PATH, asked_for())


def supported_isas() -> tuple[str, ...]:
    """The instruction sets that the library was built for and this processor runs, best first."""
    if not PATH.exists():
        return ()
    handle = ctypes.CDLL(str(PATH))
    _check_version(handle, PATH)
    missing = missing_of_isas(handle)
    return tuple(name for name, reason in missing.items() if reason is None)


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
    "play": (c_int64, ctypes.POINTER(Call), c_int64),
    "play_timed": (c_int64, ctypes.POINTER(Call), c_int64, ctypes.POINTER(c_int64)),
    "take_float_mode": (c_int64,),
    "set_float_mode": (None, c_int64),
    "share": (None, c_int64, c_int64, SHARED_BODY, c_void_p),
    "prefer_huge_pages": (None, c_void_p, c_int64),
    "shuffle": (None, c_int64),
}
"""What else the library exports: the type of the result and those of the arguments."""


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
    """Addresses and numbers of a call's packed arguments."""
    return _record(name).unpack(arguments)[1:]
