"""Gemma 3n's text model; see `architectures`.

Invariant: torch-free. What llama.cpp knows of it without a key of the file stands here as it does there.
"""

from __future__ import annotations

from statistics import NormalDist

from quire.models.gguf.model import GgufModel
from quire.models.gguf.shapes import Config, dense, named, windows
from quire.models.gguf.tensor_names import SANDWICH, Place, Places
from quire.models.json_object import JsonObject

GEMMA3N_PLACES: Places = {
    **SANDWICH,
    "per_layer_token_embd": "model.token_rows.embed_tokens_per_layer",
    "per_layer_model_proj": "model.token_rows.per_layer_model_projection",
    "per_layer_proj_norm": "model.token_rows.per_layer_projection_norm",
    "altup_proj": Place("model.altup_projections.{}", apart=True),
    "altup_unembd_proj": Place("model.altup_unembed_projections.{}", apart=True),
    "altup_correct_coef": "altup.correction_coefs",
    "altup_correct_scale.weight": "altup.correct_output_scale",
    "altup_predict_coef": "altup.prediction_coefs",
    "altup_router": "altup.modality_router",
    "altup_router_norm": "altup.router_norm",
    "laurel_l": "laurel.linear_left",
    "laurel_r": "laurel.linear_right",
    "laurel_post_norm": "laurel.post_laurel_norm",
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
}
_LAYERS_WITH_KEYS = 20
"""Of files that do not say how many layers share keys and values."""


def gemma3n(model: GgufModel) -> Config:
    """Widths that no key has are those of tensors; shares that are cut off are told as normal quantiles."""
    own = model.own
    keys = {
        "altup_active_idx": "altup.active_idx",
        "altup_num_inputs": "altup.num_inputs",
        "hidden_size_per_layer_input": "embedding_length_per_layer_input",
        "final_logit_softcapping": "final_logit_softcapping",
        "rope_local_base_freq": "rope.freq_base_swa",
    }
    config = dense(model, "Gemma3nForCausalLM", **named(model, keys)) | windows(model)
    layers = config["num_hidden_layers"]
    config["num_kv_shared_layers"] = own.integer(
        "attention.shared_kv_layers", max(layers - _LAYERS_WITH_KEYS, 0), low=0
    )
    if "activation_sparsity_scale" in own:
        config["activation_sparsity_pattern"] = _shares(own)
    widths = {
        "laurel_rank": "blk.0.laurel_l.weight",
        "vocab_size_per_layer_input": "per_layer_token_embd.weight",
    }
    return config | {
        key: model.tensors[name][1].shape[0] for key, name in widths.items() if name in model.tensors
    }


def _shares(own: JsonObject) -> list[float]:
    """What is cut off by layer; minus infinity stands for nothing, so this is no list of finite numbers."""
    deviations = own.get("activation_sparsity_scale")
    if not isinstance(deviations, list) or not all(isinstance(each, float) for each in deviations):
        raise own.wrong("activation_sparsity_scale", "a list of numbers")
    return [NormalDist().cdf(each) for each in deviations]
