# SPDX-License-Identifier: Apache-2.0
"""Hugging Face transformers: `generate` with all prompts, which are equally long, in one batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from benchmarks.compare.cases import NUM_THREADS
from benchmarks.compare.workers import worker

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def load(model: Path, precision: str) -> worker.Generate:
    """The checkpoint in one of `DTYPES`."""
    torch.set_num_threads(NUM_THREADS)
    factory: Any = AutoModelForCausalLM
    network = factory.from_pretrained(model, dtype=DTYPES[precision]).eval()
    network.generation_config.eos_token_id = None
    network.generation_config.pad_token_id = 0

    def generate(prompts: worker.Prompts, output_len: int) -> list[int]:
        ids = torch.tensor(prompts)
        with torch.inference_mode():
            sequences = network.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                min_new_tokens=output_len,
                max_new_tokens=output_len,
            )
        return [len(sequence) - len(prompt) for sequence, prompt in zip(sequences, prompts, strict=True)]

    return generate


if __name__ == "__main__":
    worker.run(load)
