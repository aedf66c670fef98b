"""Puts our layers into the places of a model's modules, and lists what is to be loaded."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from torch import nn
from transformers import PreTrainedModel

from quire.config import EngineConfig
from quire.errors import UnsupportedModelError
from quire.layers.attention import Attention
from quire.layers.base import activation_dtype
from quire.layers.embedding import VocabEmbedding
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
from quire.models.transformers_backend.plan import Plan
from quire.models.transformers_backend.probes import as_activation, as_norm
from quire.models.transformers_backend.sites import Port
from quire.models.transformers_backend.tensors import (
    Loaded,
    Stored,
    held_tensors,
    module_names,
    stored_tensors,
)

AllStored = Mapping[str, Sequence[Stored]]


@dataclass
class Places:
    """What stands in a model now: the layers that are to be loaded, and the one that makes its logits, if any."""

    head: VocabEmbedding | None
    loaded: Loaded = field(default_factory=list)
    why_whole: str | None = None
    """Why ranks cannot share it; None: they can."""


def put_ours(
    model: PreTrainedModel, config: EngineConfig, plan: Plan, kept: Collection[nn.Module] = ()
) -> Places:
    """Replace what we have a layer for; the rest, and what is in `kept`, keeps its modules and has its tensors held.

    Raises:
        UnsupportedModelError: its embedding or output head is none that we have.
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


def _put_tables(model: PreTrainedModel, stored: AllStored, config: EngineConfig) -> Places:
    """The embedding of tokens, and the output head."""
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
        return Places(None, loaded)
    if is_tied:
        _put(model, head_path, TiedHead(table, head.bias))
        return Places(table, loaded)
    own = as_head(head, head_path, config)
    _put(model, head_path, own)
    return Places(own, [*loaded, (module_names(stored[f"{head_path}.weight"]), own)])


def _take_sinks(model: PreTrainedModel, stored: AllStored) -> Loaded:
    """Sinks, which attention reads by itself: modules have none any more to hand over."""
    loaded: Loaded = []
    for attention in [module for module in model.modules() if isinstance(module, Attention)]:
        if attention.sinks is not None:
            path, _, key = attention.sinks.name.rpartition(".")
            model.get_submodule(path)._parameters[key] = None
            loaded.append((module_names(stored[attention.sinks.name]), attention.sinks))
    return loaded


def _put_experts(model: PreTrainedModel, stored: AllStored, config: EngineConfig, plan: Plan) -> Loaded:
    """Packed experts, if all the model's can be; otherwise transformers' own loop computes them."""
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
    plan: Plan,
    loaded: Loaded,
    kept: Collection[nn.Module],
) -> None:
    """Matrices, norms, activations and rotary embeddings; a module that stands in several places is replaced in all."""
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
    module: nn.Module, path: str, stored: AllStored, config: EngineConfig, plan: Plan, loaded: Loaded
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
    """Let every rotary embedding look up what it has computed once."""
    for path, module in list(model.named_modules()):
        if type(module).__name__.endswith("RotaryEmbedding"):
            _put(model, path, RotaryTable(module, config))


def put_positions(model: PreTrainedModel, port: Port) -> None:
    """Have tables of positions told the step's, where the model would count them itself."""
    for path, module in list(model.named_modules()):
        if counts_positions(module):
            _put(model, path, CountedPositions(module, port))


def _put(model: nn.Module, path: str, module: nn.Module) -> None:
    *parents, name = path.split(".")
    model.get_submodule(".".join(parents))._modules[name] = module
