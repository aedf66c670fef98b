# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.gpu.start MODEL`: start an engine, say `ready`, and end; and the checkpoint it is to load.

The time that counts is the whole process's: Python, imports, loading, warm-up, graphs.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.gpu.target import Target, make_target

SHARD_BYTES = 4 << 30


def write_checkpoint(target: Target, model_dir: Path) -> int:
    """Random safetensors, made on the device, for the config.json in a directory; returns the bytes written."""
    from safetensors.torch import save_file

    weight_map: dict[str, str] = {}
    total = 0
    for number, shard in enumerate(_shards(target, model_dir)):
        name = f"model-{number:05}.safetensors"
        save_file(shard, model_dir / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shard, name)
        total += sum(tensor.nbytes for tensor in shard.values())
    (model_dir / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return total


def _shards(target: Target, model_dir: Path) -> Iterator[dict[str, Tensor]]:
    from quire.config import EngineConfig
    from quire.engine.startup import prepare
    from quire.models.registry import ModelRegistry

    args = {"load_format": "dummy", "skip_tokenizer_init": True, "dtype": "bfloat16"}
    config = prepare(
        EngineConfig.from_args(model=str(model_dir), device=target.device.type, **args), "offline"
    )
    with torch.device("meta"):
        model = ModelRegistry.resolve_model_cls(config.arch.architecture)(config=config)
    shard: dict[str, Tensor] = {}
    for name, slots in model.checkpoint_slots().items():
        numbers = torch.empty(slots[0].source.shape, dtype=torch.bfloat16, device=target.device)
        shard[name] = numbers.normal_(0.0, 0.02).cpu()
        if sum(tensor.nbytes for tensor in shard.values()) > SHARD_BYTES:
            yield shard
            shard = {}
    yield shard


def start_seconds(target: Target, model_dir: Path, limit_s: float) -> float:
    """Seconds from the start of a process to its `ready`."""
    command = [sys.executable, "-m", "benchmarks.gpu.start", str(model_dir), "--device", target.device.type]
    started = time.perf_counter()
    with subprocess.Popen(
        [*command, *(["--tiny"] if target.tiny else [])], stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            ready = any(line.strip() == "ready" for line in process.stdout)
            seconds = time.perf_counter() - started
            process.wait(limit_s)
        finally:
            process.kill()
    if not ready:
        raise RuntimeError(f"the engine did not start; exit code {process.returncode}")
    return seconds


def main() -> None:
    found = argparse.ArgumentParser(prog="python -m benchmarks.gpu.start", description=__doc__)
    found.add_argument("model", type=Path)
    found.add_argument("--device", default="cuda")
    found.add_argument("--tiny", action="store_true")
    args = found.parse_args()
    from benchmarks.gpu.engine import Engine

    engine = Engine(
        make_target(args.device, args.tiny), args.model, load_format="safetensors", max_num_seqs=256
    )
    print("ready", flush=True)
    engine.close()


if __name__ == "__main__":
    main()
