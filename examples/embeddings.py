# SPDX-License-Identifier: Apache-2.0
"""Find the nearest texts to a question through OpenAI's embeddings API.

quire serve quire-demo-embed
python examples/embeddings.py
"""

import os

import numpy as np
from openai import OpenAI

URL = os.environ.get("QUIRE_URL", "http://localhost:8000") + "/v1"
FACTS = ["The capital of Japan is Tokyo.", "A young cow is called a calf.", "A spider has 8 legs."]


def main() -> None:
    client = OpenAI(base_url=URL, api_key="none")

    def embed(texts: list[str]) -> np.ndarray:
        """Return vectors [texts, size] of length 1."""
        reply = client.embeddings.create(model="quire-demo-embed", input=texts)
        return np.array([item.embedding for item in reply.data])

    facts = embed(FACTS)
    (question,) = embed(["What is a baby cow called?"])
    similarity = facts @ question  # cosine, since the vectors have length 1
    for place in np.argsort(-similarity):
        print(f"{similarity[place]:.2f}  {FACTS[place]}")


if __name__ == "__main__":
    main()
