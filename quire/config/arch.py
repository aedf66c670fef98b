"""What a checkpoint's config.json says, in our own names.

Invariant: `quire.models.hf_config` is the only reader of config.json; everyone else reads this frozen record,
so a foreign key or a surprising type is met once, at start-up.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class RopeScaling:
    """Rotary position embedding of one set of layers; `kind` selects the formula, unused fields stay at defaults."""

    kind: str = "default"
    theta: float = 10000.0
    partial_rotary_factor: float = 1.0
    factor: float = 1.0
    original_max_position: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()


@dataclass(frozen=True)
class ModelArch:
    """Shape and options of a decoder-only model.

    `layer_types` has one of "full_attention" or "sliding_attention" per layer. `rope` is None where positions are
    learned; `rope_local` is the rotary embedding of sliding layers where it differs (Gemma 3). `norm_offset` is what
    the checkpoint leaves out of the weights of its norms. `dtype` is the checkpoint's. `eos_token_ids` are those of
    config.json, then those that only generation_config.json names; `generation` holds its default sampling
    parameters by `SamplingParams` field name.
    """

    architecture: str
    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    dtype: str = "float32"
    hidden_act: str = "silu"
    norm_eps: float = 1e-6
    norm_offset: float = 0.0
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    attention_out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    layer_types: tuple[str, ...] = ()
    sliding_window: int | None = None
    attn_logit_softcap: float | None = None
    final_logit_softcap: float | None = None
    query_pre_attn_scalar: float | None = None
    rope: RopeScaling | None = None
    rope_local: RopeScaling | None = None
    do_layer_norm_before: bool = True
    final_norm: bool = True
    word_embed_proj_dim: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    generation: dict[str, float] = field(default_factory=dict)
