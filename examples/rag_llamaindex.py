# SPDX-License-Identifier: Apache-2.0
"""Retrieval-augmented generation with LlamaIndex: embeddings, an index and a chat model from one server.

pip install llama-index-llms-openai-like llama-index-embeddings-openai-like
quire serve --models examples/many_models.yaml
python examples/rag_llamaindex.py "What is the capital of France?"
"""

import os
import sys

from llama_index.core import Document, VectorStoreIndex
from llama_index.core.llms import ChatMessage
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from llama_index.llms.openai_like import OpenAILike

SERVER = {"api_base": os.environ.get("QUIRE_URL", "http://localhost:8000") + "/v1", "api_key": "none"}
FACTS = ["The capital of France is Paris.", "A young cow is called a calf.", "A spider has 8 legs."]


def main() -> None:
    question = " ".join(sys.argv[1:]) or "What is the capital of France?"
    embeddings = OpenAILikeEmbedding(model_name="embed", **SERVER)
    nodes = [Document(text=fact) for fact in FACTS]
    index = VectorStoreIndex.from_documents(nodes, embed_model=embeddings, transformations=[])
    found = [node.text for node in index.as_retriever(similarity_top_k=1).retrieve(question)]
    print("found: ", *found)

    chat = OpenAILike(model="chat", is_chat_model=True, temperature=0, **SERVER)
    messages = [
        ChatMessage(role="system", content="\n".join(found)),
        ChatMessage(role="user", content=question),
    ]
    print("answer:", chat.chat(messages).message.content)


if __name__ == "__main__":
    main()
