"""The attention block of a decoder layer with latent attention (MLA; DeepSeek-V2, 2024, arXiv:2405.04434).

Shapes: T tokens of the step, H hidden size, Hq heads, R rank of the latents, D rotated dimensions.
"""

from torch import Tensor

from quire.config import EngineConfig
from quire.layers.base import Module, RowSource, activation_dtype, model_dtype
from quire.layers.latent_attention import LatentAttention
from quire.layers.linear import Linear
from quire.layers.norm import RMSNorm
from quire.layers.per_head import PerHeadLinear
from quire.layers.rotary import RotaryEmbedding
from quire.layers.shard import Span
from quire.layers.step import StepContext

_NORM_EPS = 1e-6
"""Of the norms of what is compressed, whatever the model's others have."""


class LatentSelfAttention(Module):
    """Keys and values are made of a token's latent. The matrices that make them are absorbed: `k_up` into the queries,
    which then meet the latents themselves, and `v_up` into what comes out."""

    def __init__(
        self, *, config: EngineConfig, prefix: str, layer: int, rotary: RotaryEmbedding | None
    ) -> None:
        super().__init__()
        arch, latent, dtype = config.arch, config.arch.latent, model_dtype(config)
        assert latent is not None, "what a latent layer is made of"
        self.sizes = [latent.key_size, latent.rope_size]
        self.query_rank = latent.query_rank or 0
        queries = Linear(
            in_features=latent.query_rank or arch.hidden_size,
            out_features=arch.num_heads * latent.query_size,
            bias=False,
            dtype=dtype,
            name=f"{prefix}.q_b_proj" if latent.query_rank else f"{prefix}.q_proj",
            cut="output",
            spans=(Span(arch.num_heads, latent.query_size),),
        )
        self.q_proj = self.q_b_proj = self.q_a_layernorm = None
        if latent.query_rank is None:
            self.q_proj = queries
        else:
            self.q_b_proj = queries
            self.q_a_layernorm = _norm(config, latent.query_rank, f"{prefix}.q_a_layernorm")
        compressed = latent.rank + latent.rope_size
        self.qkv_a_proj = Linear(
            in_features=arch.hidden_size,
            out_features=self.query_rank + compressed,
            bias=arch.attention_bias,
            dtype=dtype,
            name=f"{prefix}.qkv_a_proj",
            spans=(Span(latent.query_rank), Span(compressed)) if latent.query_rank else (Span(compressed),),
        )
        self.kv_a_layernorm = _norm(config, latent.rank, f"{prefix}.kv_a_layernorm")
        self.k_up = PerHeadLinear(
            num_heads=arch.num_heads,
            in_features=latent.key_size,
            out_features=latent.rank,
            dtype=dtype,
            name=f"{prefix}.k_up",
            after=0 if latent.absorbed else latent.value_size,
            inverted=not latent.absorbed,
        )
        self.v_up = PerHeadLinear(
            num_heads=arch.num_heads,
            in_features=latent.rank,
            out_features=latent.value_size,
            dtype=dtype,
            name=f"{prefix}.v_up",
            before=0 if latent.absorbed else latent.key_size,
        )
        self.g_proj: Linear | None = None
        if latent.gated:
            self.g_proj = Linear(
                in_features=arch.hidden_size,
                out_features=arch.num_heads,
                bias=False,
                dtype=dtype,
                name=f"{prefix}.g_proj",
                cut="output",
                spans=(Span(arch.num_heads),),
                activation="sigmoid",
            )
        self.o_proj = Linear(
            in_features=arch.num_heads * latent.value_size,
            out_features=arch.hidden_size,
            bias=arch.attention_out_bias,
            dtype=dtype,
            name=f"{prefix}.o_proj",
            cut="input",
        )
        self.attn = LatentAttention(
            config=config,
            name=f"{prefix}.attn",
            latent=latent,
            scale=latent.query_size**-0.5 if arch.attention_scale is None else arch.attention_scale,
            rotary=rotary,
            norm=self.kv_a_layernorm,
        )

    def reads(self, source: RowSource) -> None:
        """See `Linear.reads`; where queries, or gates, are made of x itself, x has other readers."""
        if self.q_proj is None and self.g_proj is None:
            self.qkv_a_proj.reads(source)

    def forward(self, x: Tensor, positions: Tensor, step: StepContext) -> Tensor:
        """x [T, H] -> [T, H]."""
        compressed = self.qkv_a_proj(x, step)
        queries = self._queries(x, compressed[:, : self.query_rank], step)
        q, q_rope = queries.view(len(queries), -1, sum(self.sizes)).split(self.sizes, 2)
        latents = self.attn(self.k_up(q, step), q_rope, compressed[:, self.query_rank :], positions, step)
        out = self.v_up(latents, step)
        if self.g_proj is not None:
            out = out * self.g_proj(x, step).unsqueeze(2)
        return self.o_proj(out.flatten(1), step)

    def _queries(self, x: Tensor, compressed: Tensor, step: StepContext) -> Tensor:
        """[T, Hq * query size]."""
        if self.q_proj is not None:
            return self.q_proj(x, step)
        assert self.q_b_proj is not None
        assert self.q_a_layernorm is not None
        return self.q_b_proj(self.q_a_layernorm(compressed), step)


def _norm(config: EngineConfig, size: int, name: str) -> RMSNorm:
    return RMSNorm(size=size, eps=_NORM_EPS, dtype=activation_dtype(config), name=name)
