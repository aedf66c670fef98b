# SPDX-License-Identifier: Apache-2.0
"""A rank takes its share of a checkpoint, and at no time much more: no rank ever has a whole copy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quire.worker.stage_sizes import CACHES_BYTES
from tests.executor.test_multiproc import pids_of, run, started
from tests.fixtures.wide_llama import write_wide_llama

SIZES = {
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "head_dim": 64,
}
CASES: dict[str, tuple[float, dict[str, Any]]] = {
    "halves": (0.7, {"tensor_parallel_size": 2}),
    "stages": (0.65, {"pipeline_parallel_size": 2, "pipeline_partition": "2,2"}),
    "quarters": (
        0.4,
        {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "pipeline_partition": "2,2"},
    ),
    "halves, int8": (0.25, {"tensor_parallel_size": 2, "quantization": "int8"}),
}
"""What a rank may take of the checkpoint's size, of which its share is a half or a quarter."""


def peaks_of(model: Path, **args: Any) -> list[int]:
    """Bytes that each rank has had at most, from its start on."""
    engine = started(model, **args)
    run(engine)
    found = []
    for pid in pids_of(engine).values():
        status = Path(f"/proc/{pid}/status").read_text()
        found.append(1024 * int(status.split("VmHWM:")[1].split()[0]))
    engine.shutdown()
    return found


@pytest.fixture(scope="module")
def large(tiny_model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of 200 MB."""
    return write_wide_llama(tiny_model("llama"), tmp_path_factory.mktemp("large"), **SIZES)


@pytest.fixture(scope="module")
def nothing(tiny_model: Callable[[str], Path]) -> int:
    """Return the least peak memory of a rank with next to no weights, in bytes."""
    return min(peaks_of(tiny_model("llama"), tensor_parallel_size=2))


@pytest.mark.more
@pytest.mark.parametrize("case", CASES)
def test_a_rank_has_its_share_in_memory(case: str, large: Path, nothing: int) -> None:
    most, options = CASES[case]
    size = (large / "model.safetensors").stat().st_size
    assert size > 200e6
    for peak in peaks_of(large, **options):
        assert (peak - nothing) / size < most


@pytest.mark.more
def test_stages_are_measured_in_the_memory_of_a_layer(large: Path, nothing: int) -> None:
    """And of what is read between two measured steps; nothing of it is left when weights come."""
    size = (large / "model.safetensors").stat().st_size
    for peak in peaks_of(large, pipeline_parallel_size=2):
        assert peak - nothing < max(0.65 * size, CACHES_BYTES + 0.35 * size)
