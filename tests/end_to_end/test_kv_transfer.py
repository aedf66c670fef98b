"""A prefill engine and a decode engine give the tokens and logprobs of one engine, whatever gets lost between them."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.kv_store import tier

OPTIONS: dict[str, Any] = {"max_model_len": 160, "cpu_threads": 1, "max_num_seqs": 4, "block_size": 4}
CACHES: dict[str, tuple[str, dict[str, Any]]] = {
    "full": ("llama-tied-bias", {}),
    "int8": ("llama-tied-bias", {"kv_cache_dtype": "int8"}),
    "window": ("gemma3", {}),
    "small pool": ("qwen2-window", {"num_gpu_blocks_override": 90, "max_num_batched_tokens": 16}),
    "overlapped": ("llama-tied-bias", {"async_scheduling": True, "swap_space": 0.001}),
}
PREFILL = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
DECODE = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=1)
ASKED = {
    "do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_block_ids": None,
    "remote_host": None, "remote_port": None,
}  # fmt: skip


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait as long as a busy machine takes."""
    monkeypatch.setattr(tier, "SETTLE_S", 300.0)
    monkeypatch.setattr("quire.kv_store.transfer_tier.OFFER_S", 300.0)


def config(role: str, peers: list[str] | None = None, **changes: Any) -> dict[str, Any]:
    extra = {"pull_timeout_s": 300.0, "lease_s": 300.0, **({} if peers is None else {"peers": peers})}
    return {
        "kv_connector": "RowServerConnector",
        "kv_role": role,
        "kv_port": 0,
        "kv_connector_extra_config": extra,
    } | changes


@contextlib.contextmanager
def engine(model: Path, **options: Any) -> Iterator[LLM]:
    llm = LLM(str(model), **(OPTIONS | options))
    try:
        yield llm
    finally:
        llm.llm_engine.shutdown()


def prefill(llm: LLM, prompt: list[int], **changes: Any) -> dict[str, Any]:
    (output,) = llm.generate([{"prompt_token_ids": prompt, "kv_transfer_params": ASKED | changes}], PREFILL)
    assert output.kv_transfer_params is not None
    return output.kv_transfer_params


def decode(llm: LLM, prompt: list[int], params: dict[str, Any] | None) -> tuple[Any, int]:
    """Return tokens and logprobs, and the number of tokens that were pulled."""
    asked: dict[str, Any] = {"prompt_token_ids": prompt}
    (output,) = llm.generate([asked if params is None else asked | {"kv_transfer_params": params}], DECODE)
    (one,) = output.outputs
    logprobs = [next(iter(place.values())).logprob for place in one.logprobs or []]
    return (list(one.token_ids), logprobs), output.num_stored_tokens


def stats_of(llm: LLM) -> Any:
    return llm.llm_engine.call_core("stats")


def prompts_of(seed: int, number: int) -> list[list[int]]:
    draw = random.Random(seed)
    shared = [draw.randrange(3, 60) for _ in range(23)]
    return [
        shared[: draw.randrange(24)] + [draw.randrange(3, 60) for _ in range(draw.randrange(6, 70))]
        for _ in range(number)
    ]


@pytest.mark.parametrize("cache", CACHES)
def test_two_engines_have_the_bits_of_one(cache: str, tiny_model: Callable[[str], Path]) -> None:
    family, options = CACHES[cache]
    model, prompts = tiny_model(family), prompts_of(5, 12)
    with engine(model, **options) as alone:
        expected = [decode(alone, prompt, None)[0] for prompt in prompts]
    with engine(model, **options, kv_transfer_config=config("kv_producer")) as producer:
        offers = [prefill(producer, prompt) for prompt in prompts]
        peer = f"{offers[0]['remote_host']}:{offers[0]['remote_port']}"
        with engine(model, **options, kv_transfer_config=config("kv_consumer", [peer])) as consumer:
            got = [decode(consumer, *pair) for pair in zip(prompts, offers, strict=True)]
    assert [answer for answer, _ in got] == expected
    assert sum(number for _, number in got) > 200
