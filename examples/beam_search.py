# SPDX-License-Identifier: Apache-2.0
"""Beam search: the most likely continuations, best first.

python examples/beam_search.py
"""

from quire import LLM
from quire.sampling_params import BeamSearchParams


def main() -> None:
    llm = LLM("quire-demo")
    params = BeamSearchParams(beam_width=3, max_tokens=8)
    (output,) = llm.beam_search(["The capital of France is"], params)
    for sequence in output.sequences:
        print(f"{sequence.cum_logprob:7.2f}  {sequence.text!r}")


if __name__ == "__main__":
    main()
