# SPDX-License-Identifier: Apache-2.0
"""Plug-ins: every table takes rows of other packages, in every process; `QUIRE_PLUGINS` selects them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from quire import LLM, plugins
from quire.config import DeviceConfig, EngineConfig, ParallelConfig
from quire.engine.startup import prepare
from quire.entrypoints.chat.formats.format import ReasoningFormat, ToolFormat
from quire.entrypoints.chat.formats.reasoning import REASONING_FORMATS
from quire.entrypoints.chat.formats.scanning import Reasoning, ToolCall
from quire.entrypoints.chat.formats.selection import AnswerFormat, choose
from quire.entrypoints.chat.formats.syntax import HeadedJson
from quire.entrypoints.chat.formats.tools import TOOL_FORMATS
from quire.errors import ConfigError
from quire.executor.base import EXECUTORS, resolve_executor
from quire.executor.null import NullExecutor
from quire.metrics.stats import STAT_LOGGERS, IterationStats, StatLogger
from quire.models.registry import ArchitectureEntry, ModelRegistry
from quire.sampling_params import SamplingParams
from quire.scheduler.output import SchedulerStats
from quire.worker.cpu import CpuDevice
from quire.worker.devices import DEVICES, make_device
from quire.worker.sampler.feature import LogitsFeature
from quire.worker.sampler.sampler import LOGITS_FEATURES
from tests.fixtures.entry_points import Offer
from tests.fixtures.tiny_models import write_tiny_model


class Abacus(NullExecutor):
    """An executor of another package."""


class Toaster(CpuDevice):
    """A device of another package."""


class Shout(LogitsFeature[Any]):
    """A logits feature of another package."""

    def wants(self, params: SamplingParams) -> bool:
        return False

    def apply(self, logits: Tensor, staged: Any) -> None:
        raise AssertionError("nobody wants it")

    def _store(self, row: int, request: Any) -> None:
        raise AssertionError("nobody wants it")

    def _stage(self, rows: Any, users: np.ndarray) -> Any:
        raise AssertionError("nobody wants it")


ENTRY = ArchitectureEntry("quire.models.decoder:DecoderForCausalLM", "quire.models.families.qwen:read_qwen3")
CALLS: list[str] = []


def register() -> None:
    CALLS.append("called")


def fail() -> None:
    raise RuntimeError("no luck today")


@pytest.fixture
def forgotten() -> Iterator[None]:
    """General plug-ins are loaded anew in this test."""
    plugins.load_general_plugins.cache_clear()
    CALLS.clear()
    yield
    plugins.load_general_plugins.cache_clear()


def test_an_executor_of_a_package_is_named_like_any_other(offer: Offer) -> None:
    with pytest.raises(
        ConfigError, match="must be one of auto, uni, mp, ray, external_launcher, null, got 'abacus'"
    ):
        ParallelConfig(distributed_executor_backend="abacus")
    offer(EXECUTORS.group, f"abacus={__name__}:Abacus")
    assert ParallelConfig(distributed_executor_backend="abacus").distributed_executor_backend == "abacus"
    assert resolve_executor("abacus") is Abacus
    assert resolve_executor("null") is NullExecutor


def test_an_executor_needs_no_package() -> None:
    for given in (Abacus, f"{__name__}:Abacus"):
        config = EngineConfig.from_args(distributed_executor_backend=given)
        assert resolve_executor(config.parallel.distributed_executor_backend) is Abacus


@pytest.mark.parametrize(
    ("given", "problem"),
    [("nowhere:X", "cannot import"), (f"{__name__}:Toaster", "not a subclass of quire.executor")],
)
def test_a_place_without_an_executor_is_refused(given: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=f"--distributed-executor-backend: .*{problem}"):
        resolve_executor(given)


def test_a_class_of_another_kind_is_refused(offer: Offer) -> None:
    offer(EXECUTORS.group, f"toaster={__name__}:Toaster")
    with pytest.raises(ConfigError, match="expected: subclass of Executor"):
        resolve_executor("toaster")


def test_a_built_in_row_cannot_be_replaced(offer: Offer) -> None:
    offer(EXECUTORS.group, f"null={__name__}:Abacus")
    assert EXECUTORS.names() == ["uni", "mp", "ray", "external_launcher", "null"]
    assert resolve_executor("null") is NullExecutor


def test_a_device_of_a_package_is_named_like_any_other(offer: Offer) -> None:
    offer(DEVICES.group, f"toaster={__name__}:Toaster")
    assert DeviceConfig(device="toaster").device == "toaster"
    assert isinstance(make_device("toaster"), Toaster)


def test_logits_features_of_packages_come_last(offer: Offer) -> None:
    built_in = LOGITS_FEATURES.resolve_all()
    offer(LOGITS_FEATURES.group, f"shout={__name__}:Shout")
    assert LOGITS_FEATURES.resolve_all() == [*built_in, Shout]


class Ledger(StatLogger):
    """A stat logger of another package."""

    def __init__(self, config: EngineConfig) -> None:
        self.model, self.num_tokens = config.model.model, 0

    def record(self, iteration: IterationStats, scheduler: SchedulerStats | None, core: int) -> None:
        self.num_tokens += iteration.num_generation_tokens


def test_every_front_end_makes_the_stat_loggers_of_packages(offer: Offer) -> None:
    offer(STAT_LOGGERS.group, f"ledger={__name__}:Ledger")
    llm = LLM("quire-demo", distributed_executor_backend="null", max_model_len=64)
    llm.generate([[5, 6]], SamplingParams(max_tokens=3, ignore_eos=True), use_tqdm=False)
    (ledger,) = llm.llm_engine._front_end.stat_loggers.members
    assert isinstance(ledger, Ledger)
    assert (ledger.model, ledger.num_tokens) == ("quire-demo", 3)


def test_a_model_of_a_package_is_known_by_its_architecture(offer: Offer) -> None:
    offer("quire.models", f"MyArch={__name__}:ENTRY")
    assert "MyArch" in ModelRegistry.get_supported_archs()
    assert ModelRegistry.resolve_model_cls("MyArch").__name__ == "DecoderForCausalLM"
    assert ModelRegistry.resolve_config_reader("MyArch").__name__ == "read_qwen3"


def test_environment_variable_selects_plug_ins(offer: Offer, monkeypatch: pytest.MonkeyPatch) -> None:
    offer(EXECUTORS.group, f"abacus={__name__}:Abacus", f"slide={__name__}:Abacus")
    for value, expected in [
        ("slide", ["slide"]),
        (" abacus,slide ", ["abacus", "slide"]),
        ("", []),
        ("x", []),
    ]:
        monkeypatch.setenv("QUIRE_PLUGINS", value)
        assert EXECUTORS.names()[5:] == expected
    with pytest.raises(
        ConfigError, match="must be one of uni, mp, ray, external_launcher, null, got 'abacus'"
    ):
        resolve_executor("abacus")


def test_general_plug_ins_are_called_once_in_a_process(offer: Offer, forgotten: None) -> None:
    offer(plugins.GENERAL, f"mine={__name__}:register")
    for _ in range(3):
        prepare(EngineConfig.from_args(device="cpu"), "offline")
    assert CALLS == ["called"]


def test_a_general_plug_in_that_fails_is_named(offer: Offer, forgotten: None) -> None:
    offer(plugins.GENERAL, f"mine={__name__}:fail")
    with pytest.raises(ConfigError, match=r"the plug-in 'mine' of quire.plugins failed: .*no luck today"):
        prepare(EngineConfig.from_args(device="cpu"), "offline")


PROGRAM = """
import asyncio, sys
from quire import AsyncLLM, EngineArgs, ModelRegistry, SamplingParams

if sys.argv[2]:
    ModelRegistry.register_model("MyArch", sys.argv[2])

async def main():
    engine = AsyncLLM.from_engine_args(EngineArgs(model=sys.argv[1], max_model_len=32, device="cpu"))
    try:
        await engine.wait_ready()
        params = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
        async for output in engine.generate({"prompt_token_ids": [5, 6]}, params, "r"):
            tokens = output.outputs[0].token_ids
        print("tokens", tokens)
    finally:
        await engine.shutdown()

if __name__ == "__main__":
    asyncio.run(main())
"""


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A site directory with an installed package that registers MyArch, and a checkpoint of it."""
    site = tmp_path_factory.mktemp("site")
    (site / "my_model.py").write_text(
        "from quire.models.registry import ModelRegistry\n\n\n"
        "def register():\n    ModelRegistry.register_model('MyArch', 'my_classes:MyModel')\n"
    )
    (site / "my_classes.py").write_text(
        "from quire.models.decoder import DecoderForCausalLM\n\n\nclass MyModel(DecoderForCausalLM):\n    pass\n"
    )
    info = site / "my_model-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my-model\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[quire.plugins]\nmy = my_model:register\n")
    model = write_tiny_model("llama", site / "checkpoint")
    config = model / "config.json"
    config.write_text(config.read_text().replace("LlamaForCausalLM", "MyArch"))
    return site


def run_program(package: Path, registered: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    paths = [str(package), *filter(None, [os.environ.get("PYTHONPATH")]), os.getcwd()]
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, str(package / "checkpoint"), registered],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.more
def test_installed_package_registers_its_model_in_the_core_too(package: Path) -> None:
    done = run_program(package)
    assert "tokens [" in done.stdout, done.stderr


@pytest.mark.more
def test_model_registered_by_a_program_reaches_the_core_process(package: Path) -> None:
    done = run_program(package, "my_classes:MyModel", QUIRE_PLUGINS="")
    assert "tokens [" in done.stdout, done.stderr


def test_without_the_plug_in_the_model_is_unknown(package: Path) -> None:
    done = run_program(package, QUIRE_PLUGINS="")
    assert "architecture 'MyArch' is not supported" in done.stderr


@pytest.mark.more
def test_a_class_that_another_process_cannot_import_is_named(package: Path) -> None:
    done = run_program(package, "no_such_module:MyModel", QUIRE_PLUGINS="")
    assert "the class 'no_such_module:MyModel' of MyArch cannot be imported by this process" in done.stderr


SHOUTED = ToolFormat(
    "shouted",
    (HeadedJson("CALL ", r"(?P<name>\w+)", "{name} "),),
    evidence=(("CALL ",),),
)
PONDERED = ReasoningFormat("pondered", ("(hm ",), (" so)",), evidence=(("(hm ",),))


@pytest.mark.parametrize("name", ["shouted", "auto"])
def test_format_of_a_package_is_chosen_by_name_and_by_evidence(offer: Offer, name: str) -> None:
    template = "answer with (hm ... so) and CALL name {}"
    assert choose("auto", "auto", template) == AnswerFormat(None, None)
    offer(TOOL_FORMATS.group, f"shouted={__name__}:SHOUTED")
    offer(REASONING_FORMATS.group, f"pondered={__name__}:PONDERED")
    formats = choose(name, "pondered" if name == "shouted" else "auto", template)
    assert (formats.tools, formats.reasoning) == (SHOUTED, PONDERED)
    reader = formats.reader("", {"f": {}})
    found = [*reader.feed('(hm a call so)I CALL f {"a": 1}'), *reader.finish()]
    assert found == [Reasoning("a call"), "I", ToolCall("f", '{"a": 1}')]


def test_a_format_of_another_kind_is_refused(offer: Offer) -> None:
    offer(TOOL_FORMATS.group, f"pondered={__name__}:PONDERED")
    with pytest.raises(ConfigError, match="expected: ToolFormat"):
        choose("pondered", "none", None)
