# SPDX-License-Identifier: Apache-2.0
"""Random conversations of several turns, with restarts between them, have the bits of one engine without a store.

Each kind of cache is tried with each tier that a block can come back from: the host's memory, a directory, a row server
in memory, a row server over TCP, and a prefill engine.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.kv_store import tier as store_tier
from quire.kv_store.disk.opening import open_disk_store
from quire.kv_store.memory import MemoryStore, RowMemory
from quire.kv_store.row_store import RowStore
from quire.kv_store.server import OpenStore, RowServer
from tests.end_to_end.server import free_port

OPTIONS: dict[str, Any] = {"max_model_len": 160, "cpu_threads": 1, "max_num_seqs": 6, "block_size": 4}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "full": ("llama-tied-bias", {}),
    "window": ("gemma3", {}),
    "state": ("jamba-dense", {}),
    "latent": ("deepseekv2-lite", {}),
    "int8": ("llama-tied-bias", {"kv_cache_dtype": "int8"}),
    "chunked": ("llama4", {}),
    "delta": ("qwen3next", {}),
}
QUICK = ("full", "window", "state", "latent", "int8")
TIERS = ("host", "disk", "memory", "peer", "prefill")
FEW_BLOCKS = {"full": 40, "window": 38, "state": 32, "latent": 40, "int8": 40, "chunked": 52, "delta": 32}
"""Blocks that have no room for the prefixes of all conversations, which go to the host and come back."""
KEY = bytes(range(32))
SEED, FEW, MANY = 41, 12, 200
WITHIN_S = 300.0
ASKED = {"do_remote_decode": True, "do_remote_prefill": False}

Answer = tuple[list[int], list[float]]


@dataclass(frozen=True)
class Turn:
    """Prompt of one turn, and its sampling: greedy, or seeded."""

    prompt: list[int]
    seed: int | None

    @property
    def params(self) -> SamplingParams:
        drawn = {"temperature": 0.0} if self.seed is None else {"temperature": 1.0, "seed": self.seed}
        return SamplingParams(max_tokens=5, ignore_eos=True, logprobs=1, **drawn)


@dataclass(frozen=True)
class Round:
    """Turns that are computed at once, after a restart or not, and their answers by an engine without a store."""

    turns: list[Turn]
    restarts: bool
    answers: list[Answer]


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait for rows as long as a busy machine takes, though computing them would be faster in such small models."""
    for name in ("LEAST_WAIT_S", "MOST_WAIT_S", "SETTLE_S"):
        monkeypatch.setattr(store_tier, name, WITHIN_S)
    monkeypatch.setattr("quire.kv_store.transfer_tier.OFFER_S", WITHIN_S)
    monkeypatch.setattr(store_tier, "EXPECTED_BYTES_PER_S", 1e15)


def answers_of(llm: LLM, turns: list[Turn], transfers: list[Any] | None = None) -> tuple[list[Answer], int]:
    """Return tokens and their logprobs, and the number of prompt tokens from a store; without one, of cached ones."""
    prompts: list[Any] = [{"prompt_token_ids": turn.prompt} for turn in turns]
    for prompt, params in zip(prompts, transfers or [], strict=False):
        prompt["kv_transfer_params"] = params
    outputs = llm.generate(prompts, [turn.params for turn in turns])
    answers = [
        (
            list(one.token_ids),
            [place[token].logprob for token, place in zip(one.token_ids, one.logprobs or [], strict=True)],
        )
        for one in (output.outputs[0] for output in outputs)
    ]
    has_store = llm.llm_engine.config.kv_store.moves_rows
    cached = [output.num_stored_tokens if has_store else output.num_cached_tokens or 0 for output in outputs]
    return answers, sum(cached)


class Conversations:
    """Conversations in progress; many begin alike."""

    def __init__(self, number: int) -> None:
        self._draw = random.Random(SEED)
        starts = [self._tokens(23) for _ in range(3)]
        self._histories = [
            self._draw.choice(starts)[: self._draw.randrange(24)] + self._tokens(self._draw.randrange(1, 20))
            for _ in range(number)
        ]
        self._left = [self._draw.randrange(2, 4) for _ in range(number)]

    def rounds(self, llm: LLM) -> Iterator[Round]:
        """Let an engine answer turn by turn, some conversations at a time, until all have ended."""
        while any(self._left):
            open_ones = [number for number, left in enumerate(self._left) if left]
            chosen = self._draw.sample(open_ones, min(len(open_ones), self._draw.randrange(4, 20)))
            seeds = [self._draw.choice([None, self._draw.randrange(1000)]) for _ in chosen]
            turns = [
                Turn(list(self._histories[number]), seed) for number, seed in zip(chosen, seeds, strict=True)
            ]
            answers, _ = answers_of(llm, turns)
            for number, (tokens, _) in zip(chosen, answers, strict=True):
                self._histories[number] += tokens + self._tokens(self._draw.randrange(1, 9))
                self._left[number] -= 1
            yield Round(turns, self._draw.random() < 0.6, answers)

    def _tokens(self, number: int) -> list[int]:
        return [self._draw.randrange(3, 60) for _ in range(number)]


@cache
def script(model: Path, kind: str, number: int) -> list[Round]:
    """Return the rounds of that many conversations."""
    with engine(model, KINDS[kind][1]) as llm:
        return list(Conversations(number).rounds(llm))


@contextlib.contextmanager
def engine(model: Path, options: dict[str, Any]) -> Iterator[LLM]:
    llm = LLM(str(model), **(OPTIONS | options))
    try:
        yield llm
    finally:
        llm.llm_engine.shutdown()


@contextlib.contextmanager
def place(name: str, kind: str, folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the options of an engine with a tier."""
    if name == "host":
        few = {"num_gpu_blocks_override": FEW_BLOCKS[kind], "max_model_len": 80}
        yield few | {"swap_space": 0.01, "preemption_mode": "swap", "max_num_batched_tokens": 24}
    elif name == "disk":
        yield {"kv_store": str(folder / "rows")}
    else:
        with served(name, folder) as options:
            yield options


@contextlib.contextmanager
def served(name: str, folder: Path) -> Iterator[dict[str, Any]]:
    """Serve rows: in memory by a Unix socket, or from an encrypted directory by TCP with a key."""
    memory, key_file = RowMemory(1 << 26), folder / "key"
    key_file.write_text(KEY.hex())

    def on_disk(namespace: Any) -> RowStore:
        return open_disk_store(folder / "served", namespace, 1 << 28, KEY)

    open_store: OpenStore = (
        (lambda namespace: MemoryStore(namespace, memory)) if name == "memory" else on_disk
    )
    address = f"unix:{folder}/s" if name == "memory" else "tcp://127.0.0.1:0"
    server = RowServer(address, open_store, None if name == "memory" else KEY)
    server.start()
    with contextlib.closing(server):
        asked = {} if name == "memory" else {"kv_store_key_file": str(key_file)}
        yield {"kv_store": server.address} | asked


def replay(model: Path, options: dict[str, Any], rounds: list[Round]) -> int:
    """Compare the answers of engines with a tier; returns the number of tokens that it had for them."""
    num_stored = 0
    with contextlib.ExitStack() as running:
        llm = running.enter_context(engine(model, options))
        for one in rounds:
            answers, number = answers_of(llm, one.turns)
            assert answers == one.answers
            num_stored += number
            if one.restarts:
                running.close()
                llm = running.enter_context(engine(model, options))
    return num_stored


def replay_apart(model: Path, options: dict[str, Any], rounds: list[Round]) -> int:
    """Do the same with a prefill engine and a decode engine, which are restarted in turn."""
    port, num_pulled, num_restarts = free_port(), 0, 0
    extra = {"pull_timeout_s": WITHIN_S, "lease_s": WITHIN_S}
    common = {"kv_connector": "RowServerConnector", "kv_port": port}
    roles: list[dict[str, Any]] = [
        {"kv_role": "kv_producer", "kv_connector_extra_config": extra},
        {"kv_role": "kv_consumer", "kv_connector_extra_config": extra | {"peers": [f"127.0.0.1:{port}"]}},
    ]
    with contextlib.ExitStack() as at_end:
        running = [at_end.enter_context(contextlib.ExitStack()) for _ in roles]

        def start(half: int) -> LLM:
            running[half].close()
            config = {"kv_transfer_config": common | roles[half]}
            return running[half].enter_context(engine(model, options | config))

        halves = [start(0), start(1)]
        for one in rounds:
            asked = [{"prompt_token_ids": turn.prompt, "kv_transfer_params": ASKED} for turn in one.turns]
            outputs = halves[0].generate(
                asked, SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
            )
            transfers = [output.kv_transfer_params for output in outputs]
            answers, number = answers_of(halves[1], one.turns, transfers)
            assert answers == one.answers
            num_pulled += number
            if one.restarts:
                halves[num_restarts % 2] = start(num_restarts % 2)
                num_restarts += 1
    return num_pulled


def compare(kind: str, name: str, number: int, model: Path, folder: Path) -> None:
    options, rounds = KINDS[kind][1], script(model, kind, number)
    assert any(one.restarts for one in rounds[:-1])
    if name == "prefill":
        num_tokens = replay_apart(model, options, rounds)
    else:
        with place(name, kind, folder) as tier:
            num_tokens = replay(model, options | tier, rounds)
    assert num_tokens > 5 * number, f"{name} had {num_tokens} tokens"


@pytest.mark.parametrize(
    ("kind", "name"),
    [*((kind, "disk") for kind in QUICK), *(("state", name) for name in TIERS if name != "disk")],
)
def test_a_dozen_conversations_have_the_same_bits(
    kind: str, name: str, tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    compare(kind, name, FEW, tiny_model(KINDS[kind][0]), tmp_path)


@pytest.mark.more
@pytest.mark.parametrize("name", TIERS)
@pytest.mark.parametrize("kind", KINDS)
def test_two_hundred_conversations_have_the_same_bits(
    kind: str, name: str, tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    compare(kind, name, MANY, tiny_model(KINDS[kind][0]), tmp_path)
