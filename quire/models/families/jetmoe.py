"""JetMoE (Shen et al., 2024, arXiv:2404.07413): experts among attention's heads as well as among MLPs."""

from __future__ import annotations

from quire.config.arch import CheckpointNames, ExpertStack, ModelArch
from quire.models.families.experts import all_layers, read_experts
from quire.models.families.fields import MAX_HEADS, MAX_WIDTH, biases, read_llama, rms_eps
from quire.models.json_object import JsonObject

_NAMES = CheckpointNames(
    {
        "self_attn": "self_attention",
        "self_attn.gate": "experts.router.layer",
        "self_attn.input_linear": "experts.input_linear",
        "self_attn.output_linear": "experts.output_linear",
        "self_attn.bias": "experts.bias",
        "mlp.gate": "router.layer",
        "mlp.experts": "",
        "gate_up_proj": "input_linear",
        "down_proj": "output_linear",
    },
    {},
)


def read_jetmoe(architecture: str, config: JsonObject) -> ModelArch:
    """The last norm alone has the epsilon of the file."""
    config.choice("activation_function", ("silu",), "silu")
    experts = read_experts(
        config,
        count="num_local_experts",
        size="intermediate_size",
        layers=all_layers(config),
        routing={"default_top_k": 2, "normalized": True},
        stack=ExpertStack(),
        out_bias=True,
    )
    assert experts is not None, "there are layers"
    kv_heads = config.integer("num_key_value_heads", 16, high=MAX_HEADS)
    return read_llama(
        architecture,
        config.with_values(num_attention_heads=kv_heads * experts.routing.top_k),
        names=_NAMES,
        layer_types=("mixture_of_attention",) * config.integer("num_hidden_layers"),
        attention_experts=experts,
        experts=experts,
        num_kv_heads=kv_heads,
        head_dim=config.integer("kv_channels", 128, high=MAX_WIDTH),
        norm_eps=1e-6,
        final_norm_eps=rms_eps(config, 1e-6),
        tie_word_embeddings=config.flag("tie_word_embeddings", True),
        **biases(False),
    )
