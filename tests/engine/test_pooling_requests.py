# SPDX-License-Identifier: Apache-2.0
"""Requests for what is pooled of a prompt, through both engines and over the death of a core."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire.config import EngineConfig
from quire.config.pooling import PoolingSpec
from quire.engine.async_llm import AsyncLLM
from quire.engine.llm_engine import LLMEngine
from quire.engine.prompt_forms import parts_of
from quire.engine.startup import load_tokenizer, prepare
from quire.errors import (
    ContextLengthError,
    DeadlineError,
    EngineError,
    QueueFullError,
    UnavailableError,
    ValidationError,
)
from quire.metrics.stats import IterationStats, StatLogger
from quire.pooling.inputs import PoolingInputs
from quire.pooling.outputs import PoolingOutput, PoolingRequestOutput
from quire.pooling_params import PoolingParams, TextOptions
from quire.sampling_params import SamplingParams
from quire.scheduler.output import SchedulerStats
from tests.engine.test_front_end import Cores
from tests.fixtures.pooling import (
    CLS,
    CONTEXT,
    CROSS_ENCODER,
    EMBEDDER,
    REWARDS,
    SEP,
    Pools,
)

EMBED = PoolingParams()
PROMPTS = [[1, 2, 3], [4], [1, 2, 3, 4, 5, 6, 7], [9, 9]]


class PooledCores(Cores):
    """A front end of a pooling model."""

    def __init__(self, pools: Pools, monkeypatch: pytest.MonkeyPatch, **args: Any) -> None:
        def prepared(config: EngineConfig, usage: Any) -> EngineConfig:
            return dataclasses.replace(prepare(config, usage), pooling=EMBEDDER)

        monkeypatch.setattr("tests.engine.test_front_end.prepare", prepared)
        super().__init__(**args)

    def pool(self, label: str, prompt: Any, **terms: Any) -> str:
        outputs = self.outputs.setdefault(label, [])
        tokenized = self.front_end.input_processor.tokenize(prompt)
        name, messages = self.front_end.submit(label, tokenized, EMBED, outputs.append, **terms)
        self.send(messages)
        return name

    def pooled(self, label: str) -> PoolingRequestOutput[PoolingOutput]:
        (output,) = self.outputs[label]
        assert isinstance(output, PoolingRequestOutput)
        return output


@pytest.fixture
def cores(pools: Pools, monkeypatch: pytest.MonkeyPatch) -> PooledCores:
    return PooledCores(pools, monkeypatch)


class Ledger(StatLogger):
    def __init__(self) -> None:
        self.total = IterationStats()

    def record(self, iteration: IterationStats, scheduler: SchedulerStats | None, core: int) -> None:
        self.total.num_prompt_tokens += iteration.num_prompt_tokens
        self.total.finished += iteration.finished
        self.total.ended += iteration.ended


# The front end


def test_a_prompt_that_is_pooled_has_one_output(cores: PooledCores) -> None:
    ledger = Ledger()
    cores.front_end.stat_loggers.add(ledger)
    cores.pool("a", PROMPTS[0])
    assert len(cores.front_end.output_processor.waiting) == 1
    cores.run()
    output = cores.pooled("a")
    assert (output.finish_reason, output.outputs.data.shape, output.prompt_token_ids) == (
        "stop",
        (8,),
        [1, 2, 3],
    )
    assert output.outputs.data.dtype == np.float32
    assert len(cores.front_end) == len(cores.front_end.output_processor.waiting) == 0
    (finished,), (ended,) = ledger.total.finished, ledger.total.ended
    assert (ledger.total.num_prompt_tokens, finished.is_pooled, finished.num_generation_tokens) == (
        3,
        True,
        0,
    )
    assert (ended.finish_reasons, ended.num_prompt_tokens) == (["stop"], 3)


def test_a_core_that_takes_over_pools_the_same(cores: PooledCores) -> None:
    for number, prompt in enumerate(PROMPTS):
        cores.pool(f"before{number}", prompt)
        cores.pool(f"after{number}", prompt)
    cores.run()
    for number, prompt in enumerate(PROMPTS):
        cores.pool(f"lost{number}", prompt)
    cores.replace(0)
    cores.run()
    for number in range(len(PROMPTS)):
        assert cores.pooled(f"lost{number}").outputs == cores.pooled(f"before{number}").outputs


def test_aborted_late_or_failed_pooling_returns_only_its_error(cores: PooledCores) -> None:
    for label in "abc":
        cores.pool(label, PROMPTS[2], timeout_s=5.0 if label == "b" else None)
    cores.send(cores.front_end.abort("a"))
    cores.now += 6
    cores.send(cores.front_end.expire(cores.now))
    cores.run()
    assert [cores.pooled(label).finish_reason for label in "abc"] == ["abort", "timeout", "stop"]
    assert [cores.pooled(label).outputs.data.size for label in "abc"] == [0, 0, 8]
    with pytest.raises(EngineError, match="was aborted in the engine"):
        cores.pooled("a").check()
    with pytest.raises(DeadlineError, match="time was over"):
        cores.pooled("b").check()
    cores.pooled("c").check()


def test_a_prompt_may_fill_the_context_and_no_more(cores: PooledCores) -> None:
    limit = cores.config.model.max_model_len
    cores.pool("full", [1] * limit)
    cores.run()
    assert cores.pooled("full").finish_reason == "stop"
    with pytest.raises(ContextLengthError, match=rf"but there are {limit + 1} tokens in the prompt; the"):
        cores.pool("long", [1] * (limit + 1))
    with pytest.raises(ValidationError, match="token ids are integers in"):
        cores.pool("unknown", [10**6])


def test_a_pooling_model_does_not_generate(cores: PooledCores) -> None:
    with pytest.raises(ValidationError, match="this model does not generate; its tasks are embed, token"):
        cores.add("a", [1])


def test_a_generating_model_does_not_pool() -> None:
    front_end = Cores().front_end
    prompt = front_end.input_processor.tokenize([1])
    with pytest.raises(
        ValidationError, match=r"this is a generating model without pooling; start it with --runner"
    ):
        front_end.submit("a", prompt, EMBED, print)
    with pytest.raises(ValidationError, match="pairs of texts are for pooling models"):
        front_end.input_processor.tokenize({"prompt": "a", "second_prompt": "b"})


def test_core_receives_the_start_of_a_second_text(cores: PooledCores) -> None:
    cores.pool("a", {"prompt_token_ids": [1, 2, 3], "second_text_start": 2})
    (request,) = cores.cores[0].scheduler._queues.by_id.values()
    assert request.second_text_start == 2
    cores.run()


# Checks against the model


def inputs_of(spec: PoolingSpec, directory: Path) -> PoolingInputs:
    config = prepare(EngineConfig.from_args(model=str(directory)), "offline")
    config = dataclasses.replace(config, pooling=spec)
    return PoolingInputs(config, spec, load_tokenizer(config))


@pytest.mark.parametrize(
    ("spec", "params", "message"),
    [
        (EMBEDDER, {"task": "classify"}, "task is classify, but this model is served for embed, token_embed"),
        (
            EMBEDDER,
            {"dimensions": 3},
            "dimensions is 3, but this model's embeddings can have 2, 4, 8 numbers",
        ),
        (dataclasses.replace(EMBEDDER, matryoshka=()), {"dimensions": 2}, "embeddings can have 8"),
        (dataclasses.replace(EMBEDDER, matryoshka=(0,)), {"dimensions": 9}, "can have 1 to 8 numbers"),
        (CROSS_ENCODER, {"dimensions": 1}, "dimensions are of embeddings, and the task is classify"),
        (EMBEDDER, {"step_tag_id": 1}, "step_tag_id is for step reward models"),
        (REWARDS, {"step_tag_id": 99}, r"token ids are integers in \[0, 29\]"),
        (REWARDS, {"returned_token_ids": [0, 2]}, "returned_token_ids has 2, but the model gives 2 numbers"),
    ],
)
def test_unsupported_pooling_params_are_refused(
    spec: PoolingSpec, params: dict[str, Any], message: str, pair_model_dir: Path
) -> None:
    with pytest.raises(ValidationError, match=message):
        inputs_of(spec, pair_model_dir).validated(PoolingParams(**params))


def test_supported_pooling_params_are_resolved(pair_model_dir: Path) -> None:
    assert inputs_of(EMBEDDER, pair_model_dir).validated(EMBED).task == "embed"
    any_size = dataclasses.replace(EMBEDDER, matryoshka=(0,))
    for spec, size in ((EMBEDDER, 4), (EMBEDDER, 8), (any_size, 5)):
        assert inputs_of(spec, pair_model_dir).validated(PoolingParams(dimensions=size)).dimensions == size
    assert inputs_of(REWARDS, pair_model_dir).validated(EMBED).task == "token_classify"


def test_a_text_gets_the_prompt_that_is_named_or_the_models_own(pair_model_dir: Path) -> None:
    inputs = inputs_of(EMBEDDER, pair_model_dir)

    def ids(name: str | None) -> list[int]:
        return inputs.tokenize(parts_of("x"), TextOptions(prompt_name=name)).token_ids

    assert ids(None) == ids("") == [CLS, 23, SEP]
    assert ids("query") == [CLS, 16, 27, 26, 23, SEP]
    inputs.spec = dataclasses.replace(EMBEDDER, default_prompt="passage")
    assert (ids(None)[1], ids("")[1]) == (15, 23)
    with pytest.raises(ValidationError, match="has no prompt 'essay'; it has query, passage"):
        ids("essay")
    assert inputs.prompt_named(("document", "passage")) == "passage"
    assert inputs.prompt_named(("nothing",)) is None


def test_a_composed_pair_that_gets_no_shorter_is_refused(pair_model_dir: Path) -> None:
    """Be it that a template leaves the document out, or that each rest of it has as many tokens as all of it."""
    inputs = inputs_of(CROSS_ENCODER, pair_model_dir)
    cut = TextOptions(8)
    for compose in (lambda *_: [1] * 9, lambda _one, two, _told: [1] * (9 + (len(two) == 1))):
        with pytest.raises(ValidationError, match="no room for the second text"):
            list(inputs.composed([("a", "abcdef")], cut, compose))
    (found,) = inputs.composed([("a", "abcdef")], cut, lambda one, two, _told: [1] * (2 + 2 * len(two)))
    assert len(found.token_ids) <= 8


def test_a_prompt_that_is_not_pooled_is_known_by_its_length(pair_model_dir: Path) -> None:
    spec = dataclasses.replace(EMBEDDER, include_prompt=False)
    inputs, query = inputs_of(spec, pair_model_dir), TextOptions(prompt_name="query")
    assert inputs.tokenize(parts_of("x"), query).instruction_length == 4, "with what stands before any text"
    assert inputs.tokenize(parts_of("x")).instruction_length is None
    first, *others = inputs.windows("x" * 2 * CONTEXT, query)
    assert (first.instruction_length, {one.instruction_length for one in others}) == (4, {None})
    shortest = TextOptions(3, prompt_name="query")
    assert inputs.tokenize(parts_of("x"), shortest).instruction_length == 2, "something is always pooled"
    same = parts_of(inputs.tokenize(parts_of("x"), query).as_prompt())
    assert inputs.tokenize(same).instruction_length == 4
    with pytest.raises(ValidationError, match="with an instruction cannot be cut"):
        inputs.tokenize(same, TextOptions(5))
    inputs.spec = EMBEDDER
    assert inputs.tokenize(parts_of("x"), query).instruction_length is None


def test_text_is_truncated_only_if_requested(pair_model_dir: Path) -> None:
    inputs, long = inputs_of(EMBEDDER, pair_model_dir), "abc" * 100
    assert len(inputs.tokenize(parts_of(long)).token_ids) == len(long) + 2
    for most, length in ((-1, CONTEXT), (5, 5)):
        cut = inputs.tokenize(parts_of(long), TextOptions(most)).token_ids
        assert (len(cut), cut[0], cut[-1]) == (length, CLS, SEP)
    left = TextOptions(5, "left")
    assert inputs.tokenize(parts_of("abcdef"), left).token_ids == [CLS, 3, 4, 5, SEP]
    assert inputs.tokenize(parts_of([1, 2, 3, 4, 5, 6]), left).token_ids == [2, 3, 4, 5, 6]
    for bad in ({"truncate_prompt_tokens": 0}, {"truncate_prompt_tokens": -2}, {"truncation_side": "middle"}):
        with pytest.raises(ValidationError, match=next(iter(bad))):
            TextOptions(**bad)  # type: ignore[arg-type]


def test_pair_is_one_prompt_with_the_start_of_the_second_text(pair_model_dir: Path) -> None:
    inputs = inputs_of(CROSS_ENCODER, pair_model_dir)
    pair = inputs.tokenize(parts_of({"prompt": "ab", "second_prompt": "c"}))
    assert (pair.token_ids, pair.second_text_start) == ([CLS, 0, 1, SEP, 2, SEP], 4)
    same = inputs.tokenize(parts_of({"prompt_token_ids": pair.token_ids, "second_text_start": 4}))
    assert (same.token_ids, same.second_text_start) == (pair.token_ids, 4)
    for bad, message in (
        ({"prompt": "a", "second_prompt": ""}, "must not be empty"),
        ({"prompt_token_ids": [1], "second_prompt": "a"}, "needs 'prompt'"),
        ({"prompt_token_ids": [1, 2], "second_text_start": 2}, "index of one of"),
        (
            {"prompt_token_ids": [1, 2], "instruction_length": 0},
            "'instruction_length' must be the index of one of",
        ),
        ({"second_prompt": "a"}, "needs 'prompt'"),
    ):
        with pytest.raises(ValidationError, match=message):
            inputs.tokenize(parts_of(bad))  # type: ignore[arg-type]


# The engines


def engine_args(directory: Path, **args: Any) -> EngineConfig:
    fixed = {"model": str(directory), "distributed_executor_backend": "null", "num_gpu_blocks_override": 65}
    return EngineConfig.from_args(**fixed, **args)


def test_the_synchronous_engine_pools(pools: Pools, pair_model_dir: Path) -> None:
    pools(EMBEDDER)
    engine = LLMEngine(engine_args(pair_model_dir))
    for number, prompt in enumerate(PROMPTS):
        engine.add_request(str(number), list(prompt), EMBED)
    engine.abort_request("3")
    outputs: dict[str, PoolingRequestOutput[PoolingOutput]] = {}
    while engine.has_unfinished_requests():
        outputs |= {output.request_id: output for output in engine.step()}
    assert [outputs[str(i)].finish_reason for i in range(4)] == ["stop", "stop", "stop", "abort"]
    assert len({outputs[str(i)].outputs.data.tobytes() for i in range(3)}) == 3
    engine.shutdown()


@pytest.fixture
async def engine(pools: Pools, pair_model_dir: Path) -> AsyncIterator[AsyncLLM]:
    pools(EMBEDDER)
    engine = AsyncLLM(engine_args(pair_model_dir, max_num_seqs=2, max_num_queued_reqs=6), in_process=True)
    await engine.wait_ready()
    yield engine
    await engine.shutdown()


async def one(engine: AsyncLLM, prompt: Any, **terms: Any) -> PoolingRequestOutput[PoolingOutput]:
    (output,) = [output async for output in engine.encode(prompt, EMBED, "x", **terms)]
    return output


async def test_many_prompts_match_each_prompt_alone(engine: AsyncLLM) -> None:
    prompts: list[Any] = [[n % 7, n % 5, *range(n % 9)] for n in range(50)]
    together = await engine.encode_all(prompts, EMBED, [f"r-{n}" for n in range(50)])
    for prompt, output in zip(prompts, together, strict=True):
        assert output.outputs == (await one(engine, prompt)).outputs
    assert [output.request_id for output in together] == [f"r-{n}" for n in range(50)]
    assert engine.num_unfinished_requests() == 0


async def test_tokenization_options_are_applied(engine: AsyncLLM) -> None:
    async def ids(label: str, **terms: Any) -> list[int]:
        async for output in engine.encode("hello", EMBED, label, **terms):
            return output.prompt_token_ids
        raise AssertionError("one output comes")

    whole = await ids("a")
    bare = await ids("b", options=TextOptions(add_special_tokens=False))
    assert whole == [CLS, *bare, SEP]
    assert await ids("c", tokenization_kwargs={"add_special_tokens": False}) == bare
    assert await ids("d", options=TextOptions(truncate_prompt_tokens=4)) == [*whole[:3], SEP]


async def test_at_most_two_batches_are_in_the_engine(engine: AsyncLLM) -> None:
    seen = []
    submit = engine._front_end.submit

    def watched(*args: Any, **kwargs: Any) -> Any:
        seen.append(engine.num_unfinished_requests())
        return submit(*args, **kwargs)

    engine._front_end.submit = watched  # type: ignore[method-assign]
    await engine.encode_all([[1, n % 9] for n in range(40)], EMBED, ["x"] * 40)
    assert (len(seen), max(seen)) == (40, 3)


async def test_an_error_of_one_prompt_ends_all_and_leaves_nothing(engine: AsyncLLM) -> None:
    with pytest.raises(ValidationError, match="token ids are integers"):
        await engine.encode_all([[1]] * 9 + [[10**6]], EMBED, ["x"] * 10)
    with pytest.raises(DeadlineError):
        await engine.encode_all([[1]] * 20, EMBED, ["x"] * 20, timeout_s=1e-9)
    task = asyncio.create_task(engine.encode_all([[1, 2]] * 2000, EMBED, ["y"] * 2000))
    await asyncio.sleep(0)
    await engine.abort("y")
    with pytest.raises(EngineError, match="aborted"):
        await task
    task = asyncio.create_task(engine.encode_all([[1, 2]] * 2000, EMBED, ["z"] * 2000))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert engine.num_unfinished_requests() == 0
    assert (await one(engine, "abc")).outputs.data.shape == (8,)


async def test_a_full_queue_refuses_and_a_dead_engine_too(engine: AsyncLLM) -> None:
    engine.output_processor.waiting.add("somebody", 5)
    engine._front_end.config = engine.config.evolve(max_num_queued_reqs=3)
    with pytest.raises(QueueFullError, match="the queue is full"):
        await engine.encode_all([[1]] * 3, EMBED, ["x"] * 3)
    await engine.shutdown()
    with pytest.raises((EngineError, UnavailableError)):
        await one(engine, [1])


async def test_pooling_params_do_not_generate(engine: AsyncLLM) -> None:
    with pytest.raises(ValidationError, match="this model does not generate"):
        async for _ in engine.generate([1], SamplingParams(), "x"):
            pass
