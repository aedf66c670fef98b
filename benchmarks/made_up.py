# SPDX-License-Identifier: Apache-2.0
"""A made-up Llama, and engines that decode one request of it at a time."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from quire.config import EngineConfig
from quire.engine.llm_engine import LLMEngine
from quire.sampling_params import SamplingParams


def written(directory: Path, **sizes: int) -> Path:
    """A directory with a config.json and no weights; `sizes` are keys of it."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **sizes,
        "max_position_embeddings": 1024,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    }
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def started(model: Path, **options: Any) -> LLMEngine:
    """An engine of one thread and one request at a time."""
    return LLMEngine(
        EngineConfig.from_args(
            model=str(model),
            load_format="dummy",
            skip_tokenizer_init=True,
            device="cpu",
            cpu_threads=1,
            max_model_len=512,
            max_num_seqs=1,
            num_gpu_blocks_override=64,
            num_scheduler_steps=1,
            **options,
        )
    )


def timed(engine: LLMEngine, name: str, prompt: list[int], num_tokens: int) -> tuple[float, float]:
    """Seconds of the prompt, and of each step behind it."""
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
    engine.add_request(name, {"prompt_token_ids": prompt}, params)
    began = time.perf_counter()
    engine.step()
    prompt_s, began, steps = time.perf_counter() - began, time.perf_counter(), 0
    while engine.has_unfinished_requests():
        engine.step()
        steps += 1
    return prompt_s, (time.perf_counter() - began) / steps
