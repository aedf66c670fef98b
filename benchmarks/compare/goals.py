"""What quire wants to reach against its peers: ratios of output rates at the same number of bits per weight."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Goal:
    """In one case quire's weights of some bits are to be so many times as fast as a peer's."""

    peer: str
    case: str
    bits: int
    ratio: float


_LLAMA_CPP = {
    "prefill": {16: 1.5, 8: 2.0, 4: 2.0},
    "decode-1": {16: 1.0, 8: 1.6, 4: 1.5},
    "decode-16": {16: 1.8, 8: 2.3, 4: 2.3},
    "batch": {16: 1.7, 8: 2.3, 4: 2.1},
}

GOALS = (
    *(
        Goal("llama.cpp", case, bits, ratio)
        for case, by_bits in _LLAMA_CPP.items()
        for bits, ratio in by_bits.items()
    ),
    Goal("vllm", "batch", 16, 3.0),
)
"""Set so that each also beats ik_llama.cpp and OpenVINO where they were first measured. vLLM: its best type counts."""

PROBE_SHARES = {"bf16": 0.92, "int8": 0.90, "int4": 0.88}
"""Of what a probe reads beside it, for decoding one request with weights of a format."""


def goal(peer: str, case: str, bits: int) -> Goal | None:
    """The goal for this comparison, if there is one."""
    return next((one for one in GOALS if (one.peer, one.case, one.bits) == (peer, case, bits)), None)
