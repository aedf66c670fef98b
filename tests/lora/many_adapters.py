# SPDX-License-Identifier: Apache-2.0
"""A thousand adapters in turn, in a process of its own: what it holds after 200 of them and at the end, as JSON.

python -m tests.lora.many_adapters MODEL NUM_KEPT ADAPTER ...
"""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

from quire import LLM, LoRARequest, SamplingParams

AT_A_TIME = 8
STAGES = (0, 200, 1000)


def held() -> dict[str, int]:
    """By the process, of what the system counts."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {"bytes": pages * 4096, "files": len([*Path("/proc/self/fd").iterdir()])}


def answers(llm: LLM, paths: list[str], numbers: range) -> Iterator[tuple[str, str]]:
    """Yield the path and the answer of one adapter after the other."""
    params = SamplingParams(temperature=0, max_tokens=2)
    for first in range(numbers.start, numbers.stop, AT_A_TIME):
        adapters = [
            LoRARequest(f"a{n}", n + 1, paths[n % len(paths)]) for n in range(first, first + AT_A_TIME)
        ]
        prompts = [[1, 2, 3]] * AT_A_TIME
        for adapter, output in zip(
            adapters, llm.generate(prompts, params, lora_request=adapters, use_tqdm=False), strict=True
        ):
            yield adapter.lora_path, output.outputs[0].text


def main(model: str, num_kept: int, paths: list[str]) -> None:
    options: dict[str, Any] = {"max_model_len": 64, "max_loras": 4, "cpu_threads": 1}
    llm = LLM(model, enable_lora=True, max_cpu_loras=num_kept, **options)
    stages, texts = [], set[tuple[str, str]]()
    for begin, end in pairwise(STAGES):
        texts |= set(answers(llm, paths, range(begin, end)))
        stages.append(held())
    engine = llm.llm_engine
    engine.call_core("check_integrity")
    usage = engine.call_core("stats").get("kv_cache_usage", 0)
    print(
        json.dumps({"stages": stages, "texts": len(texts), "kept": len(engine.list_loras()), "usage": usage})
    )


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3:])
