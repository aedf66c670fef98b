# SPDX-License-Identifier: Apache-2.0
"""Requests of an adapter are read and written by its tokenizer and chat template; those beside them by the model's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from quire import LLM, LoRARequest, SamplingParams
from quire.sampling_params import BeamSearchParams
from tests.lora.adapters import write_adapter
from tests.lora.own_texts import FIRST_FREE, added, write_own_tokenizer

ARR, MATEY = FIRST_FREE, FIRST_FREE + 1
TEMPLATE = "{% for message in messages %}<|arr|>{{ message['content'] }}{% endfor %}"
HI = [{"role": "user", "content": "<|arr|>hi"}]


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> LoRARequest:
    directory = tmp_path_factory.mktemp("pirate")
    write_adapter(directory, {"model.layers.0.mlp.up_proj": (96, 64)})
    tokens = [added(ARR, "<|arr|>"), added(MATEY, "matey", special=False)]
    write_own_tokenizer(directory, lambda file: file["added_tokens"].extend(tokens), eos_token="<|arr|>")
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    return LoRARequest("pirate", 1, str(directory))


@pytest.fixture(scope="module")
def llm(tiny_model: Callable[[str], Path]) -> LLM:
    return LLM(str(tiny_model("llama")), max_model_len=128, cpu_threads=1, enable_lora=True)


def only(token_id: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=3, allowed_token_ids=[token_id])


def test_text_goes_in_and_out_by_the_adapters_tokens(llm: LLM, adapter: LoRARequest) -> None:
    prompts = ["ho matey<|arr|>"] * 2
    own, plain = llm.generate(prompts, only(MATEY), lora_request=[adapter, None], use_tqdm=False)
    assert own.prompt_token_ids[-2:] == [MATEY, ARR]
    assert len(plain.prompt_token_ids) == len(prompts[0])
    assert (own.outputs[0].text, plain.outputs[0].text) == ("mateymateymatey", "")
    own, plain = llm.generate(prompts, only(ARR), lora_request=[adapter, None], use_tqdm=False)
    assert [(one.outputs[0].finish_reason, len(one.outputs[0].token_ids)) for one in (own, plain)] == [
        ("stop", 1),
        ("length", 3),
    ], "what ends a text is the adapter's word"


def test_bad_words_and_beams_are_the_adapters(llm: LLM, adapter: LoRARequest) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=3, bad_words=["matey"], logit_bias={MATEY: 100.0})
    own, plain = llm.generate(["ho"] * 2, params, lora_request=[adapter, None], use_tqdm=False)
    assert MATEY not in own.outputs[0].token_ids
    assert plain.outputs[0].token_ids == [MATEY] * 3, "to the model they are other tokens"
    (found,) = llm.beam_search(["ho matey"], BeamSearchParams(2, 2), lora_request=adapter)
    assert all(one.text is not None and one.text.startswith("ho matey") for one in found.sequences)
    assert all(one.tokens[3] == MATEY for one in found.sequences)


def test_a_chat_has_the_adapters_template(llm: LLM, adapter: LoRARequest) -> None:
    params = SamplingParams(max_tokens=1)
    own, plain = llm.chat([HI, HI], params, lora_request=[adapter, None], use_tqdm=False)
    assert own.prompt_token_ids[0] == ARR
    assert ARR not in own.prompt_token_ids[1:], "what a user writes is text"
    tokenizer = llm.get_tokenizer()
    assert tokenizer.decode(own.prompt_token_ids[1:]) == "<|arr|>hi"
    assert tokenizer.decode(plain.prompt_token_ids) == "<user><|arr|>hi\n<assistant>"
    (asked,) = llm.chat(HI, params, lora_request=adapter, chat_template="{{ 'Say:' }}", use_tqdm=False)
    assert tokenizer.decode(asked.prompt_token_ids) == "Say:"
