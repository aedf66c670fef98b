# SPDX-License-Identifier: Apache-2.0
"""Speculative decoding: the same tokens in fewer steps.

python examples/speculation.py
"""

from quire import LLM, SamplingParams

PROMPT = "Monday, Tuesday, Monday, Tuesday,"


def main() -> None:
    params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    plain = LLM("quire-demo").generate(PROMPT, params, use_tqdm=False)[0]
    # "auto" looks drafts up in the text itself; {"method": "draft_model", "model": ...} asks a smaller model.
    config = {"method": "auto", "adaptive": False}
    fast = LLM("quire-demo", speculative_config=config).generate(PROMPT, params, use_tqdm=False)[0]
    print("same tokens:", plain.outputs[0].token_ids == fast.outputs[0].token_ids)
    print("drafts accepted:", fast.metrics.num_accepted_tokens, "of", fast.metrics.num_draft_tokens)


if __name__ == "__main__":
    main()
