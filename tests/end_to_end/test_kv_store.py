# SPDX-License-Identifier: Apache-2.0
"""Engines with --kv-store: the same tokens and logprobs as without it, across restarts, whatever the cache holds."""

from __future__ import annotations

import contextlib
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.errors import ConfigError
from quire.kv_store import namespace, tier
from quire.kv_store.memory import MemoryStore, RowMemory
from quire.kv_store.server import RowServer
from tests.fixtures.quick import quick

OPTIONS: dict[str, Any] = {"max_model_len": 160, "cpu_threads": 1, "max_num_seqs": 4, "block_size": 4}
CACHES: dict[str, tuple[str, dict[str, Any]]] = {
    "full": ("llama-tied-bias", {}),
    "int8": ("llama-tied-bias", {"kv_cache_dtype": "int8"}),
    "window": ("gemma3", {}),
    "small pool": ("qwen2-window", {"num_gpu_blocks_override": 90, "max_num_batched_tokens": 16}),
    "overlapped": ("llama-tied-bias", {"async_scheduling": True, "swap_space": 0.001}),
}
PARAMS = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=1)


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait for rows as long as a busy machine takes, though computing them would be faster in such small models."""
    monkeypatch.setattr(tier, "LEAST_WAIT_S", 300.0)
    monkeypatch.setattr(tier, "MOST_WAIT_S", 300.0)
    monkeypatch.setattr(tier, "SETTLE_S", 300.0)
    monkeypatch.setattr(tier, "EXPECTED_BYTES_PER_S", 1e15)


def turns(llm: LLM, prompts: list[list[int]]) -> tuple[list[tuple[list[int], list[float]]], int]:
    """Return tokens and their logprobs, and the number of prompt tokens from the store."""
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], PARAMS)
    answers = [
        (list(one.token_ids), [next(iter(place.values())).logprob for place in one.logprobs or []])
        for one in (output.outputs[0] for output in outputs)
    ]
    return answers, sum(output.num_stored_tokens for output in outputs)


def conversations(
    model: Path, seed: int, stores: list[str | None], options: dict[str, Any]
) -> tuple[list[Any], int]:
    """Return all answers of conversations with one engine per turn, and the tokens that came from the store."""
    draw = random.Random(seed)
    shared = [draw.randrange(3, 60) for _ in range(23)]
    histories = [
        shared[: draw.randrange(24)] + [draw.randrange(3, 60) for _ in range(draw.randrange(1, 20))]
        for _ in range(5)
    ]
    answers, num_stored = [], 0
    for store in stores:
        llm = LLM(str(model), kv_store=store, **(OPTIONS | options))
        answered, num_loaded = turns(llm, histories)
        llm.llm_engine.shutdown()
        answers.append(answered)
        num_stored += num_loaded
        for history, (tokens, _) in zip(histories, answered, strict=True):
            history += tokens + [draw.randrange(3, 60) for _ in range(draw.randrange(1, 9))]
    return answers, num_stored


@pytest.mark.parametrize("cache", CACHES)
def test_conversations_across_restarts_have_the_same_bits(
    cache: str, tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    family, options = CACHES[cache]
    model, store = tiny_model(family), str(tmp_path / "store")
    expected, none = conversations(model, 7, [None] * 3, options)
    got, num_stored = conversations(model, 7, [store] * 3, options)
    assert none == 0
    assert num_stored > 100
    assert got == expected


@pytest.mark.parametrize("kind", ["unix", "tcp"])
def test_engines_share_prefixes_by_a_row_server(
    kind: str, tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    """Three engines, one after the other, and the last without the server."""
    model, key = tiny_model("gemma3"), tmp_path / "key"
    key.write_text("ab" * 32)
    options = {"kv_store_key_file": str(key)} if kind == "tcp" else {}
    memory = RowMemory(1 << 24)
    server = RowServer(
        f"unix:{tmp_path}/s" if kind == "unix" else "tcp://127.0.0.1:0",
        lambda namespace: MemoryStore(namespace, memory),
        b"\xab" * 32 if kind == "tcp" else None,
    )
    server.start()
    expected, _ = conversations(model, 7, [None] * 3, {})
    with contextlib.closing(server):
        got, num_stored = conversations(model, 7, [server.address] * 3, options)
    assert num_stored > 100
    assert got == expected
    with pytest.raises(ConfigError, match="does not work"):
        conversations(model, 7, [server.address], options)


@pytest.mark.parametrize("ranks_are", quick(["threads", "processes"], ["threads"]))
def test_two_ranks_keep_rows_of_their_own(
    ranks_are: str, tiny_model: Callable[[str], Path], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if ranks_are == "threads":
        request.getfixturevalue("thread_ranks")
    model, store = tiny_model("llama-tied-bias"), str(tmp_path / "store")
    ranks = {"tensor_parallel_size": 2}
    expected, _ = conversations(model, 3, [None] * 2, ranks)
    got, num_stored = conversations(model, 3, [store] * 2, ranks)
    assert num_stored > 30
    assert got == expected
    _, num_stored = conversations(model, 3, [store], {})
    assert num_stored == 0, "rows of ranks are not those of a whole model"
    folders = [path.parent.name for path in (tmp_path / "store").glob("*/namespace.json")]
    assert len({name.partition(".")[0] for name in folders}) == 3


def test_other_weights_find_nothing(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    store = str(tmp_path / "store")
    conversations(tiny_model("llama-tied-bias"), 3, [store], {})
    _, num_stored = conversations(tiny_model("llama-tied-bias"), 3, [store], {"kv_cache_dtype": "int8"})
    assert num_stored == 0
    _, num_stored = conversations(tiny_model("llama-tied-bias"), 3, [store], {})
    assert num_stored > 0


def test_rows_of_another_byte_order_are_refused(
    tiny_model: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are in a folder of their own, and one that was renamed says why it does not fit."""
    model, store = tiny_model("llama-tied-bias"), tmp_path / "store"
    conversations(model, 3, [str(store)], {})
    (little,) = store.iterdir()
    monkeypatch.setattr(namespace, "sys", SimpleNamespace(byteorder="big"))
    _, num_stored = conversations(model, 3, [str(store)], {})
    assert num_stored == 0
    (big,) = set(store.iterdir()) - {little}
    shutil.rmtree(big)
    little.rename(big)
    with pytest.raises(ConfigError, match="byte_order is None there and 'big' here"):
        conversations(model, 3, [str(store)], {})


def test_a_second_engine_reads_what_the_first_one_writes(
    tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    model, store = tiny_model("llama-tied-bias"), str(tmp_path / "store")
    prompt = list(range(3, 43))
    first = LLM(str(model), kv_store=store, **OPTIONS)
    expected, _ = turns(first, [prompt])
    assert first.llm_engine.call_core("reset_prefix_cache"), "which saves what is to be saved"
    second = LLM(str(model), kv_store=store, **OPTIONS)
    (output,) = second.generate([{"prompt_token_ids": prompt}], PARAMS)
    assert (output.num_cached_tokens, output.num_stored_tokens) == (36, 36)
    assert turns(second, [prompt])[0] == expected
    first.llm_engine.shutdown()
    second.llm_engine.shutdown()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"enable_prefix_caching": False}, "--no-enable-prefix-caching"),
        ({"kv_store": None, "kv_store_key_file": "key"}, "--kv-store-key-file needs --kv-store"),
        ({"kv_store_key_file": "/nowhere/key"}, "cannot read"),
        ({"kv_store_gb": 0.0}, "--kv-store-gb"),
        ({"kv_store_gb": 1e-9}, "have no room for one row"),
        ({"kv_store": "/proc/quire"}, "/proc/quire"),
    ],
)
def test_kv_store_with_unsupported_options_is_refused(
    options: dict[str, Any], message: str, tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM(str(tiny_model("llama-tied-bias")), **(OPTIONS | {"kv_store": str(tmp_path)} | options))
