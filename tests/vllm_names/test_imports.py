# SPDX-License-Identifier: Apache-2.0
"""vLLM's import paths: each gives quire's object, or an error that names the import to use."""

from __future__ import annotations

import importlib
import subprocess
import sys
from typing import Any

import pytest

from quire.vllm_names.imports import ABSENT, ALL, PRESENT, attributes_of
from tests.fixtures.folded import folded

# Statement of a vLLM script, with quire for vllm -> the place of the object.
FOUND = {
    "quire:LLM": "quire.entrypoints.llm",
    "quire:SamplingParams": "quire.sampling_params",
    "quire:EngineArgs": "quire.config.engine",
    "quire:AsyncEngineArgs": "quire.config.engine",
    "quire:AsyncLLMEngine": "quire.engine.async_llm",
    "quire:LLMEngine": "quire.engine.llm_engine",
    "quire:ModelRegistry": "quire.models.registry",
    "quire:RequestOutput": "quire.outputs",
    "quire:CompletionOutput": "quire.outputs",
    "quire:PoolingParams": "quire.pooling_params",
    "quire:BeamSearchParams": "quire.sampling_params",
    "quire:EmbeddingRequestOutput": "quire.pooling.outputs",
    "quire.sampling_params:SamplingParams": "quire.sampling_params",
    "quire.sampling_params:BeamSearchParams": "quire.sampling_params",
    "quire.sampling_params:RequestOutputKind": "quire.sampling_params",
    "quire.sampling_params:StructuredOutputsParams": "quire.structured_outputs_params",
    "quire.sampling_params:GuidedDecodingParams": "quire.structured_outputs_params",
    "quire.pooling_params:PoolingParams": "quire.pooling_params",
    "quire.lora.request:LoRARequest": "quire.adapters",
    "quire.exceptions:VLLMValidationError": "quire.errors",
    "quire.inputs:EmbedsPrompt": "quire.inputs",
    "quire.entrypoints.serve.engine.protocol:UsageInfo": "quire.entrypoints.openai.protocol.responses",
    "quire.engine.arg_utils:EngineArgs": "quire.config.engine",
    "quire.engine.arg_utils:AsyncEngineArgs": "quire.config.engine",
    "quire.engine.async_llm_engine:AsyncLLMEngine": "quire.engine.async_llm",
    "quire.engine.llm_engine:LLMEngine": "quire.engine.llm_engine",
    "quire.engine.protocol:EngineClient": "quire.engine.async_llm",
    "quire.v1.engine.async_llm:AsyncLLM": "quire.engine.async_llm",
    "quire.v1.engine.llm_engine:LLMEngine": "quire.engine.llm_engine",
    "quire.v1.engine.exceptions:EngineDeadError": "quire.errors",
    "quire.v1.metrics.reader:Counter": "quire.metrics.reader",
    "quire.v1.metrics.reader:Vector": "quire.metrics.reader",
    "quire.utils:FlexibleArgumentParser": "quire.vllm_names.functions",
    "quire.utils:random_uuid": "quire.vllm_names.functions",
    "quire.utils.argparse_utils:FlexibleArgumentParser": "quire.vllm_names.functions",
    "quire.inputs:TokensPrompt": "quire.inputs",
    "quire.inputs:TextPrompt": "quire.inputs",
    "quire.inputs.data:TokensPrompt": "quire.inputs",
    "quire.logger:init_logger": "logging",
    "quire.logprobs:Logprob": "quire.outputs",
    "quire.sequence:Logprob": "quire.outputs",
    "quire.outputs:RequestOutput": "quire.outputs",
    "quire.outputs:EmbeddingRequestOutput": "quire.pooling.outputs",
    "quire.outputs:ScoringRequestOutput": "quire.pooling.outputs",
    "quire.config:VllmConfig": "quire.config.engine",
    "quire.config:ModelConfig": "quire.config.model",
    "quire.config:CacheConfig": "quire.config.cache",
    "quire.config:SpeculativeConfig": "quire.config.speculative",
    "quire.entrypoints.llm:LLM": "quire.entrypoints.llm",
    "quire.entrypoints.openai.protocol:ChatCompletionRequest": "quire.entrypoints.openai.protocol.requests",
    "quire.entrypoints.openai.protocol:ChatCompletionResponse": "quire.entrypoints.openai.protocol.responses",
    "quire.entrypoints.openai.chat_completion.protocol:ChatCompletionRequest": (
        "quire.entrypoints.openai.protocol.requests"
    ),
    "quire.tokenizers:get_tokenizer": "quire.vllm_names.functions",
    "quire.transformers_utils.tokenizer:get_tokenizer": "quire.vllm_names.functions",
    "quire.model_executor.models:ModelRegistry": "quire.models.registry",
    "quire.model_executor.models.registry:ModelRegistry": "quire.models.registry",
}

# Place -> words of the sentence.
MISSING = {
    "quire:initialize_ray_cluster": "distributed_executor_backend",
    "quire.config:CompilationConfig": "leave compilation_config out",
    "quire.config:PoolerConfig": "as a dict",
    "quire.config:KVTransferConfig": "as a dict",
    "quire.config:ProfilerConfig": "as a dict",
    "quire.distributed.parallel_state:get_tp_group": r"quire\.layers\.shard",
    "quire.distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1": r"quire\.kv_connectors",
    "quire.renderers.chat_utils:load_chat_template": "apply_chat_template",
    "quire.entrypoints.pooling.embed.protocol:EmbeddingRequest": "quire serve",
    "quire.entrypoints.openai.run_batch:main": "quire run-batch",
    "quire.sampling_params:SamplingType": "temperature is 0",
    "quire.distributed:cleanup_dist_env_and_memory": r"LLM\.shutdown",
    "quire.distributed.parallel_state:destroy_model_parallel": r"LLM\.shutdown",
    "quire.entrypoints.chat_utils:load_chat_template": "apply_chat_template",
    "quire.entrypoints.openai.cli_args:make_arg_parser": "ServerConfig",
    "quire.entrypoints.openai.serving_chat:OpenAIServingChat": "quire serve",
    "quire.entrypoints.openai.tool_parsers:ToolParserManager": r"quire\.tool_formats",
    "quire.tool_parsers:ToolParserManager": r"quire\.tool_formats",
    "quire.reasoning:ReasoningParserManager": r"quire\.reasoning_formats",
    "quire.envs:VLLM_USE_V1": "QUIRE_",
    "quire.model_executor.layers.linear:ColumnParallelLinear": r"quire\.layers",
    "quire.attention:Attention": r"quire\.attention_backends",
    "quire.multimodal:MULTIMODAL_REGISTRY": "multi_modal_data",
    "quire.assets.image:ImageAsset": "multi_modal_data",
    "quire.platforms:current_platform": "choose_device",
    "quire.usage.usage_lib:UsageContext": "usage_context",
    "quire.v1.sample.logits_processor:LogitsProcessor": r"quire\.logits_processors",
    "quire.v1.worker.gpu_worker:Worker": "one engine",
    "quire.v1.core.sched.output:SchedulerOutput": "one engine",
}


def imported(place: str) -> Any:
    module, _, name = place.partition(":")
    return getattr(__import__(module, fromlist=[name]), name)  # as `from module import name`


@folded("place", FOUND)
def test_import_path_gives_own_object(place: str) -> None:
    assert imported(place).__module__ == FOUND[place]


@folded("place", MISSING)
def test_absent_import_names_a_remedy(place: str) -> None:
    with pytest.raises(ImportError, match=MISSING[place]):
        imported(place)


@folded("module", PRESENT)
def test_every_present_place_exists(module: str) -> None:
    for name, place in PRESENT[module].items():
        source, _, attribute = place.partition(":")
        assert getattr(importlib.import_module(module), name) is getattr(
            importlib.import_module(source), attribute
        )


@folded("module", ABSENT)
def test_every_absent_module_imports(module: str) -> None:
    for name in ABSENT[module]:
        shown = "Anything" if name == ALL else name
        with pytest.raises(ImportError, match=f"{module}.{shown} is not in quire"):
            getattr(importlib.import_module(module), shown)


def test_unknown_paths_are_ordinary_errors() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'quire\.nothing'"):
        importlib.import_module("quire.nothing")
    with pytest.raises(AttributeError, match="has no attribute 'init_loger'; did you mean 'init_logger'"):
        attributes_of("quire.logger")("init_loger")


def test_config_imports_nothing_heavy() -> None:
    script = "import sys, quire.config; assert not {'numpy', 'torch', 'tokenizers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True)
