# SPDX-License-Identifier: Apache-2.0
"""Connection of a transformers model to the paged KV cache, and replacement of its modules by our layers.

transformers lets attention modules call any registered function. Ours passes the heads to the model's `AttentionPort`.
Which modules attend, with how many heads and what window, is found by running the model once on the meta device, where
nothing is computed, and recording the calls.

Shapes: T tokens of the step, Hq/Hkv query and key-value heads, Dk/Dv sizes of keys and values.
"""

from __future__ import annotations

import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
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
from quire.layers.attention_parts import Sinks
from quire.layers.base import activation_dtype
from quire.layers.embedding import VocabEmbedding
from quire.layers.shard import Shard
from quire.layers.step import StepContext
from quire.models.transformers_backend import experts
from quire.models.transformers_backend.hosted import (
    CountedPositions,
    RotaryTable,
    TiedHead,
    as_embedding,
    as_head,
    as_linear,
    counts_positions,
)
from quire.models.transformers_backend.plan import ShardingPlan, as_activation, as_norm
from quire.models.transformers_backend.tensors import (
    CheckpointView,
    Loaded,
    held_tensors,
    module_names,
    stored_tensors,
)

NAME = "quire"
"""Name of our function among transformers' attention implementations."""

_HEAD_UNIT = 8
"""Head sizes are padded with zeros to a multiple of this, as the kernels require."""

_WITHOUT_EFFECT = {"position_ids", "cache_position", "output_attentions", "use_cache", "dropout"}
"""Arguments that modules pass on and that have no effect here."""

_SINKS = "s_aux"
"""Argument name of attention sinks."""

Attend = Callable[[nn.Module, Tensor, Tensor, Tensor, Mapping[str, Any]], Tensor]


class WholeAttention(Attention):
    """Attention with all heads on every rank."""

    def apply_shard(self, shard: Shard) -> None:
        return None


class AttentionPort:
    """Attention function of one model's modules: query, key and value [T, H, D] -> [T, Hq, Dv].

    Invariant: `attend` is the paged attention except within `doing`; a step is set while its forward pass runs. A
    module that attends several times in a step uses separate keys and values each time, in the same order.
    """

    def __init__(self) -> None:
        self.attend: Attend = self._paged
        self.positions: Tensor | None = None
        """Positions of the current pass in the model's numbering, [T]; None: the model counts its tokens."""
        self._step: tuple[Tensor, StepContext] | None = None
        self._turns: Counter[nn.Module] = Counter()

    @contextmanager
    def doing(self, attend: Attend) -> Iterator[None]:
        """Replace the attention function in this context."""
        self.attend = attend
        try:
            yield
        finally:
            self.attend = self._paged

    @contextmanager
    def numbering(self, positions: Tensor | None) -> Iterator[None]:
        """Set the positions of the tokens in this context."""
        self.positions = positions
        try:
            yield
        finally:
            self.positions = None

    @contextmanager
    def during(self, positions: Tensor, step: StepContext) -> Iterator[None]:
        """Set the step of the forward pass in this context."""
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
    """Return v, repeated for query heads: attention of a token to itself alone."""
    return v.repeat_interleave(q.shape[1] // v.shape[1], dim=1)


def _through_port(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attend through the port: [1, H, T, D] each -> [1, T, Hq, Dv], and no weights."""
    port = module.port
    assert isinstance(port, AttentionPort)
    q, k, v = (heads[0].transpose(0, 1) for heads in (query, key, value))
    return port.attend(module, q, k, v, options | {"attention_mask": attention_mask})[None], None


AttentionInterface.register(NAME, _through_port)


def give_port(model: nn.Module) -> AttentionPort:
    """Set one new port on all modules of a model."""
    port = AttentionPort()
    for module in model.modules():
        module.__dict__["port"] = port
    return port


class RecordedSites(NamedTuple):
    """Result of the recording run."""

    kind: type[ModelOutput]
    """Result type of the backbone."""
    unused: frozenset[nn.Module]
    """Modules of the backbone that are never called; other code may use their parameters."""


def find_sites(
    model: PreTrainedModel, backbone: nn.Module, port: AttentionPort, config: EngineConfig, plan: ShardingPlan
) -> RecordedSites:
    """Run a model on the meta device, and give each attention module an `Attention` per call, in `paged`.

    Also records the attention modules in the plan.

    Raises:
        UnsupportedModelError: it cannot run on a packed batch, or its attention is unsupported by the KV cache.
        ConfigError: the attention backend lacks a required feature.
    """
    names = {module: name for name, module in model.named_modules()}
    found: dict[nn.Module, list[Attention]] = defaultdict(list)
    left_out = _experts_of_their_own(model)

    def record(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, options: Mapping[str, Any]) -> Tensor:
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
            port.doing(record),
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
    return RecordedSites(type(output), frozenset(backbone.modules()) - called)


def _experts_of_their_own(model: nn.Module) -> list[nn.Module]:
    """Return experts modules with their own loops, which read tensor data."""
    return [
        module
        for module in model.modules()
        if type(module).__name__.endswith("Experts") and not hasattr(module, "_apply_gate")
    ]


@contextmanager
def _leaving_out(modules: Collection[nn.Module]) -> Iterator[None]:
    """Replace modules' forward by one that returns rows shaped like its input."""
    for module in modules:
        module.forward = _rows_like
    try:
        yield
    finally:
        for module in modules:
            del module.forward


@contextmanager
def _calls(model: nn.Module) -> Iterator[set[nn.Module]]:
    """Collect the modules that are called in this context."""
    called: set[nn.Module] = set()

    def record(module: nn.Module, args: Any) -> None:
        called.add(module)

    hooks = [module.register_forward_pre_hook(record) for module in model.modules()]
    try:
        yield called
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def _keeping_buffers(model: nn.Module) -> Iterator[None]:
    """Restore the model's buffers afterwards, since its code may move them to the compute device."""
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
    """Return the innermost line of transformers' models that raised it, for developers."""
    frames = traceback.extract_tb(error.__traceback__)
    *_, frame = [frames[-1], *(frame for frame in frames if "modeling_" in frame.filename)]
    return f"in {frame.name}, line {frame.lineno} of {Path(frame.filename).name}"


def _has_interface(backbone: nn.Module) -> bool:
    """Return whether the model declares support for other attention implementations."""
    kinds = ("_supports_attention_backend", "_supports_sdpa", "_supports_flash_attn")
    return any(getattr(backbone, kind, False) for kind in kinds)


def _why_not(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, options: Mapping[str, Any]) -> str | None:
    """Return why the KV cache does not support this attention, as a phrase for users; None if it does."""
    if len(q) != len(k):
        return "attends to something other than the preceding tokens"
    if options.get("is_causal", getattr(module, "is_causal", True)) is False:
        return "attends to later tokens, too"
    if q.shape[1] % k.shape[1]:
        return f"has {q.shape[1]} query heads for {k.shape[1]} key-value heads"
    for name, value in options.items():
        is_known = name in _WITHOUT_EFFECT or (name == _SINKS and _own_name(module, value) is not None)
        if isinstance(value, Tensor) and not is_known:
            return f"hands over {name}, which the KV cache's attention does not take"
    kind = _layer_type(module)
    return None if kind in (None, "full_attention", "sliding_attention") else f"is a layer of {kind}"


def _layer_type(module: nn.Module) -> str | None:
    """Return the layer type of a module in config.json, if any."""
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
    """Return the name of a module's parameter."""
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
    """Pad [T, H, D] with zeros to D = size."""
    missing = size - heads.shape[-1]
    return F.pad(heads, (0, missing)) if missing else heads.contiguous()


AllStored = Mapping[str, Sequence[CheckpointView]]


@dataclass
class ReplacedModules:
    """Replaced layers of a model: those to be loaded, and the output head, if any."""

    head: VocabEmbedding | None
    loaded: Loaded = field(default_factory=list)
    why_whole: str | None = None
    """Why the model cannot be sharded; None: it can."""


def replace_modules(
    model: PreTrainedModel, config: EngineConfig, plan: ShardingPlan, kept: Collection[nn.Module] = ()
) -> ReplacedModules:
    """Replace modules that equal our layers; the rest, and those in `kept`, stay and get `Held` tensors.

    Raises:
        UnsupportedModelError: its embedding or output head is unsupported.
    """
    stored = stored_tensors(model)
    places = _put_tables(model, stored, config)
    places.loaded += _take_sinks(model, stored)
    places.loaded += _put_experts(model, stored, config, plan)
    _put_modules(model, stored, config, plan, places.loaded, kept)
    ours = {id(layer) for _, layer in places.loaded}
    theirs = [module for module in model.modules() if id(module) not in ours]
    held = [*held_tensors(model, theirs, activation_dtype(config), stored)]
    places.loaded += [([layer.name], layer) for layer in held]
    places.why_whole = plan.why_not([layer.name for layer in held])
    return places


def _put_tables(model: PreTrainedModel, stored: AllStored, config: EngineConfig) -> ReplacedModules:
    """Replace the token embedding and the output head."""
    paths = {id(module): path for path, module in model.named_modules()}
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if not isinstance(embedding, nn.Embedding) or type(head).forward is not nn.Linear.forward:
        raise UnsupportedModelError("it has no embedding of tokens, or no output head, of the usual kind")
    is_pooled = config.pooling is not None
    is_tied = head.weight is embedding.weight and not is_pooled
    path, head_path = paths[id(embedding)], paths[id(head)]
    try:
        table = as_embedding(embedding, path, config, is_head=is_tied)
    except ValueError as error:
        raise UnsupportedModelError(f"{path}: {error}") from error
    _put(model, path, table)
    loaded: Loaded = [(module_names(stored[f"{path}.weight"]), table)]
    if is_pooled:
        _put(model, head_path, nn.Identity())
        return ReplacedModules(None, loaded)
    if is_tied:
        _put(model, head_path, TiedHead(table, head.bias))
        return ReplacedModules(table, loaded)
    own = as_head(head, head_path, config)
    _put(model, head_path, own)
    return ReplacedModules(own, [*loaded, (module_names(stored[f"{head_path}.weight"]), own)])


def _take_sinks(model: PreTrainedModel, stored: AllStored) -> Loaded:
    """Move sinks from modules to our attention, which applies them."""
    loaded: Loaded = []
    for attention in [module for module in model.modules() if isinstance(module, Attention)]:
        if attention.sinks is not None:
            path, _, key = attention.sinks.name.rpartition(".")
            model.get_submodule(path)._parameters[key] = None
            loaded.append((module_names(stored[attention.sinks.name]), attention.sinks))
    return loaded


def _put_experts(
    model: PreTrainedModel, stored: AllStored, config: EngineConfig, plan: ShardingPlan
) -> Loaded:
    """Replace experts by packed ones, if all of the model's support it; otherwise transformers' loop stays."""
    modules = {path: module for path, module in model.named_modules() if hasattr(module, "_apply_gate")}
    made = {path: experts.as_experts(module, path, stored, config, plan) for path, module in modules.items()}
    loaded: Loaded = []
    packed = {path: found for path, found in made.items() if found is not None}
    is_packed = len(packed) == len(modules)
    model.set_experts_implementation(experts.NAME if is_packed else "eager")
    for path, (module, layers) in packed.items() if is_packed else ():
        modules[path]._parameters.clear()
        modules[path].packed = module
        loaded += layers
    return loaded


def _put_modules(
    model: PreTrainedModel,
    stored: AllStored,
    config: EngineConfig,
    plan: ShardingPlan,
    loaded: Loaded,
    kept: Collection[nn.Module],
) -> None:
    """Replace linear layers, norms, activations and rotary embeddings; a shared module is replaced in all places."""
    done: dict[int, nn.Module | None] = {}
    ours = {id(layer) for _, layer in loaded}
    for path, module in list(model.named_modules(remove_duplicate=False)):
        if not path or id(module) in ours or module in kept:
            continue
        if id(module) not in done:
            done[id(module)] = _put_one(module, path, stored, config, plan, loaded)
        put = done[id(module)]
        if put is not None:
            _put(model, path, put)


def _put_one(
    module: nn.Module, path: str, stored: AllStored, config: EngineConfig, plan: ShardingPlan, loaded: Loaded
) -> nn.Module | None:
    parts = stored.get(f"{path}.weight", ())
    layer = None
    if parts:
        layer = as_linear(module, path, parts, config, plan) or as_norm(module, path, config)
    if layer is not None:
        loaded.append((module_names(parts), layer))
        return layer
    return as_activation(module)


def put_rotary_tables(model: PreTrainedModel, config: EngineConfig) -> None:
    """Replace every rotary embedding by its table."""
    for path, module in list(model.named_modules()):
        if type(module).__name__.endswith("RotaryEmbedding"):
            _put(model, path, RotaryTable(module, config))


def put_positions(model: PreTrainedModel, port: AttentionPort) -> None:
    """Pass the step's positions to position embeddings where the model would count them itself."""
    for path, module in list(model.named_modules()):
        if counts_positions(module):
            _put(model, path, CountedPositions(module, port))


def _put(model: nn.Module, path: str, module: nn.Module) -> None:
    *parents, name = path.split(".")
    model.get_submodule(".".join(parents))._modules[name] = module
