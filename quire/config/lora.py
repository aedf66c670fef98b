"""Low-rank adapters (see lora.md)."""

from __future__ import annotations

from dataclasses import dataclass

from quire.config.fields import Config, option
from quire.errors import ConfigError


@dataclass(frozen=True)
class LoRAConfig(Config):
    """Low-rank adapters that requests may name (see lora.md)."""

    enable_lora: bool = option(False, "Serve low-rank adapters (LoRA) beside the model.")
    max_loras: int = option(
        1, "Different adapters in one step; each takes memory of the device.", ge=1, le=256
    )
    max_lora_rank: int = option(16, "Largest rank of an adapter.", ge=1, le=512)
    max_cpu_loras: int | None = option(
        None, "Adapters kept in the host's memory, at least --max-loras. Default: as many as that.", ge=1
    )

    lora_dtype: str = option(
        "auto",
        "What adapters' matrices are kept in; auto: as the model's are; int8 takes half of bfloat16's memory.",
        choices=("auto", "float32", "float16", "bfloat16", "int8"),
    )
    lora_extra_vocab_size: int = option(
        256,
        "Tokens of which an adapter may have rows of its own in the embedding, and in the head; 0: none.",
        ge=0,
        le=4096,
    )

    @property
    def num_kept(self) -> int:
        """Adapters in the host's memory."""
        return self.max_cpu_loras or self.max_loras

    def check(self) -> None:
        """Refuse what cannot be served.

        Raises:
            ConfigError: names the flag and the limit.
        """
        if self.num_kept < self.max_loras:
            raise ConfigError(
                f"--max-cpu-loras is {self.num_kept}, and --max-loras {self.max_loras} needs as many"
            )
