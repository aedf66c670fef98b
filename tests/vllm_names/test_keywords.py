# SPDX-License-Identifier: Apache-2.0
"""vLLM's keywords of the engine, of sampling parameters and of `EngineArgs`, and its environment variables."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import logging
from typing import Any

import pytest

import quire
from quire import EngineArgs, LoRARequest, PoolingParams, SamplingParams
from quire.config import EngineConfig, ServerConfig, engine_fields
from quire.config.encoding import CheckpointQuantization
from quire.config.engine import child_configs
from quire.engine.startup import choose_quantization, prepare
from quire.errors import ConfigError, ValidationError
from quire.sampling_params import BeamSearchParams
from quire.vllm_names import row as rows
from quire.vllm_names.environment import ENVIRONMENT, adopt_environment
from quire.vllm_names.functions import FlexibleArgumentParser
from quire.vllm_names.option_values import CHECKPOINT_METHODS, OPTION_VALUES
from quire.vllm_names.options import OPTIONS
from quire.vllm_names.parameters import METHODS
from quire.vllm_names.row import Fate, nearest
from quire.vllm_names.server_options import SERVER_OPTIONS
from tests.fixtures.folded import folded

OWN_SERVER = {field.name for field in dataclasses.fields(ServerConfig)}

# Keywords -> the options that differ from the defaults.
ACCEPTED: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"trust_remote_code": True, "enable_sleep_mode": True, "disable_log_requests": True}, {}),
    ({"tokenizer_mode": "auto", "cpu_offload_gb": 0, "disable_custom_all_reduce": False}, {}),
    ({"compilation_config": {"mode": 3}, "use_tqdm_on_load": False}, {}),
    ({"cpu_offload_gb": 0.0, "worker_cls": "auto", "hf_token": None}, {}),
    ({"task": "embed"}, {"runner": "pooling", "convert": "embed"}),
    ({"task": "generate"}, {"runner": "generate"}),
    ({"rope_scaling": {"rope_type": "yarn"}}, {"hf_overrides": {"rope_scaling": {"rope_type": "yarn"}}}),
    ({"guided_decoding_backend": "xgrammar"}, {"structured_outputs_config": {"backend": "xgrammar"}}),
    ({"quantization": "awq_marlin"}, {"quantization": "awq"}),
    ({"kv_cache_dtype": "fp8_e4m3"}, {"kv_cache_dtype": "fp8"}),
    ({"speculative_config": {"model": "d"}}, {"speculative_config": {"method": "draft_model", "model": "d"}}),
    ({"speculative_config": {"method": "ngram"}}, {"speculative_config": {"method": "ngram"}}),
    ({"speculative_config": None}, {}),
    ({"spec_model": "d", "spec_tokens": 2}, {
        "speculative_config": {"method": "draft_model", "model": "d", "num_speculative_tokens": 2}
    }),
    ({"data_parallel_master_port": 5}, {"data_parallel_rpc_port": 5}),
]  # fmt: skip

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"cpu_offload_gb": 4}, "cpu_offload_gb is not supported: .*quantize"),
    ({"task": "transcription"}, "task must be one of auto, generate, embed"),
    ({"quantization": "quark"}, "--quantization quark is not supported"),
    ({"task": "embed", "runner": "generate"}, "task is runner in quire, which is given as well; drop one"),
    ({"rope_theta": 1.0, "hf_overrides": {"rope_theta": 2.0}}, "another value"),
]


def flat(config: EngineConfig) -> dict[str, Any]:
    return {name: getattr(getattr(config, child), name) for name, (child, _) in engine_fields().items()}


@folded(("given", "expected"), ACCEPTED, ids=str)
def test_engine_keyword_sets_options(given: dict[str, Any], expected: dict[str, Any]) -> None:
    assert flat(EngineConfig.from_args(**given)) == flat(EngineConfig.from_args(**expected))


@pytest.mark.parametrize(("given", "message"), REFUSED, ids=str)
def test_unsupported_engine_keyword_names_a_remedy(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig.from_args(**given)


def test_unknown_keyword_suggests_close_spelling_only() -> None:
    with pytest.raises(TypeError, match=r"'enable_sleep_mod'$"):
        EngineConfig.from_args(enable_sleep_mod=True)
    with pytest.raises(TypeError, match="did you mean 'gpu_memory_utilization'"):
        EngineConfig.from_args(gpu_memory_utilizaton=0.5)


def test_accepted_keyword_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    rows._logged.clear()
    with caplog.at_level(logging.WARNING, "quire.vllm_names"):
        EngineConfig.from_args(trust_remote_code=True)
        EngineConfig.from_args(trust_remote_code=True)
    assert [record.getMessage() for record in caplog.records] == [
        "trust_remote_code: accepted, without effect: no remote code is run; models are built from quire's own layers"
    ]


def test_no_row_hides_an_own_option() -> None:
    own = set(engine_fields()) | OWN_SERVER
    assert own.isdisjoint(OPTIONS)
    assert own.isdisjoint(SERVER_OPTIONS)
    assert OPTIONS.keys().isdisjoint(SERVER_OPTIONS)


@folded("row", [row for row in OPTIONS.values() if row.fate is Fate.RENAMED], ids=str)
def test_renamed_options_exist(row: rows.NameRow) -> None:
    targets = [row.to] if row.to else [name for options in row.values.values() for name in options]
    for target in targets:
        assert target.partition(".")[0] in engine_fields()


@folded("row", OPTION_VALUES.values(), ids=str)
def test_translated_values_are_choices(row: Any) -> None:
    option, _, key = row.option.partition(".")
    if row.to is not None and not key:
        EngineConfig.from_args(**{option: row.to})
        assert EngineConfig.from_args(**{option: row.value}) == EngineConfig.from_args(**{option: row.to})
    elif row.to is None:
        given = {option: {key: row.value}} if key else {option: row.value}
        with pytest.raises(ConfigError, match="is not supported"):
            EngineConfig.from_args(**given)


def test_checkpoint_methods_are_those_of_the_reader() -> None:
    from quire.models.quantized.reader import METHODS

    assert set(CHECKPOINT_METHODS) | {"fp8"} == {*METHODS.names(), "gguf"}


# Sampling parameters


def test_guided_decoding_is_structured_outputs() -> None:
    params = SamplingParams(guided_decoding={"regex": "a+"})  # type: ignore[call-arg]
    assert params == SamplingParams(structured_outputs={"regex": "a+"})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "given", [{"best_of": 1}, {"best_of": None}, {"use_beam_search": False}, {"early_stopping": False}]
)
def test_neutral_sampling_keyword_is_accepted(given: dict[str, Any]) -> None:
    assert SamplingParams(**given) == SamplingParams()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"best_of": 3}, "best_of is not supported: ask for n completions"),
        ({"use_beam_search": True}, r"LLM\.beam_search"),
        ({"length_penalty": 2.0}, "BeamSearchParams"),
        ({"truncate_prompt_tokens": 5}, "cut the token ids"),
    ],
)
def test_unsupported_sampling_keyword_names_a_remedy(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        SamplingParams(**given)


def test_keywords_of_adapters_and_pooling_are_read() -> None:
    assert LoRARequest("a", 1, lora_local_path="p") == LoRARequest("a", 1, "p")  # type: ignore[call-arg]
    assert LoRARequest("a", 1, "p", base_model_name="m") == LoRARequest("a", 1, "p")  # type: ignore[call-arg]
    with pytest.raises(ValidationError, match="another lora_int_id"):
        LoRARequest("a", 1, "p", load_inplace=True)  # type: ignore[call-arg]
    assert PoolingParams(normalize=False) == PoolingParams(use_activation=False)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="PoolingParams has no field 'wibble'"):
        PoolingParams(wibble=1)  # type: ignore[call-arg]


def test_unknown_sampling_keyword_is_a_type_error() -> None:
    with pytest.raises(
        TypeError, match="SamplingParams has no field 'tempreature'; did you mean 'temperature'"
    ):
        SamplingParams(tempreature=1.0)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"SamplingParams has no field 'wibble'$"):
        SamplingParams(wibble=1.0)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="BeamSearchParams has no field 'max_token'"):
        BeamSearchParams(beam_width=2, max_token=3)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="Missing required argument 'beam_width'"):
        BeamSearchParams(max_tokens=3)  # type: ignore[call-arg]


def test_assignment_to_sampling_params_names_clone() -> None:
    params = SamplingParams()
    with pytest.raises(AttributeError, match=r"clone\(temperature=0\.5\) returns a changed copy"):
        params.temperature = 0.5  # type: ignore[misc]
    assert params.clone(temperature=0.5).temperature == 0.5


# EngineArgs


def test_engine_args_is_a_dataclass_of_all_options() -> None:
    args = EngineArgs("m", max_model_len=64, trust_remote_code=True)
    fields = dataclasses.asdict(args)
    assert fields.keys() == engine_fields().keys()
    assert (fields["model"], fields["max_model_len"], fields["seed"]) == ("m", 64, 0)
    assert EngineArgs(**fields) == args
    assert EngineArgs(**fields).create_engine_config() == EngineConfig.from_args(model="m", max_model_len=64)


def test_engine_args_can_be_assigned_before_use() -> None:
    args = EngineArgs("m")
    args.max_model_len = 32
    assert args.create_engine_config().model.max_model_len == 32
    args.max_model_len = "long"
    with pytest.raises(ConfigError, match="--max-model-len must be an integer"):
        args.create_engine_config()


@pytest.mark.parametrize("make", [argparse.ArgumentParser, FlexibleArgumentParser])
def test_engine_args_come_from_argparse(make: type[argparse.ArgumentParser]) -> None:
    parser = EngineArgs.add_cli_args(make())
    parser.add_argument("--own", type=int, default=1)
    line = (
        "--model m --max-model-len 4K -tp 2 --own 3 --served-model-name a b --no-enable-prefix-caching "
        '--hf-overrides {"a":1} --cudagraph-capture-sizes 1 2 --served-model-name c'
    )
    parsed = parser.parse_args(line.split())
    args = EngineArgs.from_cli_args(parsed)
    assert parsed.own == 3
    assert (args.model, args.max_model_len, args.tensor_parallel_size) == ("m", 4096, 2)
    assert (args.served_model_name, args.enable_prefix_caching) == (("a", "b", "c"), False)
    assert (args.hf_overrides, args.cudagraph_capture_sizes) == ({"a": 1}, (1, 2))
    assert args.seed == 0
    assert EngineArgs.from_cli_args(parser.parse_args([])) == EngineArgs()


@pytest.mark.parametrize(
    "line", ["--max-model-len x", "--max-model-len 1.5", "--hf-overrides {", "--hf-overrides 3"]
)
def test_argparse_refuses_bad_values(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser(prog="mine"))
    with pytest.raises((SystemExit, ConfigError)) as error:
        EngineArgs.from_cli_args(parser.parse_args(line.split()))
    shown = capsys.readouterr().err if isinstance(error.value, SystemExit) else str(error.value)
    assert line.split()[0] in shown


def test_flexible_parser_reads_vllm_flags(capsys: pytest.CaptureFixture[str]) -> None:
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser(prog="mine"))
    line = "--max_model_len 64 --trust-remote-code --task embed --speculative-config.method ngram"
    args = EngineArgs.from_cli_args(parser.parse_args(line.split()))
    assert (args.max_model_len, args.convert, args.speculative_config) == (64, "embed", {"method": "ngram"})
    with pytest.raises(SystemExit):
        parser.parse_args(["--cpu-offload-gb", "3"])
    assert capsys.readouterr().err.startswith("mine: error: --cpu-offload-gb is not supported")


def test_every_option_has_an_argparse_flag() -> None:
    parser = EngineArgs.add_cli_args(argparse.ArgumentParser())
    assert {action.dest for action in parser._actions} == engine_fields().keys() | {"help"}
    assert len(parser._action_groups) == 2 + len(child_configs())


# Environment


def test_renamed_variables_are_set() -> None:
    environment = {"VLLM_API_KEY": "k", "VLLM_LOGGING_LEVEL": "DEBUG", "QUIRE_LOG_LEVEL": "INFO", "HOME": "/"}
    adopt_environment(environment)
    assert environment["QUIRE_API_KEY"] == "k"
    assert environment["QUIRE_LOG_LEVEL"] == "INFO"


def test_every_variable_of_vllm_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    rows._logged.clear()
    names = [*ENVIRONMENT, "VLLM_OF_NOBODY"]
    with caplog.at_level(logging.WARNING, "quire.vllm_names"):
        adopt_environment(dict.fromkeys(names, "1"))
    said = {record.getMessage().partition(":")[0]: record.getMessage() for record in caplog.records}
    assert said.keys() == set(names)
    assert said["VLLM_CPU_KVCACHE_SPACE"].endswith(
        "is not read: use --kv-cache-memory-bytes, in bytes: 4G is 4 GiB"
    )


# Methods


@folded("kind", METHODS)
def test_no_row_hides_an_argument_of_a_method(kind: str) -> None:
    owner, _, name = kind.partition(".")
    method = getattr(getattr(quire, owner), name)
    assert hasattr(method, "__wrapped__"), "the method has no decorator"
    assert METHODS[kind].keys().isdisjoint(inspect.signature(method).parameters)


# Spelling


def test_nearest_ignores_common_prefixes() -> None:
    own = list(engine_fields())
    for name in (
        "enable_ssl_refresh",
        "enable_sleep_mode",
        "disable_log_requests",
        "guided_decoding_backend",
        "uds",
    ):
        assert nearest(name, own) is None
    assert nearest("max_model_length", own) == "max_model_len"


# Format of the checkpoint


@folded(
    ("asked", "found", "chosen"),
    [
        ("awq", "awq", None),
        ("awq_marlin", "awq", None),
        ("fp8", "fp8", None),
        ("fp8", "fbgemm_fp8", None),
        ("int8", "awq", "int8"),
        ("int8", None, "int8"),
        (None, "awq", None),
    ],
)
def test_format_of_the_checkpoint_needs_no_option(
    asked: str | None, found: str | None, chosen: str | None
) -> None:
    assert quantized(asked, found) == chosen


@pytest.mark.parametrize(("asked", "found", "is_in"), [("awq", "gptq", "gptq"), ("gptq", None, "floats")])
def test_other_format_of_the_checkpoint_is_refused(asked: str, found: str | None, is_in: str) -> None:
    with pytest.raises(
        ConfigError, match=f"--quantization is {asked}, but the checkpoint is in {is_in}; drop it"
    ):
        quantized(asked, found)


def quantized(asked: str | None, found: str | None) -> str | None:
    """The option that start-up leaves, for a checkpoint of this method."""
    config = prepare(EngineConfig.from_args(cpu_threads=1), "offline")
    encoding = None if found is None else CheckpointQuantization(found, ())
    arch = dataclasses.replace(config.arch, quantization=encoding)
    config = dataclasses.replace(config, model_arch=arch).evolve(
        quantization=EngineConfig.from_args(quantization=asked).quantization.quantization
    )
    choice = choose_quantization(config)
    return config.quantization.quantization if choice is None else choice.value
