# SPDX-License-Identifier: Apache-2.0
"""Change the model's logits with Python code, for single requests.

python examples/logits_processor.py
"""

from quire import LLM, SamplingParams


def without(banned: int):
    """Return a processor that forbids one token."""

    def process(prompt_ids: list[int], output_ids: list[int], logits):
        """Change the logits [vocabulary] for the next token, given all tokens so far."""
        logits[banned] = -float("inf")

    return process


def main() -> None:
    llm = LLM("quire-demo")
    prompt = "The capital of France is"
    plain = SamplingParams(temperature=0.0, max_tokens=6)
    first = llm.generate(prompt, plain, use_tqdm=False)[0].outputs[0]
    changed = SamplingParams(temperature=0.0, max_tokens=6, logits_processors=[without(first.token_ids[0])])
    second = llm.generate(prompt, changed, use_tqdm=False)[0].outputs[0]
    print("plain:  ", repr(first.text))
    print("changed:", repr(second.text))
    # A server takes processors from its operator only: quire serve --logits-processors module:Class


if __name__ == "__main__":
    main()
