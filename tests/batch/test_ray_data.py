# SPDX-License-Identifier: Apache-2.0
"""The example for Ray Data, on two hosts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from quire import LLM, SamplingParams
from tests.fixtures.ray_cluster import Cluster, with_ray
from tests.fixtures.ray_cluster import cluster as cluster

ROOT = Path(__file__).parents[2]
NAMES = ["France", "Japan", "Italy", "Brazil", "Spain"]


@pytest.mark.more
@with_ray
def test_answers_on_a_cluster_are_those_of_one_engine(cluster: Cluster, tmp_path: Path) -> None:
    pq.write_table(pa.table({"country": NAMES, "number": range(5)}), tmp_path / "in.parquet")
    prompt = "What is the capital of {country}?"
    command = [sys.executable, str(ROOT / "examples/ray_data.py"), "in.parquet", "out", "--prompt", prompt]
    command += ["--actors", "2", "--batch-size", "2", "--max-tokens", "20"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    rows = sorted(pq.read_table(tmp_path / "out").to_pylist(), key=lambda row: row["number"])
    chats = [[{"role": "user", "content": prompt.format(country=name)}] for name in NAMES]
    llm = LLM("quire-demo", cpu_threads=1)
    outputs = llm.chat(chats, SamplingParams(temperature=0, max_tokens=20), use_tqdm=False)
    expected = [output.outputs[0].text for output in outputs]
    assert [(row["country"], row["answer"]) for row in rows] == list(zip(NAMES, expected, strict=True))
