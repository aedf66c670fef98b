"""The table of ops: every kernel the engine calls, with its shapes, dtypes and implementations, best first.

Invariant: which implementation runs depends only on the device and dtype of an op's key tensor (and, where a
row gives `accepts`, on properties of the model), never on the batch; otherwise a request's result would
depend on its neighbours.

`@op(...)` turns a function into a row: the signature and docstring are the contract, the body is the torch
oracle, and the listed implementations are tried before it. Tensors that choose the implementation are
positional-only.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, update_wrapper
from importlib import import_module
from typing import Any, Generic, Literal, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor

from quire.errors import ConfigError
from quire.kernels import cpu, reference
from quire.kernels.attention_metadata import AttentionMetadata

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Implementation:
    """One way to compute an op."""

    name: str
    """Family of the implementation, as `quire doctor` shows it: "cpu", "triton"."""
    load: Callable[[], Callable[..., Any]]
    """Imports and returns the function, on first use."""
    supports: Callable[[str, torch.dtype], bool]
    """Whether it handles a device type and dtype of the key tensor; asked once for each pair."""
    status: Callable[[], str]
    """Why this family is, or is not, in use on this machine: one phrase for people."""
    accepts: Callable[..., bool] | None = None
    """A further test of a call's arguments, on the hot path. It may look at properties of the model (head
    size, weight layout), never at the number of tokens or requests."""


class Op(Generic[P, R]):
    """A callable row of the table; calls the first implementation that supports its arguments."""

    def __init__(self, oracle: Callable[P, R], implementations: tuple[Implementation, ...], key: int) -> None:
        self.name = oracle.__name__
        self.oracle = oracle
        self.implementations = implementations
        self._key = key
        self._choices: dict[tuple[torch.device, torch.dtype], list[_Choice]] = {}
        update_wrapper(self, oracle)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        tensor: Any = args[self._key]
        choices = self._choices.get((tensor.device, tensor.dtype)) or self._choose(
            tensor.device, tensor.dtype
        )
        for function, accepts in choices:
            if accepts is None or accepts(*args, **kwargs):
                return function(*args, **kwargs)  # type: ignore[no-any-return]
        raise AssertionError(f"op {self.name}: the oracle is always last and takes everything")

    def supporting(self, device_type: str, dtype: torch.dtype) -> tuple[Implementation, ...]:
        """The implementations a call with this device type and dtype tries before the oracle, in order."""
        if reference_only():
            return ()
        return tuple(row for row in self.implementations if row.supports(device_type, dtype))

    def _choose(self, device: torch.device, dtype: torch.dtype) -> "list[_Choice]":
        rows = self.supporting(device.type, dtype)
        choices = [_Choice(row.load(), row.accepts) for row in rows]
        self._choices[device, dtype] = choices = [*choices, _Choice(self.oracle, None)]
        return choices


class _Choice(NamedTuple):
    function: Callable[..., Any]
    accepts: Callable[..., bool] | None


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
    """Whether QUIRE_KERNELS=reference asks for the oracle everywhere; nothing else reads the variable."""
    value = os.environ.get("QUIRE_KERNELS", "auto")
    if value not in ("auto", "reference"):
        raise ConfigError(f"QUIRE_KERNELS is {value!r}; it must be 'auto' or 'reference'")
    return value == "reference"


class OpChoice(NamedTuple):
    """One line of `quire doctor`: what an op runs on a device, and why."""

    op: str
    implementations: tuple[str, ...]
    reason: str


def describe(device_type: str = "cpu", dtype: torch.dtype = torch.bfloat16) -> list[OpChoice]:
    """For each op, the implementations tried for this device type and dtype, in order, with the reason."""
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


def _cpu(function: str, accepts: Callable[..., bool] | None = None) -> Implementation:
    """A row of the C++ CPU library: `function` of `quire.kernels.cpu.binding`."""

    def load() -> Callable[..., Any]:
        return getattr(import_module("quire.kernels.cpu.binding"), function)  # type: ignore[no-any-return]

    def supports(device_type: str, dtype: torch.dtype) -> bool:
        return device_type == "cpu" and cpu.supports(dtype)

    return Implementation("cpu", load, supports, cpu.status, accepts)


# Shapes: T tokens of the step, H hidden size, I intermediate size, Hq/Hkv query and key-value heads, D head
# size, R requests, V vocabulary rows, P positions. Tensors are contiguous in their last dimension.


@op(_cpu("rms_norm"))
def rms_norm(x: Tensor, weight: Tensor, /, eps: float) -> Tensor:
    """`x / rms(x) * weight` over the last dimension.

    x [..., H] any float dtype; weight [H] of x's dtype or float32. Computed in float32 with one rounding at
    the end, returned in x's dtype and shape.
    """
    return reference.rms_norm(x, weight, eps)


@op(_cpu("fused_add_rms_norm"))
def fused_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, /, eps: float) -> tuple[Tensor, Tensor]:
    """`(rms_norm(x + residual), x + residual)`, both new tensors of x's dtype and shape.

    x, residual [..., H] of one dtype; weight as in `rms_norm`. The norm is taken of the sum as rounded to x's
    dtype.
    """
    return reference.fused_add_rms_norm(x, residual, weight, eps)


@op(_cpu("layer_norm"))
def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, /, eps: float) -> Tensor:
    """`(x - mean) / std * weight + bias` over the last dimension; shapes and dtypes as in `rms_norm`."""
    return reference.layer_norm(x, weight, bias, eps)


@op(_cpu("silu_and_mul"))
def silu_and_mul(x: Tensor, /) -> Tensor:
    """`silu(first half) * second half`: x [..., 2 * I] -> [..., I] of x's dtype."""
    return reference.silu_and_mul(x)


@op(_cpu("gelu_and_mul"))
def gelu_and_mul(x: Tensor, /, approximate: Literal["none", "tanh"] = "none") -> Tensor:
    """`gelu(first half) * second half`: x [..., 2 * I] -> [..., I] of x's dtype."""
    return reference.gelu_and_mul(x, approximate)


@op(_cpu("rotary_embedding"), key=1)
def rotary_embedding(
    positions: Tensor, q: Tensor, k: Tensor, cos_sin_cache: Tensor, /, interleaved: bool = False
) -> tuple[Tensor, Tensor]:
    """Rotate q and k by their positions, in place, and return them.

    positions [T] int64 in [0, P); q [T, Hq, D] and k [T, Hkv, D] of one dtype, views with a token stride
    allowed; cos_sin_cache [P, rot_dim] float32 = cat(cos, sin), rot_dim even and <= D (the rest of each head
    is left alone). The pairs are (i, i + rot_dim / 2), or (2 i, 2 i + 1) when interleaved. A position outside
    the cache is an IndexError.
    """
    return reference.rotary_embedding(positions, q, k, cos_sin_cache, interleaved)


# A KV cache is a pair of tensors that share the memory of a block in equal parts:
#
#     k_cache [num_blocks, Hkv, D, block_size] and v_cache [num_blocks, Hkv, block_size, D],
#
# contiguous, of any float dtype. In int8 D is larger by 4: behind a head's keys stand block_size float32 scales, and
# behind each value stands its own. What is stored is round(x / scale), with scale = amax / 127 for each token and head.


@op(_cpu("write_kv"))
def write_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor, /) -> None:
    """Store each token's key and value in its slot.

    k, v [T, Hkv, D], views with a token stride allowed; slot_mapping [T] int64, slot = block_id * block_size +
    offset, all different; a negative slot is skipped, one past the cache is an IndexError.
    """
    reference.write_kv(k, v, k_cache, v_cache, slot_mapping)


@op(_cpu("rotary_and_write_kv"), key=1)
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
) -> None:
    """`rotary_embedding` on q and k, in place, then `write_kv`, in one pass and with the same bits."""
    reference.rotary_and_write_kv(
        positions, q, k, v, cos_sin_cache, k_cache, v_cache, slot_mapping, interleaved
    )


def _any_multiple_of_8(q: Tensor, *_args: Any, **_features: Any) -> bool:
    """Head sizes that the C++ attention takes."""
    return q.shape[2] % 8 == 0


@op(_cpu("paged_attention", _any_multiple_of_8))
def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    metadata: AttentionMetadata,
    /,
    scale: float,
    *,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    alibi_slopes: Tensor | None = None,
) -> Tensor:
    """Causal attention of each request's last tokens over its cached keys and values: a new [T, Hq, D].

    q [T, Hq, D], a view with a token stride allowed; caches as above, Hq a multiple of Hkv (query head h reads head
    h // (Hq / Hkv)); the step's own keys are already written. Score of query position i and key position j: s =
    scale * q.k; with `soft_cap` c, s = c * tanh(s / c); with `alibi_slopes` [Hq], s - slope * (i - j). With
    `sliding_window` w, only i - w < j <= i is seen. Rows of no request come out as 0. A block id that is needed and not
    in the cache is an IndexError.
    """
    return reference.paged_attention(
        q,
        k_cache,
        v_cache,
        metadata,
        scale,
        sliding_window=sliding_window,
        soft_cap=soft_cap,
        alibi_slopes=alibi_slopes,
    )


@op(_cpu("embedding"), key=1)
def embedding(ids: Tensor, weight: Tensor, /) -> Tensor:
    """Rows of a table: ids [T] int64 in [0, V), weight [V, H] -> [T, H]; any other id is an IndexError."""
    return reference.embedding(ids, weight)


@op()
def linear(x: Tensor, weight: Tensor, /, bias: Tensor | None = None) -> Tensor:
    """`x @ weight.T + bias`: x [..., K], weight [N, K], bias [N], all of one dtype -> [..., N]."""
    return reference.linear(x, weight, bias)
