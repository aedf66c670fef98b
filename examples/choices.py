# SPDX-License-Identifier: Apache-2.0
"""Classify texts with a chat model whose answer must be one of a few words.

python examples/choices.py
"""

from quire import LLM, SamplingParams
from quire.sampling_params import StructuredOutputsParams

QUESTIONS = ["Is Paris the capital of France?", "Is 12 + 30 equal to 50?"]


def main() -> None:
    llm = LLM("quire-demo")
    params = SamplingParams(
        temperature=0.0,
        max_tokens=8,
        structured_outputs=StructuredOutputsParams(choice=["yes", "no"]),
    )
    chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
    for question, output in zip(QUESTIONS, llm.chat(chats, params, use_tqdm=False), strict=True):
        print(question, output.outputs[0].text)


if __name__ == "__main__":
    main()
