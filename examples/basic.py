# SPDX-License-Identifier: Apache-2.0
"""Continue a batch of prompts in this process.

python examples/basic.py
"""

from quire import LLM, SamplingParams

PROMPTS = ["The capital of France is", "The opposite of hot is", "The currency of Japan is"]


def main() -> None:
    llm = LLM("quire-demo")  # or a directory, a Hugging Face id, or a GGUF file
    outputs = llm.generate(PROMPTS, SamplingParams(temperature=0.0, max_tokens=16))
    for output in outputs:  # in the order of the prompts
        print(f"{output.prompt}{output.outputs[0].text}")


if __name__ == "__main__":
    main()
