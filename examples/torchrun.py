# SPDX-License-Identifier: Apache-2.0
"""One model on several ranks, each of which runs this program.

    torchrun --nproc-per-node 2 examples/torchrun.py "Which city is France's capital?"

Every rank gives the same requests in the same order, computes its part of each layer, and ends with the same outputs.
"""

import os
import sys

from quire import LLM, SamplingParams


def main() -> None:
    size = int(os.environ.get("WORLD_SIZE", "1"))
    llm = LLM(tensor_parallel_size=size, distributed_executor_backend="external_launcher")
    question = " ".join(sys.argv[1:]) or "What is the capital of France?"
    (output,) = llm.chat(
        [{"role": "user", "content": question}], SamplingParams(max_tokens=40), use_tqdm=False
    )
    if os.environ.get("RANK") == "0":
        print(output.outputs[0].text)


if __name__ == "__main__":
    main()
