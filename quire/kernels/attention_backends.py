"""Attention backends by name: which function computes `ops.paged_attention` for a model's layers.

Invariant: a backend is chosen once for each kind of layer, when the model is built, and never by what is in a batch.
All read one cache, that of `ops.write_kv`. An installed package adds a backend by an entry point of the group
`quire.attention_backends` that names an `AttentionBackend`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module

import torch
from torch import Tensor

from quire.errors import ConfigError
from quire.kernels import ops
from quire.plugins import PluginTable, instance_of

PagedAttention = Callable[..., Tensor]
"""A function with the signature and the contract of `ops.paged_attention`."""


@dataclass(frozen=True, slots=True)
class AttentionNeeds:
    """What a layer asks of its backend."""

    device_type: str
    """As torch names it: "cpu", "cuda", "xpu"."""
    dtype: torch.dtype
    """Of queries, keys and values."""
    cache_dtype: torch.dtype
    head_size: int
    has_soft_cap: bool = False
    has_alibi: bool = False
    has_sinks: bool = False
    batch_invariant: bool = False
    """Whether a row must have the same bits in every batch and however a prompt is cut into chunks."""


@dataclass(frozen=True, slots=True)
class AttentionBackend:
    """One way to compute attention over the paged cache."""

    why_not: Callable[[AttentionNeeds], str | None]
    """Why it cannot do that here: a phrase for people; None if it can."""
    load: Callable[[AttentionNeeds], PagedAttention]
    """Imports and returns the function; asked only where `why_not` has nothing to say."""
    capturable: bool = False
    """Whether its calls can be part of a graph that a GPU replays, or of a tape that a CPU plays: the same launches for
    every batch of a size, and nothing that the recorder does not see."""


def known_backends() -> list[str]:
    """Names that `resolve_backend` takes, but for auto."""
    return BACKENDS.names()


def resolve_backend(name: str, needs: AttentionNeeds) -> tuple[str, AttentionBackend]:
    """The backend of a name, as `--attention-backend` gives it, with its name; for auto, the best that can do it.

    Raises:
        ConfigError: there is none of that name, or it cannot do what is needed; the message says why.
    """
    if name == "auto":
        return _best(needs)
    backend = BACKENDS.resolve(name)
    reason = backend.why_not(needs)
    if reason is not None:
        raise ConfigError(f"--attention-backend {name} cannot be used here: {reason}. {_say_usable(needs)}")
    return name, backend


def _best(needs: AttentionNeeds) -> tuple[str, AttentionBackend]:
    reasons = {name: _BUILT_IN[name].why_not(needs) for name in _AUTO}
    usable = [name for name, reason in reasons.items() if reason is None]
    if not usable:
        why = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
        raise ConfigError(f"no attention backend can be used here. {why}")
    return usable[0], _BUILT_IN[usable[0]]


def _say_usable(needs: AttentionNeeds) -> str:
    usable = [name for name, backend in _BUILT_IN.items() if backend.why_not(needs) is None]
    return f"Of the built-in ones, {', '.join(usable)} can" if usable else "No built-in one can"


def _needs_row(name: str) -> Callable[[AttentionNeeds], str | None]:
    """Whether the row of that name in the table of ops computes on the device and dtype."""

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
    function: PagedAttention = import_module("quire.kernels.torch_sdpa").paged_attention
    return function


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
