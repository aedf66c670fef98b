# SPDX-License-Identifier: Apache-2.0
"""Under torchrun every rank is a program with its own engine, and all equal one rank."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, LoRARequest, SamplingParams
from quire.config import EngineConfig
from quire.engine.startup import prepare
from quire.errors import ConfigError
from quire.executor.ranks.external_launcher import LauncherEnvironment
from quire.structured_outputs_params import StructuredOutputsParams
from tests.end_to_end.server import free_port
from tests.fixtures.tiny_models import oracle_of
from tests.lora.adapters import linear_shapes, write_adapter

TOLD = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "somewhere", "MASTER_PORT": "29500"}
LORA = {"enable_lora": True, "max_loras": 2, "tp_invariant": False}
PROGRAM = """
import json, os, sys
from quire.errors import QuireError
from tests.executor.test_external_launcher import LORA, said, said_by_adapters, started

rank = int(os.environ["RANK"])
model, out = sys.argv[1:]

def refused(work):
    try:
        work()
    except QuireError as error:
        return str(error)

size = refused(lambda: started(model, tensor_parallel_size=4))
option = refused(lambda: started(model, tensor_parallel_size=2, max_num_seqs=3 + rank))
llm = started(model, tensor_parallel_size=2, speculative_config={"method": "ngram"})
outputs = said(llm)
plan = refused(lambda: llm.generate([[1 + rank]], use_tqdm=False))
os.environ["HOME"] = f"{out}/home{rank}"
adapted = said_by_adapters(started(model, tensor_parallel_size=2, **LORA), "~")
with open(f"{out}/{rank}", "w") as file:
    json.dump({"size": size, "option": option, "plan": plan, "said": outputs, "adapted": adapted}, file)
"""


def started(model: str, **args: Any) -> LLM:
    limits = {
        "max_model_len": 64,
        "max_num_seqs": 3,
        "max_num_batched_tokens": 16,
        "num_gpu_blocks_override": 12,
    }
    if "tensor_parallel_size" in args:
        args["distributed_executor_backend"] = "external_launcher"
    return LLM(model, device="cpu", **{"tp_invariant": True} | limits | args)


def said(llm: LLM) -> Any:
    """Return the outputs of requests that do not all fit into the cache at once."""
    prompts = [[3, 1, 4, 1, 5] * 5, [2, 7, 1, 8], [99] * 30, [50, 60, 70]]
    params = [
        SamplingParams(max_tokens=9, temperature=0.0, ignore_eos=True, logprobs=1),
        SamplingParams(max_tokens=9, ignore_eos=True, logprobs=1),
        SamplingParams(max_tokens=12, seed=4, ignore_eos=True, n=2),
        SamplingParams(max_tokens=8, seed=5, structured_outputs=StructuredOutputsParams(regex="[ab]{5}")),
    ]
    return [
        [list(one.token_ids), [[found.logprob for found in at.values()] for at in one.logprobs or []]]
        for output in llm.generate(prompts, params, use_tqdm=False)
        for one in output.outputs
    ]


def said_by_adapters(llm: LLM, home: str) -> Any:
    """Tokens, or why there are none, without an adapter and with two, of which rank 1 may lack the second."""
    adapters = [
        LoRARequest(name, number, f"{home}/{name}") for number, name in enumerate(("both", "first"), 1)
    ]
    params = SamplingParams(max_tokens=9, temperature=0.0, ignore_eos=True)
    outputs = [
        llm.generate([[3, 1, 4, 1, 5]], params, use_tqdm=False, lora_request=adapter)
        for adapter in (None, *adapters, adapters[0])
    ]
    return [[list(output.outputs[0].token_ids), output.outputs[0].stop_reason] for (output,) in outputs]


@pytest.mark.more
def test_two_ranks_have_the_bits_of_one_or_name_the_difference(
    tmp_path: Path, tiny_model: Callable[[str], Path]
) -> None:
    model = str(tiny_model("llama"))
    layers = {
        name: shape
        for name, shape in linear_shapes(oracle_of(tiny_model("llama"))).items()
        if "layers" in name
    }
    for path in ("home0/both", "home1/both", "home0/first"):
        write_adapter(tmp_path / path, layers, use_dora=True)
    (tmp_path / "program.py").write_text(PROGRAM)
    launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [sys.executable, "-m", *launcher, str(tmp_path / "program.py"), model, str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run(command, check=True, timeout=600, env=environment)
    alone = said(started(model))
    adapted = said_by_adapters(started(model, **LORA), str(tmp_path / "home0"))
    assert adapted[0] != adapted[1], "adapters change tokens"
    for rank in "01":
        found = json.loads((tmp_path / rank).read_text())
        assert found["said"] == json.loads(json.dumps(alone))
        assert [found["adapted"][index] for index in (0, 1, 3)] == [adapted[index] for index in (0, 1, 3)]
        reason = "adapter_config.json: " if rank == "1" else "rank 1 cannot use it; see its log"
        assert found["adapted"][2][0] == []
        assert f"adapter 'first': {reason}" in found["adapted"][2][1]
        assert found["size"] == (
            "the launcher has started 2 ranks (WORLD_SIZE), and --tensor-parallel-size is 4"
        )
        assert (
            found["option"]
            == "all ranks must have the same --max-num-seqs, but rank 0's differs from that of 1"
        )
        assert "ranks 1 planned a different step than rank 0" in found["plan"]


STRUCK = """
import os, socket, sys, time
if "HOST" in os.environ:
    socket.gethostname = lambda: os.environ["HOST"]
from quire.errors import QuireError
from tests.executor.test_external_launcher import said, started

llm = started(sys.argv[1], tensor_parallel_size=2)
print("ready", flush=True)
try:
    while True:
        said(llm)
except QuireError as error:
    print(error, flush=True)
"""


@pytest.mark.more
@pytest.mark.parametrize("num_hosts", [1, 2])
@pytest.mark.parametrize("signal_", [signal.SIGKILL, signal.SIGSTOP])
def test_killed_or_stopped_rank_is_named_by_the_other(
    signal_: signal.Signals, num_hosts: int, tiny_model: Callable[[str], Path]
) -> None:
    """Also where it is alone on its host, on which nobody sees that it is stopped."""
    told = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    environment = os.environ | told | {"PYTHONPATH": os.pathsep.join(sys.path)}
    hosts = [{"HOST": f"host{rank}", "LOCAL_WORLD_SIZE": "1"} for rank in range(2)]
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", STRUCK, str(tiny_model("llama"))],
            stdout=subprocess.PIPE,
            text=True,
            env=environment | {"RANK": str(rank)} | (hosts[rank] if num_hosts > 1 else {}),
        )
        for rank in range(2)
    ]
    try:
        assert [rank.stdout.readline() for rank in ranks if rank.stdout] == ["ready\n"] * 2
        ranks[1].send_signal(signal_)
        struck = time.monotonic()
        said, _ = ranks[0].communicate(timeout=300)
        assert time.monotonic() - struck < 12  # and to end, of which some seconds are
        assert "rank 1 is lost; it says: " in said
        assert ranks[0].returncode == 0
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()


def test_launcher_environment_is_read() -> None:
    assert LauncherEnvironment.read(TOLD) == LauncherEnvironment(
        1, 2, 2, "somewhere", 29500, store_is_there=False
    )
    more = {"LOCAL_WORLD_SIZE": "1", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    assert LauncherEnvironment.read(TOLD | more) == LauncherEnvironment(
        1, 2, 1, "somewhere", 29500, store_is_there=True
    )


@pytest.mark.parametrize(
    ("told", "words"),
    [
        ({"RANK": "", "MASTER_PORT": ""}, "missing: RANK, MASTER_PORT$"),
        ({"RANK": "2"}, "RANK must be an integer of 0 to 1, got '2'"),
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE must be an integer of 1 to 65536, got 'two'"),
        ({"LOCAL_WORLD_SIZE": "3"}, "LOCAL_WORLD_SIZE must be an integer of 1 to 2, got '3'"),
        ({"MASTER_PORT": "-1"}, "MASTER_PORT must be an integer of 1 to 65535, got '-1'"),
    ],
)
def test_wrong_launcher_environment_is_named(told: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        LauncherEnvironment.read(TOLD | told)


@pytest.mark.parametrize(
    ("usage", "args", "words"),
    [
        ("server", {}, r"LLM\(\.\.\.\), in a program that each rank runs"),
        ("offline", {"data_parallel_size": 2}, "--data-parallel-size 1"),
        ("offline", {"scheduling_policy": "priority"}, "--priority-ageing-s 0"),
    ],
)
def test_options_planned_unequally_by_ranks_are_refused(
    usage: Any, args: dict[str, Any], words: str, tiny_model: Callable[[str], Path]
) -> None:
    config = EngineConfig.from_args(
        model=str(tiny_model("llama")), device="cpu", distributed_executor_backend="external_launcher", **args
    )
    with pytest.raises(
        ConfigError, match=f"--distributed-executor-backend external_launcher requires {words}"
    ):
        prepare(config, usage)
