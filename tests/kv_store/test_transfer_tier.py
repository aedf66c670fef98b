# SPDX-License-Identifier: Apache-2.0
"""A prefill core and a decode core give the tokens of one, however slow, short or broken the way between them is."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.config import EngineConfig
from quire.engine.messages import AbortRequests, AddRequest, EngineCoreRequest, UtilityCall
from quire.kv_cache.rows import LeaseStats
from quire.kv_cache.spec import KVCacheSpec
from quire.kv_store import tier
from quire.kv_transfer_params import PULL_FAILED, KVOffer, KVTransfer
from quire.sampling_params import SamplingParams
from tests.kv_store.storing_executor import Disk
from tests.kv_store.test_tier import KINDS, PROMPTS, Engine, config_for, specs_of, tokens_alone

PEER = "127.0.0.1:7"
SETTINGS = {
    "kv_connector": "RowServerConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"peers": [PEER]},
}
PLACE = f"tcp://{PEER}"


@pytest.fixture
def model(null_model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tier, "POLL_S", 0.0)  # rows come after a number of polls here
    return null_model_dir


def transferring(model: Path, **changes: Any) -> EngineConfig:
    return config_for(model, **({"kv_store": None, "kv_transfer_config": SETTINGS} | changes))


def add(
    engine: Engine, name: str, prompt: list[int], transfer: KVTransfer | None, max_tokens: int = 7
) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    engine.tokens[name] = []
    request = EngineCoreRequest(name, list(prompt), params, engine.clock.now, kv_transfer=transfer)
    engine.core.handle(AddRequest(request))


def prefilled(
    config: EngineConfig, disk: Disk, specs: Mapping[str, KVCacheSpec], prompt: list[int] = PROMPTS[0]
) -> KVOffer:
    """Return the offer of a prefill core, which has ended since."""
    engine = Engine(config, disk, specs)
    add(engine, "p", prompt, KVTransfer(), max_tokens=1)
    for _ in range(3000):
        engine.step()
        if "p" in engine.ended:
            break
    offer = engine.ended["p"].kv_offer
    assert offer is not None
    engine.core.shutdown()
    return offer


def stats_of(engine: Engine) -> dict[str, int]:
    stats = engine.core.step().stats
    assert stats is not None
    found: dict[str, int] = msgspec.structs.asdict(stats.transfer)
    return found


@pytest.mark.parametrize("kinds", KINDS)
@pytest.mark.parametrize("async_scheduling", [False, True])
def test_a_prompt_is_computed_by_one_core_only(
    model: Path, kinds: tuple[str, ...], async_scheduling: bool
) -> None:
    config, disk, specs = transferring(model, async_scheduling=async_scheduling), Disk(), specs_of(kinds)
    expected = tokens_alone(config.evolve(kv_transfer_config={}), specs, PROMPTS[0])
    disk.delay = 3
    offer = prefilled(config, disk, specs)
    assert offer.lease.encode() in disk.rows
    engine = Engine(config, disk, specs)
    add(engine, "d", PROMPTS[0], KVTransfer(PLACE, offer.lease))
    explained = engine.core.explain("d")
    assert explained is not None
    assert explained.cause == "not_ready"
    engine.finish()
    assert engine.tokens["d"] == expected
    update = engine.ended["d"]
    assert (update.num_cached_tokens, update.num_stored_tokens) == (16, 16)
    stats = stats_of(engine)
    assert (stats["num_pulls"], stats["num_failed_pulls"]) == (1, 0)
    assert offer.lease.encode() not in disk.rows, "the lease has ended"
    engine.core.shutdown()


@pytest.mark.parametrize("delay", range(8))
def test_request_is_released_at_any_poll_that_ends_its_pull(model: Path, delay: int) -> None:
    """Also the one behind a step, after which nothing else is due."""
    config, disk, specs = transferring(model), Disk(), specs_of(("full",))
    offer = prefilled(config, disk, specs)
    engine = Engine(config, disk, specs)
    disk.delay = delay
    add(engine, "d", PROMPTS[0], KVTransfer(PLACE, offer.lease))
    engine.finish()
    assert engine.ended["d"].num_stored_tokens == 16
    assert stats_of(engine)["num_failed_pulls"] == 0
    engine.core.shutdown()


def test_request_is_released_if_a_reset_ends_its_pull(model: Path) -> None:
    config, disk, specs = transferring(model), Disk(), specs_of(("full",))
    offer = prefilled(config, disk, specs)
    engine = Engine(config, disk, specs)
    add(engine, "d", PROMPTS[0], KVTransfer(PLACE, offer.lease))
    disk.delay = 20
    engine.step()  # The lookup was done at once; the load has begun.
    assert not engine.core.has_work()
    engine.core.handle(UtilityCall(1, "reset_prefix_cache", []))
    engine.finish()
    assert len(engine.tokens["d"]) == 7
    engine.core.shutdown()


@pytest.mark.parametrize("fault", ["late", "broken", "short", "gone"])
def test_failed_pull_computes_and_is_reported(model: Path, fault: str) -> None:
    config, disk, specs = transferring(model), Disk(), specs_of(("full",))
    expected = tokens_alone(config.evolve(kv_transfer_config={}), specs, PROMPTS[0])
    offer = prefilled(config, disk, specs)
    engine = Engine(config, disk, specs)
    disk.delay = 300 if fault == "late" else 5
    disk.fails = fault == "broken"
    disk.loses = frozenset({1}) if fault == "short" else frozenset()
    if fault == "gone":
        disk.rows.clear()
    add(engine, "d", PROMPTS[0], KVTransfer(PLACE, offer.lease))
    engine.clock.now += 0.25
    if fault == "late":
        engine.clock.now += 20.0
    for _ in range(60):
        engine.step()
    explained = engine.core.explain("d")
    assert explained is not None
    assert any("of which not all came" in share.text for share in explained.shares)
    engine.finish()
    assert engine.tokens["d"] == expected
    assert stats_of(engine)["num_failed_pulls"] == 1
    disk.fails, disk.delay = False, 0
    engine.core.shutdown()


@pytest.mark.parametrize("fault", ["late", "broken", "short", "gone", "resting"])
def test_a_failed_pull_ends_the_request_by_policy(model: Path, fault: str) -> None:
    """Another request, and one that needs no pull, go on."""
    policy = {"kv_transfer_config": SETTINGS | {"kv_load_failure_policy": "fail"}}
    config, disk, specs = transferring(model, **policy), Disk(), specs_of(("full",))
    offer = prefilled(config, disk, specs)
    engine = Engine(config, disk, specs)
    add(engine, "other", PROMPTS[3], None)
    disk.delay = 300 if fault == "late" else 5
    disk.fails = fault in ("broken", "resting")
    disk.loses = frozenset({1}) if fault == "short" else frozenset()
    if fault == "gone":
        disk.rows.clear()
    names = ["d", "later"] if fault == "resting" else ["d"]
    for name in names:
        add(engine, name, PROMPTS[0], KVTransfer(PLACE, offer.lease))
        engine.clock.now += 20.0 if fault == "late" else 0.0
        for _ in range(60):
            engine.step()
    engine.finish()
    for name in names:
        assert (engine.ended[name].finish_reason, engine.ended[name].error) == ("error", PULL_FAILED)
        assert engine.tokens[name] == []
    assert len(engine.tokens["other"]) == 7
    assert stats_of(engine)["num_failed_pulls"] == len(names)
    disk.fails, disk.delay, disk.loses = False, 0, frozenset()
    add(engine, "alone", PROMPTS[0], None)
    engine.finish()
    assert len(engine.tokens["alone"]) == 7
    engine.core.shutdown()


def test_leases_are_counted_while_they_last(model: Path) -> None:
    config, disk, specs = transferring(model), Disk(), specs_of(("full",))
    disk.leases = LeaseStats(2, 7.5)
    engine = Engine(config, disk, specs)
    add(engine, "p", PROMPTS[0], KVTransfer(), max_tokens=1)
    while "p" not in engine.ended:
        engine.step()
    for _ in range(4):
        engine.step()
    assert (stats_of(engine)["num_leases"], stats_of(engine)["oldest_lease_s"]) == (2, 7.5)
    disk.leases = LeaseStats()
    engine.clock.now += 2.0
    for _ in range(4):
        engine.step()
    assert (stats_of(engine)["num_leases"], stats_of(engine)["oldest_lease_s"]) == (0, 0.0)
    assert engine.core.patience_s is None, "nothing is left to count"
    engine.core.shutdown()


def test_an_offer_without_room_is_smaller(model: Path) -> None:
    config, disk, specs = transferring(model), Disk(), specs_of(("full",))
    disk.fails = True
    offer = prefilled(config, disk, specs)
    assert (offer.num_tokens, offer.as_params()["do_remote_prefill"]) == (0, False)


def test_an_aborted_prefill_offers_nothing(model: Path) -> None:
    config, disk, specs = transferring(model, max_num_batched_tokens=8), Disk(), specs_of(("full",))
    engine = Engine(config, disk, specs)
    add(engine, "p", PROMPTS[0], KVTransfer())
    engine.step()
    engine.core.handle(AbortRequests(["p"]))
    for _ in range(20):
        engine.step()
    assert not any(len(name) == 36 and name.isascii() and b"-" in name for name in disk.rows)
    assert stats_of(engine)["num_offers"] == 0
    engine.core.shutdown()


def test_a_refused_request_ends_its_lease(model: Path) -> None:
    config, disk, specs = transferring(model), Disk(), specs_of(("full",))
    offer = prefilled(config, disk, specs)
    engine = Engine(config, disk, specs)
    add(engine, "d", [1] * 100, KVTransfer(PLACE, offer.lease))
    engine.step()
    assert engine.ended["d"].refused
    assert offer.lease.encode() not in disk.rows
    engine.core.shutdown()


@given(
    kinds=st.sampled_from(KINDS),
    blocks=st.sampled_from([14, 40]),
    faults=st.lists(
        st.tuples(st.integers(0, 30), st.frozensets(st.integers(0, 5), max_size=2), st.booleans()),
        min_size=2,
        max_size=2,
    ),
    aborted=st.booleans(),
)
@settings(max_examples=30, deadline=None)
def test_tokens_equal_one_core_under_any_faults(
    null_model_dir: Path,
    kinds: tuple[str, ...],
    blocks: int,
    faults: list[tuple[int, frozenset[int], bool]],
    aborted: bool,
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tier, "POLL_S", 0.0)
        config = transferring(null_model_dir, num_gpu_blocks_override=len(kinds) * blocks, max_model_len=28)
        disk, specs = Disk(), specs_of(kinds)
        expected = [tokens_alone(config.evolve(kv_transfer_config={}), specs, prompt) for prompt in PROMPTS]
        disk.delay, disk.loses, disk.fails = faults[0]
        offers = [prefilled(config, disk, specs, prompt) for prompt in PROMPTS]
        engine = Engine(config, disk, specs)
        disk.delay, disk.loses, disk.fails = faults[1]
        for number, (prompt, offer) in enumerate(zip(PROMPTS, offers, strict=True)):
            add(engine, str(number), prompt, KVTransfer(PLACE, offer.lease))
            engine.step()
        if aborted:
            engine.core.handle(AbortRequests(["1"]))
        engine.finish()
        for number, tokens in enumerate(expected):
            if number != 1 or not aborted:
                assert engine.tokens[str(number)] == tokens
        engine.core.shutdown()
