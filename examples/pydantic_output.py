# SPDX-License-Identifier: Apache-2.0
"""Answers that are always a valid instance of a pydantic model.

python examples/pydantic_output.py
"""

from pydantic import BaseModel

from quire import LLM, SamplingParams
from quire.sampling_params import StructuredOutputsParams

SENTENCES = [
    "My friend Peter lives in Paris and is 36.",
    "My friend Maria lives in Rome and is 28.",
]


class Person(BaseModel):
    """A person."""

    name: str
    age: int
    city: str


def main() -> None:
    llm = LLM("quire-demo")
    params = SamplingParams(
        temperature=0.0,
        max_tokens=200,
        structured_outputs=StructuredOutputsParams(json=Person.model_json_schema()),
    )
    ask = "Extract name, age and city from this sentence as JSON: "
    chats = [[{"role": "user", "content": ask + sentence}] for sentence in SENTENCES]
    for output in llm.chat(chats, params, use_tqdm=False):
        print(repr(Person.model_validate_json(output.outputs[0].text)))


if __name__ == "__main__":
    main()
