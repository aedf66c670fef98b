# SPDX-License-Identifier: Apache-2.0
"""vLLM's command lines: each is accepted with a known meaning, or refused with a remedy."""

from __future__ import annotations

import shlex
from dataclasses import fields
from typing import Any

import click
import pytest

from quire.config import EngineConfig, ServerConfig, engine_fields
from quire.entrypoints.cli.bench import bench
from quire.entrypoints.cli.main import cli
from quire.entrypoints.cli.options import engine_config, server_config
from quire.entrypoints.cli.run import run
from quire.entrypoints.cli.serve import serve
from quire.errors import ConfigError
from quire.vllm_names.bench_options import BENCH_OPTIONS
from quire.vllm_names.llama_options import LLAMA_OPTIONS, RUN_OPTIONS
from tests.fixtures.folded import folded


def parsed(command: click.Command, line: str) -> dict[str, Any]:
    root = click.Context(cli, info_name="quire", **cli.context_settings)  # type: ignore[arg-type]
    with command.make_context(str(command.name), shlex.split(line), parent=root) as ctx:
        return ctx.params


def configs(line: str) -> tuple[EngineConfig, ServerConfig, dict[str, Any]]:
    params = parsed(serve, line)
    return engine_config(params), server_config(params), params


def value(line: str, name: str) -> Any:
    engine, server, _ = configs(line)
    if name in engine_fields():
        return getattr(getattr(engine, engine_fields()[name][0]), name)
    return getattr(server, name)


# Command line -> options that differ from their defaults.
ACCEPTED: dict[str, dict[str, Any]] = {
    "m --trust-remote-code": {},
    "m --trust_remote_code": {},
    "m --no-trust-remote-code": {},
    "m --code-revision main": {},
    "m --enable-auto-tool-choice --tool-call-parser hermes": {"tool_call_parser": "hermes"},
    "m --enable-auto-tool-choice --tool-call-parser=hermes": {"tool_call_parser": "hermes"},
    "m --enable-reasoning --reasoning-parser deepseek_r1": {"reasoning_parser": "deepseek_r1"},
    "m --served-model-name a b": {"served_model_name": ("a", "b")},
    "m --served-model-name a b --port 80": {"served_model_name": ("a", "b"), "port": 80},
    "--model m --served-model-name a b": {"served_model_name": ("a", "b")},
    "--served-model-name a m": {"served_model_name": ("a",)},
    "m --served-model-name a --served-model-name b": {"served_model_name": ("a", "b")},
    "m --api-key a b": {},
    "m --disable-log-requests": {},
    "m --enable-log-requests": {},
    "m --no-enable-log-requests": {},
    "m --enable-log-outputs --enable-log-deltas": {},
    "m --max-log-len 100": {},
    "m --disable-log-stats": {"disable_log_stats": True},
    "m --enable-sleep-mode": {},
    "m --enable-prompt-tokens-details": {},
    "m --enable-server-load-tracking": {},
    "m --enable-request-id-headers": {},
    "m --enable-force-include-usage": {"enable_force_include_usage": True},
    "m --disable-frontend-multiprocessing": {},
    "m --h11-max-incomplete-event-size 4194304 --h11-max-header-count 256": {},
    "m --response-role assistant": {},
    "m --ssl-certfile c.pem --ssl-keyfile k.pem": {"ssl_certfile": "c.pem", "ssl_keyfile": "k.pem"},
    "m --ssl-certfile c --ssl-ca-certs a --ssl-cert-reqs 2": {"ssl_ca_certs": "a", "ssl_cert_reqs": 2},
    "m --ssl-certfile c.pem --enable-ssl-refresh": {"enable_ssl_refresh": True},
    "m --root-path /v": {"root_path": "/v"},
    """m --allowed-origins '["*"]'""": {"allowed_origins": ("*",)},
    """m --allowed-methods '["*"]' --allowed-headers '["*"]'""": {},
    """m --allowed-origins '["http://a", "http://b"]'""": {"allowed_origins": ("http://a", "http://b")},
    "m --task generate": {"runner": "generate"},
    "m --task auto": {"runner": "auto"},
    "m --task embed": {"runner": "pooling", "convert": "embed"},
    "m --task score": {"runner": "pooling"},
    "m --task classify": {"runner": "pooling", "convert": "classify"},
    "m --runner pooling --convert embed": {"runner": "pooling", "convert": "embed"},
    "m --guided-decoding-backend xgrammar": {"structured_outputs_config": {"backend": "xgrammar"}},
    "m --guided-decoding-backend=llguidance": {"structured_outputs_config": {"backend": "guidance"}},
    "m --guided-decoding-disable-any-whitespace": {
        "structured_outputs_config": {"disable_any_whitespace": True}
    },
    "m --structured-outputs-config.backend guidance": {"structured_outputs_config": {"backend": "guidance"}},
    """m --override-pooler-config '{"pooling_type": "MEAN"}'""": {"pooler_config": {"pooling_type": "MEAN"}},
    """m --rope-scaling '{"rope_type": "yarn"}' --rope-theta 1e6""": {
        "hf_overrides": {"rope_scaling": {"rope_type": "yarn"}, "rope_theta": 1e6}
    },
    """m --hf-overrides '{"a": 1}' --rope-theta 10000""": {"hf_overrides": {"a": 1, "rope_theta": 10000}},
    "m --hf-overrides.rope_scaling.factor 4": {"hf_overrides": {"rope_scaling": {"factor": 4}}},
    """m --speculative-config '{"model": "d", "num_speculative_tokens": 4}'""": {
        "speculative_config": {"method": "draft_model", "model": "d", "num_speculative_tokens": 4}
    },
    "m --speculative-config.method ngram --speculative-config.num_speculative_tokens 4": {
        "speculative_config": {"method": "ngram", "num_speculative_tokens": 4}
    },
    """m -sc '{"method": "ngram"}'""": {"speculative_config": {"method": "ngram"}},
    """m -sc '{"method": "ngram"}' -sc.num_speculative_tokens=3""": {
        "speculative_config": {"method": "ngram", "num_speculative_tokens": 3}
    },
    "m --spec-method suffix --spec-tokens 3": {
        "speculative_config": {"method": "suffix", "num_speculative_tokens": 3}
    },
    "m --speculative-model d --num-speculative-tokens 5": {
        "speculative_config": {"method": "draft_model", "model": "d", "num_speculative_tokens": 5}
    },
    "m --speculative-model [ngram] --ngram-prompt-lookup-max 4": {
        "speculative_config": {"method": "ngram", "prompt_lookup_max": 4}
    },
    "m --speculative-disable-by-batch-size 8": {},
    "m --num-lookahead-slots 4": {},
    "m --quantization awq": {"quantization": "awq"},
    "m -q gptq_marlin": {"quantization": "gptq"},
    "m --quantization fp8": {"quantization": "fp8"},
    "m --kv-cache-dtype fp8_e4m3": {"kv_cache_dtype": "fp8"},
    "m --kv-cache-dtype auto": {"kv_cache_dtype": "auto"},
    "m --load-format fastsafetensors": {"load_format": "safetensors"},
    "m --attention-backend TORCH_SDPA": {"attention_backend": "torch_sdpa"},
    "m --generation-config vllm": {"generation_config": "quire"},
    "m --model-impl vllm": {"model_impl": "quire"},
    "m --tokenizer-mode auto": {},
    "m --tokenizer-mode slow": {},
    "m --cpu-offload-gb 0": {},
    "m --swap-space 4": {"swap_space": 4.0},
    """m --limit-mm-per-prompt '{"image": 2}'""": {"limit_mm_per_prompt": {"image": 2}},
    "m --limit-mm-per-prompt.image 2": {"limit_mm_per_prompt": {"image": 2}},
    """m --compilation-config '{"mode": 3}'""": {},
    "m --compilation-config 3": {},
    "m --compilation-config.mode 3 --compilation-config.custom_ops+ a,b": {},
    "m -cc.mode=3": {},
    "m -O3": {},
    "m -O 2 --seed 3": {"seed": 3},
    "m --cuda-graph-sizes 1 2 4": {"cudagraph_capture_sizes": (1, 2, 4)},
    "m --cudagraph-capture-sizes 1 2 4": {"cudagraph_capture_sizes": (1, 2, 4)},
    "m --max-seq-len-to-capture 8192": {},
    "m --enforce-eager --disable-custom-all-reduce": {"enforce_eager": True},
    "m -tp 2 -pp 2 -dp 1": {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
    "m -dcp 1 -pcp 1": {},
    "m -ep": {"enable_expert_parallel": True},
    "m --headless -dp 4 -dpl 2 -dpr 2 -dpa 10.0.0.1 -dpp 13345 -dpb mp": {
        "data_parallel_size_local": 2,
        "data_parallel_start_rank": 2,
        "data_parallel_address": "10.0.0.1",
        "data_parallel_rpc_port": 13345,
    },
    "m -ac.backend FLASH_ATTN": {},
    "m --worker-use-ray": {"distributed_executor_backend": "ray"},
    "m --max-parallel-loading-workers 2": {},
    "m --data-parallel-master-ip 10.0.0.1": {"data_parallel_address": "10.0.0.1"},
    "m --max-num-partial-prefills 2 --max-long-partial-prefills 1": {},
    "m --scheduler-delay-factor 0.5": {},
    "m --use-v2-block-manager": {},
    "m --enable-lora --lora-modules a=x b=y": {"enable_lora": True, "lora_modules": ("a=x", "b=y")},
    """m --enable-lora --lora-modules '{"name": "a", "path": "x", "base_model_name": "m"}'""": {
        "lora_modules": ("a=x",)
    },
    "m --enable-lora --fully-sharded-loras --max-lora-rank 32": {"max_lora_rank": 32},
    "m --gpu-memory-utilization 0.9 --max-model-len 32k": {"max_model_len": 32000},
    "m --max-model-len=-1": {"max_model_len": -1},
    "m --no-enable-prefix-caching --prefix-caching-hash-algo sha256": {"enable_prefix_caching": False},
    "m --mm-processor-cache-gb 0 --disable-mm-preprocessor-cache": {},
    "m --calculate-kv-scales": {},
    "m --show-hidden-metrics-for-version 0.9": {},
    "m --collect-detailed-traces all": {},
    "m --numa-bind": {"cpu_pin_threads": True},
    "m --distributed-timeout-seconds 60 --ubatch-size 2 --enable-dbo --moe-backend triton": {},
    "-m m -c 4096 -np 4 -t 2 -b 512 -ub 128 -ngl 99 -fa on": {
        "max_model_len": 4096,
        "max_num_seqs": 4,
        "cpu_threads": 2,
        "max_num_batched_tokens": 512,
    },
    "m -ctk q8_0 -ctv q8_0 -a b --jinja --no-mmap --mlock --no-mmproj": {
        "kv_cache_dtype": "int8",
        "served_model_name": ("b",),
        "language_model_only": True,
    },
    "m -n 9 --temp 0.5 --repeat-penalty 1.1 --reasoning-budget 0": {
        "override_generation_config": {"max_new_tokens": 9, "temperature": 0.5, "repetition_penalty": 1.1},
        "default_chat_template_kwargs": {"enable_thinking": False},
    },
    "-hf o/n:Q4_K_M -md d.gguf --draft-max 4 --pooling mean --metrics --slots": {
        "model": "o/n:Q4_K_M",
        "speculative_config": {"method": "draft_model", "model": "d.gguf", "num_speculative_tokens": 4},
        "pooler_config": {"pooling_type": "MEAN"},
    },
    """m --custom-histogram-buckets '{"a": [1]}' --disable-uvicorn-metrics-access-log""": {},
}

# Command line -> what the sentence names.
REFUSED = {
    "m --cpu-offload-gb 10": "--quantization int4",
    'm --kv-transfer-config \'{"kv_connector": "NixlConnector", "kv_role": "kv_both"}\'': "RowServerConnector",
    "m --kv-transfer-config.kv_connector NixlConnector --kv-transfer-config.kv_role kv_both": "RowServerConnector",
    "m --kv-offloading-size 4": "--swap-space",
    "m --tokenizer-mode mistral": "--tokenizer",
    "m --tokenizer-revision abc": "--revision",
    "m --quantization quark": "--quantization int4",
    "m --quantization moe_wna16": "--quantization int4",
    "m --kv-cache-dtype fp8_e5m2": "use fp8 or int8",
    "m --load-format runai_streamer": "safetensors or GGUF",
    "m --load-format tensorizer": "safetensors or GGUF",
    "m --attention-backend FLASH_ATTN": "torch_sdpa",
    "m --guided-decoding-backend outlines": "guidance or xgrammar",
    "m --structured-outputs-config.backend lm-format-enforcer": "guidance or xgrammar",
    "m --task transcription": "--runner",
    "m --response-role bot": "the role assistant",
    "m --middleware a.b": "proxy",
    "m --log-config-file x.json": "--log-level",
    "m --tool-parser-plugin x.py": "quire.tool_formats",
    "m --reasoning-parser-plugin x.py": "quire.reasoning_formats",
    "m --tool-server demo": "the client runs",
    "m --allow-credentials": "bearer token",
    "m --allowed-methods '[\"GET\"]'": "--allowed-origins",
    "m --grpc": "HTTP only",
    "m --return-tokens-as-token-ids": "each request",
    "m --trust-request-chat-template": "--chat-template",
    "m -dcp 2": "--tensor-parallel-size",
    "m --enable-eplb": "experts",
    "m --worker-cls a.B": "quire.devices",
    "m --hf-token abc": "HF_TOKEN",
    "m --numa-bind-nodes 0 1": "--cpu-numa",
    "m --enable-prompt-adapter": "LoRA",
    "m --profiler-config.profiler torch": "torch_profiler_dir",
    "m --hf-overrides 3 --rope-theta 1": "--hf-overrides",
    'm --lora-modules \'{"name": "a"}\'': "path",
    "m --speculative-config.method ngram --spec-method suffix": "another value",
    "m --worker-use-ray --distributed-executor-backend mp": "drop one",
}

REFUSED |= {
    "m --lora a.gguf": "--lora-modules NAME=DIRECTORY",
    "m -ot x=CPU": "--device cpu or cuda",
    "m -ctk q4_0": "must be one of f32, f16, bf16, q8_0",
    "m --slot-save-path x": "--kv-store",
    "m --grammar-file x": "structured_outputs",
}

# Flag in neither -> the suggestion.
UNKNOWN = {
    "--gpu-memory-utilizaton 0.9": "--gpu-memory-utilization",
    "--max-num-seq 4": "--max-num-seqs",
    "--enable-foo": None,
    "--enable-ssl": None,
    "--nodes 3": "--nnodes",
    "--api": None,
    "--speculative-confi.method x": None,
}


# Command line of `bench serve` -> options that it sets, or what the sentence names.
BENCH: dict[str, dict[str, Any] | str] = {
    "--backend vllm --dataset-name random --num-prompts 8 --trust-remote-code": {"num_prompts": 8},
    "--backend=openai-chat --served-model-name m": {"endpoint": "/v1/chat/completions", "model": "m"},
    "--tokenizer t --random-range-ratio 0.0 --burstiness 1.0 --percentile-metrics ttft,tpot": {},
    "--dataset-name sharegpt": "random token ids",
    "--save-result --result-dir d": "--json FILE",
    "--goodput ttft:100": "P99",
    "--num-promts 3": "--num-prompts",
}


@folded("line", BENCH)
def test_flags_of_bench_are_read(line: str) -> None:
    expected = BENCH[line]
    if isinstance(expected, dict):
        assert parsed(bench.commands["serve"], line).items() >= expected.items()
        return
    with pytest.raises(click.UsageError) as error:
        parsed(bench.commands["serve"], line)
    assert expected in error.value.format_message()


def test_flags_of_bench_stand_beside_those_of_engines() -> None:
    line = "--dataset-name random --num-prompts 2 --trust-remote-code --task generate"
    assert (
        parsed(bench.commands["throughput"], line).items() >= {"num_prompts": 2, "runner": "generate"}.items()
    )
    assert not {row.name for row in BENCH_OPTIONS.values()} & engine_fields().keys() - {
        "tokenizer",
        "served_model_name",
    }


@folded("line", ACCEPTED)
def test_command_line_sets_options(line: str) -> None:
    for name, expected in ACCEPTED[line].items():
        assert value(line, name) == expected
    assert configs(line)[2]["model_argument"] in ("m", None)


def test_llama_cpp_and_ollama_flags_of_run_are_read() -> None:
    line = "m hi --temp 0 -n 9 -sys s --format json --keepalive 5m -cnv"
    wanted = {"temperature": 0.0, "max_tokens": 9, "system_prompt": "s", "json_schema": '{"type": "object"}'}
    assert parsed(run, line).items() >= wanted.items()
    with pytest.raises(click.UsageError, match="behind the model: quire run MODEL"):
        parsed(run, "-m m -p hi")


def test_flags_of_llama_server_lead_to_options() -> None:
    served = {*engine_fields(), *(field.name for field in fields(ServerConfig)), "models"}
    ran = {str(param.name) for param in run.params}
    for rows, options in ((LLAMA_OPTIONS, served), (RUN_OPTIONS, ran)):
        for row in rows.values():
            targets = {row.to, *(target for values in row.values.values() for target in values)} - {""}
            assert {target.partition(".")[0] for target in targets} <= options, row


@folded("line", REFUSED)
def test_unsupported_command_line_names_a_remedy(line: str) -> None:
    with pytest.raises((click.UsageError, ConfigError)) as error:
        configs(line)
    message = error.value.format_message() if isinstance(error.value, click.UsageError) else str(error.value)
    assert REFUSED[line] in message
    assert "\n" not in message


@folded("flag", UNKNOWN)
def test_unknown_flag_suggests_close_spelling_only(flag: str) -> None:
    near = UNKNOWN[flag]
    with pytest.raises(click.NoSuchOption) as error:
        configs(f"m {flag}")
    assert error.value.possibilities == ([near] if near else None)


def test_keys_of_own_flags_keep_their_meaning() -> None:
    assert parsed(run, "hello --stop a --stop '[b]'")["stop"] == ("a", "[b]")
    assert parsed(run, "--model m --stop a hello")["words"] == ("hello",)
    assert parsed(run, "quire-demo --stop a hello")["words"] == ("quire-demo", "hello")
    assert parsed(serve, "-- m")["model_argument"] == "m"
    assert parsed(serve, "--chat-template -x m")["chat_template"] == "-x"


def test_config_file_with_vllm_keys_is_read(tmp_path: Any) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(
        "trust-remote-code: true\ntask: embed\nkv-cache-dtype: fp8_e4m3\nserved-model-name: [a, b]\n"
    )
    line = f"m --config {file}"
    assert value(line, "convert") == "embed"
    assert value(line, "kv_cache_dtype") == "fp8"
    assert value(line, "served_model_name") == ("a", "b")
    file.write_text("middleware: a.b\n")
    with pytest.raises(ConfigError, match=r"serve\.yaml: middleware is not supported: put a proxy"):
        configs(line)
