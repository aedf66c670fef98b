# SPDX-License-Identifier: Apache-2.0
"""Harmony on a random model whose tokens are its markers: every finished answer satisfies its constraint."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from tokenizers import AddedToken, Tokenizer

from quire import LLM, SamplingParams
from quire.entrypoints.chat.formats.constraint import Form, json_of
from quire.entrypoints.chat.formats.harmony import MARKERS
from quire.entrypoints.chat.formats.model import ModelFormat, PromptEnd
from quire.entrypoints.chat.formats.selection import choose
from quire.entrypoints.chat.tool_grammar import AllowedCalls, AllowedFunction
from quire.json_schema.structural_tag import as_tag
from quire.outputs import ChatAnswer
from tests.fixtures.tiny_models import VOCAB_SIZE

PROMPT = "<|start|>user<|message|>Hi.<|end|><|start|>assistant"
BEGIN = PromptEnd(PROMPT)
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"unit": {"enum": ["C", "F"]}, "n": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["unit", "n"],
    "additionalProperties": False,
}
SCHEMAS = {"look_up": SCHEMA, "now": {"type": "object", "properties": {}, "additionalProperties": False}}
FUNCTIONS = [AllowedFunction(name, schema, True) for name, schema in SCHEMAS.items()]
ENDS = ("<|return|>", "<|call|>")
RENAMED = {"<eos>": "<|return|>", "<bos>": "<|start|>"}
ENDING = {"<|end|>": 6, "<|return|>": 4}
"""Logits of a model that comes to an end now and then."""
NUM_ANSWERS = 24


class Speaker:
    """A model, and how its answers are read."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self.format = ModelFormat(choose("openai", "openai_gptoss", None), llm.get_tokenizer())

    def finished(self, form: Form) -> list[ChatAnswer]:
        """The answers that were finished, most random ones."""
        encode = self._llm.get_tokenizer().encode
        bias = {encode(marker, add_special_tokens=False)[0]: bias for marker, bias in ENDING.items()}
        params = [
            SamplingParams(temperature=1.5, seed=seed, max_tokens=180, logit_bias=bias)
            for seed in range(NUM_ANSWERS)
        ]
        settled = [
            self.format.with_format_options(one, BEGIN).replace_unchecked(structured_outputs=as_tag(form))
            for one in params
        ]
        outputs = [
            one.outputs[0] for one in self._llm.generate([PROMPT] * NUM_ANSWERS, settled, use_tqdm=False)
        ]
        assert {output.finish_reason for output in outputs} <= {"stop", "length"}
        texts = [output.text for output in outputs if output.finish_reason == "stop"]
        assert len(texts) > NUM_ANSWERS / 2
        return [self.format.read(text, BEGIN, SCHEMAS) for text in texts]


@pytest.fixture(scope="module")
def speaker(tiny_model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Speaker]:
    folder = tmp_path_factory.mktemp("harmony") / "model"
    shutil.copytree(tiny_model("llama"), folder)
    _speak_harmony(folder)
    llm = LLM(str(folder), max_num_seqs=16)
    yield Speaker(llm)
    llm.llm_engine.shutdown()


def _speak_harmony(folder: Path) -> None:
    """Markers are special tokens, all that the vocabulary has room for, and some end an answer, as gpt-oss has them."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        text = (folder / name).read_text()
        for old, new in RENAMED.items():
            text = text.replace(old, new)
        (folder / name).write_text(text)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(marker, special=True) for marker in MARKERS])
    tokenizer.save(str(folder / "tokenizer.json"))
    assert tokenizer.get_vocab_size() <= VOCAB_SIZE
    ends = [tokenizer.token_to_id(marker) for marker in ENDS]
    for name in ("config.json", "generation_config.json"):
        content = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(content | {"eos_token_id": ends}))


def names_of(answer: ChatAnswer) -> list[str]:
    """Validate the arguments of an answer's tool calls and return the names of the functions."""
    for call in answer.tool_calls:
        jsonschema.validate(json.loads(call.arguments), SCHEMAS[call.name])
    return [call.name for call in answer.tool_calls]


@pytest.mark.parametrize("at_most_one", [False, True])
def test_required_calls_come_and_validate(speaker: Speaker, at_most_one: bool) -> None:
    form = speaker.format.grammar(BEGIN).calls(AllowedCalls(FUNCTIONS, at_most_one))
    for answer in speaker.finished(form):
        assert names_of(answer)
        assert len(names_of(answer)) == 1 or not at_most_one
        assert not answer.content


def test_a_named_call_comes_behind_reasoning(speaker: Speaker) -> None:
    found = speaker.finished(speaker.format.grammar(BEGIN).calls(AllowedCalls(FUNCTIONS[:1], True)))
    assert [names_of(answer) for answer in found] == [["look_up"]] * len(found)
    assert any(answer.reasoning for answer in found)


def test_strict_calls_validate_where_they_come(speaker: Speaker) -> None:
    found = speaker.finished(speaker.format.grammar(BEGIN).calls_in_text(AllowedCalls(FUNCTIONS, False)))
    assert any(names_of(answer) for answer in found)
    assert all("functions." not in answer.content for answer in found)


def test_a_final_message_has_its_form(speaker: Speaker) -> None:
    grammar = speaker.format.grammar(BEGIN)
    for answer in speaker.finished(grammar.text(json_of(SCHEMA))):
        jsonschema.validate(json.loads(answer.content), SCHEMA)
    for answer in speaker.finished(grammar.text_or_calls(json_of(SCHEMA), AllowedCalls(FUNCTIONS, False))):
        assert bool(names_of(answer)) != bool(answer.content)
        if answer.content:
            jsonschema.validate(json.loads(answer.content), SCHEMA)
