# SPDX-License-Identifier: Apache-2.0
"""quire, through its own `LLM` class."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.compare.cases import MAX_MODEL_LEN, MAX_NUM_SEQS, NUM_THREADS
from benchmarks.compare.workers import worker
from quire import LLM, SamplingParams

FORMATS: Mapping[str, Mapping[str, Any]] = {
    "bf16": {"matmul_precision": "highest"},
    "bf16, auto": {},
    "int8": {"quantization": "int8"},
    "int4": {"quantization": "int4"},
    "int4, int4 head": {"quantization": "int4", "quantization_config": {"head": "int4"}},
    "GPTQ g128": {"quantization_config": {"head": "int8"}},
    "AWQ g128": {"quantization_config": {"head": "int8"}},
    "Q8_0": {},
    "Q4_0": {},
    "Q4_K_M": {},
}
"""Name of a weight format -> arguments of the engine."""


def load(model: Path, precision: str) -> worker.Generate:
    """The checkpoint's own type, or weights quantized while they are loaded."""
    llm = LLM(
        str(model),
        **FORMATS[precision],
        load_format="auto",
        cpu_threads=NUM_THREADS,
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=MAX_NUM_SEQS,
        enable_prefix_caching=False,
        skip_tokenizer_init=True,
        disable_log_stats=True,
    )

    def generate(prompts: worker.Prompts, output_len: int) -> list[int]:
        params = SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True, detokenize=False)
        outputs = llm.generate(prompts, params, use_tqdm=False)
        return [len(output.outputs[0].token_ids) for output in outputs]

    return generate


if __name__ == "__main__":
    worker.run(load)
