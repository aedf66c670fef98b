# SPDX-License-Identifier: Apache-2.0
"""Cost of adapters: prompts and tokens per second of an engine with adapters, beside those of one without.

    python -m benchmarks.adapters [MODEL] [--quantization int8] [--rank 16] [--lora-dtype int8] [--batch-size 16]
        [--rounds 3]

All engines run in one process and take turns, so that what else the machine does meets them alike. Weights and adapters
are random. Prints, for each load, the medians as shares of those of the engine without adapters; and the longest time
between two tokens of requests that run, when none comes to them, when one does whose adapter is there, and when one
does whose adapter is to be read.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from itertools import count
from pathlib import Path

import torch
from safetensors.torch import save_file

from quire import LoRARequest, SamplingParams
from quire.config import EngineConfig
from quire.engine.llm_engine import LLMEngine
from quire.processes import freeze_garbage

MODEL = Path(__file__).parent / "models" / "dummy-0.5b"
PROMPT_LEN, NUM_STEPS = 16, 12
COMES_AT, STREAMED = 4, 40
"""The step in which a request joins those that run, and the tokens that these have."""
_NUMBERS = count()


def linears(model: Path) -> dict[str, tuple[int, int]]:
    """The linear modules of a model of Llama's build: outputs and inputs."""
    config = json.loads((model / "config.json").read_text())
    hidden, inner, heads = (
        config[key] for key in ("hidden_size", "intermediate_size", "num_attention_heads")
    )
    size = config.get("head_dim") or hidden // heads
    queries, keys = heads * size, config["num_key_value_heads"] * size
    shapes = {
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    layers = range(config["num_hidden_layers"])
    return {f"model.layers.{i}.{name}": shape for i in layers for name, shape in shapes.items()}


def write_adapter(directory: Path, shapes: dict[str, tuple[int, int]], rank: int) -> str:
    """A random adapter of all these modules."""
    directory.mkdir()
    tensors = {}
    for name, (outputs, inputs) in shapes.items():
        tensors[f"base_model.model.{name}.lora_A.weight"] = torch.randn(rank, inputs).bfloat16()
        tensors[f"base_model.model.{name}.lora_B.weight"] = torch.randn(outputs, rank).bfloat16() / 1024
    save_file(tensors, directory / "adapter_model.safetensors")
    (directory / "adapter_config.json").write_text(
        json.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": rank})
    )
    return str(directory)


def seconds(
    engine: LLMEngine, adapters: Sequence[LoRARequest | None], vocab_size: int
) -> tuple[float, float]:
    """Return the seconds of the step that computes a prompt per adapter, and the median of the decode steps."""
    params = SamplingParams(temperature=0.0, max_tokens=NUM_STEPS, ignore_eos=True, detokenize=False)
    for adapter in adapters:
        prompt = {"prompt_token_ids": random.choices(range(vocab_size), k=PROMPT_LEN)}
        engine.add_request(str(next(_NUMBERS)), prompt, params, lora_request=adapter)
    steps = []
    while engine.has_unfinished_requests():
        started = time.perf_counter()
        engine.step()
        steps.append(time.perf_counter() - started)
    most, *others = sorted(steps, reverse=True)
    return most, statistics.median(others)


def longest_gap(
    engine: LLMEngine, adapters: Sequence[LoRARequest | None], comes: LoRARequest | None, vocab_size: int
) -> float:
    """Most seconds between two tokens of any request that runs, from when another one comes; None: none does."""
    params = SamplingParams(temperature=0.0, max_tokens=STREAMED, ignore_eos=True, detokenize=False)
    for adapter in adapters:
        prompt = {"prompt_token_ids": random.choices(range(vocab_size), k=PROMPT_LEN)}
        engine.add_request(str(next(_NUMBERS)), prompt, params, lora_request=adapter)
    steps: list[float] = []
    while engine.has_unfinished_requests():
        if len(steps) == COMES_AT and comes is not None:
            one = SamplingParams(temperature=0.0, max_tokens=1, detokenize=False)
            engine.add_request(str(next(_NUMBERS)), {"prompt_token_ids": [1]}, one, lora_request=comes)
        started = time.perf_counter()
        engine.step()
        steps.append(time.perf_counter() - started)
    return max(steps[COMES_AT:])


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", type=Path, default=MODEL)
    parser.add_argument("--quantization")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--lora-dtype", default="auto")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    size, options = args.batch_size, {"quantization": args.quantization} if args.quantization else {}
    options |= {"load_format": "dummy", "skip_tokenizer_init": True, "enable_prefix_caching": False}
    options |= {"max_model_len": 128, "max_num_seqs": size + 1, "max_num_batched_tokens": size * PROMPT_LEN}
    options |= {"num_scheduler_steps": 1}  # steps are what is timed
    limits = {"max_loras": size + 1, "max_cpu_loras": size + 1, "max_lora_rank": args.rank}
    limits |= {"lora_dtype": args.lora_dtype}
    base = LLMEngine(EngineConfig.from_args(model=str(args.model), **options))
    served = LLMEngine(EngineConfig.from_args(model=str(args.model), enable_lora=True, **limits, **options))
    freeze_garbage()  # as a server does once it is ready
    vocab_size = json.loads((args.model / "config.json").read_text())["vocab_size"]
    with tempfile.TemporaryDirectory() as scratch:
        shapes = linears(args.model)
        paths = [write_adapter(Path(scratch) / str(i), shapes, args.rank) for i in range(size)]
        each = [LoRARequest(f"adapter-{i}", i + 1, path) for i, path in enumerate(paths)]
        loads: dict[str, tuple[LLMEngine, list[LoRARequest | None]]] = {
            "no adapters served": (base, [None] * size),
            "no adapter": (served, [None] * size),
            "one adapter": (served, [each[0]] * size),
            "an adapter each": (served, [*each]),
        }
        gaps: dict[str, list[float]] = {"nobody": [], "is there": [], "is read": []}
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in loads}
        for turn in range(args.rounds + 1):
            for name, (engine, adapters) in loads.items():
                times = seconds(engine, adapters, vocab_size)
                if turn:  # the first reads the adapters, and records what is replayed
                    found[name].append(times)
            # A number that nobody had before stands for weights that nobody has read.
            new = LoRARequest("new", size + 2 + turn, paths[0])
            for name, adapter in (("nobody", None), ("is there", each[1]), ("is read", new)):
                gaps[name].append(longest_gap(served, each, adapter, vocab_size))
    medians = {name: tuple(map(statistics.median, zip(*times, strict=True))) for name, times in found.items()}
    first = medians["no adapters served"]
    for name, (prompts, tokens) in medians.items():
        shares = f"{first[0] / prompts:7.1%} {first[1] / tokens:7.1%}"
        rates = f"{size * PROMPT_LEN / prompts:8.0f} tokens/s of prompts, {size / tokens:7.1f} tokens/s"
        print(f"{name:20} {rates}  {shares}")
    alone, there, read = (1000 * statistics.median(times[1:]) for times in gaps.values())
    print(
        f"longest time between two tokens of {size} streams: {alone:.0f} ms; {there:.0f} ms as a request comes whose "
        f"adapter is there, {read:.0f} ms where it is read first: {max(read - alone, 0):.0f} ms more"
    )


if __name__ == "__main__":
    main()
