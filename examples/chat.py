# SPDX-License-Identifier: Apache-2.0
"""Hold a conversation of several turns in this process.

python examples/chat.py
"""

from quire import LLM, SamplingParams

QUESTIONS = ["What is the capital of Italy?", "What is 12 + 30?"]


def main() -> None:
    llm = LLM("quire-demo")
    params = SamplingParams(temperature=0.0, max_tokens=64)
    messages = []
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        (output,) = llm.chat([messages], params, use_tqdm=False)
        answer = output.outputs[0].text
        messages.append({"role": "assistant", "content": answer})
        print(f"> {question}\n{answer}")


if __name__ == "__main__":
    main()
