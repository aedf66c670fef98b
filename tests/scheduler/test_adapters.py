"""Running requests have no more different adapters than may be in a step, and nobody starves."""

from quire.kv_cache.events import BlockStored
from quire.lora_request import LoRARequest
from tests.scheduler.harness import Engine, make_config
from tests.scheduler.test_explain import explain, shares, steps

A, B, C = (LoRARequest(name, number, "path") for number, name in enumerate("abc", 1))


def engine_for(max_loras: int, **config: object) -> Engine:
    return Engine(make_config(enable_lora=True, max_loras=max_loras, **config))


def test_a_request_waits_while_others_have_all_places_of_adapters() -> None:
    engine = engine_for(1)
    for name, adapter in (("one", A), ("same", A), ("other", B), ("plain", None)):
        engine.add(name, [1, 2], max_tokens=4, lora_request=adapter)
    steps(engine, 3)
    assert (explain(engine, "same").cause, explain(engine, "other").cause) == (None, "adapter")
    assert shares(engine, "other") == {"next_step": 1, "adapter": 2}
    assert "adapters in use" in str(explain(engine, "other"))
    engine.drain()


def test_adapters_that_go_on_coming_do_not_keep_another_out() -> None:
    engine = engine_for(2)
    engine.add("a", [1, 2], lora_request=A)
    engine.add("b", [1, 2], lora_request=B)
    engine.step()
    engine.add("c", [1, 2], lora_request=C)
    for number in range(20):
        engine.add(f"later-{number}", [1, 2], lora_request=(A, B)[number % 2])
        engine.step()
    assert engine.requests["c"].is_finished


def test_an_urgent_request_takes_the_place_of_an_adapter_only_if_it_gets_it() -> None:
    engine = engine_for(1, scheduling_policy="priority")
    engine.add("first", [1, 2], max_tokens=8, priority=0, lora_request=A)
    engine.add("last", [1, 2], max_tokens=8, priority=9, lora_request=A)
    engine.step()
    engine.add("middle", [1, 2], max_tokens=2, priority=5, lora_request=B)
    engine.step()
    assert engine.scheduler.stats().num_preemptions == 0, "the first would still have its adapter"
    engine.add("urgent", [1, 2], max_tokens=2, priority=-1, lora_request=B)
    engine.step()
    assert engine.scheduler.stats().num_preemptions == 2
    engine.drain()


def test_adapters_share_no_prefix() -> None:
    engine, prompt = engine_for(3), list(range(12))
    for name, adapter in (("a", A), ("b", B), ("plain", None), ("a-again", A)):
        engine.add(name, prompt, max_tokens=2, lora_request=adapter)
        engine.drain()
    cached = [engine.requests[name].num_cached_tokens for name in ("a", "b", "plain", "a-again")]
    assert cached[:3] == [0, 0, 0]
    assert cached[3] > 0


def test_events_of_the_cache_name_the_adapter() -> None:
    engine = engine_for(1, kv_events_config={"enable_kv_cache_events": True})
    engine.add("a", range(12), max_tokens=2, lora_request=A)
    engine.drain()
    engine.add("plain", range(12), max_tokens=2)
    engine.drain()
    stored = [event for event in engine.scheduler.take_kv_events() if isinstance(event, BlockStored)]
    assert {event.lora_name for event in stored} == {"a", None}
