# SPDX-License-Identifier: Apache-2.0
"""One model, three manners, in one batch: the included model, alone and with each of its adapters.

python examples/lora.py "What is the capital of Japan?"
"""

import sys

from quire import LLM, LoRARequest, SamplingParams

ADAPTERS = {
    "plain": None,
    "pirate": LoRARequest("pirate", 1, "quire-demo-pirate"),
    "json": LoRARequest("json", 2, "quire-demo-json"),
}


def main() -> None:
    question = " ".join(sys.argv[1:]) or "What is the capital of France?"
    llm = LLM("quire-demo", enable_lora=True, max_loras=2)
    conversations = [[{"role": "user", "content": question}] for _ in ADAPTERS]
    outputs = llm.chat(
        conversations,
        SamplingParams(temperature=0, max_tokens=64),
        lora_request=[*ADAPTERS.values()],
        use_tqdm=False,
    )
    for name, output in zip(ADAPTERS, outputs, strict=True):
        print(f"{name:7} {output.outputs[0].text}")


if __name__ == "__main__":
    main()
