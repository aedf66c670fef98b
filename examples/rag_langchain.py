# SPDX-License-Identifier: Apache-2.0
"""Retrieval-augmented generation with LangChain: embeddings, a vector store and a chat model from one server.

pip install langchain-openai
quire serve --models examples/many_models.yaml
python examples/rag_langchain.py "What is the capital of France?"
"""

import os
import sys

from langchain_core.prompts import ChatPromptTemplate
from langchain_core.vectorstores import InMemoryVectorStore
from langchain_openai import ChatOpenAI, OpenAIEmbeddings

SERVER = {"base_url": os.environ.get("QUIRE_URL", "http://localhost:8000") + "/v1", "api_key": "none"}
FACTS = ["The capital of France is Paris.", "A young cow is called a calf.", "A spider has 8 legs."]
PROMPT = ChatPromptTemplate([("system", "{facts}"), ("user", "{question}")])


def main() -> None:
    question = " ".join(sys.argv[1:]) or "What is the capital of France?"
    # By default LangChain sends the token ids of OpenAI's tokenizer, which are other words to any other model.
    embeddings = OpenAIEmbeddings(model="embed", check_embedding_ctx_length=False, **SERVER)
    store = InMemoryVectorStore.from_texts(FACTS, embeddings)
    found = [document.page_content for document in store.similarity_search(question, k=1)]
    print("found: ", *found)

    chain = PROMPT | ChatOpenAI(model="chat", temperature=0, **SERVER)
    print("answer:", chain.invoke({"facts": "\n".join(found), "question": question}).content)


if __name__ == "__main__":
    main()
