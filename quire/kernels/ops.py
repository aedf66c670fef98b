# SPDX-License-Identifier: Apache-2.0
"""The table of ops: every kernel the engine calls, with its shapes, dtypes and implementations, best first.

Invariant: which implementation runs depends only on the device and dtype of an op's key tensor (and, where a
row gives `accepts`, on properties of the model), never on the batch; otherwise a request's result would
depend on its neighbours.

`@op(...)` turns a function into a row: the signature and docstring are the contract, the body is the torch
oracle, and the listed implementations are tried before it. Tensors that choose the implementation are
positional-only.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, update_wrapper
from importlib import import_module
from typing import Any, Generic, Literal, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor

from quire.config.arch import Routing
from quire.distributed.group import Group
from quire.distributed.hosts import HostGroups
from quire.distributed.shared_memory import SharedMemory
from quire.errors import ConfigError
from quire.kernels import cpu, reference, reference_experts, reference_sampling, reference_scan, triton
from quire.kernels.attention_metadata import (
    ANY_LIMITS,
    AttentionMetadata,
    GroupMetadata,
    SamplingLimits,
    StateMetadata,
)
from quire.kernels.experts import ExpertAdapters, ExpertWeights, TokenReduction
from quire.kernels.linear import (
    PANEL,
    Function,
    FusedActivation,
    PackedWeight,
    QuantizedRows,
    RowQuantization,
    WeightScheme,
)
from quire.kernels.low_rank import RANK_UNIT, LowRankStacks

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Implementation:
    """One way to compute an op."""

    name: str
    """Family of the implementation, as shown by `quire doctor`: "cpu", "triton"."""
    load: Callable[[], Callable[..., Any]]
    """Imports and returns the function, on first use."""
    supports: Callable[[str, torch.dtype], bool]
    """Returns whether it supports a device type and dtype of the key tensor; called once for each pair."""
    status: Callable[[], str]
    """Returns why this family is, or is not, in use on this machine: one phrase for users."""
    accepts: Callable[..., bool] | None = None
    """Further test of a call's arguments, on the hot path. It may depend on properties of the model (head size, weight
    layout), never on the number of tokens or requests.
    """


class Op(Generic[P, R]):
    """A callable row of the table; calls the first implementation that supports its arguments."""

    def __init__(self, oracle: Callable[P, R], implementations: tuple[Implementation, ...], key: int) -> None:
        self.name = oracle.__name__
        self.oracle = oracle
        self.implementations = implementations
        self._key = key
        self._functions: dict[tuple[torch.device, torch.dtype], Callable[P, R]] = {}
        update_wrapper(self, oracle)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        tensor: Any = args[self._key]
        function = self._functions.get((tensor.device, tensor.dtype))
        if function is None:
            function = self._choose(tensor.device, tensor.dtype)
        return function(*args, **kwargs)

    def supporting(self, device_type: str, dtype: torch.dtype) -> tuple[Implementation, ...]:
        """Return the implementations a call with this device type and dtype tries before the oracle, in order."""
        if reference_only():
            return ()
        return tuple(row for row in self.implementations if row.supports(device_type, dtype))

    def takes(self, device_type: str, *args: P.args, **kwargs: P.kwargs) -> bool:
        """Return whether an implementation, and not the oracle, would compute this call on the device type."""
        tensor: Any = args[self._key]
        rows = self.supporting(device_type, tensor.dtype)
        return any(row.accepts is None or row.accepts(*args, **kwargs) for row in rows)

    def _choose(self, device: torch.device, dtype: torch.dtype) -> Callable[P, R]:
        function: Callable[P, R] = self.oracle
        for row in reversed(self.supporting(device.type, dtype)):
            function = row.load() if row.accepts is None else _either(row.accepts, row.load(), function)
        self._functions[device, dtype] = function
        return function


def _either(
    accepts: Callable[..., bool], first: Callable[..., Any], second: Callable[..., Any]
) -> Callable[..., Any]:
    """Return a function that calls `first` if it accepts the arguments, else `second`."""

    def choose(*args: Any, **kwargs: Any) -> Any:
        return (first if accepts(*args, **kwargs) else second)(*args, **kwargs)

    return choose


TABLE: dict[str, Op[..., Any]] = {}
"""Every op by name, in the order of this file."""


def op(*implementations: Implementation, key: int = 0) -> Callable[[Callable[P, R]], Op[P, R]]:
    """Add a row. `key` is the position of the tensor whose device and dtype choose the implementation."""

    def add(oracle: Callable[P, R]) -> Op[P, R]:
        row = Op(oracle, implementations, key)
        TABLE[row.name] = row
        return row

    return add


@cache
def reference_only() -> bool:
    """Return whether QUIRE_KERNELS=reference selects the oracle everywhere; nothing else reads the variable."""
    value = os.environ.get("QUIRE_KERNELS", "auto")
    if value not in ("auto", "reference"):
        raise ConfigError(f"QUIRE_KERNELS is {value!r}; it must be 'auto' or 'reference'")
    return value == "reference"


class OpChoice(NamedTuple):
    """Line of `quire doctor`: the implementations of an op on a device, and the reason."""

    op: str
    implementations: tuple[str, ...]
    reason: str


def describe(device_type: str = "cpu", dtype: torch.dtype = torch.bfloat16) -> list[OpChoice]:
    """Return, for each op, the implementations tried for this device type and dtype, in order, with the reason."""
    return [_describe(row, device_type, dtype) for row in TABLE.values()]


def _describe(row: Op[..., Any], device_type: str, dtype: torch.dtype) -> OpChoice:
    chosen = row.supporting(device_type, dtype)
    names = (*(implementation.name for implementation in chosen), "reference")
    if reference_only():
        reason = "QUIRE_KERNELS=reference"
    elif not row.implementations:
        reason = "no other implementation"
    else:
        reason = "; ".join(implementation.status() for implementation in chosen or row.implementations)
        reason = reason if chosen else f"nothing else for {device_type} {dtype}: {reason}"
    return OpChoice(row.name, names, reason)


def _cpu(path: str, accepts: Callable[..., bool] | None = None, *, any_dtype: bool = False) -> Implementation:
    """Return a row of the C++ CPU library: "module.function" of `quire.kernels.cpu`.

    `any_dtype` is for a key tensor whose dtype is not the model's.
    """

    def load() -> Callable[..., Any]:
        module, function = path.split(".")
        return getattr(import_module(f"quire.kernels.cpu.{module}"), function)  # type: ignore[no-any-return]

    def supports(device_type: str, dtype: torch.dtype) -> bool:
        return device_type == "cpu" and cpu.supports(torch.float32 if any_dtype else dtype)

    return Implementation("cpu", load, supports, cpu.status, accepts)


def _triton(
    path: str, accepts: Callable[..., bool] | None = None, *, any_dtype: bool = False
) -> Implementation:
    """Return a row of the GPU kernels: "module.function" of `quire.kernels.triton`; `any_dtype` as in `_cpu`."""

    def load() -> Callable[..., Any]:
        module, function = path.split(".")
        return getattr(import_module(f"quire.kernels.triton.{module}"), function)  # type: ignore[no-any-return]

    def supports(device_type: str, dtype: torch.dtype) -> bool:
        return triton.supports(device_type, torch.float32 if any_dtype else dtype)

    return Implementation("triton", load, supports, triton.status, accepts)


def _float_cache(*args: Any, **_options: Any) -> bool:
    """Return whether no tensor is an int8 cache, whose scales the GPU kernels do not support."""
    return all(getattr(arg, "dtype", None) != torch.int8 for arg in args)


def _not_plain(_weight: Tensor, scheme: WeightScheme, *_args: Any, **_options: Any) -> bool:
    """Return whether quire's GPU kernels multiply with the weight; other weights stay unpacked, for the vendor's
    library.
    """
    return scheme.kind != "float" or scheme.invariant


def _in_rows(_x: Any, weight: PackedWeight, *_args: Any, **_options: Any) -> bool:
    """Return whether a packed weight has the GPU layout."""
    return weight.layout == "rows"


def _experts_in_panels(
    _x: Tensor, _chosen: Tensor, _weights: Tensor, of: ExpertWeights, *_adapters: Any
) -> bool:
    """Return whether experts are packed in the CPU layout."""
    return of.layout == "panels"


def _expert_rows_in_panels(_x: Tensor, _chosen: Tensor, of: ExpertWeights, *_adapters: Any) -> bool:
    """Return whether experts are packed in the CPU layout."""
    return of.layout == "panels"


def _experts_in_rows(
    _x: Tensor, _chosen: Tensor, _weights: Tensor, of: ExpertWeights, *_adapters: Any
) -> bool:
    """Return whether experts are packed in the GPU layout."""
    return of.layout == "rows"


def _rows_in_shared_memory(_x: Tensor, _counts: Sequence[int], group: Group) -> bool:
    """Return whether the ranks share memory."""
    return isinstance(group, SharedMemory)


def _in_shared_memory(_x: Tensor, group: Group, *_args: Any, **_options: Any) -> bool:
    """Return whether the ranks, or those of each host, share memory."""
    return isinstance(group, SharedMemory | HostGroups)


# Shapes: T tokens of the step, H hidden size, I intermediate size, Hq/Hkv query and key-value heads, D head size, R
# requests, V vocabulary rows, P positions. Tensors are contiguous in their last dimension.


@op(_cpu("elementwise.rms_norm"), _triton("elementwise.rms_norm"))
def rms_norm(x: Tensor, weight: Tensor, /, eps: float) -> Tensor:
    """`x / rms(x) * weight` over the last dimension.

    x [..., H] any float dtype; weight [H] of x's dtype or float32. Computed in float32 with one rounding at
    the end, returned in x's dtype and shape.
    """
    return reference.rms_norm(x, weight, eps)


@op(_cpu("elementwise.fused_add_rms_norm"), _triton("elementwise.fused_add_rms_norm"))
def fused_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, /, eps: float) -> tuple[Tensor, Tensor]:
    """`(rms_norm(x + residual), x + residual)`, both new tensors of x's dtype and shape.

    x, residual [..., H] of one dtype; weight as in `rms_norm`. The norm is computed from the sum as rounded to x's
    dtype.
    """
    return reference.fused_add_rms_norm(x, residual, weight, eps)


@op(_cpu("elementwise.layer_norm"), _triton("elementwise.layer_norm"))
def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, /, eps: float) -> Tensor:
    """`(x - mean) / std * weight + bias` over the last dimension; shapes and dtypes as in `rms_norm`."""
    return reference.layer_norm(x, weight, bias, eps)


@op(_cpu("elementwise.fused_add_layer_norm"), _triton("elementwise.fused_add_layer_norm"))
def fused_add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, /, eps: float
) -> tuple[Tensor, Tensor]:
    """`(layer_norm(x + residual), x + residual)`, as in `fused_add_rms_norm`."""
    return reference.fused_add_layer_norm(x, residual, weight, bias, eps)


def _float32(x: Tensor, *_args: Any, **_options: Any) -> bool:
    return x.dtype is torch.float32


@op(_cpu("linear.round_rows", _float32))
def round_rows(x: Tensor, /, rounding: RowQuantization) -> Tensor:
    """Quantize and dequantize x [..., K], keeping shape and dtype; computed in float32.

    Integer codes are q = `clamp(round(x / s + z), lowest, 127)`, dequantized to `(q - z) * s`; E4M3 codes are of `x /
    s`,
    at most 448. Without a given scale, each group of a row computes its own. If symmetric, s is the largest magnitude,
    at
    most `bound`, over half of the range of codes (448 for E4M3), and z is 0. Else s is the distance from the least
    value to
    the largest, 0 included, over that range, and z is lowest - least / s, rounded. A non-finite value then makes its
    group
    NaN.
    """
    return reference.round_rows(x, rounding)


@op(_cpu("elementwise.accumulate"), key=1)
def accumulate(vectors: Tensor, x: Tensor, chunks: Tensor, /, reduction: TokenReduction) -> None:
    """Accumulate tokens of texts into one vector per text, in token order.

    vectors [S, H], float64 for sums and else float32, changed in place; x [T, H] of any float dtype. chunks int64 [4,
    R]
    has, for R different rows of `vectors`: the row, the index in x of its first token, that token's position in its
    text
    (0: nothing was accumulated before), and the number of tokens, at least one. An invalid chunk is an IndexError.
    """
    reference.accumulate(vectors, x, chunks, reduction)


@op(_cpu("elementwise.activate"), _triton("elementwise.activate"))
def activate(x: Tensor, /, function: Function) -> Tensor:
    """Apply an elementwise `Function`, such as "gelu": x [..., I], returned in x's dtype and shape."""
    return reference.activate(x, function)


@op(_cpu("elementwise.silu_and_mul"), _triton("elementwise.silu_and_mul"))
def silu_and_mul(x: Tensor, /) -> Tensor:
    """`silu(first half) * second half`: x [..., 2 * I] -> [..., I] of x's dtype."""
    return reference.silu_and_mul(x)


@op(_cpu("elementwise.gelu_and_mul"), _triton("elementwise.gelu_and_mul"))
def gelu_and_mul(x: Tensor, /, approximate: Literal["none", "tanh"] = "none") -> Tensor:
    """`gelu(first half) * second half`: x [..., 2 * I] -> [..., I] of x's dtype."""
    return reference.gelu_and_mul(x, approximate)


# Producers of inputs for fp8 weights only, which quantize their rows. Results are bit-identical to `packed_linear`'s
# quantization of the result of the op without the suffix.


@op(_triton("elementwise.rms_norm_fp8"))
def rms_norm_fp8(x: Tensor, weight: Tensor, /, eps: float) -> QuantizedRows:
    """`rms_norm` in E4M3: x [T, H]."""
    return reference.rms_norm_fp8(x, weight, eps)


@op(_triton("elementwise.fused_add_rms_norm_fp8"))
def fused_add_rms_norm_fp8(
    x: Tensor, residual: Tensor, weight: Tensor, /, eps: float
) -> tuple[QuantizedRows, Tensor]:
    """`fused_add_rms_norm` with the norm in E4M3: x, residual [T, H]; the sum is of x's dtype."""
    return reference.fused_add_rms_norm_fp8(x, residual, weight, eps)


@op(_triton("elementwise.silu_and_mul_fp8"))
def silu_and_mul_fp8(x: Tensor, /) -> QuantizedRows:
    """`silu_and_mul` in E4M3: x [T, 2 * I] -> [T, I]."""
    return reference.silu_and_mul_fp8(x)


@op(_triton("elementwise.gelu_and_mul_fp8"))
def gelu_and_mul_fp8(x: Tensor, /, approximate: Literal["none", "tanh"] = "none") -> QuantizedRows:
    """`gelu_and_mul` in E4M3: x [T, 2 * I] -> [T, I]."""
    return reference.gelu_and_mul_fp8(x, approximate)


@op(_cpu("attention.rotary_embedding"), _triton("rotary.rotary_embedding"), key=1)
def rotary_embedding(
    positions: Tensor, q: Tensor, k: Tensor, cos_sin_cache: Tensor, /, interleaved: bool = False
) -> tuple[Tensor, Tensor]:
    """Rotate q and k by their positions, in place, and return them.

    positions [T] int64 in [0, P); q [T, Hq, D] and k [T, Hkv, D], Hkv may be 0, of one dtype, views with a token stride
    allowed; cos_sin_cache [P, rot_dim] float32 = cat(cos, sin), rot_dim even and <= D (the rest of each head is
    unchanged).
    The pairs are (i, i + rot_dim / 2), or (2 i, 2 i + 1) when interleaved. A position outside the cache is an
    IndexError.
    """
    return reference.rotary_embedding(positions, q, k, cos_sin_cache, interleaved)


# A KV cache is a pair of tensors that share the memory of a block in equal parts:
#
#     k_cache [num_blocks, Hkv, D, block_size] and v_cache [num_blocks, Hkv, block_size, D],
#
# contiguous on a CPU, of any float dtype. On a GPU keys lie in memory as values do, and k_cache is the transposed view:
# a token's key is one piece, which threads read side by side. In int8 D, a multiple of 4, is larger by 4: behind a
# head's keys stand block_size float32 scales, and behind each value stands its own. What is stored is round(x / scale),
# with scale = amax / 127 for each token and head. In E4M3 (float8_e4m3fn, on GPUs) there are no scales, and what is
# larger than 448 is stored as 448.


@op(_cpu("attention.write_kv"), _triton("rotary.write_kv", _float_cache))
def write_kv(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    /,
    scales: Tensor | None = None,
) -> None:
    """Store each token's key and value in its slot.

    k, v [T, Hkv, D], views with a token stride allowed; slot_mapping [T] int64, slot = block_id * block_size + offset,
    all
    different; a negative slot is skipped, one past the cache is an IndexError. For an int8 cache, scales, float32 [2,
    Hkv],
    may be given for the keys and the values of each head; codes are then clamped to -128 .. 127.
    """
    reference.write_kv(k, v, k_cache, v_cache, slot_mapping, scales)


@op(_cpu("attention.rotary_and_write_kv"), _triton("rotary.rotary_and_write_kv", _float_cache), key=1)
def rotary_and_write_kv(
    positions: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos_sin_cache: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    /,
    interleaved: bool = False,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 0.0,
    scales: Tensor | None = None,
) -> None:
    """`rotary_embedding` on q and k, in place, then `write_kv`, in one pass and with the same bits.

    With norms, which both or neither have, each head's `rms_norm` is rotated: weights [D] of one dtype, q's or float32.
    scales as in `write_kv`.
    """
    reference.rotary_and_write_kv(
        *(
            positions,
            q,
            k,
            v,
            cos_sin_cache,
            k_cache,
            v_cache,
            slot_mapping,
            interleaved,
            q_norm,
            k_norm,
            eps,
            scales,
        )
    )


def _any_multiple_of_8(q: Tensor, *_args: Any, **_features: Any) -> bool:
    """Return whether the C++ attention supports the head size."""
    return q.shape[2] % 8 == 0


@op(
    _cpu("attention.paged_attention", _any_multiple_of_8),
    _triton("attention.paged_attention", _float_cache),
)
def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    metadata: AttentionMetadata,
    /,
    scale: float,
    *,
    sliding_window: int | None = None,
    attention_chunk: int | None = None,
    soft_cap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    relative_bias: Tensor | None = None,
) -> Tensor:
    """Causal attention of each request's last tokens over its cached keys and values: a new [T, Hq, D].

    q [T, Hq, D], a view with a token stride allowed; caches as above, Hq a multiple of Hkv (query head h reads head
    h // (Hq / Hkv)); the step's own keys are already written. Score of query position i and key position j: s =
    scale * q.k; with `soft_cap` c, s = c * tanh(s / c); with `alibi_slopes` [Hq], s - slope * (i - j). With
    `sliding_window` w, only i - w < j <= i is visible; with `attention_chunk` c, only j <= i with i // c = j // c. With
    `sinks` [Hq], every softmax has one more score, its head's, without a value (G. Xiao et al., 2023,
    arXiv:2309.17453).
    With `relative_bias` float32 [Hq, 2 * P - 1], s plus entry P - 1 + j - i, for requests of up to P tokens.
    With `metadata.last_seen` l, j <= l_i replaces j <= i, and a slope's bias is by the distance's magnitude.
    Padding rows are 0. A required block id outside the cache, an l out of bounds, or a request longer than P is an
    IndexError.
    """
    return reference.paged_attention(
        q,
        k_cache,
        v_cache,
        metadata,
        scale,
        sliding_window=sliding_window,
        attention_chunk=attention_chunk,
        soft_cap=soft_cap,
        alibi_slopes=alibi_slopes,
        sinks=sinks,
        relative_bias=relative_bias,
    )


@op(
    _cpu("attention.bidirectional_attention", _any_multiple_of_8),
    _triton("bidirectional.bidirectional_attention"),
)
def bidirectional_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    metadata: GroupMetadata,
    /,
    scale: float,
    *,
    window: int | None = None,
    alibi_slopes: Tensor | None = None,
    relative_bias: Tensor | None = None,
) -> Tensor:
    """Bidirectional attention within each request: a new [T, Hq, D].

    q [T, Hq, D], k and v [T, Hkv, D] of one dtype, views with a token stride allowed; Hq and Hkv as in
    `paged_attention`.
    Requests are complete: each has as many rows as tokens, and no blocks. Score of positions i and j: s = scale * q.k;
    with
    `alibi_slopes` [Hq], s - slope * |i - j|; with `relative_bias` float32 [Hq, 2 * P - 1], s plus entry P - 1 + j - i,
    for
    requests of up to P tokens. With `window` w, only |i - j| < w is visible. Padding rows are 0. An incomplete request,
    or
    one longer than P, is an IndexError.
    """
    return reference.bidirectional_attention(
        q,
        k,
        v,
        metadata,
        scale,
        window=window,
        alibi_slopes=alibi_slopes,
        relative_bias=relative_bias,
    )


# Recurrent layers: `states` [num_blocks, ...] float32 is a layer's view of its part of the cache, each block's state
# contiguous. `StateMetadata` says which states the T rows start from and where they write them; a state outside the
# cache is an IndexError. Padding rows are 0. Tensors with rows have any float dtype and may be strided; others are
# float32. C is channels, N states per channel.


@op(_cpu("scan.causal_conv"), _triton("scan.causal_conv"))
def causal_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    states: Tensor,
    metadata: StateMetadata,
    /,
    silu: bool = False,
) -> Tensor:
    """Depthwise causal convolution, optionally followed by silu: x [T, C] -> a new [T, C] of x's dtype.

    out[t] = bias + sum over k of weight[k] * x[t - K + 1 + k], with weight [K, C] and bias [C]. A state is the last K -
    1
    inputs, the oldest first: states [num_blocks, K - 1, C].
    """
    return reference_scan.causal_conv(x, weight, bias, states, metadata, silu)


@op(_cpu("scan.selective_scan"), _triton("scan.selective_scan"))
def selective_scan(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    skip: Tensor,
    gate: Tensor | None,
    states: Tensor,
    metadata: StateMetadata,
    /,
) -> Tensor:
    """Mamba's recurrence (Gu and Dao, 2023, arXiv:2312.00752): x, dt [T, C] -> a new [T, C] of x's dtype.

    With d = softplus(dt[t]): s = exp(d * a) * s + b[t] * (d * x[t]); out[t] = sum over N of c[t] * s + skip * x[t],
    times
    silu(gate[t]) if there is a gate [T, C]. a [N, C], skip [C], b and c [T, N], states [num_blocks, N, C].
    """
    return reference_scan.selective_scan(x, dt, a, b, c, skip, gate, states, metadata)


@op(_cpu("scan.ssd_scan"), _triton("scan.ssd_scan"))
def ssd_scan(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    skip: Tensor,
    dt_bias: Tensor,
    gate: Tensor | None,
    states: Tensor,
    metadata: StateMetadata,
    /,
    groups: int = 1,
    time_limits: tuple[float, float] = (0.0, float("inf")),
) -> Tensor:
    """Mamba 2's recurrence (Dao and Gu, 2024, arXiv:2405.21060): x [T, H * D] -> a new [T, H * D] of x's dtype.

    For each of H heads of size D, which share b and c [T, G * N] in G groups: with d = softplus(dt[t] + dt_bias),
    clamped
    to the limits, s = exp(d * a) * s + b[t] * (d * x[t]) and out[t] = sum over N of c[t] * s + skip * x[t], times
    silu(gate[t]) if there is a gate [T, H * D]. dt [T, H]; a, skip and dt_bias [H]; states [num_blocks, H, N, D].
    """
    return reference_scan.ssd_scan(x, dt, a, b, c, skip, dt_bias, gate, states, metadata, groups, time_limits)


def _whole_columns(
    _qkv: Tensor, _ba: Tensor, _rates: Tensor, _dt_bias: Tensor, states: Tensor, *_args: Any, **_options: Any
) -> bool:
    """Return whether the C++ delta rule supports the head sizes."""
    keys, values = states.shape[2:]
    return keys <= 256 and keys % 8 == 0 and values % 16 == 0


@op(_cpu("scan.gated_delta", _whole_columns), _triton("recurrence.gated_delta"))
def gated_delta(
    qkv: Tensor,
    ba: Tensor,
    rates: Tensor,
    dt_bias: Tensor,
    states: Tensor,
    metadata: StateMetadata,
    /,
    strongest: float = 1.0,
    least: float | None = None,
) -> Tensor:
    """Gated delta rule (S. Yang et al., 2024, arXiv:2412.06464): [T, Hv, Dv] of qkv's dtype, in float32.

    qkv [T, 2 * Hk * Dk + Hv * Dv] has the queries of all heads, their keys, then values; each of Hk key heads serves
    Hv / Hk value heads. ba [T, Hv + Hv * N] of its dtype: the logits of the write strengths (sigmoid, times
    `strongest`),
    then N time steps of each head; rates [Hv] below 0 and dt_bias [Hv * N] float32. Queries and keys are normalized to
    unit
    vectors, q = q / sqrt(Dk). For each value head and token the state S [Hv, Dk, Dv] becomes
    S * exp(rate * softplus(step + dt_bias)), then S + k (v - S^T k)^T * strength, and the result is S^T q.

    With one step per head, S decays uniformly; with Dk of them each of its rows does (Kimi Delta Attention, 2025,
    arXiv:2510.26692). Strengths above 1 give the state negative eigenvalues (Grazzi et al., 2024, arXiv:2411.12537).
    With `least`, below 0, S is multiplied by exp(least * sigmoid(-rate * (step + dt_bias))) instead.
    """
    return reference_scan.gated_delta(qkv, ba, rates, dt_bias, states, metadata, strongest, least)


def _whole_vectors(_x: Tensor, weights: Tensor, *_args: Any, **_options: Any) -> bool:
    """Return whether the C++ recurrence supports the head size."""
    return weights.shape[1] % 8 == 0


@op(_cpu("scan.rg_lru", _whole_vectors), _triton("recurrence.rg_lru"))
def rg_lru(
    x: Tensor, weights: Tensor, bias: Tensor, rates: Tensor, states: Tensor, metadata: StateMetadata, /
) -> Tensor:
    """Real-gated linear recurrent units (S. De et al., 2024, arXiv:2402.19427): x [T, h * D] -> the same shape and
    dtype.

    Each head computes its gates from its channels: weights [h, D, 2 * D] and bias [h, 2 * D] give, through a sigmoid, i
    and
    r of each channel. With a = exp(rate * r), rates [h * D] below 0, in float32, the state [h * D], which is the
    result,
    becomes a * state + sqrt(1 - a^2) * i * x; at the first token of a request, i * x. All but x is float32.
    """
    return reference_scan.rg_lru(x, weights, bias, rates, states, metadata)


def _whole_squares(
    _r: Tensor,
    _w: Tensor,
    _k: Tensor,
    _v: Tensor,
    _a: Tensor,
    _of_heads: Tensor,
    states: Tensor,
    *_args: Any,
    **_options: Any,
) -> bool:
    """Return whether the C++ RWKV-7 kernel supports the head size."""
    return states.shape[2] <= 256 and states.shape[2] % 16 == 0


@op(_cpu("scan.rwkv7", _whole_squares), _triton("recurrence.rwkv7"))
def rwkv7(
    r: Tensor,
    w: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    of_heads: Tensor,
    states: Tensor,
    metadata: StateMetadata,
    /,
    eps: float,
) -> Tensor:
    """RWKV-7's heads (B. Peng et al., 2025, arXiv:2503.14456): r, w, k, v, a [T, h * D] -> [T, h * D] of their dtype.

    In float32, for each head and token: with i = sigmoid(a), u = k * of_heads[0] normalized to unit length, and
    k = k * (1 + (i - 1) * of_heads[1]), the state S [h, D, D] becomes exp(-exp(-1/2) * sigmoid(w)) S, by rows,
    - (u * i) (S^T u)^T + k v^T, where S on the right is the previous state in both terms. The result is the layer norm
      of
    S^T r, with eps, times of_heads[3], plus of_heads[4], plus v times the sum of r * k * of_heads[2]. of_heads [5, h *
    D]
    float32.
    """
    return reference_scan.rwkv7(r, w, k, v, a, of_heads, states, metadata, eps)


@op(_cpu("elementwise.embedding"), _triton("elementwise.embedding"), key=1)
def embedding(ids: Tensor, weight: Tensor, /) -> Tensor:
    """Rows of a table: ids [T] int64 in [0, V), weight [V, H] -> [T, H]; any other id is an IndexError."""
    return reference.embedding(ids, weight)


@op()
def linear(
    x: Tensor, weight: Tensor, /, bias: Tensor | None = None, dtype: torch.dtype | None = None
) -> Tensor:
    """`x @ weight.T + bias`: x [..., K], weight [N, K], bias [N] -> [..., N] of x's dtype, or of `dtype`.

    With another dtype, sums are rounded to it once if the vendor's library supports that. This op is plain torch, which
    on
    a GPU is the vendor's library. Layers pack their weights and call `packed_linear` on a CPU with C++ kernels, and on
    a
    GPU if the weight is quantized or must be batch-invariant.
    """
    return reference.linear(x, weight, bias, dtype)


@op(_cpu("linear.pack_weight"), _triton("linear.pack_weight", _not_plain))
def pack_weight(weight: Tensor, /, scheme: WeightScheme, halves: int = 1) -> PackedWeight:
    """Pack a weight [N, K] of any float dtype into the layout of `packed_linear`, quantized as the scheme says.

    N is a multiple of `halves`, which is 2 if gate and up are stacked. int8: q = round(w / s) with s the largest
    magnitude of a row / 127, or of a group, rounded to float16 if float16 holds it to 2^-8; a weight with a group that
    float16 does not hold keeps all scales in float32. int4: symmetric, s = f * (the value of largest magnitude of a
    group) / -8 and w = s * (q - 8); else s = f * (largest - smallest, 0 included) / 15 and w = s * (q - z); s is
    rounded to bfloat16 first, and f, from 11/16 to 18/16, is the factor with the least squared error in the group.
    fp8: E4M3 of w / s with s the largest magnitude of a row, or of the tensor, / 448. A non-finite value makes its
    scale non-finite.
    """
    return reference.pack_weight(weight, scheme, halves)


@op(_cpu("linear.packed_linear"), _triton("linear.packed_linear", _in_rows))
def packed_linear(
    x: Tensor | QuantizedRows,
    weight: PackedWeight,
    /,
    bias: Tensor | None = None,
    activation: FusedActivation | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """`x @ weight.T + bias`: x [..., K], bias float32 [N] -> [..., N] of x's dtype, or of `dtype`.

    On a CPU, an integer weight with a fast scheme quantizes x to 8 bits: 64 values of k of a row use steps of 1/254 of
    the range of the values and 0 (int8; 32 values, if the weight has groups), of their largest magnitude / 127 (int4),
    or of the largest magnitude sum of a pair, k and k + 1 with k even, / 127 (codebook formats). An fp8 weight
    quantizes a row of x to E4M3 times its largest magnitude / 448, and takes x [T, K] in that form, too.

    `activation` is applied to the result. For a weight in two halves, [..., N / 2], it is `ops.silu_and_mul` or
    "clamped_swiglu": with g = min(gate, 7) and u = up in [-7, 7], (u + 1) * g * sigmoid(1.702 g). For any other weight
    it
    is one of `ops.activate`, bit-identical to applying it separately.
    """
    return reference.packed_linear(x, weight, bias, activation, dtype)


@op(_cpu("linear.rounded_linear", _float32))
def rounded_linear(
    x: Tensor, weight: PackedWeight, /, rounding: RowQuantization, bias: Tensor | None = None
) -> Tensor:
    """`packed_linear`, with precise weights, of `round_rows(x)`: float32 [..., K] -> [..., N].

    On a CPU, int8 with a scale per output is multiplied in integers if the rounding is to bytes; with a zero point it
    needs
    `code_sums`, and the zero point's part is subtracted from the sums before they are scaled. On any instruction set,
    sums
    of 64 products are exact, and a row's sums are exact while they fit into the 24 bits of a float32.
    """
    return reference.rounded_linear(x, weight, rounding, bias)


def _of_rank_units(_out: Tensor, _x: Tensor, _adapter_rows: Tensor, adapters: LowRankStacks) -> bool:
    """Return whether slots are padded to a multiple of `RANK_UNIT` ranks."""
    return adapters.a.shape[-1] % RANK_UNIT == 0


def _adds_to_float32(out: Tensor, _x: Tensor, _adapter_rows: Tensor, adapters: LowRankStacks) -> bool:
    """Return whether the C++ kernel supports the call: activations are float32 on a CPU."""
    return out.dtype is torch.float32 and _of_rank_units(out, _x, _adapter_rows, adapters)


@op(_cpu("low_rank.low_rank_linear", _adds_to_float32), _triton("low_rank.low_rank_linear", _of_rank_units))
def low_rank_linear(out: Tensor, x: Tensor, adapter_rows: Tensor, adapters: LowRankStacks, /) -> None:
    """Add the output of each row's low-rank adapter for x to out, in place (E. Hu et al., 2021, arXiv:2106.09685).

    If the adapter is affine, a row is multiplied by its factors, and its offsets are added, before.

    out [T, N] and x [T, K] of one float dtype, out contiguous. adapter_rows [T] int32 has each row's slot; a negative
    number
    leaves the row unchanged. An invalid slot is an IndexError on a CPU, and leaves the row unchanged on a GPU. Computed
    in
    float32, and rounded once, when it is added. A row's result depends on that row and its adapter alone.
    """
    reference.low_rank_linear(out, x, adapter_rows, adapters)


@op(
    _cpu("linear.packed_embedding", any_dtype=True),
    _triton("linear.packed_embedding", _in_rows, any_dtype=True),
)
def packed_embedding(ids: Tensor, weight: PackedWeight, /) -> Tensor:
    """Rows of a packed table: ids [T] int64 in [0, N) -> float32 [T, K]. An id outside is an IndexError."""
    return reference.packed_embedding(ids, weight)


# Collectives between the ranks that compute a model together. All ranks of a group call the same ones in the same
# order; a lost rank is a RankLostError on the others. In a group of one, they do nothing.


@op(_cpu("collectives.all_reduce", _in_shared_memory))
def all_reduce(x: Tensor, /, group: Group) -> Tensor:
    """Return the sum of all ranks' x, of any shape and float dtype, with the same bits on every rank.

    Ranks are added in pairs of neighbours, then the sums of pairs, and so on.
    """
    return reference.all_reduce(x, group)


@op(_cpu("collectives.all_gather", _in_shared_memory))
def all_gather(x: Tensor, /, group: Group, dim: int = -1) -> Tensor:
    """Return all ranks' x, of one shape, concatenated along `dim` in rank order."""
    return reference.all_gather(x, group, dim)


@op(_cpu("collectives.all_to_all", _rows_in_shared_memory, any_dtype=True))
def all_to_all(x: Tensor, counts: Sequence[int], /, group: Group) -> tuple[Tensor, list[int]]:
    """Send the first counts[0] rows of x [T, ...] to rank 0, the next counts[1] to rank 1 ...

    Returns the received rows, in the order of their source ranks, and how many came from each.
    """
    return reference.all_to_all(x, counts, group)


@op()
def send(x: Tensor, /, group: Group, to: int) -> None:
    """Send x to another rank, which calls `recv`; x may change afterwards."""
    group.send(x, to)


@op()
def recv(out: Tensor, /, group: Group, source: int) -> None:
    """Receive into `out`, contiguous, from a rank that sends the same shape and dtype."""
    group.recv(out, source)


# Experts: E MLPs, of which each token uses `top_k`.


@op(_cpu("experts.route"), _triton("experts.route"))
def route(logits: Tensor, bias: Tensor | None, /, routing: Routing) -> tuple[Tensor, Tensor]:
    """Return each token's experts: logits [T, E] any float dtype -> ids int32 [T, top_k] and weights float32 [T,
    top_k].

    Scores are the softmax or the sigmoids of a row. Selection scores are scores plus `bias` (float32 [E]; D. Wang et
    al.,
    2024, arXiv:2408.15664). With groups, only the `top_groups` groups with the largest sums of their `group_members`
    highest selection scores are eligible (DeepSeek-V2, arXiv:2405.04434). The `top_k` experts with the highest
    selection
    scores are chosen, in that order, ties by lower id. Weights are their scores, divided by their sum (plus 1e-20) if
    `normalized`, times `scale`. A row's result depends on that row alone.

    With "sparsemixer" (L. Liu et al., 2024, arXiv:2409.12136) logits are chosen one by one, always the largest
    remaining,
    m. Its weight, before `scale`, is its softmax probability among it and the remaining l with
    (m - l) / max(|l|, m) <= `reach`.
    """
    return reference_experts.route(logits, bias, routing)


@op(_cpu("experts.experts", _experts_in_panels), _triton("experts.experts", _experts_in_rows))
def experts(
    x: Tensor,
    chosen: Tensor,
    weights: Tensor,
    /,
    of: ExpertWeights,
    adapter_rows: Tensor | None = None,
    adapters: ExpertAdapters | None = None,
) -> Tensor:
    """Return the weighted sum of each token's expert outputs: x [T, H] -> [T, H] of x's dtype.

    chosen [T, k] int32, different within a row, and weights [T, k] float32 as from `route`; an invalid id is an
    IndexError.
    An expert is `down(activation(gate(x), up(x)))`, or without a gate `down(activation(up(x)))`, each matmul as in
    `packed_linear`; only chosen experts are read. A token's experts are added in float32 in the order of their ids,
    independent of the rest of the step. Choices outside the numbers of `of`, which other ranks hold, add nothing.

    With adapters, and `adapter_rows` [T] int32 with each token's adapter, its outputs are added to each matmul as in
    `low_rank_linear`, to gate and up before the activation.
    """
    return reference_experts.experts(x, chosen, weights, of, adapter_rows, adapters)


@op(_cpu("experts.expert_rows", _expert_rows_in_panels))
def expert_rows(
    x: Tensor,
    chosen: Tensor,
    /,
    of: ExpertWeights,
    adapter_rows: Tensor | None = None,
    adapters: ExpertAdapters | None = None,
) -> Tensor:
    """Return the output of each of a token's experts: x [T, H], chosen [T, k] as in `experts` -> float32 [T, k, H].

    Zeros for choices outside the numbers of `of`. Adapters, for the numbers of `of`, as in `experts`.
    """
    return reference_experts.expert_rows(x, chosen, of, adapter_rows, adapters)


@op(_cpu("experts.add_choices"))
def add_choices(rows: Tensor, chosen: Tensor, weights: Tensor, /) -> Tensor:
    """Return the weighted sum of `expert_rows`' output, float32 [T, k, H] -> [T, H], with the bits of `experts`."""
    return reference_experts.add_choices(rows, chosen, weights)


# Latent attention (MLA; DeepSeek-V2, 2024, arXiv:2405.04434) in its absorbed form. A token is stored as one vector of R
# + D elements, the latent [R] and a rotated key [D] of all heads, in a cache [num_blocks, block_size, R + D],
# contiguous, of any float dtype. A query is multiplied by its head's key up-projection, and the weighted sum of latents
# by the value up-projection: so all heads read the same vectors, once.


def _of_whole_panels(x: Tensor, weight: PackedWeight) -> bool:
    """Return whether each head has its own panels."""
    return weight.layout == "panels" and weight.outputs % (x.shape[1] * PANEL) == 0


@op(_cpu("attention.per_head_linear", _of_whole_panels), _triton("latent.per_head_linear", _in_rows))
def per_head_linear(x: Tensor, weight: PackedWeight, /) -> Tensor:
    """Multiply each head by its own weight: x [T, Hq, K], strides allowed, weight [Hq * N, K] -> [T, Hq, N] of x's
    dtype.

    The heads' weights [N, K] are stacked in order; each multiplies as in `packed_linear`.
    """
    return reference.per_head_linear(x, weight)


@op(_cpu("attention.write_latents"), _triton("latent.write_latents"), key=1)
def write_latents(
    positions: Tensor,
    q: Tensor,
    rows: Tensor,
    norm: Tensor,
    cos_sin_cache: Tensor,
    cache: Tensor,
    slot_mapping: Tensor,
    /,
    eps: float,
    interleaved: bool = False,
) -> None:
    """Store each token's normed latent and rotated key in its slot, and rotate its queries q [T, Hq, D] in place.

    rows [T, R + D] of q's dtype, a token stride allowed, unchanged; norm [R] of that dtype or float32; positions and
    cos_sin_cache [P, D] as in `rotary_embedding`, slot_mapping as in `write_kv`.
    """
    reference.write_latents(positions, q, rows, norm, cos_sin_cache, cache, slot_mapping, eps, interleaved)


def _whole_pieces(q: Tensor, q_rope: Tensor, *_args: Any) -> bool:
    """Return whether the C++ kernel supports the sizes of latents and keys."""
    return q.shape[2] % 16 == 0 and q_rope.shape[2] % 8 == 0


@op(_cpu("attention.latent_attention", _whole_pieces), _triton("latent.latent_attention"))
def latent_attention(
    q: Tensor, q_rope: Tensor, cache: Tensor, metadata: AttentionMetadata, /, scale: float
) -> Tensor:
    """Causal attention of each request's last tokens over its cached latents: a new [T, Hq, R].

    q [T, Hq, R] and q_rope [T, Hq, D] of one dtype, strides allowed. The score of a query and a cached vector (c, k) is
    scale * (q.c + q_rope.k), and its value is c. Padding rows, and block ids, are as in `paged_attention`.
    """
    return reference.latent_attention(q, q_rope, cache, metadata, scale)


# Sampling. Logits are float32, contiguous [N, V]; the order of tokens is that of `token_order`: the higher logit first
# and, of equal logits, the lower id first. A row's results depend on that row alone.


@op(_cpu("sampling.unusable_rows"), _triton("logprobs.unusable_rows"))
def unusable_rows(logits: Tensor, /) -> Tensor:
    """Return the rows that cannot be sampled: [N, V] -> [N] bool.

    They hold a NaN or +inf, or nothing but -inf; a single -inf only means that a token is impossible.
    """
    return reference_sampling.unusable_rows(logits)


@op(_triton("logprobs.clear_rows"))
def clear_rows(logits: Tensor, cleared: Tensor, /) -> None:
    """Set the rows [N, V] selected by `cleared` [N] bool to 0, in place, without a device-to-host sync on a GPU."""
    reference_sampling.clear_rows(logits, cleared)


@op(_cpu("sampling.apply_penalties"))
def apply_penalties(logits: Tensor, indices: Tensor, repetition: Tensor, subtracted: Tensor, /) -> None:
    """Penalize some logits in place, in float64: x -> (x / r if x > 0 else x * r) - s, clamped to float32's maximum.

    indices [M] int64, all different, into the flattened logits; repetition r and subtracted s [M] float64. Repetition:
    N. Keskar et al., "CTRL" (2019), section 4.1. An index outside the logits is an IndexError.
    """
    reference_sampling.apply_penalties(logits, indices, repetition, subtracted)


@op(_triton("logprobs.penalise_rows"))
def penalise_rows(
    logits: Tensor, token_rows: Tensor, places: Tensor, factors: Tensor, /, longest: int
) -> None:
    """Apply `apply_penalties` to every token in a row of tokens, counted here; logits [N, V], in place.

    token_rows [rows, columns] int32 in [0, V). places [U, 4] int64, for each of U samples: its row of the logits, all
    different; its row of tokens; the number of prompt tokens in it, and of all tokens, at most `longest`. factors [U,
    3]
    float64: repetition; frequency, for each time that a token was generated; presence, if it was.
    """
    reference_sampling.penalise_rows(logits, token_rows, places, factors)


@op(_cpu("sampling.mask_logits"), _triton("logprobs.mask_logits"))
def mask_logits(logits: Tensor, rows: Tensor, words: Tensor, /) -> None:
    """Forbid tokens in some rows, in place: logits [N, V] become -inf where a row's mask bit is 0.

    rows [U] int64, all different; words [U, ceil(V / 32)] int32: bit v % 32 of word v // 32 is token v's. No logit is
    NaN.
    """
    reference_sampling.mask_logits(logits, rows, words)


@op(_cpu("sampling.sample_tokens"), _triton("sampling.sample_tokens"))
def sample_tokens(
    logits: Tensor,
    settings: Tensor,
    keys: Tensor | None,
    /,
    limits: SamplingLimits = ANY_LIMITS,
) -> Tensor:
    """Sample one token per row: logits [N, V] -> ids [N] int64, -1 for a row whose logits are all -inf.

    settings [N, 4] float64: temperature, ln(min_p), top_k, top_p. Temperature 0 takes the first token of the order.
    Otherwise logits are divided by the temperature; tokens less likely than min_p times the first are dropped (N.
    Nguyen et
    al., "Turning up the heat", 2024; -inf is off); the `top_k` first tokens are kept (A. Fan et al., "Hierarchical
    neural
    story generation", 2018; V is off) and of those the fewest first ones that hold `top_p` of their mass (A. Holtzman
    et
    al., "The curious case of neural text degeneration", 2019; 1 is off). `limits` says which of the three any row uses.

    A remaining token is drawn by its probability, with random numbers that are a function of keys [N, 2] int64, a seed
    and
    a position for each row; None if all have temperature 0. Philox4x32-10: J. Salmon et al., "Parallel random numbers:
    as
    easy as 1, 2, 3" (2011). The method depends on the device, and so does the token of a seed. A CPU uses inverse
    transform
    sampling, which needs one number: in id order, with c the cumulative weights in float64 and u from `philox.uniform`,
    the
    first token whose c exceeds u * c[-1]. A GPU uses the Gumbel-max trick, which needs a number for each token but no
    sums:
    the token with the largest logit plus `philox.gumbel`, ties by lower id.

    Implementations differ only if rounding (1e-6 of the total mass, or of a Gumbel number) decides on which side of a
    boundary something falls, and on tokens e**87 times less likely than the first, which may count as impossible.
    """
    return reference_sampling.sample_tokens(logits, settings, keys)


@op(_cpu("sampling.token_logprobs"), _triton("logprobs.token_logprobs"))
def token_logprobs(logits: Tensor, chosen: Tensor, /, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the log-softmax of finite logits for the chosen token and the first `num_top` <= V of the order.

    chosen [N] int64 in [0, V), else an IndexError -> ids [N, 1 + num_top] int64, the chosen one first; their logprobs
    float32; ranks of the chosen tokens, from 1, [N] int64.
    """
    return reference_sampling.token_logprobs(logits, chosen, num_top)
