# SPDX-License-Identifier: Apache-2.0
"""Quantization on load and LoRA of encoder-decoder models, and checkpoints that name their tables otherwise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from quire import LLM, SamplingParams
from quire.adapters import LoRARequest
from tests.lora.adapters import linear_shapes, merge, write_adapter
from tests.seq2seq.tiny import greedy, save, texts

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=1)
TEXTS = texts(5, 20)


def tokens(llm: LLM, **terms: Any) -> list[list[int]]:
    return [
        list(one.outputs[0].token_ids) for one in llm.generate(list(TEXTS), GREEDY, use_tqdm=False, **terms)
    ]


@pytest.mark.parametrize("method", ["int8", "int4"])
@pytest.mark.parametrize("name", ["t5", "bart"])
def test_rounded_weights_keep_bits_in_any_batch(tmp_path: Path, name: str, method: str) -> None:
    model = save(name, tmp_path)
    llm = LLM(str(tmp_path), skip_tokenizer_init=True, dtype="float32", quantization=method)
    together = llm.generate(list(TEXTS), GREEDY, use_tqdm=False)
    logprobs = [one.outputs[0].cumulative_logprob for one in together]
    llm.llm_engine.reset_prefix_cache()
    alone = [llm.generate([text], GREEDY, use_tqdm=False)[0].outputs[0] for text in TEXTS]
    assert [list(one.token_ids) for one in alone] == [list(one.outputs[0].token_ids) for one in together]
    assert [one.cumulative_logprob for one in alone] == logprobs
    if method == "int8":
        assert alone[0].token_ids[0] == greedy(model, TEXTS[0], 1)[0][0]
    llm.shutdown()


@pytest.mark.parametrize("name", ["t5", "bart"])
def test_adapter_of_the_decoder_equals_merged_weights(tmp_path: Path, name: str) -> None:
    model = save(name, tmp_path / "model")
    shapes = {key: shape for key, shape in linear_shapes(model).items() if "decoder." in key}
    adapter = write_adapter(tmp_path / "adapter", shapes)
    llm = LLM(str(tmp_path / "model"), skip_tokenizer_init=True, dtype="float32", enable_lora=True)
    plain = tokens(llm)
    adapted = tokens(llm, lora_request=LoRARequest("mine", 1, str(adapter)))
    assert plain == [greedy(model, text, 8)[0] for text in TEXTS]
    merge(model, adapter, {})
    assert adapted == [greedy(model, text, 8)[0] for text in TEXTS]
    llm.shutdown()


def test_table_may_be_stored_under_any_of_its_names(tmp_path: Path) -> None:
    model = save("bart", tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    (shared,) = (key for key in tensors if key.endswith("shared.weight"))
    table = tensors.pop(shared)
    for names in (("encoder.embed_tokens", "decoder.embed_tokens", "shared"), ("decoder.embed_tokens",)):
        own = {f"model.{name}.weight": table.clone() for name in names}
        save_file(tensors | own | {"lm_head.weight": table.clone()}, file, metadata={"format": "pt"})
        llm = LLM(str(tmp_path), skip_tokenizer_init=True, dtype="float32")
        assert tokens(llm) == [greedy(model, text, 8)[0] for text in TEXTS]
        llm.shutdown()
