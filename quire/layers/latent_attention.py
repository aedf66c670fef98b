"""Latent attention over the paged cache (MLA; DeepSeek-V2, 2024, arXiv:2405.04434).

Shapes: T tokens of the step, Hq heads, R rank of the latents, D rotated dimensions.
Invariant: every step attends in the absorbed form, prefill too, so that no bit of a result tells how a prompt was cut.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from quire.config import EngineConfig
from quire.config.arch import LatentArch
from quire.errors import ConfigError
from quire.kernels import ops
from quire.kernels.attention_metadata import AttentionMetadata
from quire.kv_cache.spec import KVCacheSpec, LatentAttentionSpec
from quire.layers.attention import kv_cache_dtype
from quire.layers.base import Module, activation_dtype, device_type
from quire.layers.kv_cache import cache_planes
from quire.layers.norm import RMSNorm
from quire.layers.rotary import RotaryEmbedding, Unrotated
from quire.layers.step import StepContext


class LatentAttention(Module):
    """Causal attention of one decoder layer over its latents; its cache, laid out as `quire.kernels.ops` says, is bound
    after loading.

    `name` identifies the layer's cache and is unique in the model. `norm`, which the model owns, is that of latents.
    Without `rotary` nothing is turned.

    Raises:
        ConfigError: the attention backend, or the type of the cache, that was asked for cannot be had.
    """

    def __init__(
        self,
        *,
        config: EngineConfig,
        name: str,
        latent: LatentArch,
        scale: float,
        rotary: RotaryEmbedding | None,
        norm: RMSNorm,
    ) -> None:
        super().__init__()
        self.name = name
        self.size = latent.rank + latent.rope_size
        self.scale = scale
        self.rotary = Unrotated(latent.rope_size) if rotary is None else rotary
        self.norm = norm
        self.block_size = config.cache.block_size
        self.kv_dtype = _cache_dtype(config)
        self.backend_name, self._attend = _backend(config)
        self.cache = torch.empty(0)
        self.group_id = 0

    def forward(
        self, q: Tensor, q_rope: Tensor, rows: Tensor, positions: Tensor, step: StepContext
    ) -> Tensor:
        """q [T, Hq, R], q_rope [T, Hq, D], and rows [T, R + D], latents and keys as they are made -> [T, Hq, R].

        The latents, normed, and the keys, rotated, are in the cache afterwards; q_rope is rotated in place.
        """
        assert positions.dim() == 1, f"this rotary embedding takes positions [T], not {[*positions.shape]}"
        own = step.metadata(self.group_id, AttentionMetadata)
        ops.write_latents(
            self.rotary.places(positions),
            q_rope,
            rows,
            self.norm.weight,
            self.rotary.cos_sin_cache,
            self.cache,
            own.slot_mapping,
            self.norm.eps,
            self.rotary.interleaved,
        )
        return self._attend(q, q_rope, self.cache, own, self.scale)

    def bind(self, group_id: int, spec: KVCacheSpec, tensor: Tensor) -> None:
        """See `CacheUser`; a block holds a vector for each of its tokens."""
        assert isinstance(spec, LatentAttentionSpec), f"latents have no place in {type(spec).__name__}"
        self.group_id = group_id
        (latents,) = cache_planes(spec, tensor)
        self.cache = latents.view(self.kv_dtype).view(-1, spec.kernel_block_size, self.size)

    def why_not_captured(self) -> str | None:
        """See `CacheUser`."""
        return (
            "latent attention by reference cannot be captured" if self.backend_name == "reference" else None
        )

    def kv_cache_spec(self) -> KVCacheSpec:
        """See `CacheUser`."""
        return LatentAttentionSpec(self.block_size, 1, self.size, self.kv_dtype.itemsize)


def _cache_dtype(config: EngineConfig) -> torch.dtype:
    name = config.cache.kv_cache_dtype
    if name in ("int8", "fp8"):
        raise ConfigError(
            f"--kv-cache-dtype {name} cannot be had with latent attention, whose cache is small as it is; bfloat16 and"
            " float16 can"
        )
    return kv_cache_dtype(config)


def _backend(config: EngineConfig) -> tuple[str, Callable[..., Tensor]]:
    """The name of what computes attention, and itself."""
    rows = ops.latent_attention.supporting(device_type(config), activation_dtype(config))
    known = {row.name: row.load for row in rows} | {"reference": lambda: ops.latent_attention.oracle}
    asked = config.kernels.attention_backend
    name = next(iter(known)) if asked == "auto" else asked
    if name not in known:
        raise ConfigError(
            f"--attention-backend {name} cannot be used here: latent attention has {', '.join(known)}"
        )
    if name == "reference" and config.kernels.batch_invariant:
        raise ConfigError(
            "latent attention is computed by reference here: its sums depend on the batch, and --batch-invariant"
            " forbids that"
        )
    return name, known[name]()
