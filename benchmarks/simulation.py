# SPDX-License-Identifier: Apache-2.0
"""Simulated beside real runs: `python -m benchmarks.simulation [MODEL]`.

A machine is calibrated, then each load runs on a real engine, with its arrival times, and in the simulator. Ratios are
simulated / real. Run it on an idle machine: whatever else runs is in the real numbers alone. A second part has the
costs of the real steps in place of the calibrated ones, so it shows what a machine that changes its speed in between
does not explain.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from quire.bench.workload import percentile
from quire.config import EngineConfig
from quire.engine.async_llm import AsyncLLM
from quire.engine.trace import read_trace
from quire.inputs import TokensPrompt
from quire.sampling_params import RequestOutputKind, SamplingParams
from quire.simulate.calibrate import calibrate
from quire.simulate.load import LoadDescription, SimulatedRequest
from quire.simulate.machine import Machine, machine_of
from quire.simulate.report import summarize
from quire.simulate.simulator import RequestTimes, SimulatedRun
from quire.simulate.sweep import Scenario

SHARES_OF_CAPACITY = (float("inf"), 0.7, 0.3)  # Rates of arrivals; infinite: all at once.


async def answer(
    engine: AsyncLLM, name: str, request: SimulatedRequest, started: float, vocab: int
) -> RequestTimes:
    """Send a request at its time and return the times of its outputs."""
    await asyncio.sleep(max(started + request.arrival_s - time.perf_counter(), 0.0))
    sent = last = time.perf_counter()
    times = RequestTimes(sent - started, len(request.prompt_token_ids))
    prompt = TokensPrompt(prompt_token_ids=[token % vocab for token in request.prompt_token_ids])
    params = SamplingParams(
        temperature=0.0,
        max_tokens=request.num_output_tokens,
        ignore_eos=True,
        output_kind=RequestOutputKind.DELTA,
    )
    async for output in engine.generate(prompt, params, name):
        now = time.perf_counter()
        if times.num_output_tokens:
            times.gaps_s.append(now - last)
        else:
            times.first_s = now - started
        last, times.last_s = now, now - started
        times.num_output_tokens += len(output.outputs[0].token_ids)
    return times


async def real_run(engine: AsyncLLM, name: str, load: Sequence[SimulatedRequest]) -> SimulatedRun:
    """Run a load on a real engine."""
    started, vocab = time.perf_counter(), engine.config.arch.vocab_size
    tasks = [answer(engine, f"{name}-{place}", one, started, vocab) for place, one in enumerate(load)]
    return SimulatedRun(list(await asyncio.gather(*tasks)), [], [], 0, 0, 0)


def simulated_run(machine: Machine, load: Sequence[SimulatedRequest]) -> SimulatedRun:
    return Scenario.from_machine(machine, load).run(machine)


async def compare(config: EngineConfig, num_requests: int, prompt_tokens: str, output_tokens: str) -> None:
    """Print the ratios of each load."""
    machine = await asyncio.to_thread(calibrate, config)
    print(f"mean error of the fitted steps: {machine.costs.error:.1%}")
    burst = LoadDescription(num_requests, prompt_tokens=prompt_tokens, output_tokens=output_tokens)
    alone = simulated_run(machine, burst.requests())
    capacity = len(alone.requests) / max(one.last_s for one in alone.requests)
    loads = {
        share: LoadDescription(
            num_requests, share * capacity, prompt_tokens, output_tokens, seed=number
        ).requests()
        for number, share in enumerate(SHARES_OF_CAPACITY)
    }
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory, "run.trace")
        recording = dataclasses.replace(config.observability, record_trace=str(file))
        real = await real_runs(dataclasses.replace(config, observability=recording), loads, burst.requests())
        own = msgspec.structs.replace(machine, costs=machine_of(read_trace(file)).costs)
    for name, costs in ("calibrated before", machine), ("costs of the run itself", own):
        print(name)
        for share, load in loads.items():
            report(share, simulated_run(costs, load), real[share])


async def real_runs(
    config: EngineConfig, loads: dict[float, list[SimulatedRequest]], warm: Sequence[SimulatedRequest]
) -> dict[float, SimulatedRun]:
    """Run loads one after the other on one real engine."""
    engine = AsyncLLM(config)
    try:
        await engine.wait_ready()
        await real_run(engine, "warm", warm)  # memory that no step has touched takes time once
        return {share: await real_run(engine, f"{share}", load) for share, load in loads.items()}
    finally:
        await engine.shutdown()


def report(share: float, simulated: SimulatedRun, real: SimulatedRun) -> None:
    """Print one line of ratios."""
    one, other = summarize("simulated", simulated), summarize("real", real)
    per_token = [
        percentile(
            [(each.last_s - each.first_s) / max(each.num_output_tokens - 1, 1) for each in run.requests], 50
        )
        for run in (simulated, real)
    ]
    print(
        f"{share:g} of capacity: throughput {one.output_tokens_per_s / other.output_tokens_per_s:.2f}, first token "
        f"50 % {one.ttft_ms.p50 / other.ttft_ms.p50:.2f} ({other.ttft_ms.p50:.1f} ms), time per token 50 % "
        f"{per_token[0] / per_token[1]:.2f} ({1e3 * per_token[1]:.2f} ms), whole request 50 % "
        f"{one.e2e_ms.p50 / other.e2e_ms.p50:.2f}"
    )


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default="quire-demo")
    parser.add_argument("--num-requests", type=int, default=60)
    parser.add_argument("--prompt-tokens", default="100-600")
    parser.add_argument("--output-tokens", default="16-96")
    parser.add_argument("--load-format", default="auto", help="dummy: random weights")
    parser.add_argument("--quantization", default="")
    args = parser.parse_args()
    options = {
        "model": args.model,
        "load_format": args.load_format,
        "skip_tokenizer_init": args.load_format == "dummy",  # a directory that has a config.json alone
        "enable_prefix_caching": False,
    }
    if args.quantization:
        options["quantization"] = args.quantization
    asyncio.run(
        compare(EngineConfig.from_args(**options), args.num_requests, args.prompt_tokens, args.output_tokens)
    )


if __name__ == "__main__":
    main()
