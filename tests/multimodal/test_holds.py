# SPDX-License-Identifier: Apache-2.0
"""Holds for encodings: who waits for what and how long, what is kept and evicted, and what a failure costs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from quire.engine.messages import AbortRequests, AddRequest, EngineCoreRequest
from quire.media import EncodeProgress, MediaItem, all_encoded
from quire.multimodal.holds import IDLE_SLICE_S, STEP_SHARE
from quire.sampling_params import SamplingParams
from quire.scheduler.explain import Cause
from quire.scheduler.feature_stats import EncoderStats
from quire.scheduler.output import RequestUpdate
from tests.engine.whole_engine import WholeEngine
from tests.fixtures.media import digest_of, item

PROMPT = list(range(12))
GIB = 2**30
BYTES_EACH = 4 * 16  # of the model of letters
QUICK, SLOW = (
    next(n for n in range(100) if digest_of(n)[-1] % 3 == slices - 1) for slices in (1, 3)
)  # contents whose encoding takes one slice, and three


def make(num_embeddings: int = 10**6, **args: Any) -> WholeEngine:
    fixed = {"enable_prompt_embeds": True, "encoder_cache_gb": num_embeddings * BYTES_EACH / GIB}
    return WholeEngine(**fixed | args)


class Core:
    """A core alone, with the budgets of its slices."""

    def __init__(self, **args: Any) -> None:
        self.whole = make(**args)
        self.core, self.executor = self.whole.core, self.whole.executor
        self.budgets: list[float] = []
        self.updates: dict[str, list[RequestUpdate]] = {}
        encode = self.executor.encode_media

        def encoded(items: Sequence[MediaItem], budget_s: float) -> EncodeProgress:
            self.budgets.append(budget_s)
            return encode(items, budget_s)

        self.executor.encode_media = encoded  # type: ignore[method-assign]

    def add(self, name: str, media: Sequence[MediaItem] = (), *, max_tokens: int = 3, **fields: Any) -> None:
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, temperature=0.0)
        self.core.handle(
            AddRequest(EngineCoreRequest(name, PROMPT, params, 0.0, media=list(media), **fields))
        )

    def step(self) -> None:
        for update in self.core.step().updates:
            self.updates.setdefault(update.request_id, []).append(update)
        self.whole.media.check_integrity()

    def drain(self) -> None:
        while self.core.has_work():
            self.step()

    def cause(self, name: str) -> str | None:
        found = self.core.explain(name)
        assert found is not None
        return found.cause

    def end(self, name: str) -> RequestUpdate:
        return self.updates[name][-1]

    @property
    def stats(self) -> EncoderStats:
        stats = self.core.scheduler.stats()
        self.whole.media.add_stats(stats)
        assert stats.encoder is not None
        return stats.encoder


def test_request_is_held_until_its_items_are_encoded() -> None:
    core = Core()
    core.add("a", [item(2, 5, SLOW)])
    causes = []
    for _ in range(3):
        causes.append(core.cause("a"))
        core.step()
    assert causes == [Cause.NOT_READY.name.lower()] * 3
    explanation = core.core.explain("a")
    assert explanation is not None
    assert "for its media to be ready" in str(explanation)
    core.drain()
    assert core.end("a").finish_reason == "length"
    assert len(core.budgets) == 3


def test_running_streams_go_on_between_slices_of_limited_time(monkeypatch: pytest.MonkeyPatch) -> None:
    core = Core(max_encoder_slice_ms=20.0)
    core.add("stream", max_tokens=20)
    core.step()
    core.add("a", [item(2, 5, SLOW)])
    for step_s in (1.0, 0.02, 0.0):
        monkeypatch.setattr(core.whole.media, "_step_s", step_s)  # that of the last step
        before = len(core.updates["stream"])
        core.step()
        assert len(core.updates["stream"]) == before + 1
    assert core.budgets == [0.02, STEP_SHARE * 0.02, 0.0]
    core.drain()


def test_idle_core_encodes_in_larger_slices() -> None:
    core = Core()
    core.add("a", [item(2, 5, SLOW)])
    core.drain()
    assert core.budgets == [IDLE_SLICE_S] * 3


def test_content_of_two_requests_is_encoded_once() -> None:
    core = Core()
    for name in "ab":
        core.add(name, [item(2, 5, SLOW), item(7, 10, SLOW)])
    core.drain()
    core.add("later", [item(0, 3, SLOW)])
    core.drain()
    assert len(core.budgets) == 3
    stats = core.stats
    assert (stats.num_hits, stats.num_misses, stats.num_items) == (2, 1, {"embeds": 3})
    assert (stats.num_bytes, stats.num_used_bytes) == (3 * BYTES_EACH, 0)


def test_request_waits_for_room_in_order_of_arrival() -> None:
    core = Core(num_embeddings=8)
    core.add("a", [item(0, 6, 0)])
    core.add("b", [item(0, 7, 1)])
    core.add("c", [item(0, 2, 2)])  # for which there would be room
    assert [core.cause(name) for name in "abc"] == ["not_ready", "encoder_room", "encoder_room"]
    assert "--encoder-cache-gb" in str(core.core.explain("b"))
    core.drain()
    started = {name: updates[0].scheduled_ts for name, updates in core.updates.items()}
    assert started["a"] < started["b"] < started["c"]
    assert all(core.end(name).finish_reason == "length" for name in "abc")


def test_request_whose_items_are_all_in_use_needs_no_room() -> None:
    core = Core(num_embeddings=8)
    core.add("a", [item(0, 6, 0)])
    core.add("b", [item(0, 7, 1)])
    core.add("c", [item(2, 8, 0)])
    assert [core.cause(name) for name in "abc"] == ["not_ready", "encoder_room", "not_ready"]
    core.drain()


def test_least_recently_used_embeddings_are_evicted() -> None:
    core = Core(num_embeddings=8)
    for content in (0, 1, 0, 2):
        core.add(f"r{len(core.updates)}", [item(0, 4, content)])
        core.drain()
    assert core.executor.embeddings.keys() == {digest_of(0), digest_of(2)}


def test_embeddings_of_preempted_requests_stay() -> None:
    core = Core(num_gpu_blocks_override=13, block_size=4)
    for number in range(3):
        core.add(f"r{number}", [item(2, 5, number)], max_tokens=20)
    core.drain()
    assert core.core.scheduler.stats().num_preemptions > 0
    assert core.stats.num_misses == 3
    assert len(core.budgets) <= 9


def test_failure_ends_the_requests_of_its_item_alone() -> None:
    core = Core()
    core.executor.failing_media.add(digest_of(SLOW))
    core.add("bad", [item(0, 3, QUICK), item(4, 7, SLOW)])
    core.add("same", [item(1, 4, SLOW)])
    core.add("good", [item(0, 3, QUICK)])
    core.add("text")
    core.drain()
    for name in ("bad", "same"):
        end = core.end(name)
        assert (end.finish_reason, end.refused) == ("error", True)
        assert end.error == "the embeds cannot be used: its file is damaged"
    assert [core.end(name).finish_reason for name in ("good", "text")] == ["length", "length"]
    assert core.executor.embeddings.keys() == {digest_of(QUICK)}
    assert core.stats.num_failed == 1


def test_embeddings_larger_than_announced_cost_their_request() -> None:
    """A tower that makes more of an item than the configuration says must not exceed the limit."""
    core = Core(num_embeddings=8)
    encode = core.executor.encode_media

    def larger(items: Sequence[MediaItem], budget_s: float) -> EncodeProgress:
        done = encode(items, budget_s)
        num_bytes = {digest: 3 * number for digest, number in done.num_bytes.items()}
        return EncodeProgress(done.done, done.failed, num_bytes)

    core.executor.encode_media = larger  # type: ignore[method-assign]
    core.add("a", [item(0, 4, QUICK)])
    core.drain()
    assert (core.end("a").finish_reason, core.stats.num_bytes) == ("error", 0)
    assert "--encoder-cache-gb" in (core.end("a").error or "")


@pytest.mark.parametrize("num_steps", [0, 1, 5])
def test_abort_drops_what_is_unfinished_and_keeps_the_rest(num_steps: int) -> None:
    core = Core()
    core.add("a", [item(0, 3, SLOW), item(4, 7, QUICK)], max_tokens=20)
    for _ in range(num_steps):
        core.step()
    core.core.handle(AbortRequests(["a"]))
    core.drain()
    kept = {digest_of(SLOW), digest_of(QUICK)} if num_steps == 5 else set()
    assert core.executor.embeddings.keys() == kept
    assert not core.executor._slices
    assert core.stats.num_used_bytes == 0


def test_abort_of_one_leaves_the_encoding_of_the_other() -> None:
    core = Core()
    core.add("a", [item(0, 3, SLOW, path="/first")])
    core.add("b", [item(0, 3, SLOW, path="/second")])
    core.step()
    core.core.handle(AbortRequests(["a"]))
    core.drain()
    assert core.end("b").finish_reason == "length"
    assert len(core.budgets) == 3


def test_request_too_large_for_the_cache_is_refused() -> None:
    core = Core(num_embeddings=8)
    core.add("a", [item(0, 9)])
    core.add("b", [item(0, 5, 0), item(5, 8, 0, runs=[(5, 6)])])
    core.add("c", [item(0, 8)], max_tokens=1)
    core.drain()
    for name, problem in (("a", "--encoder-cache-gb"), ("b", "takes 1 embeddings")):
        assert (core.end(name).finish_reason, core.end(name).refused) == ("error", True)
        assert problem in (core.end(name).error or "")
    assert core.end("c").finish_reason == "length"


def test_content_with_another_number_of_embeddings_is_refused() -> None:
    core = Core()
    core.add("a", [item(0, 5)])
    core.add("b", [item(0, 4)])
    core.drain()
    assert "takes 4 embeddings, and the same content in another request took 5" in (core.end("b").error or "")


def test_reset_drops_what_no_request_uses() -> None:
    core = Core()
    core.add("a", [item(0, 3, QUICK)])
    core.drain()
    core.add("b", [item(0, 3, SLOW)])
    core.step()
    assert core.core.utilities["reset_encoder_cache"]() is False
    assert not core.executor.embeddings
    core.drain()
    assert core.core.utilities["reset_encoder_cache"]() is True
    assert not core.executor.embeddings


def test_sleeping_core_encodes_nothing_and_drops_the_unused() -> None:
    core = Core()
    core.add("a", [item(0, 3, QUICK)])
    core.drain()
    core.add("b", [item(0, 3, SLOW)])
    core.step()
    core.core.utilities["sleep"](1)
    core.drain()
    assert not core.executor.embeddings
    num_slices = len(core.budgets)
    core.core.utilities["wake_up"](["weights", "kv_cache", "scheduling"])
    core.drain()
    assert len(core.budgets) == num_slices + 2
    assert core.end("b").finish_reason == "length"


def test_progress_of_ranks_is_what_all_have_in_common() -> None:
    a, b, c = (digest_of(n) for n in range(3))
    first = EncodeProgress([a, b], {}, {a: 8, b: 16})
    second = EncodeProgress([b, a], {}, {a: 8, b: 20})
    third = EncodeProgress([b], {c: "no"}, {b: 16})
    assert all_encoded([first, second]) == EncodeProgress([a, b], {}, {a: 8, b: 20})
    assert all_encoded([first, second, third]) == EncodeProgress([b], {c: "no"}, {b: 20})


def test_each_item_is_encoded_in_the_name_of_its_requests() -> None:
    core = Core()
    core.add("one", [item(2, 5, 1)])
    core.add("two", [item(2, 5, 2)])
    core.add("three", [item(2, 5, 1)])
    noted: list[list[str]] = []
    core.executor.note_encoding = lambda request_ids: noted.append(list(request_ids))
    core.drain()
    assert {tuple(each) for each in noted if each} == {("one", "three"), ("two",)}
    assert noted[-1] == []
