# SPDX-License-Identifier: Apache-2.0
"""A prefill engine and a decode engine give the tokens and logprobs of one engine, whatever gets lost between them."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.errors import ConfigError
from quire.kv_store import tier
from tests.end_to_end.server import free_port
from tests.fixtures.quick import quick

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


def prompts_of(seed: int, number: int) -> list[list[int]]:
    draw = random.Random(seed)
    shared = [draw.randrange(3, 60) for _ in range(23)]
    return [
        shared[: draw.randrange(24)] + [draw.randrange(3, 60) for _ in range(draw.randrange(6, 70))]
        for _ in range(number)
    ]


@pytest.mark.parametrize(
    "cache",
    [pytest.param(cache, marks=[pytest.mark.more] * (cache in ("int8", "overlapped"))) for cache in CACHES],
)
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


def test_missing_blocks_are_computed(tiny_model: Callable[[str], Path]) -> None:
    """A lease that has ended, an engine that is another, gone or of other rows: the same bits."""
    model, (prompt, other) = tiny_model("llama-tied-bias"), prompts_of(6, 1) + prompts_of(7, 1)
    with engine(model) as alone:
        expected = [decode(alone, prompt, None)[0], decode(alone, other, None)[0]]
    with (
        engine(model, kv_transfer_config=config("kv_producer")) as producer,
        engine(model, kv_cache_dtype="int8", kv_transfer_config=config("kv_producer")) as misfit,
    ):
        offers = [prefill(producer, prompt), prefill(misfit, prompt), prefill(producer, other)]
        peers = [f"{offer['remote_host']}:{offer['remote_port']}" for offer in offers]
        with engine(model, kv_transfer_config=config("kv_consumer", peers)) as consumer:
            answer, number = decode(consumer, prompt, offers[0] | {"remote_port": offers[1]["remote_port"]})
            assert (answer, number) == (expected[0], 0), "its rows are of another type"
            assert decode(consumer, prompt, offers[0]) == (expected[0], 0), "this engine has them already"
            assert consumer.llm_engine.call_core("reset_prefix_cache")
            assert decode(consumer, prompt, offers[0]) == (expected[0], 0), "the lease has ended"
            producer.llm_engine.shutdown()
            assert decode(consumer, other, offers[2]) == (expected[1], 0), "the engine has gone"


def test_a_lease_ends_when_the_blocks_have_come(tiny_model: Callable[[str], Path]) -> None:
    model, (prompt,) = tiny_model("llama-tied-bias"), prompts_of(8, 1)
    with engine(model, kv_transfer_config=config("kv_producer")) as producer:
        offer = prefill(producer, prompt)
        peer = f"{offer['remote_host']}:{offer['remote_port']}"
        with engine(model, kv_transfer_config=config("kv_both", [peer])) as consumer:
            num_tokens = (len(prompt) - 1) // 4 * 4
            assert offer["remote_num_tokens"] == num_tokens
            assert decode(consumer, prompt, offer)[1] == num_tokens
        with engine(model, kv_transfer_config=config("kv_consumer", [peer])) as later:
            assert decode(later, prompt, offer)[1] == 0


def test_salts_keep_their_own_blocks(tiny_model: Callable[[str], Path]) -> None:
    model, (prompt,) = tiny_model("llama-tied-bias"), prompts_of(9, 1)
    with engine(model, kv_transfer_config=config("kv_producer")) as producer:
        offer = prefill(producer, prompt)
        peer = f"{offer['remote_host']}:{offer['remote_port']}"
        with engine(model, kv_transfer_config=config("kv_consumer", [peer])) as consumer:
            asked = {"prompt_token_ids": prompt, "cache_salt": "mine", "kv_transfer_params": offer}
            (output,) = consumer.generate([asked], DECODE)
            assert output.num_stored_tokens == 0


@pytest.mark.parametrize("ranks_are", quick(["threads", "processes"], ["threads"]))
def test_ranks_transfer_their_own_blocks(
    ranks_are: str, tiny_model: Callable[[str], Path], request: pytest.FixtureRequest
) -> None:
    if ranks_are == "threads":
        request.getfixturevalue("thread_ranks")
    model, (prompt,) = tiny_model("llama-tied-bias"), prompts_of(10, 1)
    ranks = {"tensor_parallel_size": 2}
    with engine(model, **ranks) as alone:
        expected, _ = decode(alone, prompt, None)
    port = free_port(2)
    with engine(model, **ranks, kv_transfer_config=config("kv_producer", kv_port=port)) as producer:
        offer = prefill(producer, prompt)
        assert (offer["remote_port"], offer["tp_size"]) == (port, 2)
        consumes = config("kv_consumer", [f"127.0.0.1:{port}"])
        with engine(model, **ranks, kv_transfer_config=consumes) as consumer:
            answer, number = decode(consumer, prompt, offer)
    assert (answer, number) == (expected, (len(prompt) - 1) // 4 * 4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"enable_prefix_caching": False, "kv_transfer_config": config("kv_producer")}, "--no-enable-prefix"),
        ({"kv_transfer_config": config("kv_producer", kv_ip="192.0.2.1")}, "there is no key"),
        ({"kv_transfer_config": config("kv_consumer", ["192.0.2.1:7"])}, "there is no key"),
        (
            {"kv_transfer_config": config("kv_producer", kv_connector="mine")},
            "must be one of RowServerConnector",
        ),
        ({"kv_transfer_config": config("kv_producer"), "tensor_parallel_size": 2}, "kv_port 0"),
    ],
)
def test_impossible_transfer_is_refused(
    options: dict[str, Any], message: str, tiny_model: Callable[[str], Path]
) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM(str(tiny_model("llama-tied-bias")), **(OPTIONS | options))
