# SPDX-License-Identifier: Apache-2.0
"""vLLM's CPU backend, eager (compiling takes minutes at each start), its engine core in this process."""

from __future__ import annotations

import os
from pathlib import Path

from benchmarks.compare.cases import MAX_MODEL_LEN, MAX_NUM_SEQS, NUM_THREADS
from benchmarks.compare.workers import worker

DTYPES = {"bf16": "bfloat16", "fp32": "float32"}
_CPUS = sorted(os.sched_getaffinity(0))[:NUM_THREADS]

os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_CPU_OMP_THREADS_BIND=",".join(map(str, _CPUS)),
    VLLM_NO_USAGE_STATS="1",
    HF_HUB_OFFLINE="1",
)


def hold_to_avx2() -> None:
    """vLLM asks torch for the CPU's features when it chooses its kernels; no setting of its own overrides that."""
    import torch

    for question in ("_is_avx512_supported", "_is_avx512_bf16_supported"):
        setattr(torch.cpu, question, lambda: False)


def load(model: Path, precision: str) -> worker.Generate:
    """The checkpoint in one of `DTYPES`."""
    from vllm import LLM, SamplingParams

    llm = LLM(
        str(model),
        dtype=DTYPES[precision],
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=MAX_NUM_SEQS,
        enable_prefix_caching=False,
        enforce_eager=True,
        skip_tokenizer_init=True,
    )

    def generate(prompts: worker.Prompts, output_len: int) -> list[int]:
        params = SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True, detokenize=False)
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = llm.generate(inputs, params, use_tqdm=False)
        return [len(output.outputs[0].token_ids) for output in outputs]

    return generate


if __name__ == "__main__":
    if os.environ.get("ATEN_CPU_CAPABILITY") == "avx2":
        hold_to_avx2()
    worker.run(load)
