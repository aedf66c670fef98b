# SPDX-License-Identifier: Apache-2.0
"""The table of ops: every kernel the engine calls, with its shapes, dtypes and implementations, best first.

Invariant: which implementation runs depends only on the device and dtype of an op's key tensor (and, where a row gives
`accepts`, on properties of the model), never on the batch; otherwise a request's result would depend on its neighbors.

`op(oracle, ...)` makes a row: the signature and docstring of the torch oracle, in a module `reference*`, are the
contract, and the listed implementations are tried before it. Tensors that choose the implementation are
positional-only.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, update_wrapper
from importlib import import_module
from typing import Any, Generic, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor

from quire.distributed.group import Group, HostGroups
from quire.distributed.shared_memory import SharedMemory
from quire.errors import ConfigError
from quire.kernels import (
    cpu,
    reference,
    reference_attention,
    reference_collectives,
    reference_experts,
    reference_pooling,
    reference_quantized,
    reference_sampling,
    reference_scan,
    triton,
)
from quire.kernels.experts import ExpertWeights
from quire.kernels.linear import PANEL, PackedWeight, WeightScheme
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


def op(oracle: Callable[P, R], *implementations: Implementation, key: int = 0) -> Op[P, R]:
    """Add a row. `key` is the position of the tensor whose device and dtype choose the implementation."""
    row = Op(oracle, implementations, key)
    TABLE[row.name] = row
    return row


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


def _both(path: str) -> tuple[Implementation, Implementation]:
    """Return the rows of a function that both have under one path."""
    return _cpu(path), _triton(path)


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


def _float32(x: Tensor, *_args: Any, **_options: Any) -> bool:
    return x.dtype is torch.float32


def _any_multiple_of_8(q: Tensor, *_args: Any, **_features: Any) -> bool:
    """Return whether the C++ attention supports the head size."""
    return q.shape[2] % 8 == 0


def _whole_columns(
    _qkv: Tensor, _ba: Tensor, _rates: Tensor, _dt_bias: Tensor, states: Tensor, *_args: Any, **_options: Any
) -> bool:
    """Return whether the C++ delta rule supports the head sizes."""
    keys, values = states.shape[2:]
    return keys <= 256 and keys % 8 == 0 and values % 16 == 0


def _whole_vectors(_x: Tensor, weights: Tensor, *_args: Any, **_options: Any) -> bool:
    """Return whether the C++ recurrence supports the head size."""
    return weights.shape[1] % 8 == 0


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


def _of_rank_units(_out: Tensor, _x: Tensor, _adapter_rows: Tensor, adapters: LowRankStacks) -> bool:
    """Return whether slots are padded to a multiple of `RANK_UNIT` ranks."""
    return adapters.a.shape[-1] % RANK_UNIT == 0


def _adds_to_float32(out: Tensor, _x: Tensor, _adapter_rows: Tensor, adapters: LowRankStacks) -> bool:
    """Return whether the C++ kernel supports the call: activations are float32 on a CPU."""
    return out.dtype is torch.float32 and _of_rank_units(out, _x, _adapter_rows, adapters)


def _of_whole_panels(x: Tensor, weight: PackedWeight) -> bool:
    """Return whether each head has its own panels."""
    return weight.layout == "panels" and weight.outputs % (x.shape[1] * PANEL) == 0


def _whole_pieces(q: Tensor, q_rope: Tensor, *_args: Any) -> bool:
    """Return whether the C++ kernel supports the sizes of latents and keys."""
    return q.shape[2] % 16 == 0 and q_rope.shape[2] % 8 == 0


rms_norm = op(reference.rms_norm, *_both("elementwise.rms_norm"))
fused_add_rms_norm = op(reference.fused_add_rms_norm, *_both("elementwise.fused_add_rms_norm"))
layer_norm = op(reference.layer_norm, *_both("elementwise.layer_norm"))
fused_add_layer_norm = op(reference.fused_add_layer_norm, *_both("elementwise.fused_add_layer_norm"))
round_rows = op(reference_quantized.round_rows, _cpu("linear.round_rows", _float32))
accumulate = op(reference_pooling.accumulate, _cpu("elementwise.accumulate"), key=1)
activate = op(reference.activate, *_both("elementwise.activate"))
silu_and_mul = op(reference.silu_and_mul, *_both("elementwise.silu_and_mul"))
gelu_and_mul = op(reference.gelu_and_mul, *_both("elementwise.gelu_and_mul"))
rms_norm_fp8 = op(reference_quantized.rms_norm_fp8, _triton("elementwise.rms_norm_fp8"))
fused_add_rms_norm_fp8 = op(
    reference_quantized.fused_add_rms_norm_fp8, _triton("elementwise.fused_add_rms_norm_fp8")
)
silu_and_mul_fp8 = op(reference_quantized.silu_and_mul_fp8, _triton("elementwise.silu_and_mul_fp8"))
gelu_and_mul_fp8 = op(reference_quantized.gelu_and_mul_fp8, _triton("elementwise.gelu_and_mul_fp8"))
rotary_embedding = op(
    reference.rotary_embedding, _cpu("attention.rotary_embedding"), _triton("rotary.rotary_embedding"), key=1
)
write_kv = op(reference.write_kv, _cpu("attention.write_kv"), _triton("rotary.write_kv", _float_cache))
rotary_and_write_kv = op(
    reference.rotary_and_write_kv,
    _cpu("attention.rotary_and_write_kv"),
    _triton("rotary.rotary_and_write_kv", _float_cache),
    key=1,
)
paged_attention = op(
    reference.paged_attention,
    _cpu("attention.paged_attention", _any_multiple_of_8),
    _triton("attention.paged_attention", _float_cache),
)
bidirectional_attention = op(
    reference_attention.bidirectional_attention,
    _cpu("bidirectional.bidirectional_attention", _any_multiple_of_8),
    _triton("bidirectional.bidirectional_attention"),
)
causal_conv = op(reference_scan.causal_conv, *_both("scan.causal_conv"))
selective_scan = op(reference_scan.selective_scan, *_both("scan.selective_scan"))
ssd_scan = op(reference_scan.ssd_scan, *_both("scan.ssd_scan"))
gated_delta = op(
    reference_scan.gated_delta, _cpu("scan.gated_delta", _whole_columns), _triton("recurrence.gated_delta")
)
rg_lru = op(reference_scan.rg_lru, _cpu("scan.rg_lru", _whole_vectors), _triton("recurrence.rg_lru"))
rwkv7 = op(reference_scan.rwkv7, _cpu("scan.rwkv7", _whole_squares), _triton("recurrence.rwkv7"))
embedding = op(reference.embedding, *_both("elementwise.embedding"), key=1)
linear = op(reference.linear)
pack_weight = op(reference.pack_weight, _cpu("linear.pack_weight"), _triton("linear.pack_weight", _not_plain))
packed_linear = op(
    reference.packed_linear, _cpu("linear.packed_linear"), _triton("linear.packed_linear", _in_rows)
)
rounded_linear = op(reference_quantized.rounded_linear, _cpu("linear.rounded_linear", _float32))
low_rank_linear = op(
    reference_experts.low_rank_linear,
    _cpu("low_rank.low_rank_linear", _adds_to_float32),
    _triton("low_rank.low_rank_linear", _of_rank_units),
)
packed_embedding = op(
    reference.packed_embedding,
    _cpu("linear.packed_embedding", any_dtype=True),
    _triton("linear.packed_embedding", _in_rows, any_dtype=True),
)
all_reduce = op(reference_collectives.all_reduce, _cpu("collectives.all_reduce", _in_shared_memory))
all_gather = op(reference_collectives.all_gather, _cpu("collectives.all_gather", _in_shared_memory))
all_to_all = op(
    reference_collectives.all_to_all, _cpu("collectives.all_to_all", _rows_in_shared_memory, any_dtype=True)
)
send = op(reference_collectives.send)
recv = op(reference_collectives.recv)
route = op(reference_experts.route, *_both("experts.route"))
experts = op(
    reference_experts.experts,
    _cpu("experts.experts", _experts_in_panels),
    _triton("experts.experts", _experts_in_rows),
)
expert_rows = op(reference_experts.expert_rows, _cpu("experts.expert_rows", _expert_rows_in_panels))
add_choices = op(reference_experts.add_choices, _cpu("experts.add_choices"))
per_head_linear = op(
    reference_attention.per_head_linear,
    _cpu("latent.per_head_linear", _of_whole_panels),
    _triton("latent.per_head_linear", _in_rows),
)
write_latents = op(
    reference_attention.write_latents, _cpu("latent.write_latents"), _triton("latent.write_latents"), key=1
)
latent_attention = op(
    reference_attention.latent_attention,
    _cpu("latent.latent_attention", _whole_pieces),
    _triton("latent.latent_attention"),
)
unusable_rows = op(
    reference_sampling.unusable_rows, _cpu("sampling.unusable_rows"), _triton("logprobs.unusable_rows")
)
clear_rows = op(reference_sampling.clear_rows, _triton("logprobs.clear_rows"))
apply_penalties = op(reference_sampling.apply_penalties, _cpu("sampling.apply_penalties"))
penalize_rows = op(reference_sampling.penalize_rows, _triton("logprobs.penalize_rows"))
mask_logits = op(
    reference_sampling.mask_logits, _cpu("sampling.mask_logits"), _triton("logprobs.mask_logits")
)
sample_tokens = op(reference_sampling.sample_tokens, *_both("sampling.sample_tokens"))
token_logprobs = op(
    reference_sampling.token_logprobs, _cpu("sampling.token_logprobs"), _triton("logprobs.token_logprobs")
)
