# SPDX-License-Identifier: Apache-2.0
"""Random events against a whole scheduler, prefix cache and block pool; the oracle runs each request alone.

The null executor checks every plan and every slot that is read; the harness checks budget, rows, progress and the
integrity of the cache after every step.
"""

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from quire.adapters import LoRARequest
from quire.errors import ValidationError
from quire.pooling_params import PoolingParams
from quire.scheduler.request import RequestStatus
from tests.fixtures.media import parts, placed
from tests.scheduler.harness import VOCAB_SIZE, Engine, failing, make_config, make_spec, run_alone

STEMS = ([3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3], [2] * 16, [3, 1, 4, 1, 2, 7, 1, 8, 2, 8, 1, 8])
ADAPTERS = [LoRARequest(name, number, "path") for number, name in enumerate("abc", 1)]
KINDS = [
    ("full",),
    ("full", "full"),
    ("window 6",),
    ("full", "window 5"),
    ("full", "window 1", "window 9"),
    ("chunk 6",),
    ("full", "chunk 8"),
    ("state 1",),
    ("full", "state 2"),
]
KEYS = "xyz"
"""What a holder that exists in tests only holds requests for."""
keys = st.sampled_from(KEYS)
token_ids = st.integers(0, VOCAB_SIZE - 1)


@st.composite
def prompts(draw):
    """1 to 22 tokens, most of them a prefix that other prompts have too."""
    stem = draw(st.sampled_from(STEMS))[: draw(st.sampled_from([16, 12, 9, 8, 5, 0]))]
    return stem + draw(st.lists(token_ids, min_size=0 if stem else 1, max_size=6))


@st.composite
def parameters(draw):
    max_tokens = draw(st.integers(1, 12) | st.none())
    return {
        "max_tokens": max_tokens,
        "min_tokens": draw(st.integers(0, min(max_tokens or 6, 6))),
        "stop_token_ids": draw(st.lists(token_ids, max_size=2)),
        "eos_token_ids": draw(st.lists(token_ids, max_size=1)),
        "ignore_eos": draw(st.booleans()),
        "cache_salt": draw(st.sampled_from([None, None, "tenant"])),
        "logprobs": draw(st.sampled_from([None, 0, 2])),
        "prompt_logprobs": draw(st.sampled_from([None, None, None, 1])),
        "priority": draw(st.integers(-1, 2)),
        "tenant": draw(st.sampled_from("ab")),
        "pooling_params": draw(st.sampled_from([None, None, None, PoolingParams()])),
        "adapter_request": draw(st.sampled_from([None, None, *ADAPTERS])),
        "parts": draw(st.just([]) | parts),
        "lacks": draw(st.sampled_from([[], [], [], [], ["x"], ["y", "x"]])),
    }


class SchedulerMachine(RuleBasedStateMachine):
    """Requests come, go, are held and fail at any moment; at the end everyone left must finish as if alone.

    Attributes:
        num_looks: of all machines so far: how often the cache was looked at, once after each event.
    """

    num_looks = 0

    @initialize(
        slack=st.sampled_from([1, 2, 5, 20, 100]),
        kinds=st.sampled_from(KINDS),
        max_num_seqs=st.integers(1, 5),
        max_loras=st.integers(1, 3),
        max_num_batched_tokens=st.sampled_from([1, 3, 8, 32, 64]),
        block_size=st.sampled_from([1, 4, 5]),
        enable_prefix_caching=st.sampled_from([True, True, False]),
        enable_chunked_prefill=st.sampled_from([True, True, False]),
        num_host_blocks=st.sampled_from([0, 1, 5, 12, 100]),
        preemption_mode=st.sampled_from(["auto", "swap", "swap", "recompute"]),
        threshold=st.sampled_from([0, 0, 1, 5]),
        scheduling_policy=st.sampled_from(["fcfs", "priority", "fair"]),
        priority_ageing_s=st.sampled_from([0.0, 5.0]),
        max_drafts=st.sampled_from([0, 2, 7]),
        num_scheduler_steps=st.sampled_from([1, 2, 3, 8]),
        max_multi_step_s=st.sampled_from([1000.0, 1.0]),
    )
    def start(
        self,
        slack,
        kinds,
        enable_chunked_prefill,
        threshold,
        max_num_batched_tokens,
        block_size,
        num_host_blocks,
        max_drafts,
        **fields,
    ):
        """`slack` is what the pool has beyond the blocks of one request of 28 tokens."""
        if not enable_chunked_prefill:  # prompts must fit a step, which is checked before the scheduler
            max_num_batched_tokens, threshold = max(max_num_batched_tokens, 24), 0
        config = make_config(
            num_gpu_blocks_override=-(-27 // block_size) * len(kinds) + slack,
            block_size=block_size,
            max_model_len=40,
            enable_chunked_prefill=enable_chunked_prefill,
            long_prefill_token_threshold=threshold,
            enable_lora=True,
            max_cpu_loras=3,
            max_num_batched_tokens=max_num_batched_tokens,
            **fields,
        )
        self.engine = Engine(config, len(kinds), kinds, num_host_blocks, max_drafts)
        self.specs = [make_spec(kind, block_size) for kind in kinds]
        self.ended_early: set[str] = set()

    @property
    def unfinished(self) -> list[str]:
        return [name for name, request in self.engine.requests.items() if not request.is_finished]

    @rule(burst=st.lists(st.tuples(prompts(), parameters()), min_size=1, max_size=3))
    def add(self, burst):
        for prompt, params in burst:
            self._add(prompt, params)

    @precondition(lambda self: self.engine.requests)
    @rule(data=st.data(), params=parameters())
    def add_next_turn(self, data, params):
        """A prompt that goes on from what another request knows by now, or from a part of it."""
        name = data.draw(st.sampled_from(sorted(self.engine.requests)))
        known = self.engine.requests[name].token_ids[: data.draw(st.integers(1, 24))]
        if data.draw(st.booleans()):
            params |= {"media": [one for one in self.engine.requests[name].media if one.end <= len(known)]}
        self._add(known, params)

    @precondition(lambda self: self.unfinished)
    @rule(data=st.data(), siblings=st.lists(parameters(), min_size=1, max_size=3))
    def fork(self, data, siblings):
        """Others with the same prompt and keys as an unfinished request, whatever it is doing."""
        parent = self.engine.requests[data.draw(st.sampled_from(self.unfinished))]
        for params in siblings:
            salt = parent.extra_keys.cache_salt
            same = {
                "cache_salt": salt,
                "adapter_request": parent.adapter_request,
                "fork_of": parent.request_id,
            }
            self._add(parent.prompt_token_ids, {**params, **same, "media": parent.media})

    def _add(self, prompt, params):
        params = dict(params)
        config = self.engine.config
        name = f"r{len(self.engine.requests)}"
        longest = min(len(prompt) + (params["max_tokens"] or 40), config.model.max_model_len) - 1
        if params["pooling_params"] is not None:
            longest = len(prompt)
        chunk = config.scheduler.max_num_batched_tokens
        parts = params.pop("parts")
        params.setdefault("media", placed(parts, len(prompt), chunk))
        needed = sum(spec.max_blocks(longest, chunk) for spec in self.specs)
        if needed <= config.cache.num_gpu_blocks_override - 1:
            self.engine.add(name, prompt, **params)
        else:
            with pytest.raises(ValidationError):
                self.engine.add(name, prompt, **params)

    @rule(count=st.integers(1, 12))
    def step(self, count):
        for _ in range(count):
            self.engine.step()

    @precondition(lambda self: self.unfinished)
    @rule(data=st.data(), disturb=st.sampled_from(["abort", "abort_in_flight", "fail"]))
    def disturb(self, data, disturb):
        getattr(self, disturb)(data)

    def abort(self, data):
        names = data.draw(st.lists(st.sampled_from(self.unfinished), min_size=1, max_size=2))
        self.engine.abort(*names, "unknown")
        self.ended_early.update(names)

    def abort_in_flight(self, data):
        if not self.engine.has_ready():
            return
        plan = self.engine.schedule()
        output = self.engine.executor.execute_model(plan)
        self.abort(data)
        self.engine.finish_step(plan, output)

    def fail(self, data):
        if not self.engine.has_ready():
            return
        plan = self.engine.schedule()
        output = self.engine.executor.execute_model(plan)
        name = data.draw(st.sampled_from(sorted(plan.num_scheduled_tokens)))
        self.engine.finish_step(plan, failing(output, name))
        assert self.engine.last(name).finish_reason == "error"
        self.ended_early.add(name)

    @precondition(lambda self: self.unfinished)
    @rule(data=st.data(), key=keys)
    def hold(self, data, key):
        """A request that waits for its first or its next start comes to need something."""
        name = data.draw(st.sampled_from(self.unfinished))
        assert self.engine.hold(name, key) == (self.engine.requests[name].status is not RequestStatus.RUNNING)

    @rule(key=keys)
    def release(self, key):
        self.engine.release(key)

    @rule()
    def reset_prefix_cache(self):
        stats = self.engine.scheduler.stats()
        idle = stats.num_running == 0 and stats.host_cache_usage == 0.0
        assert self.engine.scheduler.reset_prefix_cache() == idle

    @invariant()
    def the_cache_is_whole(self):
        if hasattr(self, "engine"):
            self.engine.scheduler.check_integrity()
            SchedulerMachine.num_looks += 1

    def teardown(self):
        if not hasattr(self, "engine"):
            return
        for key in KEYS:
            self.engine.release(key)
        self.engine.drain()
        for name, request in self.engine.requests.items():
            last = self.engine.last(name)
            assert last.finish_reason is not None
            alone = run_alone(request, self.engine.config)
            if name in self.ended_early:
                assert self.engine.tokens(name) == alone.new_token_ids[: len(self.engine.tokens(name))]
            else:
                assert self.engine.tokens(name) == alone.new_token_ids
                assert (last.finish_reason, last.stop_reason) == (alone.finish_reason, alone.stop_reason)
                assert last.pooled == alone.pooled


def options(**numbers):
    quiet = [HealthCheck.too_slow, HealthCheck.filter_too_much]
    return settings(derandomize=True, deadline=None, suppress_health_check=quiet, **numbers)


def machine(**numbers):
    case = type("Case", (SchedulerMachine.TestCase,), {})
    case.settings = options(**numbers)
    return case


pytestmark = pytest.mark.item(55)
TestScheduler = machine(max_examples=12, stateful_step_count=30)


@pytest.mark.more
def test_ten_thousand_events():
    before = SchedulerMachine.num_looks
    run_state_machine_as_test(
        SchedulerMachine, settings=options(max_examples=220, stateful_step_count=60, database=None)
    )
    assert SchedulerMachine.num_looks - before >= 10_000


TestSchedulerAtLength = pytest.mark.soak(machine(max_examples=4000, stateful_step_count=100))
