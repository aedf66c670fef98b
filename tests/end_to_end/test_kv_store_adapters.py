# SPDX-License-Identifier: Apache-2.0
"""Blocks of requests with adapters are stored by the content of the adapter: found again, and by no other one."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.adapters import LoRARequest
from quire.kv_store import tier
from quire.lora.request_adapters import LoRAContents
from tests.fixtures.tiny_models import oracle_of
from tests.lora.adapters import linear_shapes, write_adapter

OPTIONS: dict[str, Any] = {
    "max_model_len": 96, "cpu_threads": 1, "max_num_seqs": 4, "block_size": 4, "enable_lora": True, "max_loras": 2,
}  # fmt: skip
PARAMS = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True, logprobs=1)
PROMPT = [*range(3, 40)]
NUM_TOKENS = 36

Asked = LoRARequest | None


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LEAST_WAIT_S", "MOST_WAIT_S", "SETTLE_S"):
        monkeypatch.setattr(tier, name, 300.0)
    monkeypatch.setattr(tier, "EXPECTED_BYTES_PER_S", 1e15)


@pytest.fixture
def model(tiny_model: Callable[[str], Path]) -> Path:
    return tiny_model("llama")


@pytest.fixture
def adapters(model: Path, tmp_path: Path) -> list[Path]:
    shapes = linear_shapes(oracle_of(model))
    del shapes["lm_head"]
    return [write_adapter(tmp_path / f"a{number}", shapes, seed=number) for number in range(2)]


def run(model: Path, store: Path | None, asked: list[Asked]) -> tuple[list[Any], list[int]]:
    """Return tokens with logprobs of one engine's requests, one after the other, and the tokens from the store."""
    llm = LLM(str(model), kv_store=None if store is None else str(store), **OPTIONS)
    answers, num_stored = [], []
    try:
        for adapter in asked:
            (output,) = llm.generate([{"prompt_token_ids": PROMPT}], PARAMS, lora_request=adapter)
            (one,) = output.outputs
            assert one.finish_reason == "length", one.stop_reason
            logprobs = [
                place[token].logprob for token, place in zip(one.token_ids, one.logprobs or [], strict=True)
            ]
            answers.append((list(one.token_ids), logprobs))
            num_stored.append(output.num_stored_tokens)
    finally:
        llm.llm_engine.shutdown()
    return answers, num_stored


def test_blocks_of_an_adapter_are_found_after_a_restart(
    model: Path, adapters: list[Path], tmp_path: Path
) -> None:
    """Also under another number; the other adapter and the base model find none of them."""
    store = tmp_path / "rows"
    one, two = (LoRARequest(path.name, number, str(path)) for number, path in enumerate(adapters, 1))
    expected, _ = run(model, None, [one, two, None])
    assert len({str(answer) for answer in expected}) == 3, "they answer alike"
    assert run(model, store, [one]) == (expected[:1], [0])
    renumbered = LoRARequest(one.lora_name, 7, one.lora_path)
    assert run(model, store, [renumbered, two, None]) == (expected, [NUM_TOKENS, 0, 0])
    assert run(model, store, [None, two, one]) == (expected[::-1], [NUM_TOKENS] * 3)


def test_other_weights_under_the_same_name_find_nothing(
    model: Path, adapters: list[Path], tmp_path: Path
) -> None:
    """Loaded beside the old ones, and in a new engine; the old ones are found again once they are back."""
    store, place, old = tmp_path / "rows", tmp_path / "adapter", tmp_path / "old"
    asked = [LoRARequest("mine", 1, str(place))]
    place.symlink_to(adapters[1])
    others, _ = run(model, None, asked)
    place.unlink()
    place.symlink_to(adapters[0])
    expected, _ = run(model, store, asked)
    assert expected != others
    place.unlink()
    place.symlink_to(adapters[1])
    old.symlink_to(adapters[0])
    both = [LoRARequest("mine", 1, str(old)), LoRARequest("mine", 2, str(place))]
    assert run(model, store, both) == (expected + others, [NUM_TOKENS, 0])
    place.unlink()
    place.symlink_to(adapters[0])
    assert run(model, store, asked) == (expected, [NUM_TOKENS])


def test_files_changed_before_they_are_loaded_are_refused(
    model: Path, adapters: list[Path], tmp_path: Path
) -> None:
    """One byte in the middle counts: it changes no size, header or end of a file."""
    llm = LLM(str(model), kv_store=str(tmp_path / "rows"), **OPTIONS)
    request = LoRARequest("mine", 1, str(shutil.copytree(adapters[0], tmp_path / "mine")))
    known = LoRAContents(llm.llm_engine.config).completed(request)
    assert known is not None
    weights = tmp_path / "mine" / "adapter_model.safetensors"
    content = bytearray(weights.read_bytes())
    content[len(content) // 2] ^= 1
    weights.write_bytes(content)
    (output,) = llm.generate([{"prompt_token_ids": PROMPT}], PARAMS, lora_request=known)
    assert output.outputs[0].finish_reason == "error"
    assert "its files have changed since it was loaded" in str(output.outputs[0].stop_reason)
    llm.llm_engine.shutdown()


def test_contents_are_read_only_for_a_store(adapters: list[Path], model: Path, tmp_path: Path) -> None:
    request = LoRARequest("mine", 1, str(adapters[0]))
    llm = LLM(str(model), **OPTIONS)
    assert llm.llm_engine._front_end.completed_adapter(request) is request
    assert llm.llm_engine._front_end.has_completed(request)
    llm.llm_engine.shutdown()
    llm = LLM(str(model), kv_store=str(tmp_path / "rows"), **OPTIONS)
    front_end = llm.llm_engine._front_end
    missing = LoRARequest("missing", 2, str(tmp_path / "nowhere"))
    assert not front_end.has_completed(request)
    completed = front_end.completed_adapter(request)
    assert completed is not None
    assert front_end.has_completed(request)
    assert len(completed.content) == 32
    assert front_end.completed_adapter(completed) is completed
    assert front_end.completed_adapter(missing) == missing, "it has no files, which the worker says"
    llm.llm_engine.shutdown()
