# SPDX-License-Identifier: Apache-2.0
"""vLLM's methods and attributes of classes that quire has under the same name.

A class takes `missing_member` as its `__getattr__`, so that a method of vLLM's that does not exist is an AttributeError
with a sentence.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from quire.vllm_names.row import suggestion

_WEIGHTS = "new weights are taken by weights.begin, update and finish (docs/training.md)"
_TRAINING = (
    "init_weight_transfer_engine shutdown_weight_transfer_engine start_weight_update start_draft_weight_update "
    "update_weights finish_weight_update update_weight_version get_weight_version"
)
_COMMON = {
    "reset_mm_cache": "call reset_prefix_cache",
    "release_kv_cache_memory": "call sleep(1), which keeps the weights in memory",
    "vllm_config": "the configuration is config",
    "get_vllm_config": "the configuration is config",
    **dict.fromkeys(_TRAINING.split(), _WEIGHTS),
}

MEMBERS: Mapping[str, Mapping[str, str]] = {
    "LLM": {
        **_COMMON,
        "enqueue": "give all prompts to generate, or call llm_engine.add_request and llm_engine.step",
        "enqueue_chat": "give all conversations to chat",
        "wait_for_completion": "generate waits for all prompts",
        "preprocess_chat": "call get_tokenizer().apply_chat_template",
        "set_tokenizer": "give tokenizer=DIRECTORY to LLM",
        "get_lora_tokenizer": "chat uses the tokenizer of the adapter by itself",
        "reward": "call encode, for a model with convert='reward'",
        "is_sleeping": "llm_engine.is_sleeping",
        "get_model_config": "the configuration is llm_engine.config.model",
        "model_config": "the configuration is llm_engine.config.model",
        "get_world_size": "the ranks are llm_engine.config.parallel.num_ranks",
        "vllm_config": "the configuration is llm_engine.config",
        "get_vllm_config": "the configuration is llm_engine.config",
    },
    "LLMEngine": {
        **_COMMON,
        "do_log_stats": "add_stat_logger(LoggingStatLogger()) of quire.metrics.logging logs",
        "get_tokenizer": "the tokenizer is tokenizer",
        "get_model_config": "the configuration is config.model",
        "model_config": "the configuration is config.model",
        "collective_rpc": "call LLM.collective_rpc",
        "apply_model": "call LLM.apply_model",
        "pin_lora": "max_cpu_loras is the number of adapters that are kept",
    },
    "AsyncLLM": {
        **_COMMON,
        "is_running": "errored is true once the engine has ended",
        "is_stopped": "errored is true once the engine has ended",
        "is_tracing_enabled": "set otlp_traces_endpoint",
        "do_log_stats": "add_stat_logger(LoggingStatLogger()) of quire.metrics.logging logs",
        "pin_lora": "max_cpu_loras is the number of adapters that are kept",
        "scale_elastic_ep": "the number of replicas is fixed at start",
        "wait_for_requests_to_drain": "await the generators of the requests",
        "get_model_config": "the configuration is model_config",
        "add_request": "iterate over generate in a task of its own",
        "check_admission": "generate refuses what max_num_queued_reqs and max_num_queued_tokens do not allow",
        "get_num_queued_tokens": "see the metric num_requests_waiting (docs/observability.md)",
        "get_kv_event_sources": "the addresses are those of kv_events_config (docs/kv_events.md)",
        "renderer": "the texts are made by input_processor",
        "get_supported_tasks": "the tasks are config.pooling, or generation if that is None",
        "from_vllm_config": "call AsyncLLM(config)",
        "get_num_unfinished_requests": "call num_unfinished_requests",
    },
    "Tokenizer": {
        "get_vocab": "call vocabulary()",
        "convert_tokens_to_ids": "call id_of(token)",
        "convert_ids_to_tokens": "call literal(token_id)",
        "batch_decode": "call decode for each",
        "tokenize": "call encode, and literal(token_id) for each id",
        "all_special_ids": "the ids are special_ids",
        "all_special_tokens": "the tokens are special_tokens",
        "pad_token": "batches are not padded",
        "pad_token_id": "batches are not padded",
        "padding_side": "batches are not padded",
        "add_special_tokens": "change the tokenizer's files",
        "add_tokens": "change the tokenizer's files",
        "name_or_path": "the file is file",
        "save_pretrained": "copy the tokenizer's files",
    },
}  # fmt: skip
"""Class -> member -> what to do instead."""


def missing_member(kind: str) -> Callable[[Any, str], Any]:
    """Return the `__getattr__` of a class of `MEMBERS`, which raises AttributeError."""

    def missing(instance: Any, name: str) -> Any:
        why = MEMBERS[kind].get(name)
        if why is not None:
            raise AttributeError(f"{kind}.{name} is not in quire: {why}")
        public = (one for one in dir(type(instance)) if not one.startswith("_"))
        hint = "" if name.startswith("_") else suggestion(name, public)
        raise AttributeError(f"{kind!r} object has no attribute {name!r}{hint}")

    return missing
