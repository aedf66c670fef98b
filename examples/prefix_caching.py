# SPDX-License-Identifier: Apache-2.0
"""Prefix caching: the second question about a long text computes the question only.

python examples/prefix_caching.py
"""

from quire import LLM, SamplingParams

DOCUMENT = " ".join(["The capital of France is Paris.", "The capital of Japan is Tokyo."] * 20)
QUESTIONS = ["What is the capital of France?", "What is the capital of Japan?"]


def main() -> None:
    llm = LLM("quire-demo")  # prefix caching is on by default
    params = SamplingParams(temperature=0.0, max_tokens=16)
    for question in QUESTIONS:
        chat = [{"role": "system", "content": DOCUMENT}, {"role": "user", "content": question}]
        (output,) = llm.chat([chat], params, use_tqdm=False)
        total, cached = len(output.prompt_token_ids), output.num_cached_tokens
        print(f"{cached:4} of {total} prompt tokens were cached: {output.outputs[0].text}")


if __name__ == "__main__":
    main()
