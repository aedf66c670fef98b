# SPDX-License-Identifier: Apache-2.0
"""Loading takes hardly more memory than the loaded model, from a checkpoint and from packed weights."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

ROOT = Path(__file__).parents[2]
MIB = 2**20
LAYER_BYTES = 16 * MIB
"""Of the largest matrix, gate and up in bfloat16: once in the file's map, once where the two are merged."""
NUMBERS = """
import json, sys
from pathlib import Path
import torch
from quire.models.packed_cache import PackedCache
from tests.models.harness import load_tiny

def peak_bytes():
    (line,) = (line for line in open("/proc/self/status") if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024

torch.empty(1 << 20).clone().sum()  # threads and their stacks
before = peak_bytes()
model = load_tiny(Path(sys.argv[1]), dtype="bfloat16", **json.loads(sys.argv[2]))
peak = peak_bytes()
size = sum(part.nbytes for _, layer in model.checkpoint_layers() for part in layer.tensors().values())
print(peak - before, size)
"""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """About 200 MiB."""
    directory = tmp_path_factory.mktemp("large")
    config = LlamaConfig(
        hidden_size=1024,
        intermediate_size=4096,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=8,
        vocab_size=1000,
        max_position_embeddings=128,
        dtype="bfloat16",
        architectures=["LlamaForCausalLM"],
    )
    config.save_pretrained(directory)
    with torch.device("meta"):
        state = LlamaForCausalLM(config).state_dict()
    tensors = {name: torch.full(entry.shape, 0.01, dtype=torch.bfloat16) for name, entry in state.items()}
    save_file(tensors, directory / "model.safetensors")
    return directory


def peak_and_size(checkpoint: Path, **options: Any) -> tuple[int, int]:
    """Bytes that a process grew by at its largest while it loaded, and those of the weights that it then had."""
    command = [sys.executable, "-c", NUMBERS, str(checkpoint), json.dumps(options)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    peak, size = map(int, done.stdout.split())
    return peak, size


@pytest.mark.more
@pytest.mark.parametrize("quantization", [None, "int4"])
def test_the_peak_is_the_loaded_model_and_one_layer(
    quantization: str | None, checkpoint: Path, tmp_path: Path
) -> None:
    options = {"quantization": quantization, "packed_weights_cache": str(tmp_path)}
    for start in ("packing", "mapping"):
        peak, size = peak_and_size(checkpoint, **options)
        assert peak < size + 2 * LAYER_BYTES + 8 * MIB, start
