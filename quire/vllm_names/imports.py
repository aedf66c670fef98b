# SPDX-License-Identifier: Apache-2.0
"""Import paths of vLLM under `quire.`, so that a script needs `vllm` replaced by `quire` only.

`PRESENT` are names that quire has elsewhere, `ABSENT` those that it does not have. `VllmFinder` makes modules of the
paths that do not exist; modules that exist take missing names from `attributes_of`. Invariant: the finder is asked
last, so a real module is never hidden, and nothing is imported before its name is used.
"""

from __future__ import annotations

import importlib
import types
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from typing import Any

from quire.vllm_names.row import suggestion

_ARGS = {"EngineArgs": "quire.config:EngineArgs", "AsyncEngineArgs": "quire.config:EngineArgs"}
_ASYNC = "quire.engine.async_llm:AsyncLLM"
_PARSER = "quire.vllm_names.functions:FlexibleArgumentParser"
_LOGPROBS = {
    "Logprob": "quire.outputs:Logprob",
    "FlatLogprobs": "quire.outputs:FlatLogprobs",
    "PromptLogprobs": "quire.outputs:PositionLogprobs",
    "SampleLogprobs": "quire.outputs:PositionLogprobs",
}
_INPUTS = {
    name: f"quire.inputs:{name}" for name in ("PromptType", "TextPrompt", "TokensPrompt", "DataPrompt")
}
_REQUESTS = "quire.entrypoints.openai.protocol.requests"
_RESPONSES = "quire.entrypoints.openai.protocol.responses"
_PROTOCOL = {
    "ChatCompletionRequest": f"{_REQUESTS}:ChatCompletionRequest",
    "CompletionRequest": f"{_REQUESTS}:CompletionRequest",
    "StreamOptions": f"{_REQUESTS}:StreamOptions",
    "ChatCompletionResponse": f"{_RESPONSES}:ChatCompletion",
    "ChatCompletionStreamResponse": f"{_RESPONSES}:ChatChunk",
    "CompletionResponse": f"{_RESPONSES}:Completion",
    "ChatMessage": f"{_RESPONSES}:ChatMessage",
    "DeltaMessage": f"{_RESPONSES}:ChatDelta",
    "UsageInfo": f"{_RESPONSES}:Usage",
    "ModelCard": f"{_RESPONSES}:ModelCard",
    "ModelList": f"{_RESPONSES}:ModelList",
}
_POOLED = {
    name: f"quire.pooling.outputs:{name}"
    for name in (
        "PoolingOutput", "PoolingRequestOutput", "EmbeddingOutput", "EmbeddingRequestOutput", "ClassificationOutput",
        "ClassificationRequestOutput", "ScoringOutput", "ScoringRequestOutput",
    )
}  # fmt: skip
_TOKENIZER = {
    "get_tokenizer": "quire.vllm_names.functions:get_tokenizer",
    "AnyTokenizer": "quire.engine.tokenizer:Tokenizer",
    "TokenizerLike": "quire.engine.tokenizer:Tokenizer",
}
_METRICS = {
    name: f"quire.metrics.reader:{name}" for name in ("Metric", "Counter", "Gauge", "Histogram", "Vector")
}

PRESENT: Mapping[str, Mapping[str, str]] = {
    "quire": {"BeamSearchParams": "quire.sampling_params:BeamSearchParams"},
    "quire.config": {
        "VllmConfig": "quire.config:EngineConfig",
        "SpeculativeConfig": "quire.config.speculative:SpeculativeConfig",
    },
    "quire.engine.arg_utils": _ARGS,
    "quire.engine.async_llm_engine": {"AsyncLLMEngine": _ASYNC, "AsyncEngineDeadError": "quire.errors:EngineDeadError"},
    "quire.engine.protocol": {"EngineClient": _ASYNC},
    "quire.v1.engine.async_llm": {"AsyncLLM": _ASYNC},
    "quire.v1.engine.llm_engine": {"LLMEngine": "quire.engine.llm_engine:LLMEngine"},
    "quire.v1.engine.exceptions": {
        "EngineDeadError": "quire.errors:EngineDeadError",
        "EngineGenerateError": "quire.errors:EngineError",
    },
    "quire.v1.metrics.reader": _METRICS,
    "quire.v1.metrics.loggers": {"StatLoggerBase": "quire.metrics.stats:StatLogger"},
    "quire.entrypoints.openai.protocol": _PROTOCOL,
    "quire.entrypoints.openai.chat_completion.protocol": _PROTOCOL,
    "quire.entrypoints.openai.completion.protocol": _PROTOCOL,
    "quire.entrypoints.openai.engine.protocol": _PROTOCOL,
    "quire.entrypoints.serve.engine.protocol": _PROTOCOL,
    "quire.exceptions": {
        "VLLMError": "quire.errors:QuireError",
        "VLLMClientError": "quire.errors:ClientError",
        "VLLMValidationError": "quire.errors:ValidationError",
    },
    "quire.inputs": {"SingletonPrompt": "quire.inputs:PromptType", "PromptInputs": "quire.inputs:PromptType"},
    "quire.inputs.data": _INPUTS,
    "quire.logger": {"init_logger": "logging:getLogger"},
    "quire.logprobs": _LOGPROBS,
    "quire.lora.request": {"LoRARequest": "quire.adapters:LoRARequest"},
    "quire.lora_request": {"LoRARequest": "quire.adapters:LoRARequest"},
    "quire.lora_resolvers": {"LoRAResolver": "quire.lora.resolver:LoRAResolver"},
    "quire.model_executor.models": {"ModelRegistry": "quire.models.registry:ModelRegistry"},
    "quire.model_executor.models.registry": {"ModelRegistry": "quire.models.registry:ModelRegistry"},
    "quire.outputs": _POOLED,
    "quire.sampling_params": {"GuidedDecodingParams": "quire.structured_outputs_params:StructuredOutputsParams"},
    "quire.sequence": _LOGPROBS,
    "quire.tokenizers": _TOKENIZER,
    "quire.transformers_utils.tokenizer": _TOKENIZER,
    "quire.utils": {"random_uuid": "quire.vllm_names.functions:random_uuid", "FlexibleArgumentParser": _PARSER},
    "quire.utils.argparse_utils": {"FlexibleArgumentParser": _PARSER},
}  # fmt: skip
"""Module -> name -> place of the object ("module:Name")."""

ALL = "*"
_RAY = "set distributed_executor_backend='ray', which joins or starts a cluster"
_COMPILED = "leave compilation_config out: nothing is compiled (docs/coming_from_vllm.md)"
_SHARD = "a layer is given its Shard (quire.layers.shard)"
_WEIGHTS = "new weights are taken by weights.begin, update and finish (docs/training.md)"
_ADAPTER = "use a LoRA adapter (docs/lora.md)"
_SHUTDOWN = "call LLM.shutdown(), which releases everything"
_NO_PAIRS = "prompts with an encoder's and a decoder's part are EncoderDecoderPrompt"
_DICT = "give the option as a dict"
_TEMPLATES = "call LLM.chat, or get_tokenizer().apply_chat_template"
_TOOLS = "a format is an entry point of the group quire.tool_formats (docs/plugins.md)"
_REASONING = "a format is an entry point of the group quire.reasoning_formats (docs/plugins.md)"
_SERVER = "start the server with `quire serve`, or call quire.entrypoints.openai.api_server.run_server"
_LAYERS = "a model is written on quire.layers (CONTRIBUTING.md), a plug-in of quire.models"
_MEDIA = "give pictures and sounds as they are, in multi_modal_data or in messages"

ABSENT: Mapping[str, Mapping[str, str]] = {
    "quire": {"initialize_ray_cluster": _RAY},
    "quire.config": {
        "CompilationConfig": _COMPILED,
        "CompilationMode": _COMPILED,
        "CompilationLevel": _COMPILED,
        "CUDAGraphMode": "set enforce_eager or cudagraph_capture_sizes",
        "PoolerConfig": _DICT,
        "KVTransferConfig": _DICT,
        "ProfilerConfig": _DICT,
        "ReasoningConfig": "set reasoning_start_str and reasoning_end_str",
        "MultiModalConfig": "give its fields to LLM, such as limit_mm_per_prompt",
        "OffloadConfig": "weights are not offloaded layer by layer; set quantization='int4'",
        "ECTransferConfig": "encoders run in the server that answers",
        "DecodingConfig": "set structured_outputs_config",
        "EPLBConfig": "experts stay on their ranks",
        "PromptAdapterConfig": _ADAPTER,
        "AttentionConfig": "set attention_backend",
        "set_current_vllm_config": "a configuration is an argument, never ambient",
        "get_current_vllm_config": "a configuration is an argument, never ambient",
    },
    "quire.config.compilation": {ALL: _COMPILED},
    "quire.distributed": {
        "cleanup_dist_env_and_memory": _SHUTDOWN,
        "destroy_model_parallel": _SHUTDOWN,
        "destroy_distributed_environment": _SHUTDOWN,
        "init_distributed_environment": "the executor does this (docs/parallelism.md)",
        "get_tensor_model_parallel_rank": _SHARD,
        "get_tensor_model_parallel_world_size": _SHARD,
    },
    "quire.distributed.parallel_state": {
        "destroy_model_parallel": _SHUTDOWN,
        "destroy_distributed_environment": _SHUTDOWN,
        "cleanup_dist_env_and_memory": _SHUTDOWN,
        ALL: _SHARD,
    },
    "quire.distributed.device_communicators": {ALL: "collectives of ranks are in quire.distributed"},
    "quire.distributed.utils": {"StatelessProcessGroup": _WEIGHTS},
    "quire.distributed.weight_transfer": {ALL: _WEIGHTS},
    "quire.distributed.kv_events": {ALL: "subscribe as docs/kv_events.md shows; messages are vLLM's"},
    "quire.distributed.kv_transfer": {ALL: "a connector is a plug-in of quire.kv_connectors (docs/kv_store.md)"},
    "quire.entrypoints.api_server": {ALL: _SERVER},
    "quire.entrypoints.openai.api_server": dict.fromkeys(
        ("build_app", "init_app_state", "build_async_engine_client", "router"),
        "add routes in a proxy, or call quire.entrypoints.openai.api_server.run_server(engine, server)",
    ),
    "quire.entrypoints.chat_utils": {ALL: _TEMPLATES},
    "quire.renderers": {ALL: _TEMPLATES},
    "quire.entrypoints.pooling": {ALL: _SERVER},
    "quire.entrypoints.launcher": {ALL: _SERVER},
    "quire.entrypoints.launchers": {ALL: _SERVER},
    "quire.entrypoints.utils": {ALL: _SERVER},
    "quire.entrypoints.serve": {ALL: _SERVER},
    "quire.entrypoints.openai.cli_args": {ALL: "flags are fields of quire.config.ServerConfig and EngineArgs"},
    "quire.entrypoints.openai.serving_chat": {ALL: _SERVER},
    "quire.entrypoints.openai.serving_completion": {ALL: _SERVER},
    "quire.entrypoints.openai.serving_models": {ALL: _SERVER},
    "quire.entrypoints.openai.serving_engine": {ALL: _SERVER},
    "quire.entrypoints.openai.serving_embedding": {ALL: _SERVER},
    "quire.entrypoints.openai.serving_responses": {ALL: _SERVER},
    "quire.entrypoints.openai.run_batch": {ALL: "run `quire run-batch`"},
    "quire.entrypoints.openai.tool_parsers": {ALL: _TOOLS},
    "quire.tool_parsers": {ALL: _TOOLS},
    "quire.reasoning": {ALL: _REASONING},
    "quire.envs": {ALL: "variables of quire begin with QUIRE_ (docs/configuration.md)"},
    "quire.forward_context": {ALL: _LAYERS},
    "quire.inputs": {
        "ExplicitEncoderDecoderPrompt": "it is EncoderDecoderPrompt",
        "zip_enc_dec_prompts": _NO_PAIRS,
        "to_enc_dec_tuple_list": _NO_PAIRS,
    },
    "quire.inputs.parse": {ALL: "prompts are the types of quire.inputs"},
    "quire.model_executor": {ALL: _LAYERS},
    "quire.attention": {ALL: "a backend is a plug-in of quire.attention_backends (docs/plugins.md)"},
    "quire.multimodal": {"MULTIMODAL_REGISTRY": _MEDIA},
    "quire.multimodal.utils": {ALL: _MEDIA},
    "quire.multimodal.image": {ALL: _MEDIA},
    "quire.multimodal.video": {ALL: _MEDIA},
    "quire.multimodal.audio": {ALL: _MEDIA},
    "quire.multimodal.inputs": {ALL: _MEDIA},
    "quire.assets.base": {ALL: _MEDIA},
    "quire.assets.image": {ALL: _MEDIA},
    "quire.assets.audio": {ALL: _MEDIA},
    "quire.assets.video": {ALL: _MEDIA},
    "quire.platforms": {"current_platform": "call quire.platforms.choose_device"},
    "quire.triton_utils": {ALL: "import triton itself"},
    "quire.compilation": {ALL: "nothing is compiled by torch.compile"},
    "quire.transformers_utils.config": {ALL: "call quire.models.checkpoint.read_model_config"},
    "quire.usage.usage_lib": {ALL: "quire sends no usage statistics, so leave usage_context out"},
    "quire.benchmarks": {ALL: "run `quire bench`"},
    "quire.collect_env": {ALL: "run `quire collect-env`"},
    "quire.core": {ALL: "the scheduler is quire.scheduler, the cache manager quire.kv_cache"},
    "quire.device_allocator": {ALL: "sleep() and wake_up() give memory back and take it (docs/sleep.md)"},
    "quire.engine.metrics": {ALL: "metrics are in quire.metrics (docs/observability.md)"},
    "quire.engine.multiprocessing": {ALL: "AsyncLLM has its engine core in a process of its own"},
    "quire.executor.ray_utils": {ALL: _RAY},
    "quire.profiler": {ALL: "call LLM.start_profile and stop_profile (docs/observability.md)"},
    "quire.prompt_adapter": {ALL: _ADAPTER},
    "quire.sampling_params": {"SamplingType": "a request is greedy if its temperature is 0"},
    "quire.tracing": {ALL: "set otlp_traces_endpoint (docs/observability.md)"},
    "quire.v1": {ALL: "quire has one engine: import from quire.engine, quire.scheduler, quire.worker"},
    "quire.v1.sample.logits_processor": {
        ALL: "subclass quire.logits_processors.LogitsProcessor, which sees one request at a time (docs/sampling.md)"
    },
    "quire.worker.worker_base": {ALL: "another device is a plug-in of quire.devices (docs/plugins.md)"},
    "quire.scalar_type": {ALL: "kernels are ops of quire.kernels.ops"},
    "quire._custom_ops": {ALL: "kernels are ops of quire.kernels.ops"},
    "quire.utils": {ALL: "quire.utils has random_uuid and FlexibleArgumentParser only"},
}  # fmt: skip
"""Module -> name -> reason, and what to do; `ALL` is every name, in submodules as well."""


def _packages() -> set[str]:
    parents = {name.rpartition(".")[0] for name in (*PRESENT, *ABSENT)}
    return parents | {name.rpartition(".")[0] for name in parents}


_MODULES = frozenset({*PRESENT, *ABSENT} | _packages())


def reason_of(module: str, name: str) -> str | None:
    """Return why a name is absent, by the module or a package that contains it; None: it is unknown."""
    reason = ABSENT.get(module, {}).get(name)
    while reason is None and module:
        reason = ABSENT.get(module, {}).get(ALL)
        module = module.rpartition(".")[0]
    return reason


def attributes_of(module: str) -> Callable[[str], Any]:
    """Return the `__getattr__` of a module, for vLLM's names that are elsewhere or absent.

    It raises ImportError for an absent name, since `from module import name` would replace another error's message.
    """

    def attribute(name: str) -> Any:
        place = PRESENT.get(module, {}).get(name)
        if place is not None:
            source, _, attribute = place.partition(":")
            return getattr(importlib.import_module(source), attribute)
        if name.startswith("__"):
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        if (reason := reason_of(module, name)) is not None:
            raise ImportError(f"{module}.{name} is not in quire: {reason}", name=module)
        hint = suggestion(name, PRESENT.get(module, {}))
        raise AttributeError(f"module {module!r} has no attribute {name!r}{hint}")

    return attribute


class VllmFinder(MetaPathFinder, Loader):
    """Finder and loader of modules that only vLLM has; the last entry of `sys.meta_path`."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of a module of the tables, or of one below a module that is absent as a whole."""
        if fullname in _MODULES or reason_of(fullname, ALL) is not None:
            return ModuleSpec(fullname, self, is_package=True)
        return None

    def exec_module(self, module: types.ModuleType) -> None:
        """Give the module its names."""
        vars(module)["__getattr__"] = attributes_of(module.__name__)
