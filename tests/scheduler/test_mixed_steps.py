# SPDX-License-Identifier: Apache-2.0
"""Prompts beside requests that generate: steps end in time, and no prompt waits for ever."""

from __future__ import annotations

from typing import Any

import pytest

from quire.config import EngineConfig
from quire.engine.startup import MAX_SERVER_MIXED_STEP_S, prepare
from quire.errors import ConfigError
from quire.scheduler.mixed_steps import ALONE, FIRST_TOKENS, LEAST_TOKENS, MixedStepLimit
from quire.scheduler.step import StepPlan
from tests.scheduler.harness import Engine, make_config

MOST = 512
HEADLESS = {"data_parallel_start_rank": 1, "data_parallel_size": 2, "data_parallel_size_local": 1}
TOKEN_S, WEIGHTS_S = 0.002, 0.031


class TimedEngine(Engine):
    """Engine whose steps take a pass over the weights, and some time for each token."""

    def finish_step(self, plan: Any, output: Any) -> None:
        self.now += (
            WEIGHTS_S + TOKEN_S * plan.total_num_scheduled_tokens - 0.5
        )  # the half second is the base's
        super().finish_step(plan, output)
        self.now += 0.5


def engine_of(max_s: float, **args: Any) -> TimedEngine:
    sizes = {"max_num_batched_tokens": MOST, "max_model_len": 2048, "num_gpu_blocks_override": 2049}
    return TimedEngine(make_config(max_mixed_step_s=max_s, **sizes | args))


def prompt_tokens(engine: Engine) -> int:
    """Run a step; return the tokens in it of prompts."""
    return sum(n for n in engine.step().num_scheduled_tokens.values() if n > 1)


@pytest.mark.parametrize("max_s", [0.0, 0.02, 0.25, 1.7e308])
def test_mixed_steps_end_in_time_and_prompts_end(max_s: float) -> None:
    engine = engine_of(max_s)
    engine.add("stream", range(5), max_tokens=90)
    engine.step()
    for name in ("one", "two"):
        engine.add(name, [7] * 600, max_tokens=2, cache_salt=name)
    engine.step()
    seen = [prompt_tokens(engine) for _ in range(6)]
    if not 0.0 < max_s < 1.0:  # no limit
        assert seen[0] > MOST - 4
    else:
        expected = int((max_s - WEIGHTS_S) / TOKEN_S)
        assert all(LEAST_TOKENS <= n <= max(expected * 1.2, LEAST_TOKENS) for n in seen[1:])
    engine.drain()
    assert len(engine.tokens("stream")) == 90
    assert [len(engine.tokens(name)) for name in ("one", "two")] == [2, 2]


def test_first_mixed_step_has_a_fixed_limit() -> None:
    engine = engine_of(0.25)
    engine.add("stream", range(5))
    engine.step()
    engine.add("long", [7] * 600)
    assert engine.step().num_scheduled_tokens == {"stream": 1, "long": FIRST_TOKENS}


def test_prompts_alone_have_longer_steps() -> None:
    engine = engine_of(0.05)
    for name in ("one", "two"):
        engine.add(name, [7] * 1200, max_tokens=1, cache_salt=name)
    seen = [engine.step().num_scheduled_tokens for _ in range(13)]
    assert seen[0] == {"one": FIRST_TOKENS}
    expected = (ALONE * 0.05 - WEIGHTS_S) / TOKEN_S
    assert all(0.8 * expected <= sum(tokens.values()) <= 1.2 * expected for tokens in seen[1:])
    engine.drain()


def test_prompts_alone_take_whole_steps_without_a_limit() -> None:
    engine = engine_of(0.0)
    engine.add("long", [7] * 600)
    assert engine.step().num_scheduled_tokens == {"long": MOST}


def test_step_planned_ahead_takes_from_the_end_of_the_last() -> None:
    limit = MixedStepLimit(MOST, 0.25)
    for planned_ts, now in ((0.0, 1.0), (0.0, 2.0)):  # both planned at once, a second each
        step = StepPlan(0, planned_ts, MOST, MOST, MOST)
        step.num_prompt_tokens = 400
        limit.note(step, now)
        assert limit.num_tokens(is_mixed=True) == 100


def test_server_limits_mixed_steps_by_default() -> None:
    for usage, args, expected in (
        ("server", {}, MAX_SERVER_MIXED_STEP_S),
        ("headless", HEADLESS, MAX_SERVER_MIXED_STEP_S),
        ("server", {"max_mixed_step_s": 0.0}, 0.0),
        ("server", {"enable_chunked_prefill": False}, None),
        ("offline", {}, None),
    ):
        config = prepare(EngineConfig.from_args(**args), usage)  # type: ignore[arg-type]
        assert config.scheduler.max_mixed_step_s == expected
    with pytest.raises(ConfigError, match="--max-mixed-step-s splits prompts"):
        prepare(EngineConfig.from_args(max_mixed_step_s=0.1, enable_chunked_prefill=False), "server")
