"""Baichuan and Baichuan 2 (Yang et al., 2023, arXiv:2309.10305): 7B is Llama with merged q, k and v, 13B has ALiBi."""

from __future__ import annotations

from quire.config.arch import CheckpointNames, ModelArch
from quire.models.families.fields import biases, either, read_head_dim, read_llama
from quire.models.json_object import JsonObject
from quire.models.rope_config import read_rope

_ROTARY_WIDTH, _VOCAB_OF_2 = 4096, 125696


def read_baichuan(architecture: str, config: JsonObject) -> ModelArch:
    """The first 7B alone is a BaiChuan; width tells its successor from the 13Bs, and the vocabulary series 2 from 1.

    Series 2 multiplies with the head's rows divided by their lengths.
    """
    config = either(config, {"max_position_embeddings": "model_max_length"})
    head_dim = read_head_dim(config, config.integer("num_attention_heads"))
    is_rotary = architecture == "BaiChuanForCausalLM" or config.integer("hidden_size") == _ROTARY_WIDTH
    return read_llama(
        architecture,
        config,
        names=CheckpointNames({"qkv_proj": "W_pack"}, {"gate_up_proj": ("gate_proj", "up_proj")}),
        rope=read_rope(config, head_dim=head_dim) if is_rotary else None,
        alibi=None if is_rotary else 1.0,
        head_of_unit_rows=config.integer("vocab_size") == _VOCAB_OF_2,
        **biases(),
    )
