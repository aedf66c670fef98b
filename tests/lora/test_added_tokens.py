# SPDX-License-Identifier: Apache-2.0
"""Adapters with tokens behind the model's: rows for them in embedding and head, and logits that only they have."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from quire import LLM, LoRARequest, SamplingParams
from quire.errors import ModelLoadError, ValidationError
from quire.lora.checkpoint import read_adapter
from quire.lora.targets import Targets
from quire.structured_outputs_params import StructuredOutputsParams
from tests.end_to_end.test_determinism import Result, result_of
from tests.fixtures.tiny_models import VOCAB_SIZE, oracle_of
from tests.lora.adapters import extend, merge, write_adapter
from tests.lora.own_texts import FIRST_FREE, added, write_own_tokenizer
from tests.models.harness import load_tiny

ADDED = 3
NUM_TOKENS = VOCAB_SIZE + ADDED
ARR = VOCAB_SIZE + 1
EMBEDDING, HEAD = "model.embed_tokens", "lm_head"
Q = {"model.layers.0.self_attn.q_proj": (64, 64)}
SHOWN = {"max_tokens": 6, "logprobs": 3, "prompt_logprobs": 2, "ignore_eos": True}
GREEDY, RANDOM = SamplingParams(temperature=0.0, **SHOWN), SamplingParams(temperature=1.0, seed=3, **SHOWN)


def grown(oracle: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Let a model of transformers have more tokens; returns its new tables."""
    torch.manual_seed(0)
    oracle.resize_token_embeddings(NUM_TOKENS)
    tables = oracle.get_input_embeddings().weight, oracle.get_output_embeddings().weight
    with torch.no_grad():
        for table in tables:  # so that they are chosen, too
            table[VOCAB_SIZE:] = 3.0 * torch.randn(ADDED, table.shape[1])
    return tables


def write_grown(directory: Path, oracle: Any, seed: int = 0) -> Path:
    """An adapter of a model that has been resized, with a tokenizer for it."""
    adapter = write_adapter(directory, Q, seed=seed)
    table, outputs = grown(oracle)
    if table is outputs:
        extend(adapter, {f"{EMBEDDING}.base_layer.weight": table})
    else:
        extend(adapter, {f"{EMBEDDING}.weight": table, f"{HEAD}.weight": outputs}, modules_to_save=["all"])
    tokens = [added(token, f"<{token}>", special=False) for token in range(FIRST_FREE, NUM_TOKENS)]
    return write_own_tokenizer(adapter, lambda file: file["added_tokens"].extend(tokens), eos_token="<eos>")


def make(model_dir: Path, **options: Any) -> LLM:
    settings = {"max_model_len": 64, "cpu_threads": 1, "enable_lora": True, "max_loras": 2}
    return LLM(str(model_dir), **settings | options)


def run(llm: LLM, prompts: list[list[int]], adapters: list[LoRARequest | None]) -> list[Result]:
    """Each greedily and at random, all at once."""
    params = [GREEDY] * len(prompts) + [RANDOM] * len(prompts)
    outputs = llm.generate([*prompts, *prompts], params, lora_request=[*adapters, *adapters], use_tqdm=False)
    return [result_of(output) for output in outputs]


@torch.inference_mode()
@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_added_tokens_match_the_resized_model_for_its_requests(
    name: str, tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    oracle = oracle_of(tiny_model(name))
    own = LoRARequest("grown", 1, str(write_grown(tmp_path / "grown", oracle)))
    other = LoRARequest("other", 2, str(write_adapter(tmp_path / "other", Q, seed=1)))
    merge(oracle, Path(own.lora_path), {})
    prompt = [5, ARR, 77, VOCAB_SIZE, 9]
    llm = make(tiny_model(name))
    (output,) = llm.generate([prompt], GREEDY, lora_request=own, use_tqdm=False)
    tokens = [*prompt, *output.outputs[0].token_ids]
    logprobs = oracle(torch.tensor([tokens[:-1]])).logits[0].log_softmax(1)
    assert logprobs.argmax(1)[len(prompt) - 1 :].tolist() == tokens[len(prompt) :]
    assert max(tokens[len(prompt) :]) >= VOCAB_SIZE, "some are its own"
    found = [position or {} for position in (output.prompt_logprobs or [])[1:]]
    for position, entries in enumerate([*found, *(output.outputs[0].logprobs or [])]):
        for token, entry in entries.items():
            assert abs(entry.logprob - logprobs[position, token]) < 1e-4

    prompts, adapters = [prompt, [5, 77, 9], prompt, [5, 77], [9, 9]], [own, None, own, other, None]
    plain = make(tiny_model(name), enable_lora=False)
    alone = [
        result_of(
            (plain if adapter is None else llm).generate([one], params, lora_request=adapter, use_tqdm=False)[
                0
            ]
        )
        for params in (GREEDY, RANDOM)
        for one, adapter in zip(prompts, adapters, strict=True)
    ]
    assert run(llm, prompts, adapters) == alone
    assert run(make(tiny_model(name), max_num_seqs=4, max_num_batched_tokens=8), prompts, adapters) == alone


def test_requests_have_the_tokens_of_their_adapter(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    directory = write_grown(tmp_path, oracle_of(tiny_model("llama")))
    own, llm = LoRARequest("grown", 1, str(directory)), make(tiny_model("llama"))
    say = SamplingParams(temperature=0.0, max_tokens=2, logit_bias={ARR: 100.0})
    (output,) = llm.generate(["ho" + f"<{ARR}>"], say, lora_request=own, use_tqdm=False)
    assert output.prompt_token_ids[-1] == ARR
    assert output.outputs[0].text == f"<{ARR}>" * 2
    for adapter, prompt in ((None, [VOCAB_SIZE]), (own, [NUM_TOKENS])):
        with pytest.raises(ValidationError, match=rf"token ids are integers in \[0, {prompt[0] - 1}\]"):
            llm.generate([prompt], GREEDY, lora_request=adapter, use_tqdm=False)
    constrained = SamplingParams(structured_outputs=StructuredOutputsParams(choice=["a", "b"]))
    with pytest.raises(ValidationError, match="does not support an adapter that adds tokens"):
        llm.generate(["ho"], constrained, lora_request=own, use_tqdm=False)


def test_mismatched_adapter_tensor_is_named(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    oracle = oracle_of(tiny_model("llama"))
    directory = write_grown(tmp_path / "all", oracle)
    table = oracle.get_input_embeddings().weight
    targets = Targets(load_tiny(tiny_model("llama")))

    def read(path: Path, most: int) -> Any:
        return read_adapter(path, targets, 16, torch.float32, max_rows=8, max_added=most)

    assert read(directory, ADDED).num_added == ADDED
    with pytest.raises(
        ModelLoadError, match=r"has shape \[267, 64\]; .* implies \[264, 64\], plus up to 2 rows"
    ):
        read(directory, 2)
    half = extend(write_adapter(tmp_path / "half", Q), {f"{EMBEDDING}.weight": table})
    with pytest.raises(ModelLoadError, match=r"there are 3 added tokens, .* lm_head has 0"):
        read(half, ADDED)
    llm = make(tiny_model("llama"), lora_extra_vocab_size=2)
    with pytest.raises(ValidationError, match="has id 266, and ids end at 265"):
        llm.generate(["ho"], GREEDY, lora_request=LoRARequest("grown", 1, str(directory)), use_tqdm=False)
