"""Architectures whose layers all attend and have a dense MLP, beside Llama's next of kin; see `architectures`.

Invariant: torch-free. What llama.cpp knows of an architecture without a key of the file stands here as it does there.
"""

from __future__ import annotations

from quire.models.gguf.model import GgufModel
from quire.models.gguf.shapes import SIZES, Config, biased, dense, named, windows
from quire.models.gguf.tensor_names import Listed

LAYER_NORM_SIZES = {key: name for key, name in SIZES.items() if key != "rms_norm_eps"}
XIELU: Listed = {
    "xielu.alpha_p": ("mlp.act_fn.alpha_p", (1,)),
    "xielu.alpha_n": ("mlp.act_fn.alpha_n", (1,)),
    "xielu.beta": ("mlp.act_fn.beta", ()),
}
"""What an activation has learned; where it is cut off, too, which is beyond what floats tell apart."""


def olmo2(model: GgufModel) -> Config:
    """OLMo 2, and OLMo 3, which has windows: their layers' rotary embedding is not stretched."""
    if not model.own.integer("attention.sliding_window", 0, low=0):
        return dense(model, "Olmo2ForCausalLM")
    model.own.only("rope.freq_base_swa", model.own.number("rope.freq_base"))
    return dense(model, "Olmo3ForCausalLM") | windows(model)


def exaone4(model: GgufModel) -> Config:
    """Where layers have windows, the others know no positions."""
    has_windows = model.own.integer("attention.sliding_window", 0, low=0)
    config = dense(model, "Exaone4ForCausalLM")
    return config | (windows(model) if has_windows else {"sliding_window": None, "sliding_window_pattern": 4})


def seed_oss(model: GgufModel) -> Config:
    return dense(
        model,
        "SeedOssForCausalLM",
        attention_bias=biased(model, "attn_q"),
        attention_out_bias=biased(model, "attn_output"),
        mlp_bias=biased(model, "ffn_up"),
    )


def smollm3(model: GgufModel) -> Config:
    """Every fourth layer knows no positions."""
    return dense(model, "SmolLM3ForCausalLM", attention_bias=biased(model, "attn_q"))


def ernie(model: GgufModel) -> Config:
    return dense(model, "Ernie4_5ForCausalLM", use_bias=biased(model, "attn_q"))


def glm4(model: GgufModel) -> Config:
    """GLM-4 of 2025."""
    return dense(model, "Glm4ForCausalLM", attention_bias=biased(model, "attn_q"))


def mistral3(model: GgufModel) -> Config:
    """Ministral 3, whose queries grow with their positions."""
    model.own.only("expert_count", 0)
    model.own.only("expert_used_count", 0)
    config = dense(model, "Ministral3ForCausalLM")
    # Whatever both are, scores are not scaled by how far positions are stretched.
    model.own.number("rope.scaling.yarn_log_multiplier", 1.0)
    rope = config.pop("rope_scaling") | {
        "rope_theta": model.own.number("rope.freq_base"),
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "llama_4_scaling_beta": model.own.number("attention.temperature_scale"),
    }
    return config | {"rope_parameters": rope}


def arcee(model: GgufModel) -> Config:
    return dense(model, "ArceeForCausalLM", mlp_bias=biased(model, "ffn_up"), hidden_act="relu2")


def apertus(model: GgufModel) -> Config:
    return dense(model, "ApertusForCausalLM", attention_bias=biased(model, "attn_q"))


def internlm2(model: GgufModel) -> Config:
    return dense(model, "InternLM2ForCausalLM", bias=biased(model, "attn_q"))


def starcoder2(model: GgufModel) -> Config:
    """Its window is not in the file, and is as long as what it was trained on."""
    eps = {"norm_epsilon": "attention.layer_norm_epsilon"}
    return dense(
        model,
        "Starcoder2ForCausalLM",
        LAYER_NORM_SIZES,
        **named(model, eps),
        use_bias=biased(model, "attn_q"),
    )


def stablelm(model: GgufModel) -> Config:
    """StableLM 2; only the model with 12 billion parameters has norms of q and k."""
    eps = {"layer_norm_eps": "attention.layer_norm_epsilon", "use_parallel_residual": "use_parallel_residual"}
    return dense(
        model,
        "StableLmForCausalLM",
        LAYER_NORM_SIZES,
        **named(model, eps),
        use_qkv_bias=biased(model, "attn_q"),
        qk_layernorm="blk.0.attn_q_norm.weight" in model.tensors,
    )


def command_r(model: GgufModel) -> Config:
    """Command R and Aya; Command R+ has norms of q and k."""
    return _cohere(model, "CohereForCausalLM", use_qk_norm="blk.0.attn_q_norm.weight" in model.tensors)


def cohere2(model: GgufModel) -> Config:
    """All layers but every fourth have the window; the fourth knows no positions."""
    window = {"sliding_window": "attention.sliding_window"}
    return _cohere(model, "Cohere2ForCausalLM", **named(model, window), sliding_window_pattern=4)


def _cohere(model: GgufModel, architecture: str, **more: object) -> Config:
    keys = {"layer_norm_eps": "attention.layer_norm_epsilon", "logit_scale": "logit_scale"}
    scale = {"logit_scale": 1.0} if model.own.get("logit_scale") == 0 else {}
    return dense(model, architecture, LAYER_NORM_SIZES, **named(model, keys), **scale, **more)


def hunyuan(model: GgufModel) -> Config:
    """The rotary base is that of the file, already stretched."""
    return dense(model, "HunYuanDenseV1ForCausalLM", use_qk_norm=True)


def chatglm(model: GgufModel) -> Config:
    """ChatGLM 2 and 3, and GLM-4 9B of 2024."""
    return dense(model, "GlmForCausalLM", attention_bias=biased(model, "attn_q"))


def nemotron(model: GgufModel) -> Config:
    """The converter states the layer norms' epsilon twice."""
    model.own.get("attention.layer_norm_rms_epsilon")
    eps = {"norm_eps": "attention.layer_norm_epsilon"}
    return dense(model, "NemotronForCausalLM", LAYER_NORM_SIZES, **named(model, eps))


def olmo(model: GgufModel) -> Config:
    """Its norms, which have no weights, always add the same."""
    model.own.get("attention.layer_norm_epsilon")
    return dense(
        model, "OlmoForCausalLM", LAYER_NORM_SIZES, **named(model, {"clip_qkv": "attention.clamp_kqv"})
    )


def phi2(model: GgufModel) -> Config:
    """Phi-1 to Phi-2. The converter takes for granted that MLPs are four times as wide as the model."""
    eps = {"layer_norm_eps": "attention.layer_norm_epsilon"}
    config = dense(model, "PhiForCausalLM", LAYER_NORM_SIZES, **named(model, eps))
    up = model.tensors.get("blk.0.ffn_up.weight")
    return config | ({"intermediate_size": up[1].shape[0]} if up else {})
