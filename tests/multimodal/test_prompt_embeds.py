# SPDX-License-Identifier: Apache-2.0
"""Prompts that are embeddings: forms, checks in words, hashes over values and mask, and files that go with requests."""

from __future__ import annotations

import base64
import gc
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save

from quire.config import EngineConfig
from quire.engine.llm_engine import LLMEngine
from quire.errors import ContextLengthError, ValidationError
from quire.sampling_params import SamplingParams
from tests.engine.whole_engine import MAX_MODEL_LEN, letters_model
from tests.fixtures.folded import folded

SIZE = 16  # of the model of letters
VALUES = np.random.default_rng(0).standard_normal((6, SIZE)).astype(np.float32)
GREEDY = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)


def make_engine(**args: Any) -> LLMEngine:
    fixed = {"distributed_executor_backend": "null", "enable_prompt_embeds": True}
    return LLMEngine(EngineConfig.from_args(model=str(letters_model(None)), **fixed | args))


@pytest.fixture
def engine() -> Any:
    made = make_engine()
    yield made
    made.shutdown()


def npy(values: Any, **options: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, values, **options)
    return file.getvalue()


def generated(engine: LLMEngine, prompt: Any) -> list[int]:
    engine.add_request("r", prompt, GREEDY)
    while engine.has_unfinished_requests():
        for output in engine.step():
            found = list(output.outputs[0].token_ids)
    return found


@folded(
    "given",
    [
        VALUES,
        torch.from_numpy(VALUES),
        torch.from_numpy(VALUES).double().requires_grad_(),
        VALUES.astype(np.float64),
        npy(VALUES),
        npy(np.asfortranarray(VALUES)),
        save({"anything": VALUES}),
        base64.b64encode(npy(VALUES)).decode(),
        base64.b64encode(save({"values": VALUES[None]})).decode(),
    ],
    ids=["array", "tensor", "grad", "double", "npy", "fortran", "safetensors", "base64", "base64-3d"],
)
def test_all_forms_are_the_same_prompt(engine: LLMEngine, given: Any) -> None:
    processor = engine._front_end.input_processor
    prompt = processor.tokenize({"prompt_embeds": given})
    (item,) = prompt.media
    expected = processor.tokenize({"prompt_embeds": VALUES}).media[0]
    assert item.digest == expected.digest
    assert (item.kind, item.start, item.end, item.runs) == ("embeds", 0, 6, [(0, 6)])
    assert prompt.token_ids == [0] * 6
    assert np.array_equal(load_file(item.path)["values"], VALUES)


def test_values_of_bfloat16_are_taken(engine: LLMEngine) -> None:
    values = torch.from_numpy(VALUES).bfloat16()
    prompt = engine._front_end.input_processor.tokenize({"prompt_embeds": values})
    assert np.array_equal(load_file(prompt.media[0].path)["values"], values.float().numpy())


@folded(
    ("given", "problem"),
    [
        (VALUES[:, :5], r"shape \[6, 5\], and the model's hidden size is 16"),
        (VALUES[0], r"got float32 \[16\]"),
        (VALUES[:0], r"got float32 \[0, 16\]"),
        (VALUES.astype(np.int32), "must be floats"),
        (VALUES * np.inf, "must be finite"),
        (np.full((2, SIZE), 1e300), "must be finite"),
        ("not base64!", "not valid base64"),
        (b"", "no safetensors or .npy file"),
        (b"\x93NUMPY", "malformed"),
        (npy(VALUES)[:-8], "bytes of values, and its header says"),
        (npy(VALUES).replace(b"(6, 16)", b"(9**9,)"), "malformed"),
        (npy(np.array([{}]), allow_pickle=True), "prompt_embeds: the "),
        (b"\x80\x04\x95\x0b\x00\x00\x00." + bytes(32), "no safetensors or .npy file"),
        (npy(VALUES.astype(np.int64)), "one matrix of floats"),
        (save({"a": VALUES, "b": VALUES}), "one matrix of floats, got 2"),
        (npy(VALUES * np.nan), "must be finite"),
        (3, r"got int64 \[\]"),
        ([[1.0] * SIZE, [1.0]], "must be a matrix of floats"),
    ],
)
def test_malformed_embeddings_are_refused_in_words(engine: LLMEngine, given: Any, problem: str) -> None:
    with pytest.raises(ValidationError, match=problem):
        engine.add_request("r", {"prompt_embeds": given}, GREEDY)


def test_file_that_promises_too_much_gets_no_room(engine: LLMEngine) -> None:
    content = npy(VALUES).replace(b"(6, 16), }" + b" " * 20, b"(6000000000000, 16), }" + b" " * 8)
    with pytest.raises(ValidationError, match="384 bytes of values"):
        engine.add_request("r", {"prompt_embeds": content}, GREEDY)


def test_too_many_embeddings_are_refused(engine: LLMEngine) -> None:
    with pytest.raises(ContextLengthError, match="maximum context length"):
        engine.add_request("r", {"prompt_embeds": np.ones((MAX_MODEL_LEN, SIZE), np.float32)}, GREEDY)


def test_embeddings_without_the_flag_are_refused() -> None:
    engine = make_engine(enable_prompt_embeds=False)
    with pytest.raises(ValidationError, match="--enable-prompt-embeds"):
        engine.add_request("r", {"prompt_embeds": VALUES}, GREEDY)
    engine.shutdown()


def test_prompt_logprobs_of_embeddings_are_refused(engine: LLMEngine) -> None:
    with pytest.raises(ValidationError, match="prompt_logprobs are of tokens"):
        engine.add_request("r", {"prompt_embeds": VALUES}, SamplingParams(prompt_logprobs=1))


@folded(
    ("more", "problem"),
    [
        ({"prompt": "text"}, "'prompt' cannot stand beside prompt_embeds"),
        ({"prompt_token_ids": [1] * 6}, "go together"),
        ({"prompt_is_token_ids": [True] * 6}, "go together"),
        ({"prompt_token_ids": [1] * 5, "prompt_is_token_ids": [True] + [False] * 5}, "list of 6 ids"),
        ({"prompt_token_ids": [1] * 6, "prompt_is_token_ids": [True] * 6}, "not all of them true"),
        ({"prompt_token_ids": [1] * 6, "prompt_is_token_ids": [1] * 6}, "6 booleans"),
        ({"prompt_token_ids": [1] * 6, "prompt_is_token_ids": [False] * 5}, "6 booleans"),
        ({"cache_salt": 3}, "cache_salt must be"),
    ],
)
def test_malformed_mixed_prompts_are_refused(engine: LLMEngine, more: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValidationError, match=problem):
        engine.add_request("r", {"prompt_embeds": VALUES, **more}, GREEDY)


def test_mixed_prompt_has_ids_where_the_mask_is_true(engine: LLMEngine) -> None:
    mask = [True, False, False, True, False, True]
    mixed = {"prompt_embeds": VALUES, "prompt_token_ids": [7] * 6, "prompt_is_token_ids": mask}
    prompt = engine._front_end.input_processor.tokenize(mixed)
    (item,) = prompt.media
    assert prompt.token_ids == [7, 0, 0, 7, 0, 7]
    assert (item.start, item.end, item.runs) == (1, 5, [(1, 3), (4, 5)])
    assert np.array_equal(load_file(item.path)["values"], VALUES[[1, 2, 4]])


def test_digest_covers_values_and_mask(engine: LLMEngine) -> None:
    ids = [0] * 6
    same = np.ones((6, SIZE), np.float32)
    masks = ([False] * 6, [True, False, True, False, False, False], [True, True, False, False, False, False])
    prompts = [
        {"prompt_embeds": same, "prompt_token_ids": ids, "prompt_is_token_ids": mask} for mask in masks
    ]
    other = same.copy()
    other[5, 15] = 2.0
    prompts.append({"prompt_embeds": other})
    found = [engine._front_end.input_processor.tokenize(prompt).media[0].digest for prompt in prompts]
    assert len(set(found)) == 4


def test_prefix_is_shared_by_equal_values_only() -> None:
    engine = make_engine(block_size=1)
    first = generated(engine, {"prompt_embeds": VALUES})
    assert engine.call_core("stats").get("prefix_cache_hits", 0) == 0
    assert generated(engine, {"prompt_embeds": VALUES.copy()}) == first
    assert engine.call_core("stats").get("prefix_cache_hits", 0) == 5
    assert generated(engine, {"prompt_embeds": VALUES + 1}) != first
    assert engine.call_core("stats").get("prefix_cache_hits", 0) == 5
    engine.shutdown()


def test_file_lives_as_long_as_its_request(engine: LLMEngine) -> None:
    processor = engine._front_end.input_processor
    engine.add_request("r", {"prompt_embeds": VALUES}, GREEDY)
    path = Path(
        processor._embeds._files.path_of(processor.tokenize({"prompt_embeds": VALUES}).media[0].digest)
    )
    gc.collect()
    assert path.exists()
    while engine.has_unfinished_requests():
        engine.step()
    gc.collect()
    assert not path.exists()
