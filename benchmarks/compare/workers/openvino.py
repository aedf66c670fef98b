# SPDX-License-Identifier: Apache-2.0
"""OpenVINO GenAI: its continuous batching pipeline on the CPU, with its default hints and cache type."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import openvino
import openvino_genai

from benchmarks.compare.cases import MAX_NUM_SEQS, NUM_THREADS
from benchmarks.compare.workers import worker

_CACHE_GIGABYTES = 1


def load(model: Path, precision: str) -> worker.Generate:
    """A converted model; the conversion has fixed its precision."""
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.cache_size = _CACHE_GIGABYTES
    scheduler.max_num_seqs = MAX_NUM_SEQS
    scheduler.enable_prefix_caching = False
    properties = {"INFERENCE_NUM_THREADS": NUM_THREADS, "PERFORMANCE_HINT": "LATENCY"}
    pipeline = openvino_genai.ContinuousBatchingPipeline(str(model), scheduler, "CPU", properties)

    def generate(prompts: worker.Prompts, output_len: int) -> list[int]:
        config = openvino_genai.GenerationConfig(
            max_new_tokens=output_len, min_new_tokens=output_len, ignore_eos=True, do_sample=False
        )
        inputs = [openvino.Tensor(np.array([prompt], dtype=np.int64)) for prompt in prompts]
        results = pipeline.generate(inputs, [config] * len(inputs))
        return [len(result.m_generation_ids[0]) for result in results]

    return generate


if __name__ == "__main__":
    worker.run(load)
