# SPDX-License-Identifier: Apache-2.0
"""KV events of a directory: applied in order, they give the rows that are in its files."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from quire import LLM, SamplingParams
from quire.engine import core as core_module
from quire.kv_cache.events import DISK, HOST, KVCacheEvent
from quire.kv_store import tier
from quire.kv_store.disk.namespaces import Manifest
from quire.kv_store.disk.opening import open_disk_store
from quire.kv_store.disk.segment import SegmentLayout
from quire.kv_store.row_store import Namespace
from tests.fixtures.cache_view import CacheView, Known
from tests.training.checkpoints import changed

OPTIONS: dict[str, Any] = {
    "max_model_len": 96, "cpu_threads": 1, "max_num_seqs": 4, "block_size": 4,
    "kv_events_config": {"enable_kv_cache_events": True},
}  # fmt: skip
PARAMS = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)


class Collector:
    """Publisher whose subscriber applies everything at once."""

    def __init__(self) -> None:
        self.view = CacheView()

    def publish(self, events: list[KVCacheEvent], now: float) -> None:
        self.view.apply(events)

    def close(self) -> None:
        return None

    @property
    def on_disk(self) -> set[Known]:
        return {known for known in self.view.blocks if known[0] == DISK}


@pytest.fixture
def collectors(monkeypatch: pytest.MonkeyPatch) -> list[Collector]:
    """One for each engine, in their order."""
    made: list[Collector] = []

    def collect(config: Any) -> Collector:
        made.append(Collector())
        return made[-1]

    monkeypatch.setattr(core_module, "create_publisher", collect)
    for name in ("LEAST_WAIT_S", "MOST_WAIT_S", "SETTLE_S"):
        monkeypatch.setattr(tier, name, 300.0)
    monkeypatch.setattr(tier, "EXPECTED_BYTES_PER_S", 1e15)
    return made


def opened(model: Path, store: Path, **options: Any) -> LLM:
    return LLM(str(model), kv_store=str(store), **(OPTIONS | options))


def generate(llm: LLM, seed: int, number: int = 4) -> None:
    draw = random.Random(seed)
    prompts = [{"prompt_token_ids": [draw.randrange(3, 60) for _ in range(40)]} for _ in range(number)]
    llm.generate(prompts, PARAMS)


def kept(store: Path, max_bytes: int = 1 << 30) -> set[Known]:
    """Return the rows of the only namespace of a directory."""
    (path,) = store.glob("*/namespace.json")
    manifest = msgspec.json.decode(path.read_bytes(), type=Manifest)
    rows = open_disk_store(store, Namespace(manifest.values, manifest.row_bytes), max_bytes)
    names = rows.names()
    rows.close()
    return {(DISK, int.from_bytes(name[32:], "big"), name[:32]) for name in names}


@pytest.mark.parametrize("family", ["llama-tied-bias", "gemma3"])
def test_events_of_the_directory_give_its_rows(
    family: str, tiny_model: Callable[[str], Path], tmp_path: Path, collectors: list[Collector]
) -> None:
    """Over evictions, a reset that clears the other tiers alone, a restart, and a damaged row."""
    store = tmp_path / "rows"
    first = opened(tiny_model(family), store)
    generate(first, 1)
    assert first.llm_engine.call_core("reset_prefix_cache")
    assert {medium for medium, *_ in collectors[0].view.blocks} == {DISK}
    first.llm_engine.shutdown()
    rows = kept(store)
    assert collectors[0].on_disk == rows
    assert len(rows) > 30
    second = opened(tiny_model(family), store)
    generate(second, 2, number=1)
    assert collectors[1].on_disk >= rows
    second.llm_engine.shutdown()
    assert collectors[1].on_disk == kept(store)
    assert len(collectors[1].on_disk) > len(rows)


def test_evicted_and_damaged_rows_are_reported(
    tiny_model: Callable[[str], Path], tmp_path: Path, collectors: list[Collector]
) -> None:
    store, model = tmp_path / "rows", tiny_model("llama-tied-bias")
    opened(model, store).llm_engine.shutdown()
    (path,) = store.glob("*/namespace.json")
    row_bytes = msgspec.json.decode(path.read_bytes(), type=Manifest).row_bytes
    limit = SegmentLayout("0" * 32, row_bytes).segment_bytes(40)
    llm = opened(model, store, kv_store_gb=limit / 2**30)
    for seed in range(4):
        generate(llm, seed)
    llm.llm_engine.shutdown()
    rows = kept(store, limit)
    assert 0 < len(rows) <= 40
    assert collectors[1].on_disk == rows
    for segment in store.glob("*/*.rows"):
        content = bytearray(segment.read_bytes())
        for at in range(8192, len(content), 512):
            content[at] ^= 1
        segment.write_bytes(content)
    last = opened(model, store, kv_store_gb=limit / 2**30)
    generate(last, 3)
    last.llm_engine.shutdown()
    assert collectors[2].on_disk == kept(store, limit)


def test_events_follow_an_update_of_the_weights_and_back(
    tiny_model: Callable[[str], Path], tmp_path: Path, collectors: list[Collector]
) -> None:
    store, model = tmp_path / "rows", tiny_model("llama-tied-bias")
    other = changed(model, tmp_path / "other")
    llm = opened(model, store)
    generate(llm, 1)
    assert llm.llm_engine.call_core("reset_prefix_cache")
    old = collectors[0].on_disk
    assert len(old) > 30
    llm.weights.load(str(other))
    assert not collectors[0].on_disk
    generate(llm, 2, number=1)
    assert llm.llm_engine.call_core("reset_prefix_cache")
    new = collectors[0].on_disk
    assert new
    assert not new & old
    llm.weights.load(str(model))
    generate(llm, 3, number=1)
    assert collectors[0].on_disk >= old
    assert not new & collectors[0].on_disk
    llm.llm_engine.shutdown()


def test_reader_reports_found_blocks(
    tiny_model: Callable[[str], Path], tmp_path: Path, collectors: list[Collector]
) -> None:
    store, model = tmp_path / "rows", tiny_model("llama-tied-bias")
    writer = opened(model, store)
    generate(writer, 1)
    assert writer.llm_engine.call_core("reset_prefix_cache")
    reader = opened(model, store)
    generate(reader, 1)
    assert collectors[1].on_disk
    assert collectors[1].on_disk <= collectors[0].on_disk
    assert not any(medium == HOST for medium, *_ in collectors[0].on_disk)
    reader.llm_engine.shutdown()
    writer.llm_engine.shutdown()
