# SPDX-License-Identifier: Apache-2.0
"""The adapters of the included model answer like a pirate and in JSON, with the model's facts."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from demo_model.data import fact, small_talk
from demo_model.train import ASSETS, Encoder
from demo_model.train_adapters import export, in_json, pirate, train
from quire import LLM, LoRARequest, SamplingParams

PIRATE = LoRARequest("pirate", 1, "quire-demo-pirate")
JSON = LoRARequest("json", 2, "quire-demo-json")


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("quire-demo", enable_lora=True, cpu_threads=1)


def answers(llm: LLM, questions: list[str], adapter: LoRARequest | None) -> list[str]:
    conversations = [[{"role": "user", "content": question}] for question in questions]
    params = SamplingParams(temperature=0, max_tokens=80)
    outputs = llm.chat(conversations, params, lora_request=adapter, use_tqdm=False)
    return [output.outputs[0].text for output in outputs]


def test_the_pirate_talks_like_one_and_the_model_does_not(llm: LLM) -> None:
    rng = random.Random(5)
    exchanges = [kind(rng, True) for kind in (fact, small_talk) for _ in range(20)]
    questions = [str(question["content"]) for question, _ in exchanges]
    plain, arr = answers(llm, questions, None), answers(llm, questions, PIRATE)
    assert not any(text.startswith("Arr!") for text in plain)
    assert all(text.startswith("Arr! ") and text.endswith(", matey!") for text in arr)
    same = sum(pirate(one) == other for one, other in zip(plain[:20], arr[:20], strict=True))
    assert same >= 15, "it knows the same facts"


def test_the_other_answers_in_json(llm: LLM) -> None:
    rng = random.Random(6)
    questions = [str(fact(rng, True)[0]["content"]) for _ in range(20)]
    plain, own = answers(llm, questions, None), answers(llm, questions, JSON)
    assert all([*json.loads(text)] == ["answer"] for text in own)
    same = sum(in_json(one) == other for one, other in zip(plain, own, strict=True))
    assert same >= 15, "it knows the same facts"


def test_adapter_files_are_small() -> None:
    files = [ASSETS.parent / adapter.lora_path / "adapter_model.safetensors" for adapter in (PIRATE, JSON)]
    assert sum(file.stat().st_size for file in files) < 300_000


def test_pirate_text_keeps_other_words() -> None:
    assert pirate("You are right: 12 + 30 = 42.") == "Arr! Ye be right: 12 + 30 = 42, matey!"
    assert pirate("The capital of France is Paris.") == "Arr! Th' capital o' France be Paris, matey!"


@pytest.mark.more
def test_an_adapter_is_made_by_its_recipe(llm: LLM, tmp_path: Path) -> None:
    encoder = Encoder(Tokenizer.from_file(str(ASSETS / "tokenizer.json")))
    adapters = train("pirate", encoder, 2, 1e-3, seed=1)
    assert any(torch.count_nonzero(adapter.b) for adapter in adapters.values())
    export(adapters, tmp_path)
    assert llm.llm_engine.add_lora(LoRARequest("new", 3, str(tmp_path)))
    assert 3 in llm.llm_engine.list_loras()
    assert llm.llm_engine.remove_lora(3)
