# SPDX-License-Identifier: Apache-2.0
"""Goals of quire against its peers: ratios of output rates at the same number of bits per weight."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Goal:
    """In one case quire's weights of some bits are to be so many times as fast as a peer's."""

    peer: str
    case: str
    bits: int
    ratio: float


_DENSE = {
    "prefill": {16: 1.5, 8: 2.2, 4: 2.5},
    "decode-1": {16: 1.0, 8: 1.2, 4: 1.15},
    "decode-16": {16: 1.8, 8: 2.7, 4: 2.4},
    "batch": {16: 1.65, 8: 2.5, 4: 2.6},
}
_SPARSE = {
    "prefill": {16: 1.5, 4: 1.5},
    "decode-1": {16: 1.0, 4: 1.0},
    "batch": {16: 1.8, 4: 1.8},
}


def _against_llama_cpp(ratios: Mapping[str, Mapping[int, float]]) -> tuple[Goal, ...]:
    return tuple(
        Goal("llama.cpp", case, bits, ratio)
        for case, by_bits in ratios.items()
        for bits, ratio in by_bits.items()
    )


GOALS: Mapping[str, tuple[Goal, ...]] = {
    "dummy-0.5b": (*_against_llama_cpp(_DENSE), Goal("vllm", "batch", 16, 3.0)),
    "dummy-qwen3-moe": _against_llama_cpp(_SPARSE),
}
"""By the shape of the checkpoint. vLLM: its best type counts."""

FILES = {
    "GPTQ g128": ("quire", "int4"),
    "AWQ g128": ("quire", "int4"),
    "Q8_0": ("llama.cpp", "Q8_0"),
    "Q4_0": ("llama.cpp", "Q4_0"),
    "Q4_K_M": ("llama.cpp", "Q4_K_M"),
}
"""A file that is quantized already -> the engine and the weights that quire is compared with when it serves it."""
_SAME_FILE = {"batch": 2.0, "decode-1": 1.0}
_AS_OWN_INT4 = 0.95

PROBE_SHARES = {"bf16": 0.92, "int8": 0.90, "int4": 0.88}
"""Of what a probe reads beside it, for decoding one request with weights of a format."""


def file_goal(precision: str, case: str) -> Goal | None:
    """The goal for serving a file, if there is one."""
    peer, _ = FILES[precision]
    ratio = _SAME_FILE.get(case) if peer == "llama.cpp" else _AS_OWN_INT4
    return None if ratio is None else Goal(peer, case, 8 if precision == "Q8_0" else 4, ratio)


def goal(shape: str, peer: str, case: str, bits: int) -> Goal | None:
    """The goal for this comparison, if there is one."""
    found = (one for one in GOALS.get(shape, ()) if (one.peer, one.case, one.bits) == (peer, case, bits))
    return next(found, None)
