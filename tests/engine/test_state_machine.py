# SPDX-License-Identifier: Apache-2.0
"""Random events against the whole engine, plain and overlapped, under every policy; the oracle runs each request alone.

The null executor checks every plan, and every slot that is read, at the latest moment at which a worker may begin.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from quire.errors import ValidationError
from quire.kv_cache.spec import SlidingWindowSpec
from quire.sampling_params import RequestOutputKind, SamplingParams
from quire.scheduler.output import Pooled, RequestUpdate
from quire.scheduler.scheduler import POLICIES
from tests.engine.whole_engine import (
    LETTERS,
    MAX_MODEL_LEN,
    VOCAB_SIZE,
    Media,
    WholeEngine,
    alone,
    check_result,
    pooled_alone,
)
from tests.fixtures.media import Part, bytes_of, digest_of, parts, placed

STEMS = ([3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3], [2] * 16, [3, 1, 4, 1, 2, 7, 1, 8, 2, 8, 1, 8])
GIB = 2**30
WINDOW = 6
EMBEDDING_BYTES = 4 * 16  # of the model of letters
token_ids = st.integers(0, VOCAB_SIZE - 1)
tenants = st.sampled_from(["a", "b", "c"])
KEYS = ["x", "y"]
needs = st.sampled_from([[], [], [], [], ["x"], ["y", "x"]])


@st.composite
def prompts(draw: Any) -> list[int]:
    """1 to 22 tokens, most of them a prefix that other prompts have too."""
    stem = draw(st.sampled_from(STEMS))[: draw(st.sampled_from([16, 12, 9, 8, 5, 0]))]
    return stem + draw(st.lists(token_ids, min_size=0 if stem else 1, max_size=6))


@st.composite
def parameters(draw: Any) -> SamplingParams:
    max_tokens = draw(st.integers(1, 12) | st.none())
    return SamplingParams(
        n=draw(st.sampled_from([1, 1, 1, 2, 3])),
        temperature=draw(st.sampled_from([0.0, 1.0])),
        seed=draw(st.integers(0, 3)),
        max_tokens=max_tokens,
        min_tokens=draw(st.integers(0, min(max_tokens or 6, 6))),
        stop=draw(st.lists(st.text(LETTERS, min_size=1, max_size=2), max_size=3)),
        include_stop_str_in_output=draw(st.booleans()),
        stop_token_ids=draw(st.lists(token_ids, max_size=3)),
        ignore_eos=draw(st.booleans()),
        logprobs=draw(st.sampled_from([None, None, 0, 2])),
        prompt_logprobs=draw(st.sampled_from([None, None, None, 1])),
        output_kind=draw(st.sampled_from(RequestOutputKind)),
    )


Wanted = SamplingParams | None
"""What of a prompt: tokens, or None, to pool it."""
wanted = st.integers(0, 3).flatmap(lambda share: parameters() if share else st.none())

loops = st.sampled_from(
    [
        {},
        *({"async_scheduling": True, "max_steps_in_flight": steps} for steps in (1, 2, 2, 4, 4)),
        *({"pipeline_parallel_size": 2, "max_steps_in_flight": steps} for steps in (0, 0, 3)),
        *({"num_scheduler_steps": rounds} for rounds in (2, 3, 8)),
    ]
)
host_tiers = st.sampled_from(
    [
        *([{}] * 2),
        *({"preemption_mode": mode, "host_blocks": 3} for mode in ("auto", "swap")),
        *({"preemption_mode": mode, "host_blocks": 100} for mode in ("auto", "swap", "swap", "recompute")),
    ]
)


def blocks_per_request(window: int | None, block_size: int, chunk: int) -> int:
    """Blocks that a request of the greatest length holds at most."""
    full = -(-MAX_MODEL_LEN // block_size)
    return full + (
        SlidingWindowSpec(block_size, 1, 8, 4, window).max_blocks(MAX_MODEL_LEN, chunk) if window else 0
    )


class EngineMachine(RuleBasedStateMachine):
    """Requests come, go and fail at any moment; at the end everyone left must have ended as if alone.

    Attributes:
        seen: counts of all engines so far, which say what was really tried.
        swaps_always: whether every engine has a roomy host tier and uses it, whatever is drawn.
    """

    seen: Counter[str] = Counter()
    swaps_always = False

    @initialize(
        loop=loops,
        host_tier=host_tiers,
        window=st.sampled_from([None, None, WINDOW]),
        policy=st.sampled_from(sorted(POLICIES)),
        slack=st.sampled_from([0, 0, 1, 2, 5, 40]),
        max_num_seqs=st.integers(1, 5),
        max_num_batched_tokens=st.sampled_from([5, 8, 32, 64]),
        block_size=st.sampled_from([1, 4, 5]),
        enable_prefix_caching=st.sampled_from([True, True, False]),
        enable_chunked_prefill=st.sampled_from([True, True, False]),
        long_prefill_token_threshold=st.sampled_from([0, 0, 4]),
        max_drafts=st.sampled_from([0, 0, 3, 8]),
        encoder_bytes=st.sampled_from([EMBEDDING_BYTES * 9, EMBEDDING_BYTES * 15, GIB]),
    )
    def start(
        self,
        loop: dict[str, Any],
        host_tier: dict[str, Any],
        window: int | None,
        slack: int,
        block_size: int,
        policy: str,
        encoder_bytes: int,
        **fields: Any,
    ) -> None:
        """`slack` is what the pool has beyond the blocks of one request of the greatest length."""
        if not fields["enable_chunked_prefill"]:  # then a step must hold every prompt
            fields["max_num_batched_tokens"] = max(fields["max_num_batched_tokens"], 24)
            fields["long_prefill_token_threshold"] = 0
        if "pipeline_parallel_size" in loop:  # which wants two layers
            window = WINDOW
        needed = blocks_per_request(window, block_size, fields["max_num_batched_tokens"])
        fields |= loop | {"scheduling_policy": policy, "block_size": block_size, "window": window}
        if self.swaps_always:
            host_tier = {"preemption_mode": "swap", "host_blocks": 100}
        if host_tier:
            block_bytes = 2 * block_size * 2 * 8 * 4  # keys and values of 2 heads of 8 float32
            fields["swap_space"] = host_tier["host_blocks"] * block_bytes / GIB
            fields["preemption_mode"] = host_tier["preemption_mode"]
        fields |= {"encoder_cache_gb": encoder_bytes / GIB, "enable_prompt_embeds": True}
        self.policy, self.encoder_bytes = policy, encoder_bytes
        self.max_num_batched_tokens = fields["max_num_batched_tokens"]
        self.engine = WholeEngine(num_gpu_blocks_override=1 + needed + slack, **fields)
        self.requests: dict[str, tuple[list[int], Wanted]] = {}
        self.media: dict[str, Media] = {}
        self.disturbed: set[str] = set()

    @property
    def running(self) -> list[str]:
        return [name for name in self.requests if self.engine.is_running(name)]

    @rule(
        burst=st.lists(
            st.tuples(prompts(), wanted, st.integers(-1, 1), tenants, needs, st.just([]) | parts),
            min_size=1,
            max_size=4,
        )
    )
    def add(self, burst: list[tuple[list[int], Wanted, int, str, list[str], list[Part]]]) -> None:
        for *request, media in burst:
            self._add(*request, media=placed(media, len(request[0]), self.max_num_batched_tokens))

    @precondition(lambda self: any(self.engine.outputs.values()))
    @rule(data=st.data(), params=wanted)
    def add_next_turn(self, data: st.DataObject, params: Wanted) -> None:
        """A prompt that goes on from what another request has got by now, or from a part of it."""
        name = data.draw(st.sampled_from(sorted(name for name, outs in self.engine.outputs.items() if outs)))
        told = self.requests[name][0] + self.engine.outputs[name][-1].outputs[0].token_ids
        told = told[: data.draw(st.integers(1, 24))]
        media = [one for one in self.media[name] if one.end <= len(told)]
        self._add(told, params, 0, "next turn", [], media=media)

    def _add(
        self,
        prompt: list[int],
        params: Wanted,
        priority: int,
        tenant: str,
        needs: list[str],
        *,
        media: Media,
    ) -> None:
        name = f"r{len(self.requests)}"
        self.engine.holder.expect(name, needs)
        priority = priority if self.policy == "priority" else 0
        if bytes_of(media, EMBEDDING_BYTES) > self.encoder_bytes:
            self._add_too_much(prompt, media)
            media = []
        if params is not None and params.prompt_logprobs is not None:
            media = [one for one in media if one.kind != "embeds"]
        if params is None:
            self.engine.pool(name, prompt, priority=priority, tenant=tenant, media=list(media))
        else:
            self.engine.add(name, prompt, params, media, priority=priority, tenant=tenant)
        self.requests[name], self.media[name] = (prompt, params), media
        self.seen["num_media"] += len(media)
        if any(one.digest in self.engine.executor.failing_media for one in media):
            self.disturbed.add(name)

    def _add_too_much(self, prompt: list[int], media: Media) -> None:
        """Check that a request whose embeddings exceed the encoder cache is refused."""
        with pytest.raises(ValidationError, match="encoder cache"):
            self.engine.add("too much", prompt, SamplingParams(), media)

    @rule(content=st.integers(0, 3), length=st.integers(1, 9))
    def damage(self, content: int, length: int) -> None:
        """From now on a content cannot be encoded; requests that have it already go on."""
        digest = digest_of(100 * content + length)
        self.engine.executor.failing_media.add(digest)
        for name, media in self.media.items():
            if self.engine.is_running(name) and any(one.digest == digest for one in media):
                self.disturbed.add(name)

    @rule()
    def mend(self) -> None:
        self.engine.executor.failing_media.clear()

    @rule()
    def reset_encoder_cache(self) -> None:
        self.engine.media.reset()

    @rule(key=st.sampled_from(KEYS))
    def provide(self, key: str) -> None:
        """Provide the key that some requests are held for."""
        self.engine.holder.provide(key)

    @rule(count=st.integers(1, 16))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.engine.step()

    @precondition(lambda self: self.running)
    @rule(data=st.data(), how=st.sampled_from(["abort", "fail"]))
    def disturb(self, data: st.DataObject, how: str) -> None:
        name = data.draw(st.sampled_from(self.running))
        self.disturbed.add(name)
        if how == "fail":
            self.engine.fail(name)
        else:
            self.engine.abort(name)

    @rule()
    def reset_prefix_cache(self) -> None:
        self.engine.engine.reset_prefix_cache()

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        self.engine.drain(max_steps=self._bound_on_steps())
        counts = msgspec.to_builtins(self.engine.core.scheduler.stats())
        self.seen.update({name: count for name, count in counts.items() if isinstance(count, int | float)})
        self.seen["num_steps"] += self.engine.num_steps
        self.seen["num_held"] += self.engine.holder.num_held
        self.seen["num_accepted"] += self.engine.num_accepted
        told = {name: self.engine.result(name) for name in self.engine.outputs}
        num_told = sum(len(one.token_ids) for output in told.values() for one in output.outputs)
        assert self.engine.num_generated == num_told, (
            "a token is counted that nobody gets, or none that somebody does"
        )
        for name, (prompt, params) in self.requests.items():
            disturbed, media = name in self.disturbed, self.media[name]
            if params is None:
                self._check_pooled(self.engine.pooled[name], pooled_alone(prompt, media), disturbed=disturbed)
            else:
                check_result(told[name], alone(prompt, params, media), disturbed=disturbed)

    def _check_pooled(self, last: RequestUpdate | None, expected: Pooled, *, disturbed: bool) -> None:
        """The core says nothing to who has aborted a request."""
        if last is not None and last.finish_reason == "stop":
            assert (last.pooled, last.new_token_ids) == (expected, [])
            self.seen["num_pooled"] += 1
            self.seen["num_preempted_to_pool"] += last.num_preemptions
        else:
            assert disturbed
            assert last is None or (last.finish_reason, last.pooled) == ("error", None)

    def _bound_on_steps(self) -> int:
        """The first running request advances in every step, or its last result is at most 4 steps away.

        Each of its up to 3 items takes up to 3 steps to encode.
        """
        running = [self.requests[name][1] for name in self.running]
        num_sequences = sum(1 if params is None else params.n for params in running)
        return num_sequences * (MAX_MODEL_LEN + 4 + 9) + 10


class SwappingMachine(EngineMachine):
    swaps_always = True


def options(max_examples: int, num_events: int, **more: Any) -> settings:
    quiet = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]
    return settings(
        max_examples=max_examples,
        stateful_step_count=num_events,
        deadline=None,
        database=None,
        report_multiple_bugs=False,
        suppress_health_check=quiet,
        **more,
    )


@pytest.mark.item(33, 56)
def test_every_output_is_that_of_the_request_alone() -> None:
    """Some 3,000 steps: drafts are accepted, prompts pooled, and requests preempted, most to the host."""
    for machine in (EngineMachine, SwappingMachine):
        run_state_machine_as_test(machine, settings=options(12, 30, derandomize=True))
    seen = EngineMachine.seen
    # Hypothesis draws constants from whatever modules are imported, so how many there are of each is not fixed.
    often = (seen["num_accepted"], seen["num_pooled"], seen["num_held"], seen["num_media"])
    preempted = (seen["num_swaps"], seen["num_preemptions"] - seen["num_swaps"])
    assert min(often) > 10, seen
    assert min(preempted) > 0, seen


@pytest.mark.item(56)
@pytest.mark.soak
@pytest.mark.parametrize("number", range(10))
def test_at_length(number: int) -> None:
    """Some 40,000 steps for each seed. Seed 3 once found a preempted request that was planned twice."""
    seeded = seed(number)(type("Seeded", (EngineMachine,), {}))
    run_state_machine_as_test(seeded, settings=options(60, 90))
