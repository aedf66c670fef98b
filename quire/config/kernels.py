"""Which kernels compute a step."""

from __future__ import annotations

from dataclasses import dataclass

from quire.config.fields import Config, option


@dataclass(frozen=True)
class KernelConfig(Config):
    """Choice of kernels."""

    attention_backend: str = option(
        "auto",
        "Attention kernels by name: cpu, triton, torch_sdpa, reference, or a plug-in's; auto: the best that run here.",
        metavar="NAME",
    )
    batch_invariant: bool = option(
        False,
        "Give a request the same bits in every batch on a GPU too, where that costs speed; on a CPU it is always so.",
    )
    matmul_precision: str = option(
        "highest",
        "Precision within products, by torch's names. On a CPU: highest keeps activations in float32, medium "
        "rounds those that meet bfloat16 weights to bfloat16, up to twice as fast with AVX512-BF16. On a GPU: "
        "torch's, for float32 models.",
        choices=("highest", "medium"),
    )
