# SPDX-License-Identifier: Apache-2.0
"""Order documents by their relevance to a query, over HTTP in the form of Jina and Cohere.

quire serve quire-demo-embed
python examples/rerank.py
"""

import json
import os
import urllib.request

URL = os.environ.get("QUIRE_URL", "http://localhost:8000")
DOCUMENTS = ["The capital of Japan is Tokyo.", "A young cow is called a calf.", "A spider has 8 legs."]


def rerank(query: str, documents: list[str], top_n: int) -> list[dict]:
    """Return the best documents, each with `index` and `relevance_score`."""
    body = {"model": "quire-demo-embed", "query": query, "documents": documents, "top_n": top_n}
    request = urllib.request.Request(
        f"{URL}/v1/rerank", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request) as reply:
        return json.load(reply)["results"]


def main() -> None:
    for result in rerank("What is a baby cow called?", DOCUMENTS, top_n=2):
        print(f"{result['relevance_score']:.2f}  {DOCUMENTS[result['index']]}")


if __name__ == "__main__":
    main()
