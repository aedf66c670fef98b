# SPDX-License-Identifier: Apache-2.0
"""Share of the KV cache's allocated slots that are never used, on a mix of lengths like ShareGPT's.

    python benchmarks/kv_waste.py [--num-requests 500] [--block-size 16]

Lengths are drawn from lognormal distributions with the means that W. Kwon et al. ("Efficient Memory Management for
Large Language Model Serving with PagedAttention", 2023, figure 11) give for ShareGPT: 161 tokens of prompt, 338 of
output. No model: the null executor checks every plan and computes nothing. Waste is the share of allocated slots that
hold nothing, over all requests and steps; beside it, that of the same run if each request were given one contiguous
piece of memory.
"""

from __future__ import annotations

import argparse
import logging
import math
import random
from collections import Counter
from pathlib import Path
from typing import Any

from quire.config import EngineConfig
from quire.engine.llm_engine import LLMEngine
from quire.sampling_params import RequestOutputKind, SamplingParams

MODEL = Path(__file__).parent / "models/dummy-0.5b"
MEAN_PROMPT_LEN, MEAN_OUTPUT_LEN = 161, 338
SIGMA = 1.0
"""Standard deviation of the logarithm: a long tail, as conversations have."""
MAX_MODEL_LEN = 2048
NUM_BLOCKS = 4096


def make_engine(block_size: int) -> LLMEngine:
    """Enough blocks for 32 long requests, so that some 100 run at once and memory is what limits them."""
    return LLMEngine(
        EngineConfig.from_args(
            model=str(MODEL),
            distributed_executor_backend="null",
            skip_tokenizer_init=True,
            max_model_len=MAX_MODEL_LEN,
            num_gpu_blocks_override=NUM_BLOCKS * 16 // block_size,
            block_size=block_size,
        )
    )


def lognormal_length(generator: random.Random, mean: float, limit: int) -> int:
    """At least 1, `limit` at most."""
    return max(1, min(round(generator.lognormvariate(math.log(mean) - SIGMA**2 / 2, SIGMA)), limit))


def add_requests(engine: LLMEngine, num_requests: int, seed: int) -> dict[str, tuple[int, int]]:
    """Name -> lengths of prompt and output."""
    generator = random.Random(seed)
    lengths = {}
    for number in range(num_requests):
        prompt_len = lognormal_length(generator, MEAN_PROMPT_LEN, MAX_MODEL_LEN // 2)
        output_len = lognormal_length(generator, MEAN_OUTPUT_LEN, MAX_MODEL_LEN - prompt_len)
        prompt = generator.choices(range(1000), k=prompt_len)
        params = SamplingParams(
            max_tokens=output_len, ignore_eos=True, temperature=0.0, output_kind=RequestOutputKind.FINAL_ONLY
        )
        engine.add_request(str(number), {"prompt_token_ids": prompt}, params)
        lengths[str(number)] = prompt_len, output_len
    return lengths


def run(engine: LLMEngine, lengths: dict[str, tuple[int, int]]) -> Counter[str]:
    """Slot-steps: used, and allocated in each of the ways."""
    core: Any = engine._clients[0]._core  # type: ignore[attr-defined]
    scheduler = core.scheduler
    slots: Counter[str] = Counter()
    while engine.has_unfinished_requests():
        engine.step()
        for request in scheduler._queues.running:
            prompt_len, output_len = lengths[request.request_id.rpartition("-")[0]]
            slots["used"] += request.num_computed_tokens
            slots["blocks"] += scheduler._kv.num_held_blocks(request) * scheduler._kv.block_size
            slots["contiguous, as long as it will get"] += prompt_len + output_len
            slots["contiguous, the next power of two of that"] += (
                1 << (prompt_len + output_len - 1).bit_length()
            )
            slots["contiguous, max_model_len"] += MAX_MODEL_LEN
    return slots


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--num-requests", type=int, default=500)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    logging.disable()
    engine = make_engine(args.block_size)
    lengths = add_requests(engine, args.num_requests, args.seed)
    slots = run(engine, lengths)
    used = slots.pop("used")
    print(
        f"{args.num_requests} requests, {sum(map(sum, lengths.values()))} tokens, blocks of {args.block_size}"
    )
    for way, allocated in slots.items():
        print(f"{way:45} {100 * (1 - used / allocated):6.2f} % of allocated slots hold nothing")


if __name__ == "__main__":
    main()
