# SPDX-License-Identifier: Apache-2.0
"""Running requests have at most the allowed number of adapters, and no request starves."""

from hypothesis import given, settings
from hypothesis import strategies as st

from quire.adapters import LoRARequest
from quire.kv_cache.events import BlockStored
from tests.scheduler.harness import Engine, make_config
from tests.scheduler.test_explain import explain, shares, steps

A, B, C = (LoRARequest(name, number, "path") for number, name in enumerate("abc", 1))


def engine_for(max_loras: int, **config: object) -> Engine:
    return Engine(make_config(enable_lora=True, max_loras=max_loras, **config))


def test_request_waits_while_all_adapter_slots_are_taken() -> None:
    engine = engine_for(1)
    for name, adapter in (("one", A), ("same", A), ("other", B), ("plain", None)):
        engine.add(name, [1, 2], max_tokens=4, adapter_request=adapter)
    steps(engine, 3)
    assert (explain(engine, "same").cause, explain(engine, "other").cause) == (None, "adapter")
    assert shares(engine, "other") == {"next_step": 1, "adapter": 2}
    assert "adapters in use" in str(explain(engine, "other"))
    engine.drain()


def test_adapters_that_go_on_coming_do_not_keep_another_out() -> None:
    engine = engine_for(2)
    engine.add("a", [1, 2], adapter_request=A)
    engine.add("b", [1, 2], adapter_request=B)
    engine.step()
    engine.add("c", [1, 2], adapter_request=C)
    for number in range(30):
        engine.add(f"later-{number}", [1, 2], adapter_request=(A, B)[number % 2])
        engine.step()
    assert engine.requests["c"].is_finished


def test_request_without_adapter_passes_those_waiting_for_a_slot() -> None:
    engine = engine_for(1, max_num_seqs=6)
    for name, adapter in (("a", A), ("b", B), ("c", C), ("plain", None), ("a-again", A), ("b-again", B)):
        engine.add(name, [1, 2], max_tokens=8, adapter_request=adapter)
    engine.step()
    engine.step()
    causes = {name: explain(engine, name).cause for name in engine.requests}
    assert causes == dict.fromkeys(["a", "plain", "a-again"]) | dict.fromkeys(
        ["b", "c", "b-again"], "adapter"
    )
    engine.drain()
    started = [data.request_id for plan in engine.plans for data in plan.new_requests]
    assert started == ["a", "plain", "a-again", "b", "b-again", "c"]
    assert shares(engine, "b")["adapter"] > 0


@settings(max_examples=60, deadline=None)
@given(
    policy=st.sampled_from(["fcfs", "priority", "fair"]),
    arrivals=st.lists(
        st.tuples(st.sampled_from([None, A, B, C]), st.integers(1, 6), st.integers(0, 2)), max_size=40
    ),
    max_loras=st.integers(1, 2),
)
def test_none_is_passed_by_more_than_may_run(
    policy: str, arrivals: list[tuple[LoRARequest | None, int, int]], max_loras: int
) -> None:
    engine = engine_for(max_loras, scheduling_policy=policy)
    for number, (adapter, num_tokens, num_steps) in enumerate(arrivals):
        engine.add(
            str(number), [1, 2], max_tokens=num_tokens, adapter_request=adapter, tenant=f"{number % 2}"
        )
        for _ in range(num_steps):
            engine.step()
    engine.drain()
    limit = engine.config.scheduler.max_num_seqs
    assert all(request.num_overtaken <= limit for request in engine.requests.values())
    if policy == "fcfs":
        started = [int(data.request_id) for plan in engine.plans for data in plan.new_requests]
        with_adapters = [number for number in started if arrivals[number][0] is not None]
        for place, number in enumerate(with_adapters):
            assert sum(other > number for other in with_adapters[:place]) <= limit


def test_urgent_request_takes_an_adapter_slot_only_if_it_starts() -> None:
    engine = engine_for(1, scheduling_policy="priority")
    engine.add("first", [1, 2], max_tokens=8, priority=0, adapter_request=A)
    engine.add("last", [1, 2], max_tokens=8, priority=9, adapter_request=A)
    engine.step()
    engine.add("middle", [1, 2], max_tokens=2, priority=5, adapter_request=B)
    engine.step()
    assert engine.scheduler.stats().num_preemptions == 0, "the first would still have its adapter"
    engine.add("urgent", [1, 2], max_tokens=2, priority=-1, adapter_request=B)
    engine.step()
    assert engine.scheduler.stats().num_preemptions == 2
    engine.drain()


def test_adapters_share_no_prefix() -> None:
    engine, prompt = engine_for(3), list(range(12))
    for name, adapter in (("a", A), ("b", B), ("plain", None), ("a-again", A)):
        engine.add(name, prompt, max_tokens=2, adapter_request=adapter)
        engine.drain()
    cached = [engine.requests[name].num_cached_tokens for name in ("a", "b", "plain", "a-again")]
    assert cached[:3] == [0, 0, 0]
    assert cached[3] > 0


def test_events_of_the_cache_name_the_adapter() -> None:
    engine = engine_for(1, kv_events_config={"enable_kv_cache_events": True})
    engine.add("a", range(12), max_tokens=2, adapter_request=A)
    engine.drain()
    engine.add("plain", range(12), max_tokens=2)
    engine.drain()
    stored = [event for event in engine.scheduler.pop_kv_events() if isinstance(event, BlockStored)]
    assert {event.lora_name for event in stored} == {"a", None}
