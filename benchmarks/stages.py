# SPDX-License-Identifier: Apache-2.0
"""Gain of stages that work at once: `python -m benchmarks.stages [--stages 2] [--requests 16] [--measured]`.

Steps follow each other through the stages: one at a time (`--no-async-scheduling`), or as many as there are stages, of
different requests. Scheduler and loop are the real ones; the null executor computes, and a step keeps each stage busy
for as long as a cost model says. No real time goes in, so every run gives the same numbers: tokens per second, and the
part of the time in which each stage has worked.

With `--measured` a random model is computed by as many processes with a thread each, and real time goes in. With
`--model benchmarks/models/dummy-qwen3-next` it has the shape of one: cut as its layers were measured at start, or, with
`--by-bytes`, by what a step reads of them.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections import deque
from pathlib import Path
from typing import NamedTuple

from benchmarks.routing import Clock, CostModel
from quire.config import EngineConfig
from quire.engine.core import EngineCore
from quire.engine.llm_engine import LLMEngine
from quire.engine.messages import AddRequest, EngineCoreRequest
from quire.engine.startup import prepare
from quire.models.loader import without_weights
from quire.models.stages import partition, stack_of
from quire.sampling_params import SamplingParams
from quire.scheduler.output import ModelRunnerOutput, SchedulerOutput

PROMPT_LEN, OUTPUT_LEN = 32, 64
LAYERS_PER_STAGE = 4
PARAMS = SamplingParams(temperature=0.0, max_tokens=OUTPUT_LEN, ignore_eos=True, detokenize=False)
WAYS = {"one step at a time": False, "a step for each stage": True}


class Found(NamedTuple):
    """Tokens per second, and each stage's share of the time in which it worked, if that is known."""

    tokens_per_s: float
    busy: list[float]

    def __str__(self) -> str:
        busy = ", ".join(f"{share:.0%}" for share in self.busy)
        return f"{self.tokens_per_s:.0f} tokens/s" + (f"; stages work {busy} of the time" if busy else "")


class Row:
    """Stages on made-up time, in the place of an executor's two verbs: each takes its part of a step in turn."""

    def __init__(self, core: EngineCore, clock: Clock, num_stages: int, costs: CostModel) -> None:
        self._executor, self._clock, self._costs = core.executor, clock, costs
        self.busy_s = [0.0] * num_stages
        self._free_at = [0.0] * num_stages
        self._ends: deque[float] = deque()
        self._submit, self._collect = core.executor.submit, core.executor.collect
        core.executor.submit = self.submit  # type: ignore[method-assign]
        core.executor.collect = self.collect  # type: ignore[method-assign]

    def submit(self, plan: SchedulerOutput) -> None:
        at, took = self._clock.now, self._costs.of(plan) / len(self.busy_s)
        for stage, free_at in enumerate(self._free_at):
            at = max(at, free_at) + took
            self._free_at[stage] = at
            self.busy_s[stage] += took
        self._ends.append(at)
        self._submit(plan)

    def collect(self) -> ModelRunnerOutput:
        self._clock.now = max(self._clock.now, self._ends.popleft())
        return self._collect()


def prompt(number: int) -> list[int]:
    return [1 + (number * 7 + place * 3) % 60 for place in range(PROMPT_LEN)]


def config_of(
    directory: Path, num_stages: int, overlapped: bool, executor: str, partition: str | None = None
) -> EngineConfig:
    return EngineConfig.from_args(
        model=str(directory),
        load_format="dummy",
        skip_tokenizer_init=True,
        device="cpu",
        cpu_threads=1,
        max_model_len=512,
        num_gpu_blocks_override=2048,
        pipeline_parallel_size=num_stages,
        pipeline_partition=partition,
        async_scheduling=overlapped,
        enable_prefix_caching=False,
        distributed_executor_backend=executor,
    )


def simulated(config: EngineConfig, num_requests: int, costs: CostModel) -> Found:
    clock = Clock()
    core = EngineCore(prepare(config, "offline"), clock)
    row = Row(core, clock, config.parallel.pipeline_parallel_size, costs)
    for number in range(num_requests):
        core.handle(AddRequest(EngineCoreRequest(f"0.{number}-0", prompt(number), PARAMS, 0.0)))
    while core.has_work():
        core.step()
    return Found(num_requests * OUTPUT_LEN / clock.now, [busy / clock.now for busy in row.busy_s])


def measured(config: EngineConfig, num_requests: int) -> Found:
    engine = LLMEngine(config)
    for warm in (True, False):
        for number in range(num_requests):
            engine.add_request(f"{warm}{number}", {"prompt_token_ids": prompt(number)}, PARAMS)
        began = time.perf_counter()
        while engine.has_unfinished_requests():
            engine.step()
        took = time.perf_counter() - began
    engine.shutdown()
    return Found(num_requests * OUTPUT_LEN / took, [])


def partition_by_bytes(config: EngineConfig) -> str:
    model = without_weights(prepare(config, "offline"))
    return ",".join(map(str, partition(model, stack_of(model), config.parallel.pipeline_parallel_size)))


def write_model(directory: Path, num_stages: int, size: int) -> None:
    model = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": size,
        "intermediate_size": 4 * size,
        "num_hidden_layers": LAYERS_PER_STAGE * num_stages,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "vocab_size": 64,
        "max_position_embeddings": 1024,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    }
    (directory / "config.json").write_text(json.dumps(model))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--measured", action="store_true", help="by processes, in real time")
    parser.add_argument("--model", type=Path, help="directory with a config.json")
    parser.add_argument("--by-bytes", action="store_true", help="cut by bytes, measured or not")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        directory, executor = args.model or Path(name), "mp" if args.measured else "null"
        if args.model is None:
            write_model(directory, args.stages, 512)
        for way, overlapped in WAYS.items():
            config = config_of(directory, args.stages, overlapped, executor)
            if args.by_bytes:
                cut = partition_by_bytes(config)
                config = config_of(directory, args.stages, overlapped, executor, cut)
            found = (
                measured(config, args.requests)
                if args.measured
                else simulated(config, args.requests, CostModel())
            )
            print(f"{way}: {found}")


if __name__ == "__main__":
    main()
