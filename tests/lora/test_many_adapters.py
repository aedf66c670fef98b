"""A thousand adapters in turn leave nothing behind."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path

import pytest

from quire import LLM, LoRARequest, SamplingParams
from tests.fixtures.tiny_models import oracle_of
from tests.lora.adapters import linear_shapes, write_adapter

NUM_KEPT = 32
SPARE_BYTES = 24 * 2**20
"""What an allocator may keep. A thousand adapters of this model are 80 MiB."""


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.more
def test_a_thousand_adapters_in_turn_leave_nothing_behind(
    tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    shapes = linear_shapes(oracle_of(tiny_model("llama")))
    del shapes["lm_head"]
    paths = [str(write_adapter(tmp_path / str(n), shapes, rank=16, seed=n)) for n in range(3)]
    options = {"max_model_len": 64, "max_loras": 4, "max_cpu_loras": NUM_KEPT, "cpu_threads": 1}
    llm = LLM(str(tiny_model("llama")), enable_lora=True, **options)
    params, texts = SamplingParams(temperature=0, max_tokens=2), dict[str, str]()

    def held() -> tuple[int, int]:
        gc.collect()
        return resident_bytes(), len([*Path("/proc/self/fd").iterdir()])

    before = 0, 0
    for first in range(0, 1000, 8):
        if first == 200:
            before = held()
        adapters = [LoRARequest(f"a{n}", n, paths[n % 3]) for n in range(first + 1, first + 9)]
        for adapter, output in zip(
            adapters,
            llm.generate([[1, 2, 3]] * 8, params, lora_request=adapters, use_tqdm=False),
            strict=True,
        ):
            text = output.outputs[0].text
            assert texts.setdefault(adapter.lora_path, text) == text
    num_bytes, num_files = held()
    assert num_bytes < before[0] + SPARE_BYTES
    assert num_files <= before[1]
    assert len(llm.llm_engine.list_loras()) == NUM_KEPT
    assert llm.llm_engine.call_core("stats").get("kv_cache_usage", 0) == 0
    llm.llm_engine.call_core("check_integrity")
