# SPDX-License-Identifier: Apache-2.0
"""Attention backends by name: implementations of `ops.paged_attention` for a model's layers.

Invariant: a backend is chosen once for each kind of layer, when the model is built, never by the batch. All read the
cache of `ops.write_kv`. An installed package adds a backend by an entry point of the group `quire.attention_backends`
that names an `AttentionBackend`.

`paged_attention` here is the "torch_sdpa" backend: torch's `scaled_dot_product_attention`, request by request. It needs
only torch. It gathers keys and values for every call, which costs memory and time; it is for comparison, and for
devices without other kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.errors import ConfigError
from quire.kernels import ops
from quire.kernels.attention_metadata import AttentionMetadata, check_features, check_last_seen
from quire.kernels.reference import biases_of, gather_blocks, seen_keys
from quire.plugins import PluginTable, instance_of


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    metadata: AttentionMetadata,
    scale: float,
    *,
    sliding_window: int | None = None,
    attention_chunk: int | None = None,
    soft_cap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    relative_bias: Tensor | None = None,
) -> Tensor:
    """See `ops.paged_attention`.

    Raises:
        NotImplementedError: with a soft cap or sinks, which torch's attention does not have.
    """
    check_features(q, sliding_window, attention_chunk, soft_cap, alibi_slopes, sinks, relative_bias)
    check_last_seen(metadata, len(q), attention_chunk)
    if soft_cap is not None:
        raise NotImplementedError("scaled_dot_product_attention has no soft cap")
    if sinks is not None:
        raise NotImplementedError("scaled_dot_product_attention has no sinks")
    out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    # Biases are added to the scores, for which 16 bits are too coarse.
    is_biased = alibi_slopes is not None or relative_bias is not None
    dtype = torch.float32 if is_biased else q.dtype
    starts, lengths = metadata.query_start_loc.tolist(), metadata.seq_lens.tolist()
    for request, seq_len in enumerate(lengths):
        rows = slice(starts[request], starts[request + 1])
        if rows.start == rows.stop:
            continue
        keys, values = gather_blocks(k_cache, v_cache, metadata.block_tables[request : request + 1], seq_len)
        distance = _distance(rows.stop - rows.start, seq_len, q.device)
        last_seen = None if metadata.last_seen is None else metadata.last_seen[rows]
        seen = seen_keys(distance, seq_len, sliding_window, attention_chunk, last_seen)
        # Unwritten slots can hold NaN, which a weight of 0 would not cancel.
        unseen = ~seen.any(0)[:, None]
        mixed = F.scaled_dot_product_attention(
            q[rows].transpose(0, 1).unsqueeze(0).to(dtype),
            keys.masked_fill(unseen, 0.0).to(dtype),
            values.masked_fill(unseen, 0.0).to(dtype),
            attn_mask=_bias(seen, distance, alibi_slopes, relative_bias) if is_biased else seen,
            scale=scale,
            enable_gqa=True,
        )
        out[rows] = mixed[0].transpose(0, 1)
    return out


def _distance(query_len: int, seq_len: int, device: torch.device) -> Tensor:
    """Return query position minus key position, [query_len, seq_len]; negative = a future key."""
    positions = torch.arange(seq_len, device=device)
    return positions[seq_len - query_len :, None] - positions


def _bias(seen: Tensor, distance: Tensor, slopes: Tensor | None, relative_bias: Tensor | None) -> Tensor:
    """Return the bias added to scores: float32 [Hq, query_len, seq_len]."""
    bias = torch.zeros(1, *distance.shape, device=distance.device)
    if slopes is not None:
        bias = bias - slopes.float()[:, None, None] * distance.abs()
    if relative_bias is not None:
        bias = bias + biases_of(relative_bias, distance)
    return bias.masked_fill(~seen, -torch.inf)


PagedAttention = Callable[..., Tensor]
"""Function with the signature and the contract of `ops.paged_attention`."""


@dataclass(frozen=True, slots=True)
class AttentionNeeds:
    """Features that a layer requires of its backend."""

    device_type: str
    """Device type as in torch: "cpu", "cuda", "xpu"."""
    dtype: torch.dtype
    """Dtype of queries, keys and values."""
    cache_dtype: torch.dtype
    head_size: int
    has_soft_cap: bool = False
    has_alibi: bool = False
    has_sinks: bool = False
    batch_invariant: bool = False
    """True if a row must have the same bits in every batch and chunking of a prompt."""


@dataclass(frozen=True, slots=True)
class AttentionBackend:
    """Implementation of attention over the paged cache."""

    why_not: Callable[[AttentionNeeds], str | None]
    """Returns why it is unusable here, as a phrase for users; None if it is usable."""
    load: Callable[[AttentionNeeds], PagedAttention]
    """Imports and returns the function; called only if `why_not` returned None."""
    capturable: bool = False
    """True if its calls can be captured in a CUDA graph or recorded kernel graph: the same launches for every batch of
    a size, all visible to the recorder.
    """


def known_backends() -> list[str]:
    """Return the names that `resolve_backend` accepts, except auto."""
    return BACKENDS.names()


def resolve_backend(name: str, needs: AttentionNeeds) -> tuple[str, AttentionBackend]:
    """Return name and backend for a value of `--attention-backend`; for auto, the best usable one.

    Raises:
        ConfigError: there is none of that name, or it lacks a feature; the message says why.
    """
    if name == "auto":
        return _best(needs)
    backend = BACKENDS.resolve(name)
    reason = backend.why_not(needs)
    if reason is not None:
        raise ConfigError(
            f"--attention-backend {name} cannot be used here: {reason}. {_usable_message(needs)}"
        )
    return name, backend


def _best(needs: AttentionNeeds) -> tuple[str, AttentionBackend]:
    reasons = {name: _BUILT_IN[name].why_not(needs) for name in _AUTO}
    usable = [name for name, reason in reasons.items() if reason is None]
    if not usable:
        why = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
        raise ConfigError(f"no attention backend can be used here. {why}")
    return usable[0], _BUILT_IN[usable[0]]


def _usable_message(needs: AttentionNeeds) -> str:
    usable = [name for name, backend in _BUILT_IN.items() if backend.why_not(needs) is None]
    return f"Of the built-in ones, {', '.join(usable)} can" if usable else "No built-in one can"


def _needs_row(name: str) -> Callable[[AttentionNeeds], str | None]:
    """Return a `why_not` that checks the op table's row of that name for device and dtype."""

    def why_not(needs: AttentionNeeds) -> str | None:
        rows = ops.paged_attention.supporting(needs.device_type, needs.dtype)
        if name in {row.name for row in rows}:
            return None
        if ops.reference_only():
            return "QUIRE_KERNELS=reference switches it off"
        if needs.device_type not in _DEVICES[name]:
            return f"it runs on {' and '.join(_DEVICES[name])}, and the device is {needs.device_type}"
        return f"it does not compute on {needs.device_type} in {needs.dtype} ({_row(name).status()})"

    return why_not


def _row(name: str) -> ops.Implementation:
    return next(row for row in ops.paged_attention.implementations if row.name == name)


def _no_cpu(needs: AttentionNeeds) -> str | None:
    if needs.head_size % 8:
        return f"its head size must be a multiple of 8, and the model's is {needs.head_size}"
    return _needs_row("cpu")(needs)


def _no_triton(needs: AttentionNeeds) -> str | None:
    if needs.cache_dtype == torch.int8:
        return "it does not read an int8 KV cache"
    return _needs_row("triton")(needs)


def _no_torch_sdpa(needs: AttentionNeeds) -> str | None:
    if needs.has_soft_cap:
        return "torch's attention cannot cap the model's scores softly"
    if needs.has_sinks:
        return "torch's attention has no sinks, which the model has"
    return _no_reference(needs)


def _no_reference(needs: AttentionNeeds) -> str | None:
    return (
        "its sums depend on the batch, and --batch-invariant forbids that" if needs.batch_invariant else None
    )


def _load_triton(needs: AttentionNeeds) -> PagedAttention:
    module = import_module("quire.kernels.triton.attention")
    function: PagedAttention = (
        module.invariant_paged_attention if needs.batch_invariant else module.paged_attention
    )
    return function


def _load_torch_sdpa(_needs: AttentionNeeds) -> PagedAttention:
    return paged_attention


_DEVICES = {"cpu": ("cpu",), "triton": ("cuda", "xpu")}

_BUILT_IN = {
    "cpu": AttentionBackend(_no_cpu, lambda _needs: _row("cpu").load(), capturable=True),
    "triton": AttentionBackend(_no_triton, _load_triton, capturable=True),
    "torch_sdpa": AttentionBackend(_no_torch_sdpa, _load_torch_sdpa),
    "reference": AttentionBackend(_no_reference, lambda _needs: ops.paged_attention.oracle),
}
_AUTO = ("triton", "cpu", "reference")

BACKENDS: PluginTable[AttentionBackend] = PluginTable(
    "quire.attention_backends",
    "--attention-backend",
    _BUILT_IN,
    instance_of(AttentionBackend),
    words=("auto",),
)
