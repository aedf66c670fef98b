"""What a recorded call must read: weights, or keys and values; or states, which it also writes.

Invariant: of activations nothing is counted, since they are in the caches; weights count without what pads them.
"""

import ctypes
from collections.abc import Callable, Mapping, Sequence

from quire.kernels.cpu import library

_BITS = {0: 32, 1: 16, 2: 16, 3: 8, 4: 4}
"""Of a weight, by `enum Format` of csrc/cpu/panels.h."""


def num_bytes(name: str, arguments: bytes) -> int:
    """Of a call's packed arguments; 0 for an op that reads neither."""
    count = _READERS.get(name)
    return 0 if count is None else count(library.unpacked(name, arguments))


def label(name: str, arguments: bytes) -> str:
    """The op, and for a product the matrix: outputs x inputs."""
    if name != "packed_linear":
        return name
    outputs, inputs = library.unpacked(name, arguments)[-7:-5]
    return f"{name} {outputs}x{inputs}"


def _of_linear(values: Sequence[int]) -> int:
    outputs, inputs, _, group, _, _, weight_format = values[-7:]
    return _of_matrix(outputs, inputs, group, weight_format)


def _of_matrix(outputs: int, inputs: int, group: int, weight_format: int) -> int:
    scales = {3: 4 * outputs, 4: 2 * outputs * inputs // group}.get(weight_format, 0)
    return outputs * inputs * _BITS[weight_format] // 8 + scales


def _of_experts(values: Sequence[int]) -> int:
    """Of those that the step chose."""
    chosen, tokens, top_k, hidden, inner = (values[i] for i in (2, 7, 8, 10, 11))
    (up_group, _, up_format), (down_group, _, down_format) = values[13:16], values[16:19]
    used = len({*(ctypes.c_int32 * (tokens * top_k)).from_address(chosen)})
    up = _of_matrix(2 * inner, hidden, up_group, up_format)
    return used * (up + _of_matrix(hidden, inner, down_group, down_format))


def _of_attention(values: Sequence[int]) -> int:
    lengths, requests, heads, head_size, cache_dtype = (values[i] for i in (5, 10, 16, 18, 24))
    present = sum((ctypes.c_int32 * requests).from_address(lengths))
    stored = head_size * _BITS[cache_dtype] // 8 + (4 if cache_dtype == 3 else 0)
    return 2 * present * heads * stored


def _of_heads(values: Sequence[int]) -> int:
    outputs, inputs, group, _, weight_format = values[-5:]
    return _of_matrix(outputs, inputs, group, weight_format)


def _of_latents(values: Sequence[int]) -> int:
    lengths, requests, rank, rope, cache_dtype = (values[i] for i in (5, 8, 17, 18, 21))
    present = sum((ctypes.c_int32 * requests).from_address(lengths))
    return present * (rank + rope) * _BITS[cache_dtype] // 8


def _of_delta(values: Sequence[int]) -> int:
    requests, heads, keys, columns = (values[i] for i in (11, 17, 18, 19))
    return _of_states(requests, heads * keys * columns)


def _of_selective_scan(values: Sequence[int]) -> int:
    requests, channels, count = (values[i] for i in (13, 23, 24))
    return _of_states(requests, channels * count)


def _of_ssd_scan(values: Sequence[int]) -> int:
    requests, heads, size, count = (values[i] for i in (14, 24, 25, 27))
    return _of_states(requests, heads * size * count)


def _of_states(requests: int, numbers: int) -> int:
    return 2 * 4 * requests * numbers


_READERS: Mapping[str, Callable[[Sequence[int]], int]] = {
    "packed_linear": _of_linear,
    "experts": _of_experts,
    "paged_attention": _of_attention,
    "per_head_linear": _of_heads,
    "latent_attention": _of_latents,
    "gated_delta": _of_delta,
    "selective_scan": _of_selective_scan,
    "ssd_scan": _of_ssd_scan,
}
