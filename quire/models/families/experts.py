"""What sparse families read of their experts."""

from __future__ import annotations

from typing import Any

from quire.config.arch import ExpertsArch, Routing
from quire.models.families.fields import MAX_LAYERS, MAX_WIDTH, either
from quire.models.json_object import JsonObject

MAX_EXPERTS = 4096


def read_experts(
    config: JsonObject,
    *,
    count: str,
    size: str,
    layers: tuple[int, ...],
    routing: dict[str, Any],
    **more: Any,
) -> ExpertsArch | None:
    """The experts of the layers that have them, by the keys of their number and size; None if none has.

    `routing` has what the family says of it, and `default_top_k`. Experts are gated by SiLU.
    """
    if not layers:
        return None
    config.choice("hidden_act", ("silu",), "silu")
    experts = config.integer(count, high=MAX_EXPERTS)
    default_top_k = routing.pop("default_top_k")
    optional = {} if default_top_k is None else {"default": default_top_k}
    most = experts // routing.get("groups", 1) * routing.get("top_groups", 1)
    top_k = config.integer("num_experts_per_tok", **optional, high=most)
    return ExpertsArch(
        count=experts,
        intermediate_size=config.integer(size, high=MAX_WIDTH),
        routing=Routing(top_k, **routing),
        layers=layers,
        **more,
    )


def read_deepseek_experts(
    config: JsonObject,
    *,
    default_top_k: int | None,
    first: int,
    shared: int,
    normalized: bool,
    balanced: bool = True,
    default_scale: float = 1.0,
    correction_bias: str = "gate.e_score_correction_bias",
    shared_size: int | None = None,
    layers: tuple[int, ...] | None = None,
    **more: Any,
) -> ExpertsArch | None:
    """Those of DeepSeek-V3 (arXiv:2412.19437), by its keys: groups, and a bias that keeps the load even.

    Without `balanced` they are V2's (arXiv:2405.04434): softmaxes alone choose, and a group is as good as its best
    expert. Five are defaults: of the experts of a token, the first sparse layer, the number of shared experts, whether
    weights are divided by their sum, and what they are multiplied with. `shared_size` is that of a shared expert, if it
    is not that of any other; `layers`, those that have experts, if not all behind the first.
    """
    experts = config.integer("n_routed_experts", high=MAX_EXPERTS)
    groups = config.integer("n_group", 1, high=experts)
    if experts % groups:
        raise config.wrong("n_group", f"a divisor of n_routed_experts ({experts})")
    dense = config.integer("first_k_dense_replace", first, low=0)
    size = config.integer("moe_intermediate_size", high=MAX_WIDTH)
    return read_experts(
        config,
        count="n_routed_experts",
        size="moe_intermediate_size",
        layers=all_layers(config)[dense:] if layers is None else layers,
        routing={
            "default_top_k": default_top_k,
            "scores": "sigmoid" if balanced else "softmax",
            "groups": groups,
            "top_groups": config.integer("topk_group", 1, high=groups),
            "group_members": min(2, experts // groups) if balanced else 1,
            "normalized": config.flag("norm_topk_prob", normalized),
            "scale": config.number("routed_scaling_factor", default_scale),
        },
        correction_bias=correction_bias if balanced else None,
        shared_size=(shared_size or size) * config.integer("n_shared_experts", shared, low=0, high=64),
        **more,
    )


def read_qwen_experts(
    config: JsonObject, *, default_top_k: int, normalized: bool = False, **more: Any
) -> ExpertsArch | None:
    """Those of Qwen 2 and 3: in every `decoder_sparse_step`-th layer but those that the file excepts."""
    step = config.integer("decoder_sparse_step", 1)
    excepted = config.numbers("mlp_only_layers") if "mlp_only_layers" in config else ()
    layers = tuple(layer for layer in all_layers(config) if (layer + 1) % step == 0 and layer not in excepted)
    return read_experts(
        either(config, {"num_experts": "num_local_experts"}),
        count="num_experts",
        size="moe_intermediate_size",
        layers=layers,
        routing={"default_top_k": default_top_k, "normalized": config.flag("norm_topk_prob", normalized)},
        **more,
    )


def all_layers(config: JsonObject) -> tuple[int, ...]:
    """The numbers of all layers."""
    return tuple(range(config.integer("num_hidden_layers", high=MAX_LAYERS)))
