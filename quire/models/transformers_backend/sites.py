"""Where a model of transformers attends, and how its heads get to the paged KV cache.

transformers lets a model's attention modules call any function that is registered under a name. Ours hands them to the
model's `Port`. What attends, with how many heads and what window, is not read from names: the model is run once on the
meta device, where nothing is computed, and the port takes notes.

Shapes: T tokens of the step, Hq/Hkv query and key-value heads, Dk/Dv sizes of keys and values.
"""

from __future__ import annotations

import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.utils.generic import ModelOutput

from quire.config import EngineConfig
from quire.errors import QuireError, UnsupportedModelError
from quire.layers.attention import Attention
from quire.layers.shard import Shard
from quire.layers.sinks import Sinks
from quire.layers.step import StepContext
from quire.models.transformers_backend.plan import Plan

NAME = "quire"
"""Of our function among transformers' attention implementations."""

_HEAD_UNIT = 8
"""Heads are filled up with zeros to a multiple of this, which the kernels want."""

_WITHOUT_EFFECT = {"position_ids", "cache_position", "output_attentions", "use_cache", "dropout"}
"""Tensors and numbers that modules hand on and that change nothing here."""

_SINKS = "s_aux"
"""What modules call the sinks that they hand over."""

Attend = Callable[[nn.Module, Tensor, Tensor, Tensor, Mapping[str, Any]], Tensor]


class WholeAttention(Attention):
    """Attention of which every rank has all heads."""

    def take_share(self, shard: Shard) -> None:
        return None


class Port:
    """What the attention modules of one model call: query, key and value [T, H, D] -> [T, Hq, Dv].

    Invariant: `attend` is what a step needs, except within `doing`; a step is there while its forward pass runs. A
    module that attends several times in a step does so with keys and values of its own each time, in the same order.
    """

    def __init__(self) -> None:
        self.attend: Attend = self._paged
        self.positions: Tensor | None = None
        """Of the pass that runs, as the model numbers them, [T]; None: it counts its tokens."""
        self._step: tuple[Tensor, StepContext] | None = None
        self._turns: Counter[nn.Module] = Counter()

    @contextmanager
    def doing(self, attend: Attend) -> Iterator[None]:
        """Have the modules call another function for a while."""
        self.attend = attend
        try:
            yield
        finally:
            self.attend = self._paged

    @contextmanager
    def numbering(self, positions: Tensor | None) -> Iterator[None]:
        """A pass over tokens at these positions."""
        self.positions = positions
        try:
            yield
        finally:
            self.positions = None

    @contextmanager
    def during(self, positions: Tensor, step: StepContext) -> Iterator[None]:
        """A step's forward pass."""
        self._step = (positions, step)
        self._turns.clear()
        try:
            yield
        finally:
            self._step = None

    def _paged(
        self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, options: Mapping[str, Any]
    ) -> Tensor:
        assert self._step is not None, "attention is computed within a step"
        assert isinstance(module.paged, nn.ModuleList)
        paged, size = module.paged[self._turns[module]], v.shape[-1]
        assert isinstance(paged, Attention)
        self._turns[module] += 1
        out = paged(*(_filled_up(heads, paged.head_dim) for heads in (q, k, v)), *self._step)
        return out.view(len(q), -1, paged.head_dim)[..., :size]


def own_value(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, options: Mapping[str, Any]) -> Tensor:
    """Attention of a token to itself alone: its value, for each query head that reads it."""
    return v.repeat_interleave(q.shape[1] // v.shape[1], dim=1)


def _through_port(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, None]:
    """The registered function: [1, H, T, D] each -> [1, T, Hq, Dv], and no weights."""
    port = module.port
    assert isinstance(port, Port)
    q, k, v = (heads[0].transpose(0, 1) for heads in (query, key, value))
    return port.attend(module, q, k, v, options | {"attention_mask": attention_mask})[None], None


AttentionInterface.register(NAME, _through_port)


def give_port(model: nn.Module) -> Port:
    """Let all modules of a model know one new port."""
    port = Port()
    for module in model.modules():
        module.__dict__["port"] = port
    return port


class Found(NamedTuple):
    """What a model was seen to do."""

    kind: type[ModelOutput]
    """What its backbone's results are."""
    unused: frozenset[nn.Module]
    """Modules of the backbone that it never calls: others compute with their parameters, if anything does."""


def find_sites(
    model: PreTrainedModel, backbone: nn.Module, port: Port, config: EngineConfig, plan: Plan
) -> Found:
    """Run a model that is on the meta device, and give each module an `Attention` for each time it attends, in `paged`.

    The plan knows what attends afterwards.

    Raises:
        UnsupportedModelError: it cannot be run on a packed batch, or attends in a way that the KV cache has not.
        ConfigError: the attention backend cannot do what it needs.
    """
    names = {module: name for name, module in model.named_modules()}
    found: dict[nn.Module, list[Attention]] = defaultdict(list)
    left_out = _experts_of_their_own(model)

    def take_notes(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, options: Mapping[str, Any]) -> Tensor:
        reason = _why_not(module, q, k, v, options)
        if reason is not None:
            raise UnsupportedModelError(f"{names[module]} {reason}")
        kind = Attention if plan.shares_heads(names[module]) else WholeAttention
        site = _attention(kind, config, names[module], len(found[module]), module, q, k, v, options)
        found[module].append(site)
        plan.attends[names[module]] = site.num_kv_heads
        return q.new_empty(*q.shape[:2], v.shape[2])

    ids = torch.zeros(1, 2, dtype=torch.int64, device="meta")
    try:
        with (
            port.doing(take_notes),
            _leaving_out(left_out),
            _keeping_buffers(model),
            _calls(backbone) as called,
            torch.no_grad(),
        ):
            output = backbone(input_ids=ids, position_ids=ids, use_cache=False)
    except QuireError:
        raise
    except Exception as error:
        if not found and not _has_interface(backbone):
            raise UnsupportedModelError(_NO_INTERFACE) from error
        raise UnsupportedModelError(
            f"its code cannot be run without data: {error}, {_where(error)}"
        ) from error
    if not found:
        raise UnsupportedModelError(_NO_INTERFACE)
    for module, attentions in found.items():
        module.paged = nn.ModuleList(attentions)
    called |= {inner for module in left_out for inner in module.modules()}
    return Found(type(output), frozenset(backbone.modules()) - called)


def _experts_of_their_own(model: nn.Module) -> list[nn.Module]:
    """Experts that loop by themselves, and so ask tensors whose tokens are theirs."""
    return [
        module
        for module in model.modules()
        if type(module).__name__.endswith("Experts") and not hasattr(module, "_apply_gate")
    ]


@contextmanager
def _leaving_out(modules: Collection[nn.Module]) -> Iterator[None]:
    """Have modules give rows like those that they get."""
    for module in modules:
        module.forward = _rows_like
    try:
        yield
    finally:
        for module in modules:
            del module.forward


@contextmanager
def _calls(model: nn.Module) -> Iterator[set[nn.Module]]:
    """The modules of a model that are called meanwhile."""
    called: set[nn.Module] = set()

    def take_note(module: nn.Module, args: Any) -> None:
        called.add(module)

    hooks = [module.register_forward_pre_hook(take_note) for module in model.modules()]
    try:
        yield called
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def _keeping_buffers(model: nn.Module) -> Iterator[None]:
    """Have the model's buffers as they were, where its code brings them to the device of what it computes."""
    buffers = [(module, dict(module._buffers)) for module in model.modules()]
    try:
        yield
    finally:
        for module, own in buffers:
            module._buffers.update(own)


def _rows_like(x: Tensor, *args: Any, **options: Any) -> Tensor:
    return x.new_empty(x.shape)


_NO_INTERFACE = "none of its modules attends through transformers' attention interface"


def _where(error: Exception) -> str:
    """The innermost line of transformers' models that raised it, for people who know them."""
    frames = traceback.extract_tb(error.__traceback__)
    *_, frame = [frames[-1], *(frame for frame in frames if "modeling_" in frame.filename)]
    return f"in {frame.name}, line {frame.lineno} of {Path(frame.filename).name}"


def _has_interface(backbone: nn.Module) -> bool:
    """Whether its authors say that it can attend otherwise than by code of its own."""
    kinds = ("_supports_attention_backend", "_supports_sdpa", "_supports_flash_attn")
    return any(getattr(backbone, kind, False) for kind in kinds)


def _why_not(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, options: Mapping[str, Any]) -> str | None:
    """Why the KV cache has no such attention: a phrase for people; None if it has."""
    if len(q) != len(k):
        return "attends to something else than the tokens before"
    if options.get("is_causal", getattr(module, "is_causal", True)) is False:
        return "attends to tokens behind, too"
    if q.shape[1] % k.shape[1]:
        return f"has {q.shape[1]} query heads for {k.shape[1]} key-value heads"
    for name, value in options.items():
        is_known = name in _WITHOUT_EFFECT or (name == _SINKS and _own_name(module, value) is not None)
        if isinstance(value, Tensor) and not is_known:
            return f"hands over {name}, which the KV cache's attention does not take"
    kind = _layer_type(module)
    return None if kind in (None, "full_attention", "sliding_attention") else f"is a layer of {kind}"


def _layer_type(module: nn.Module) -> str | None:
    """What config.json calls the layer of a module, if it does."""
    kinds = getattr(getattr(module, "config", None), "layer_types", None)
    index = getattr(module, "layer_idx", None)
    return kinds[index] if kinds is not None and index is not None else None


def _window(module: nn.Module, options: Mapping[str, Any]) -> int | None:
    kind, handed = _layer_type(module), options.get("sliding_window")
    if kind == "full_attention":
        return None
    if kind == "sliding_attention" and handed is None:
        return getattr(module.config, "sliding_window", None)
    return handed


def _own_name(module: nn.Module, tensor: Any) -> str | None:
    """What a module calls that parameter of its own."""
    return next((name for name, own in module._parameters.items() if own is tensor), None)


def _attention(
    kind: type[Attention],
    config: EngineConfig,
    path: str,
    turn: int,
    module: nn.Module,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    options: Mapping[str, Any],
) -> Attention:
    scale, sinks = options.get("scaling"), options.get(_SINKS)
    size = max(q.shape[2], v.shape[2])
    return kind(
        config=config,
        name=f"{path}.{turn}" if turn else path,
        num_heads=q.shape[1],
        num_kv_heads=k.shape[1],
        head_dim=-(-size // _HEAD_UNIT) * _HEAD_UNIT,
        scale=q.shape[2] ** -0.5 if scale is None else float(scale),
        sliding_window=_window(module, options),
        soft_cap=options.get("softcap"),
        sinks=None
        if sinks is None
        else Sinks(num_heads=q.shape[1], name=f"{path}.{_own_name(module, sinks)}"),
    )


def _filled_up(heads: Tensor, size: int) -> Tensor:
    """[T, H, D], with zeros up to D = size."""
    missing = size - heads.shape[-1]
    return F.pad(heads, (0, missing)) if missing else heads.contiguous()
