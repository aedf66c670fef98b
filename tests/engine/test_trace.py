# SPDX-License-Identifier: Apache-2.0
"""Recorded runs: what is written, what is read after a crash, and that a replay makes the same plans."""

from __future__ import annotations

import dataclasses
import io
import logging
import stat
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.bench.recorded_run import summarize
from quire.config import EngineConfig
from quire.engine import trace as trace_module
from quire.engine.llm_engine import LLMEngine
from quire.engine.trace import (
    MAGIC,
    Ended,
    Frame,
    Planned,
    Reset,
    Trace,
    TraceHeader,
    TraceWriter,
    read_trace,
    recorded,
    replay,
)
from quire.errors import ConfigError, EngineError
from quire.kv_cache.managers import MANAGERS
from quire.kv_cache.spec import SPECS, SwapCosts, decode_kv_config, encode_kv_config
from quire.pooling_params import PoolingParams
from quire.sampling_params import SamplingParams
from quire.scheduler.output import SchedulerOutput
from quire.scheduler.scheduler import Scheduler
from tests.scheduler.harness import Engine, failing, make_config, make_kv_config

STEM = [5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53, 59, 61, 67, 71]


def make_engine(model_dir: Path, file: Path, **args: Any) -> LLMEngine:
    """Room for about three of the requests below, in blocks of four tokens."""
    fields: dict[str, Any] = {
        "num_gpu_blocks_override": 27,
        "block_size": 4,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 24,
        "max_model_len": 64,
        "long_prefill_token_threshold": 10,
    }
    return LLMEngine(
        EngineConfig.from_args(model=str(model_dir), record_trace=str(file), **{**fields, **args})
    )


def run(engine: LLMEngine) -> None:
    """Requests that share a prefix, come late, are aborted, and do not all fit."""
    for number in range(10):
        params = SamplingParams(max_tokens=24, ignore_eos=number % 3 > 0, seed=number, min_tokens=number)
        urgency = {"priority": -number % 4} if engine.config.scheduler.scheduling_policy == "priority" else {}
        engine.add_request(f"r{number}", {"prompt_token_ids": [*STEM, number]}, params, **urgency)
        for _ in range(2):
            engine.step()
    engine.abort_request(["r8", "unknown"])
    engine.call_core("reset_prefix_cache")
    engine.add_request("late", {"prompt_token_ids": [*STEM, 99]}, SamplingParams(n=2, seed=1, logprobs=2))
    while engine.has_unfinished_requests():
        engine.step()
    assert engine.call_core("reset_prefix_cache")
    engine.shutdown()


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Every plan that any scheduler makes, in the order in which they are made."""
    made: list[bytes] = []
    schedule = Scheduler.schedule

    def remembered(self: Scheduler, now: float) -> SchedulerOutput:
        plan = schedule(self, now)
        made.append(msgspec.msgpack.encode(plan))
        return plan

    monkeypatch.setattr(Scheduler, "schedule", remembered)
    return made


@pytest.fixture(scope="module")
def recording(tiny_model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of a real model; not to be changed."""
    file = tmp_path_factory.mktemp("recording") / "run.trace"
    run(make_engine(tiny_model("llama"), file))
    return file


OVERLAPPED = {"async_scheduling": True, "max_steps_in_flight": 3}
SWAPPED = {"swap_space": 0.001, "preemption_mode": "swap"}


@pytest.mark.parametrize(
    ("family", "policy", "more"),
    [
        ("llama", "fcfs", {"num_scheduler_steps": 1}),
        ("llama", "priority", OVERLAPPED),
        ("llama", "fcfs", OVERLAPPED | SWAPPED),
        ("gemma3", "fair", {}),
        ("gemma3", "fair", OVERLAPPED | SWAPPED),
    ],
)
def test_a_recorded_run_of_a_real_model_gives_the_same_plans(
    family: str,
    policy: str,
    more: dict[str, Any],
    tiny_model: Callable[[str], Path],
    tmp_path: Path,
    plans: list[bytes],
) -> None:
    run(make_engine(tiny_model(family), tmp_path / "run.trace", scheduling_policy=policy, **more))
    recorded_plans = list(plans)
    swapped = [plan for plan in recorded_plans if msgspec.msgpack.decode(plan)["swap_ins"]]
    assert bool(swapped) == ("swap_space" in more)
    trace = read_trace(tmp_path / "run.trace")
    assert [msgspec.msgpack.encode(plan) for plan in replay(trace)] == recorded_plans
    assert plans == recorded_plans * 2
    assert trace.num_lost_bytes == 0
    summary = summarize(trace)
    assert summary.num_preemptions > 0
    assert summary.num_cached_tokens > 0
    assert summary.num_ended["abort"] == 1
    assert sum(summary.num_ended.values()) == summary.num_added == 12


def test_sums_of_a_run(recording: Path) -> None:
    trace = read_trace(recording)
    summary = summarize(trace)
    ends = [frame for frame in trace.frames if isinstance(frame, Ended)]
    assert sum(summary.waits_ns.values()) == sum(ns for end in ends for _, ns in end.waits) > 0
    assert summary.num_computed_tokens > summary.num_sampled_tokens > 100
    assert all(seconds > 0 for seconds in summary.step_times)
    assert sum(summary.step_times) <= summary.duration
    assert [frame.done for frame in trace.frames if isinstance(frame, Reset)] == [False, True]


class ForgetfulScheduler(Scheduler):
    """Forgets prefixes by itself now and then, which is no event: it will do so again."""

    def schedule(self, now: float) -> SchedulerOutput:
        plan = super().schedule(now)
        if plan.step_id % 5 == 0:
            self.reset_prefix_cache()
        return plan


def test_custom_scheduler_is_recorded(
    null_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plans: list[bytes]
) -> None:
    monkeypatch.setitem(sys.modules, "users_module", sys.modules[__name__])
    engine = make_engine(
        null_model_dir,
        tmp_path / "run.trace",
        scheduler_cls="users_module:ForgetfulScheduler",
        distributed_executor_backend="null",
    )
    engine.add_request("a", {"prompt_token_ids": STEM}, SamplingParams(max_tokens=30, ignore_eos=True))
    while engine.has_unfinished_requests():
        engine.step()
    engine.shutdown()
    trace, num_plans = read_trace(tmp_path / "run.trace"), len(plans)
    assert not any(isinstance(frame, Reset) for frame in trace.frames)
    assert len(list(replay(trace))) == num_plans > 0
    assert plans[:num_plans] == plans[num_plans:]


def test_a_run_that_was_cut_off_is_read_to_its_last_whole_frame(recording: Path, tmp_path: Path) -> None:
    data, whole = recording.read_bytes(), read_trace(recording)
    cut = tmp_path / "cut.trace"
    for size in range(len(data) - 300, len(data)):
        cut.write_bytes(data[:size])
        trace = read_trace(cut)
        assert trace.frames == whole.frames[: len(trace.frames)]
        assert len(trace.frames) < len(whole.frames)
    num_planned = sum(isinstance(frame, Planned) for frame in trace.frames)
    assert len(list(replay(trace))) == num_planned
    assert summarize(trace).lines()[-1].startswith("the run was cut off")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "is no recorded run"),
        (b"quire-trace\n\x05\0\0\0abc", "is no recorded run"),
        (b"PK\x03\x04" * 10, "is no recorded run"),
        (MAGIC + b"\x05\0\0\0\xff\xff\xff\xff\xff", "is damaged"),
        (MAGIC + b"\x0a\0\0\0" + msgspec.msgpack.encode({"version": 9}), "of version 9, not 7"),
    ],
)
def test_file_that_is_no_trace_is_refused(data: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "run.trace").write_bytes(data)
    with pytest.raises(ConfigError, match=message):
        read_trace(tmp_path / "run.trace")


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        read_trace(tmp_path / "run.trace")


def changed(trace: Trace, kind: type, **fields: Any) -> Trace:
    """The same with one of its frames changed, the third of a kind."""
    frames = list(trace.frames)
    place = [n for n, frame in enumerate(frames) if isinstance(frame, kind)][2]
    frames[place] = msgspec.structs.replace(frames[place], **fields)
    return msgspec.structs.replace(trace, frames=frames)


@pytest.mark.parametrize(
    ("kind", "fields"),
    [(Planned, {"digest": b"0" * 16}), (Planned, {"num_tokens": [999]}), (Ended, {"waits": []})],
)
def test_a_replay_stops_where_it_differs(kind: type, fields: dict[str, Any], recording: Path) -> None:
    trace = changed(read_trace(recording), kind, **fields)
    with pytest.raises(EngineError, match=rf"frame \d+ was {kind.__name__}.*the replay gives"):
        list(replay(trace))


def test_plans_of_another_version_are_not_replayed(recording: Path) -> None:
    trace = read_trace(recording)
    old = msgspec.structs.replace(trace.header, step_protocol_version=0)
    with pytest.raises(ConfigError, match="version 0"):
        list(replay(msgspec.structs.replace(trace, header=old)))


def test_a_recording_is_kept_private_and_never_overwritten(null_model_dir: Path, tmp_path: Path) -> None:
    file = tmp_path / "run.trace"
    for _ in range(3):
        make_engine(null_model_dir, file, distributed_executor_backend="null").shutdown()
    files = sorted(tmp_path.iterdir())
    assert [path.name for path in files] == ["run.trace", "run.trace.2", "run.trace.3"]
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}
    assert read_trace(file).frames == []


def test_unwritable_trace_path_is_an_error_at_start(null_model_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--record-trace: cannot write .*No such file"):
        make_engine(null_model_dir, tmp_path / "no/run.trace", distributed_executor_backend="null")


class FullDisk(io.BytesIO):
    """Takes so many bytes."""

    name = "run.trace"
    room = 3000

    def write(self, data: Any) -> int:
        if self.tell() + len(data) > self.room:
            raise OSError(28, "No space left on device")
        return super().write(data)


@pytest.mark.item(53)
def test_a_full_disk_ends_the_recording_and_not_the_run(
    null_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(trace_module, "open", lambda *_, **__: FullDisk(), raising=False)
    engine = make_engine(null_model_dir, tmp_path / "run.trace", distributed_executor_backend="null")
    with caplog.at_level(logging.ERROR):
        run(engine)
    assert caplog.text.count("the recording ends here, the run goes on") == 1


def test_every_kind_of_cache_comes_back_from_a_header() -> None:
    kv_config = make_kv_config(make_config(), num_groups=2, num_host_blocks=7)
    kv_config = dataclasses.replace(kv_config, swap_costs=SwapCosts(1e10 / 3, 77.7))
    assert decode_kv_config(encode_kv_config(kv_config)) == kv_config
    assert set(SPECS.values()) == set(MANAGERS)


def test_unknown_cache_kind_is_an_error(recording: Path) -> None:
    plain = read_trace(recording).header.kv_config
    with pytest.raises(ConfigError, match="unknown"):
        decode_kv_config({**plain, "layer_specs": {"layers.0": ("MagicSpec", {})}})


def test_trace_header_takes_kilobytes_and_decode_steps_few_bytes(recording: Path) -> None:
    trace = read_trace(recording)
    file = io.BytesIO()
    TraceWriter(file, trace.header)
    assert isinstance(trace.header, TraceHeader)
    assert file.tell() < 8192
    plans: Iterator[Planned] = (frame for frame in trace.frames if isinstance(frame, Planned))
    decode = [plan for plan in plans if plan.num_tokens == [1] * 3 and not plan.new_block_ids]
    assert max(len(msgspec.msgpack.encode(plan)) for plan in decode) < 80


adds = st.tuples(
    st.integers(1, len(STEM)),
    st.integers(1, 9),
    st.integers(-1, 2),
    st.sampled_from("ab"),
    st.booleans(),
    st.sampled_from([[], [], [], ["x"], ["x", "y"]]),
)
moments = st.lists(
    st.one_of(
        st.tuples(st.just("add"), adds),
        st.tuples(st.just("step"), st.integers(1, 6)),
        st.tuples(st.just("release"), st.sampled_from("xy")),
        st.tuples(st.sampled_from(["abort", "abort in flight", "fail", "hold", "reset"]), st.integers(0, 9)),
    ),
    min_size=2,
    max_size=20,
)


class Recording(list[Any]):
    """Frames in memory, as a file would give them back."""

    def write(self, frame: Any) -> None:
        self.append(msgspec.msgpack.decode(msgspec.msgpack.encode(frame), type=Frame))


def play(engine: Engine, kind: str, value: Any) -> None:
    """Let one of the moments happen to an engine."""
    live = [name for name, request in engine.requests.items() if not request.is_finished]
    if kind == "add":
        length, max_tokens, priority, tenant, logprobs, lacks = value
        fields = {"priority": priority, "tenant": tenant, "prompt_logprobs": 1 if logprobs else None}
        fields["lacks"] = lacks
        if max_tokens == 9:
            fields["pooling_params"] = PoolingParams()
        engine.add(
            f"r{len(engine.requests)}", STEM[:length], max_tokens=max_tokens, eos_token_ids=[3], **fields
        )
    elif kind == "step":
        for _ in range(value):
            engine.step()
    elif kind == "release":
        engine.release(value)
    elif kind == "reset":
        engine.scheduler.reset_prefix_cache()
    elif live:
        disturb(engine, kind, live[value % len(live)])


def disturb(engine: Engine, kind: str, name: str) -> None:
    if kind == "abort":
        engine.abort(name, "unknown")
        return
    if kind == "hold":
        engine.hold(name, "y")
        return
    if not engine.has_ready():
        return
    plan = engine.schedule()
    output = engine.executor.execute_model(plan)
    if kind == "abort in flight":
        engine.abort(name)
    elif name in plan.num_scheduled_tokens:
        output = failing(output, name)
    engine.finish_step(plan, output)


@settings(derandomize=True, deadline=None, max_examples=60)
@given(
    moments=moments,
    num_groups=st.sampled_from([1, 2]),
    slack=st.sampled_from([1, 4, 40]),
    policy=st.sampled_from(["fcfs", "priority", "fair"]),
    max_drafts=st.sampled_from([0, 5]),
    rounds=st.sampled_from([1, 1, 6]),
)
def test_every_recorded_event_is_replayed(
    moments: list[tuple[str, Any]], num_groups: int, slack: int, policy: str, max_drafts: int, rounds: int
) -> None:
    config = make_config(
        num_gpu_blocks_override=8 * num_groups + slack, scheduling_policy=policy, num_scheduler_steps=rounds
    )
    engine, frames = Engine(config, num_groups, max_drafts=max_drafts), Recording()
    engine.scheduler = recorded(engine.scheduler, frames)
    for kind, value in moments:
        play(engine, kind, value)
    for key in "xy":
        engine.release(key)
    engine.drain()
    header = TraceHeader(config, encode_kv_config(make_kv_config(config, num_groups)))
    assert list(replay(Trace(header, list(frames), 0))) == engine.plans


def test_trace_records_ends_by_stop_string_and_deadline(
    tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    engine = make_engine(tiny_model("llama"), tmp_path / "run.trace", num_scheduler_steps=1)
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    engine.add_request("whole", [5, 7, 11], params)
    while engine.has_unfinished_requests():
        (output,) = engine.step()
    engine.add_request("cut", [5, 7, 11], params.clone(stop=output.outputs[0].text[2:4]))
    engine.add_request("late", [5, 7, 11], params, timeout_s=1e-9)
    while engine.has_unfinished_requests():
        engine.step()
    engine.call_core("stats")
    engine.shutdown()
    ends = [
        frame.finish_reason for frame in read_trace(tmp_path / "run.trace").frames if isinstance(frame, Ended)
    ]
    assert sorted(ends) == ["length", "stop", "timeout"]
    assert sum(1 for _ in replay(read_trace(tmp_path / "run.trace"))) > 12
