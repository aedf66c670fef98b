# SPDX-License-Identifier: Apache-2.0
"""Stream several answers at once from an engine inside an asyncio program.

python examples/async_streaming.py
"""

import asyncio

from quire import AsyncLLM, EngineArgs, SamplingParams

PROMPTS = ["The capital of France is", "The capital of Japan is", "A young cow is called a"]


async def stream(engine: AsyncLLM, name: str, prompt: str) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=12)
    seen = 0
    async for output in engine.generate(prompt, params, request_id=name):
        text = output.outputs[0].text  # all of the text so far
        if text[seen:]:
            print(f"{name}: {text[seen:]!r}")
        seen = len(text)


async def main() -> None:
    engine = AsyncLLM.from_engine_args(EngineArgs(model="quire-demo"))
    try:
        await asyncio.gather(*(stream(engine, f"request {i}", one) for i, one in enumerate(PROMPTS)))
    finally:
        await engine.shutdown()


if __name__ == "__main__":
    asyncio.run(main())
