# SPDX-License-Identifier: Apache-2.0
"""Search, rerank and answer, with the two included models.

    python examples/search.py "Which city is France's capital?"

An embedding model finds the facts that are nearest to a question. A chat model, which reads question and fact together,
says how likely it would answer with each, and answers with the likeliest. It is a toy that knows these facts by heart
and reads none in its prompt, where a larger one would be given them; so nothing is left to say but what was found.
"""

import math
import sys

from quire import LLM, SamplingParams
from quire.outputs import RequestOutput
from quire.structured_outputs_params import StructuredOutputsParams

FACTS = [
    "The capital of France is Paris.",
    "The capital of Japan is Tokyo.",
    "The currency of Japan is the yen.",
    "People in Brazil speak Portuguese.",
    "The chemical symbol of gold is Au.",
    "A young cow is called a calf.",
    "The opposite of hot is cold.",
    "A spider has 8 legs.",
]


def main() -> None:
    question = " ".join(sys.argv[1:]) or "How many legs has a spider?"

    # Retrieval: cosine similarity of vectors that were made once; with many texts a vector database does this part.
    embedder = LLM("quire-demo-embed")
    known = [output.outputs.embedding for output in embedder.embed(FACTS)]
    (asked,) = (output.outputs.embedding for output in embedder.embed([question]))
    likeness = [sum(a * b for a, b in zip(asked, one, strict=True)) for one in known]
    nearest = sorted(range(len(FACTS)), key=likeness.__getitem__, reverse=True)[:3]

    # Reranking: how likely each fact is as the answer. A cross-encoder does the same in one `score`.
    chat = LLM("quire-demo")
    ask = {"role": "user", "content": question}
    candidates = [FACTS[place] for place in nearest]
    read = chat.chat(
        [[ask, {"role": "assistant", "content": fact}] for fact in candidates],
        SamplingParams(max_tokens=1, prompt_logprobs=0),
        add_generation_prompt=False,
        continue_final_message=True,
    )
    powers = [math.exp(logprob(one) - logprob(read[0])) for one in read]
    shares = [power / sum(powers) for power in powers]
    ranked = sorted(zip(shares, nearest, strict=True), reverse=True)
    for share, place in ranked:
        print(f"{share:6.1%}  {FACTS[place]}  (similarity {likeness[place]:.2f})")

    # The answer is what was found, whatever else the model would have said.
    found = StructuredOutputsParams(choice=[FACTS[ranked[0][1]]])
    (answer,) = chat.chat([ask], SamplingParams(temperature=0.0, max_tokens=64, structured_outputs=found))
    print(answer.outputs[0].text)


def logprob(output: RequestOutput) -> float:
    """Return the logprob of a whole prompt."""
    assert output.prompt_logprobs is not None
    return sum(one.logprob for entry in output.prompt_logprobs if entry for one in entry.values())


if __name__ == "__main__":
    main()
