# SPDX-License-Identifier: Apache-2.0
"""The runner on an asynchronous device gives what it gives on the host, however many steps are in flight."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quire import LLM
from quire.adapters import LoRARequest
from quire.executor import uniproc
from quire.kernels import cpu, ops, triton
from quire.kernels.attention_metadata import SamplingLimits
from quire.kernels.reference_sampling import sample_by_gumbel
from quire.kernels.triton import launch
from quire.kv_cache.grouping import group_layers
from quire.kv_cache.spec import FullAttentionSpec, KVCacheConfig
from quire.sampling_params import BeamSearchParams, SamplingParams
from quire.scheduler.output import ScheduledRequest, SchedulerOutput
from quire.worker.calibration import Rehearsal, rehearsed_groups
from quire.worker.devices import make_device
from quire.worker.model_runner import ModelRunner
from tests.end_to_end.test_overlapped import Job, facts, jobs_of_all_kinds, overlapped, serve
from tests.fixtures.quick import quick
from tests.fixtures.tiny_models import oracle_of
from tests.lora.adapters import linear_shapes, write_adapter
from tests.worker.fake_gpu import POISON, FakeGpu
from tests.worker.harness import (
    BLOCK_SIZE,
    NUM_BLOCKS,
    Driver,
    Sequence,
    ToyModel,
    request,
    tiny_config,
    toy_runner,
)
from tests.worker.harness import POISON as BAD_TOKEN

PARAMS = [
    SamplingParams(temperature=0, max_tokens=99, logprobs=2, prompt_logprobs=1),
    SamplingParams(
        seed=9, max_tokens=99, top_p=0.8, frequency_penalty=0.7, repetition_penalty=1.1, logprobs=3
    ),
    SamplingParams(
        seed=-3, max_tokens=99, top_k=5, temperature=0.6, min_tokens=4, allowed_token_ids=[1, 2, 3, 9]
    ),
]
PARAMS = [params.clone(logit_bias={BAD_TOKEN: -100.0}) for params in PARAMS]


CAPTURED = [
    SamplingParams(temperature=0, max_tokens=99),
    SamplingParams(seed=9, max_tokens=99),
    SamplingParams(seed=4, max_tokens=99, temperature=0.7, top_k=6, top_p=0.9, min_p=0.01),
    SamplingParams(temperature=0, max_tokens=99, frequency_penalty=1.5, presence_penalty=0.5),
    SamplingParams(seed=7, max_tokens=99, top_p=0.8, repetition_penalty=1.3),
    SamplingParams(seed=8, max_tokens=99, frequency_penalty=-0.5),
]
"""Of every kind that graphs choose for."""


def driven(
    driver: Driver, num_steps: int = 12, params: list[SamplingParams] = PARAMS, num_drafts: int = 0
) -> dict[str, Sequence]:
    """Requests of all kinds come, are cut into chunks and preempted, the same way in every driver.

    Guesses of up to so many tokens are verified, some of them right.
    """
    rng = random.Random(5)
    for number in range(max(5, len(params))):
        prompt = [rng.randrange(22) for _ in range(rng.randint(1, 12))]
        driver.submit(f"r{number}", prompt, params[number % len(params)])
    for turn in range(num_steps):
        names = [name for name in driver.sequences if rng.random() < 0.8]
        if names and turn % 4 == 3:
            driver.preempt(names[0])
        pending = {name: pending_tokens(driver.sequences[name]) for name in names}
        for name in names if num_drafts else ():
            sequence = driver.sequences[name]
            drafts = [
                rng.choice([0, 3, 5, sequence.token_ids[-1]]) for _ in range(rng.randint(0, num_drafts))
            ]
            if pending[name] == 1 and drafts:
                driver.drafts[name] = drafts
        driver.step({name: rng.randint(1, count) for name, count in pending.items()})
    return driver.sequences


def clean_runner(**args: Any) -> ModelRunner:
    """Return a runner of a model that gives numbers whatever it reads."""
    return toy_runner(ToyModel(poison=-1), **args)


def pending_tokens(sequence: Sequence) -> int:
    return len(sequence.token_ids) - sequence.num_computed_tokens


@pytest.mark.parametrize("options", [{"enforce_eager": True}, {"cuda_graph_capture": "lazy"}, {}], ids=str)
def test_steps_equal_the_hosts(options: dict[str, Any]) -> None:
    got = driven(Driver(toy_runner(device=FakeGpu(), **options)))
    assert got == driven(Driver(toy_runner()))


@pytest.mark.parametrize("part", [slice(1), slice(1, 2), slice(3, 4), slice(None)], ids=str)
def test_tokens_chosen_by_graphs_are_those_of_eager_steps(part: slice) -> None:
    gpu, params = FakeGpu(), CAPTURED[part]
    got = driven(Driver(clean_runner(device=gpu)), 12, params)
    assert got == driven(Driver(clean_runner()), 12, params)
    assert len(gpu.replayed_choices) >= 9  # in some steps no request has computed all of its tokens


@pytest.mark.parametrize("capture", ["start", "lazy"])
def test_steps_that_verify_drafts_are_replayed(capture: str) -> None:
    gpu, params = FakeGpu(), CAPTURED if capture == "lazy" else CAPTURED[:1]
    speculation = {"method": "ngram", "num_speculative_tokens": 3}
    runner = clean_runner(
        device=gpu,
        speculative_config=speculation,
        cuda_graph_capture=capture,
        prefill_graph_sizes=[0],
        cudagraph_capture_sizes=[1, 4, 8],
    )
    runner.parts[0].speculation = None  # drafts are ours
    runner.prepare()
    if capture == "start":
        assert gpu.captured == [32, 24, 16, 16, 12, 8, 8, 4, 4, 3, 2, 1]
    got = driven(Driver(runner), 14, params, num_drafts=3)
    assert got == driven(Driver(clean_runner()), 14, params, num_drafts=3)
    assert {12, 16, 24, 32} & {*gpu.replayed}
    assert {*gpu.replayed_choices} - {1, 2, 4, 8}


def test_steps_with_prompts_are_replayed_if_a_shape_holds_them() -> None:
    gpu = FakeGpu()
    runner = clean_runner(device=gpu, prefill_graph_sizes=[16, 40, 100], cudagraph_capture_sizes=[1])
    runner.prepare()
    assert gpu.captured == [40, 16, 1]
    drivers = Driver(runner), Driver(clean_runner())
    for driver in drivers:
        driver.submit("a", [3] * 12, CAPTURED[2])
        driver.submit("b", [5] * 45, CAPTURED[0])
        driver.step({"a": 12})
        driver.step({"a": 1, "b": 30})  # one generates, one has a piece of its prompt
        driver.step({"b": 15, "a": 1})
        driver.step({"a": 1, "b": 1})  # a decode step, which no shape of one has room for
    assert gpu.replayed == [16, 40, 16]
    assert drivers[0].sequences == drivers[1].sequences


def test_steps_with_varying_features_sample_without_graphs() -> None:
    for params in (
        SamplingParams(temperature=0, logprobs=1),
        SamplingParams(temperature=0, logit_bias={3: 1.0}),
        SamplingParams(temperature=0, allowed_token_ids=[1, 2]),
    ):
        gpu = FakeGpu()
        driver = Driver(clean_runner(device=gpu))
        driver.submit("a", [2, 3], params.clone(max_tokens=9))
        driver.generate("a", 3)
        assert (gpu.replayed, gpu.replayed_choices) == ([64, 1, 1], [])


def test_processed_logprobs_are_the_hosts() -> None:
    params = [one.clone(logprobs=3) for one in CAPTURED]
    args = {"logprobs_mode": "processed_logprobs"}
    got = driven(Driver(clean_runner(device=FakeGpu(), **args)), 8, params)
    assert got == driven(Driver(clean_runner(**args)), 8, params)


def test_decode_steps_replay_the_smallest_fitting_graph() -> None:
    gpu = FakeGpu()
    runner = toy_runner(device=gpu, prefill_graph_sizes=[0])
    runner.prepare()
    assert gpu.captured == [8, 4, 2, 1]
    assert len(gpu.pools) == 1
    driver = Driver(runner)
    for number in range(3):
        driver.submit(f"r{number}", [1 + number] * (4 + number), PARAMS[0])
    driver.step({"r0": 4, "r1": 5, "r2": 6})
    assert gpu.replayed == []
    driver.step({"r0": 1, "r1": 1, "r2": 1})
    driver.step({"r1": 1})
    driver.step({"r2": 1, "r0": 1})
    assert gpu.replayed == [4, 1, 2]


def test_a_graph_is_captured_when_it_is_needed() -> None:
    gpu = FakeGpu()
    runner = toy_runner(device=gpu, cuda_graph_capture="lazy")
    runner.prepare()
    driver = Driver(runner)
    driver.submit("r", [2, 3], SamplingParams(temperature=0))
    driver.generate("r", 4)
    assert (gpu.captured, gpu.replayed) == ([64, 1], [64, 1, 1, 1])
    assert (gpu.captured_choices, gpu.replayed_choices) == ([1], [1, 1, 1, 1])


@pytest.mark.parametrize(("capture", "captured"), [("start", [64, 8, 4, 2, 1]), ("lazy", [64])])
def test_rehearsal_measures_graphs_without_using_them(capture: str, captured: list[int]) -> None:
    gpu = FakeGpu()
    specs = {"layer": FullAttentionSpec(BLOCK_SIZE, 1, 1, 4)}
    config = tiny_config(cuda_graph_capture=capture)
    kv_config = KVCacheConfig(NUM_BLOCKS, group_layers(specs, 64), specs)
    runner = ModelRunner(ToyModel(), config, kv_config, gpu, is_rehearsal=True)
    driver = Driver(runner)
    driver.submit("r", [2, 3], CAPTURED[0])
    driver.generate("r", 3)
    assert gpu.captured == []
    runner.prepare()
    assert gpu.captured == captured
    assert {*gpu.captured_choices} == ({8, 4, 2, 1} if capture == "start" else {8})
    driver.generate("r", 5)
    assert (gpu.replayed, gpu.replayed_choices) == ([], [])


def test_graph_sizes_are_as_requested_and_a_larger_step_is_eager() -> None:
    gpu = FakeGpu()
    runner = toy_runner(device=gpu, cudagraph_capture_sizes=[2, 1, 100], prefill_graph_sizes=[0])
    runner.prepare()
    assert gpu.captured == [2, 1]
    driver = Driver(runner)
    for name in "abc":
        driver.submit(name, [4], PARAMS[0])
    driver.step(dict.fromkeys("abc", 1))
    assert gpu.replayed == []


def test_no_tensor_is_read_before_the_result_is_requested() -> None:
    """Steps are launched on tokens that the host has not seen, and their results come as late as that."""
    plain, ahead = Driver(toy_runner()), Driver(toy_runner(device=FakeGpu()))
    for driver in (plain, ahead):
        driver.submit("a", [5, 6, 7], PARAMS[0])
        driver.submit("b", [8], PARAMS[1])
    expected = [plain.step({"a": 3, "b": 1})] + [plain.step({"a": 1, "b": 1}) for _ in range(5)]
    steps = [ahead.launch({"a": 3, "b": 1})] + [ahead.launch({"a": 1, "b": 1}) for _ in range(5)]
    row = ahead.runner.batch.row("a")
    assert ahead.runner.batch.token_ids[row, :5].tolist() == [5, 6, 7, 0, 0]
    assert steps[0].sampled is not None
    assert (steps[0].sampled.parts[0].codes == POISON).all()
    for step, want in zip(steps, expected, strict=True):
        got = step.result()
        assert (got.sampled_token_ids, got.logprobs) == (want.sampled_token_ids, want.logprobs)
        assert got.prompt_logprobs == want.prompt_logprobs


def test_a_row_that_changed_hands_keeps_its_new_tokens() -> None:
    """The token of a request that ended while it was in flight goes nowhere."""
    driver = Driver(toy_runner(device=FakeGpu(), max_num_seqs=1))
    driver.submit("old", [1, 2], PARAMS[0])
    step = driver.launch({"old": 2})
    driver.finish("old")
    driver.submit("new", [3, 4, 5], PARAMS[1])
    driver.launch({"new": 2})
    step.result()
    row = driver.runner.batch.row("new")
    assert driver.runner.batch.token_ids[row, :3].tolist() == [3, 4, 5]


def test_penalties_see_the_tokens_in_flight() -> None:
    plain, ahead = Driver(toy_runner()), Driver(toy_runner(device=FakeGpu()))
    sampling = SamplingParams(
        temperature=0,
        max_tokens=9,
        frequency_penalty=2.0,
        presence_penalty=2.0,
        logit_bias={BAD_TOKEN: -100.0},
    )
    for driver in (plain, ahead):
        driver.submit("a", [1, 2, 3], sampling)
    expected = plain.generate("a", 8).output
    steps = [ahead.launch({"a": 3})] + [ahead.launch({"a": 1}) for _ in range(7)]
    assert [step.result().sampled_token_ids["a"] for step in steps] == [[token] for token in expected]


def test_penalties_count_the_drafts_before_each_sample() -> None:
    """Right ones and wrong ones."""
    plain, ahead = Driver(toy_runner()), Driver(toy_runner(device=FakeGpu()))
    sampling = PARAMS[1].clone(frequency_penalty=-1.5)
    told = Driver(toy_runner())
    told.submit("a", [1, 2, 3], sampling)
    output = told.generate("a", 12).output
    for driver in (plain, ahead):
        driver.submit("a", [1, 2, 3], sampling)
        driver.step({"a": 3})
        while len(driver.sequences["a"].output) < 12:
            count = len(driver.sequences["a"].output)
            driver.drafts["a"] = [*output[count : count + 2], (output[min(count + 2, 11)] + 1) % 22]
            driver.step({"a": 1})
    assert plain.sequences == ahead.sequences
    assert ahead.sequences["a"].output[:12] == output


def test_failures_of_steps_in_flight() -> None:
    driver = Driver(toy_runner(device=FakeGpu()))
    driver.submit("bad", [1, BAD_TOKEN], PARAMS[0])
    driver.submit("good", [1, 2], PARAMS[0])
    both = [driver.launch({"bad": 2, "good": 2}), driver.launch({"bad": 1, "good": 1})]
    results = [step.result() for step in both]
    assert [list(result.failed) for result in results] == [["bad"], []]
    assert list(results[0].sampled_token_ids) == ["good"]
    unusable = driver.runner.launch(
        SchedulerOutput(9, [request([99], request_id="odd")], [ScheduledRequest("odd", 0, 1, 1, [])], [])
    )
    assert list(unusable.result().failed) == ["odd"]


@pytest.fixture
def on_fake_gpu(monkeypatch: pytest.MonkeyPatch, restore_threads: None) -> list[FakeGpu]:
    devices: list[FakeGpu] = []

    def make(name: str) -> FakeGpu:
        devices.append(FakeGpu())
        return devices[-1]

    monkeypatch.setattr(uniproc, "make_device", make)
    return devices


@pytest.mark.more
def test_an_engine_equals_the_hosts(
    tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, on_fake_gpu: list[FakeGpu]
) -> None:
    args: dict[str, Any] = {"model": str(tiny_model("llama-tied-bias")), "max_model_len": 96}
    args |= {"max_num_batched_tokens": 24, "max_num_seqs": 8, "num_gpu_blocks_override": 16}
    got, stats = serve(jobs_of_all_kinds(), **args, **overlapped(3))
    assert stats["num_preemptions"] > 0
    assert len(set(on_fake_gpu[0].replayed)) > 2
    monkeypatch.undo()
    expected, _ = serve(jobs_of_all_kinds(), **args)
    assert facts(got) == facts(expected)


def sample_as_on_a_gpu(
    logits: Tensor, settings: Tensor, keys: Tensor | None, limits: SamplingLimits
) -> Tensor:
    keys = torch.zeros(len(logits), 2, dtype=torch.int64) if keys is None else keys
    return sample_by_gumbel(logits, settings, keys)


@pytest.mark.soak
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, for infinities that are meant
@pytest.mark.parametrize("name", ["llama", "mixtral", "deepseekv3", "bamba"])
def test_an_engine_on_the_gpus_kernels_gives_the_hosts_tokens(
    name: str, tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, on_fake_gpu: list[FakeGpu]
) -> None:
    """Every op of every step in Triton's interpreter, steps that decode and steps with prompts from graphs."""
    args = {
        "model": str(tiny_model(name)),
        "max_model_len": 64,
        "max_num_seqs": 2,
        "max_num_batched_tokens": 32,
    }
    jobs = [
        Job([5, 9, 11, 40, 7], SamplingParams(temperature=0, max_tokens=6, logprobs=1)),
        Job([8, 3, 4], SamplingParams(seed=4, max_tokens=5, top_p=0.9)),
    ]
    draws = {(torch.device("cpu"), torch.float32): sample_as_on_a_gpu}
    with monkeypatch.context() as host:
        host.setattr(uniproc, "make_device", make_device)
        host.setattr(ops.sample_tokens, "_functions", draws)  # the host, but for how a GPU draws
        expected, _ = serve(jobs, **args)
    monkeypatch.setattr(triton, "DEVICE_TYPES", ("cpu",))
    monkeypatch.setattr(cpu, "supports", lambda dtype: False)
    monkeypatch.setattr(launch, "num_processors", lambda device: 4)
    for op in ops.TABLE.values():
        monkeypatch.setattr(op, "_functions", {})
    got, _ = serve(jobs, **args, **overlapped(2), prefill_graph_sizes=[7, 32])
    assert {1, 2, 7} <= {*on_fake_gpu[0].replayed}
    assert on_fake_gpu[0].replayed_choices
    tokens = [[output.outputs[0].token_ids for output in outputs] for outputs in (got, expected)]
    assert tokens[0] == tokens[1]


def test_swapped_blocks_come_back(
    tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, on_fake_gpu: list[FakeGpu]
) -> None:
    args: dict[str, Any] = {"model": str(tiny_model("llama")), "max_model_len": 96, "max_num_seqs": 8}
    args |= {"num_gpu_blocks_override": 12, "enable_prefix_caching": False}
    jobs = jobs_of_all_kinds()[:8]
    swapping = {"swap_space": 1e-3, "preemption_mode": "swap"}
    got, stats = serve(jobs, **args, **swapping, **overlapped(2))
    assert stats["num_preemptions"] > 0
    monkeypatch.undo()
    assert facts(got) == facts(serve(jobs, **args)[0])


def test_beams_equal_the_hosts(
    tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, on_fake_gpu: list[FakeGpu]
) -> None:
    args: dict[str, Any] = {"model": str(tiny_model("llama")), "max_model_len": 96, "max_num_seqs": 8}
    prompts, params = [[5, 9, 11, 40, 7], list(range(3, 30))], BeamSearchParams(3, 20, ignore_eos=True)

    def searched(**more: Any) -> list[Any]:
        llm = LLM(**args, **more)
        try:
            found = llm.beam_search(prompts, params)
        finally:
            llm.shutdown()
        return [[(one.tokens, one.cum_logprob) for one in output.sequences] for output in found]

    got = searched(**overlapped(2))
    assert on_fake_gpu
    monkeypatch.undo()
    assert got == searched()


@pytest.mark.more
def test_rows_with_adapters_equal_the_hosts(
    tiny_model: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    on_fake_gpu: list[FakeGpu],
) -> None:
    """Slots change hands while steps are in flight; steps with adapters, and without any, are replayed from graphs."""
    with_head = linear_shapes(oracle_of(tiny_model("llama")))
    shapes = {name: shape for name, shape in with_head.items() if name != "lm_head"}
    adapters = [
        LoRARequest(name, number, str(write_adapter(tmp_path / name, parts, seed=number)))
        for number, (name, parts) in enumerate([("one", shapes), ("two", with_head), ("three", shapes)], 1)
    ]
    jobs = jobs_of_all_kinds()[:10]
    jobs += [Job([9, 8 + i], SamplingParams(max_tokens=24, seed=i), None, None) for i in range(2)]
    jobs = [job._replace(adapter=([None, *adapters] * 3)[i]) for i, job in enumerate(jobs)]
    args: dict[str, Any] = {"model": str(tiny_model("llama")), "max_model_len": 96, "max_num_seqs": 8}
    args |= {"max_num_batched_tokens": 24, "enable_lora": True, "max_loras": 2, "max_cpu_loras": 3}
    got, _ = serve(jobs, **args, **overlapped(3))
    assert on_fake_gpu[0].captured[-8:] == [8, 8, 4, 4, 2, 2, 1, 1]
    assert (
        on_fake_gpu[0].captured_choices.count(8) == 2 * 2 * 6
    )  # rehearsed and made, without adapters and with
    assert on_fake_gpu[0].replayed_choices
    assert on_fake_gpu[0].replayed
    monkeypatch.undo()
    expected, _ = serve(jobs, **args)
    assert facts(got) == facts(expected)
    bare, _ = serve([job._replace(adapter=None) for job in jobs], **args)
    assert facts(got) != facts(bare)


@pytest.mark.parametrize("name", quick(["gemma3", "opt", "qwen2-window"], ["gemma3"]))
def test_families_equal_the_hosts(
    name: str, tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, on_fake_gpu: list[FakeGpu]
) -> None:
    """Windows, groups of layers and learned positions."""
    args = {"model": str(tiny_model(name)), "max_model_len": 64, "max_num_seqs": 4}
    jobs = jobs_of_all_kinds()[:4]
    got, _ = serve(jobs, **args, **overlapped(2))
    groups = rehearsed_groups({"layer": FullAttentionSpec(16, 1, 8, 4)})
    assert on_fake_gpu[0].num_rehearsals == 2 + len(
        Rehearsal(
            tiny_config(max_model_len=64, max_num_seqs=4), 1 << 40, 1 << 40, groups, every_variant=True
        ).plans()
    )
    for captured in (on_fake_gpu[0].captured, on_fake_gpu[0].captured_choices):
        rehearsed, made = captured[: len(captured) // 2], captured[len(captured) // 2 :]
        assert rehearsed == made  # so what all of them take was known before the cache was sized
    monkeypatch.undo()
    assert facts(got) == facts(serve(jobs, **args)[0])
