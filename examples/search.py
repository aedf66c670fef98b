"""Search, rerank and answer, with the two models in the box.

    python examples/search.py "Which city is France's capital?"

An embedding model finds the facts that are nearest to a question, and a chat model answers it.
"""

import sys

from quire import LLM, SamplingParams

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
    question = " ".join(sys.argv[1:]) or "What money do they use in Japan?"
    embedder = LLM("quire-demo-embed")

    # Retrieval: cosine similarity of vectors that were made once; with many texts a vector database does this part.
    known = [output.outputs.embedding for output in embedder.embed(FACTS)]
    (asked,) = (output.outputs.embedding for output in embedder.embed([question]))
    likeness = [sum(a * b for a, b in zip(asked, one, strict=True)) for one in known]
    nearest = sorted(range(len(FACTS)), key=likeness.__getitem__, reverse=True)[:3]

    # Reranking: a score for each pair of question and text. A cross-encoder does it better, by the same call.
    candidates = [FACTS[place] for place in nearest]
    scores = [output.outputs.score for output in embedder.score(question, candidates)]
    ranked = sorted(zip(scores, candidates, strict=True), reverse=True)
    for score, fact in ranked:
        print(f"{score:6.3f}  {fact}")

    (answer,) = LLM("quire-demo").chat(
        [{"role": "user", "content": question}], SamplingParams(temperature=0.0, max_tokens=32)
    )
    print(answer.outputs[0].text)


if __name__ == "__main__":
    main()
