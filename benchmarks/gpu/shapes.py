# SPDX-License-Identifier: Apache-2.0
"""Shapes of models, and directories whose config.json has them: `--load-format dummy` needs no more."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Shape:
    """Sizes of a decoder-only model."""

    name: str
    architecture: str
    num_layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_size: int
    vocab: int
    tied: bool = False
    window: int | None = None
    soft_cap: float | None = None

    @property
    def qkv(self) -> int:
        """Outputs of the merged projections of queries, keys and values."""
        return (self.heads + 2 * self.kv_heads) * self.head_size

    @property
    def matrices(self) -> dict[str, tuple[int, int]]:
        """Name -> (outputs, inputs) of a layer's linears."""
        return {
            "qkv": (self.qkv, self.hidden),
            "o": (self.hidden, self.heads * self.head_size),
            "gate up": (2 * self.intermediate, self.hidden),
            "down": (self.hidden, self.intermediate),
        }

    @property
    def num_multiplied(self) -> int:
        """Weights that a token is multiplied with: all but the table that is looked up."""
        per_layer = sum(outputs * inputs for outputs, inputs in self.matrices.values())
        return self.num_layers * per_layer + self.vocab * self.hidden

    @property
    def kv_values_per_token(self) -> int:
        """Numbers that the KV cache holds for a token."""
        return 2 * self.num_layers * self.kv_heads * self.head_size

    def config(self) -> dict[str, Any]:
        """Return the content of config.json."""
        return {
            "architectures": [self.architecture],
            "model_type": {"LlamaForCausalLM": "llama", "Qwen2ForCausalLM": "qwen2"}[self.architecture],
            "num_hidden_layers": self.num_layers,
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_size,
            "vocab_size": self.vocab,
            "tie_word_embeddings": self.tied,
            "hidden_act": "silu",
            "max_position_embeddings": 32768,
            "rms_norm_eps": 1e-6,
            "rope_theta": 500000.0,
            "torch_dtype": "bfloat16",
        }

    def write(self, directory: Path) -> Path:
        """A model directory without weights."""
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "config.json").write_text(json.dumps(self.config()))
        return directory


LLAMA_8B = Shape("8B Llama", "LlamaForCausalLM", 32, 4096, 14336, 32, 8, 128, 128256)
QWEN_05B = Shape("0.5B Qwen 2", "Qwen2ForCausalLM", 24, 896, 4864, 14, 2, 64, 151936, tied=True)
GEMMA_2B = Shape("2B Gemma 2", "", 26, 2304, 9216, 8, 4, 256, 256000, tied=True, window=700, soft_cap=50.0)
"""For its attention, with a shorter window than its own."""
TINY = Shape("tiny", "LlamaForCausalLM", 2, 64, 96, 4, 2, 16, 300)
TINY_WINDOW = Shape("tiny window", "", 2, 64, 96, 4, 2, 16, 300, window=20, soft_cap=3.0)
TINY_TIED = Shape("tiny tied", "Qwen2ForCausalLM", 2, 64, 96, 4, 2, 16, 300, tied=True)
