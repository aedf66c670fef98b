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
        "Precision within products, as torch names it; on a CPU medium rounds activations that meet bfloat16 weights.",
        choices=("highest", "medium"),
    )
