# SPDX-License-Identifier: Apache-2.0
"""Simulated beside real runs: `python -m benchmarks.simulation [MODEL]`.

A machine is calibrated, then each load runs on a real engine, with its arrival times, and in the simulator. Ratios are
simulated / real. Run it on an idle machine: whatever else runs is in the real numbers alone.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Sequence

from quire.bench.workload import percentile
from quire.config import EngineConfig
from quire.engine.async_llm import AsyncLLM
from quire.inputs import TokensPrompt
from quire.sampling_params import RequestOutputKind, SamplingParams
from quire.simulate.calibrate import calibrate
from quire.simulate.load import LoadDescription, SimulatedRequest
from quire.simulate.report import summarize
from quire.simulate.simulator import RequestTimes, SimulatedRun, Simulator

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


async def compare(config: EngineConfig, num_requests: int, prompt_tokens: str, output_tokens: str) -> None:
    """Print the ratios of each load."""
    machine = await asyncio.to_thread(calibrate, config)
    print(f"mean error of the fitted steps: {machine.costs.error:.1%}")
    engine = AsyncLLM(config)
    try:
        await engine.wait_ready()
        burst = LoadDescription(num_requests, prompt_tokens=prompt_tokens, output_tokens=output_tokens)
        await real_run(engine, "warm", burst.requests())  # memory that no step has touched takes time once
        alone = Simulator(machine.config, machine.cache, machine.costs).run(burst.requests())
        capacity = len(alone.requests) / max(one.last_s for one in alone.requests)
        for number, share in enumerate(SHARES_OF_CAPACITY):
            load = LoadDescription(
                num_requests, share * capacity, prompt_tokens, output_tokens, seed=number
            ).requests()
            simulated = Simulator(machine.config, machine.cache, machine.costs).run(load)
            real = await real_run(engine, str(number), load)
            report(share, simulated, real)
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
