# SPDX-License-Identifier: Apache-2.0
"""llama-server's and llama-cli's flags, beside vLLM's: every command with an engine accepts or refuses them."""

from __future__ import annotations

from quire.vllm_names.row import Takes, accepted, by_value, refused, renamed, table_of

_SWITCH = Takes.NOTHING
_DEFAULTS = "override_generation_config."
_CACHE_TYPES = {
    "f32": {"kv_cache_dtype": "float32"},
    "f16": {},
    "bf16": {},
    "q8_0": {"kv_cache_dtype": "int8"},
}
_CACHE = "prefix caching is always on; --kv-store keeps it on disk (docs/kv_store.md)"
_WHOLE = "a model is on one kind of device as a whole: --device cpu or cuda (docs/gpu.md)"
_GPUS = "layers are sharded by --tensor-parallel-size over the GPUs of CUDA_VISIBLE_DEVICES"
_ADAPTERS = (
    "give --enable-lora --lora-modules NAME=DIRECTORY, with an adapter in PEFT's format (docs/lora.md)"
)
_ROPE = 'give {"rope_scaling": {...}} in --hf-overrides'
_KIND = "this follows from the model, or from --runner pooling (docs/embeddings.md)"
_GRAMMAR = "send structured_outputs in each request (docs/structured_output.md)"
_DRAFTS = "how much is drafted follows from what is accepted (docs/speculative.md)"
_LOG = "see --log-level and --log-format"
_THREADS = "see --cpu-threads and --cpu-pin-threads"

LLAMA_OPTIONS = table_of(
    renamed("ctx_size", "max_model_len", short=("-c",)),
    renamed("parallel", "max_num_seqs", short=("-np",)),
    renamed("threads", "cpu_threads", short=("-t",)),
    accepted("threads_batch", _THREADS, short=("-tb",)),
    accepted("threads_http", "one process serves HTTP; see --api-server-count"),
    renamed("batch_size", "max_num_batched_tokens", short=("-b",)),
    accepted("n_gpu_layers gpu_layers", _WHOLE, short=("-ngl",)),
    accepted("flash_attn", "attention always works this way", short=("-fa",)),
    by_value("cache_type_k", _CACHE_TYPES, "4 bits lose too much", short=("-ctk",)),
    by_value("cache_type_v", _CACHE_TYPES, "4 bits lose too much", short=("-ctv",)),
    accepted(
        "mlock mmap repack direct_io warmup cont_batching kv_unified swa_full",
        "memory and steps are managed by quire",
        _SWITCH,
    ),
    renamed("alias", "served_model_name", short=("-a",)),
    renamed("hf_repo", "model", short=("-hf", "-hfr")),
    refused("hf_file", "write it behind the repository: owner/name:FILE.gguf", short=("-hff",)),
    refused("model_url", "download the file, or name it owner/name:FILE.gguf", short=("-mu",)),
    renamed("models_dir", "models"),
    accepted("jinja", "the model's chat template is always used", _SWITCH),
    renamed("chat_template_file", "chat_template"),
    renamed("chat_template_kwargs", "default_chat_template_kwargs"),
    by_value(
        "reasoning_format",
        {"auto": {}, "deepseek": {}, "none": {"reasoning_parser": "none"}},
        "thoughts are in a field of their own",
    ),
    by_value(
        "reasoning_budget",
        {"-1": {}, "0": {"default_chat_template_kwargs.enable_thinking": False}},
        "send thinking_token_budget in requests",
    ),
    renamed("n_predict", _DEFAULTS + "max_new_tokens", short=("-n",)),
    renamed("predict", _DEFAULTS + "max_new_tokens"),
    renamed("temp", _DEFAULTS + "temperature"),
    *(
        renamed(name, _DEFAULTS + name)
        for name in ("top_k", "top_p", "min_p", "presence_penalty", "frequency_penalty")
    ),
    renamed("repeat_penalty", _DEFAULTS + "repetition_penalty"),
    refused("grammar grammar_file json_schema json_schema_file", _GRAMMAR),
    renamed("model_draft", "speculative_config.model", short=("-md",)),
    renamed("draft_max", "speculative_config.num_speculative_tokens"),
    accepted("draft_min draft_p_min", _DRAFTS),
    accepted("keep", "the context is never shifted"),
    accepted("embedding embeddings rerank reranking", _KIND, _SWITCH),
    by_value(
        "pooling",
        {name: {"pooler_config.pooling_type": name.upper()} for name in ("mean", "cls", "last")}
        | {"rank": {}},
        _KIND,
    ),
    refused("lora lora_scaled", _ADAPTERS),
    refused("control_vector control_vector_scaled", "control vectors are not applied"),
    accepted("slots props metrics perf webui ui", "the route is always there (docs/endpoints.md)", _SWITCH),
    refused("slot_save_path", "use --kv-store DIRECTORY, which keeps prefixes by itself (docs/kv_store.md)"),
    accepted("cache_reuse cache_ram slot_prompt_similarity", _CACHE),
    accepted("cache_prompt", _CACHE, _SWITCH),
    refused(
        "context_shift",
        "an answer ends where the context is full; give a larger --max-model-len",
        (False,),
        _SWITCH,
    ),
    refused(
        "rope_scale rope_freq_base rope_freq_scale yarn_orig_ctx yarn_ext_factor yarn_attn_factor", _ROPE
    ),
    refused("override_kv", "give --hf-overrides with the names of config.json"),
    refused("override_tensor", _WHOLE, short=("-ot",)),
    refused("cpu_moe", _WHOLE, (False,), _SWITCH, short=("-cmoe",)),
    refused("n_cpu_moe", _WHOLE, (0,), short=("-ncmoe",)),
    refused("split_mode", _GPUS, ("none", "layer"), short=("-sm",)),
    refused("tensor_split", _GPUS, short=("-ts",)),
    refused("main_gpu", _GPUS, (0,), short=("-mg",)),
    accepted("fit", "the KV cache takes what is free; see --kv-cache-memory-bytes", short=("-fit",)),
    by_value("no_mmproj", {False: {"language_model_only": True}}, "", _SWITCH),
    renamed("ssl_key_file", "ssl_keyfile"),
    renamed("ssl_cert_file", "ssl_certfile"),
    renamed("timeout", "write_timeout", short=("-to",)),
    accepted("numa prio poll cpu_mask cpu_range cpu_strict", _THREADS),
    refused("path", "the server sends no files; put a proxy before it"),
    refused("log_file", "redirect the standard error: 2> FILE"),
    accepted("log_disable log_prefix log_timestamps", _LOG, _SWITCH),
    accepted("log_verbosity log_colors", _LOG),
    by_value("verbose", {True: {"log_level": "debug"}}, _LOG, _SWITCH, short=("-v",)),
)
"""Rows by llama-server's name, with underscores."""

_CHAT = "without a prompt `quire run MODEL` is a chat"

RUN_OPTIONS = table_of(
    renamed("n_predict", "max_tokens", short=("-n",)),
    renamed("predict", "max_tokens"),
    renamed("temp", "temperature"),
    refused("prompt", 'write the prompt behind the model: quire run MODEL "PROMPT"', short=("-p",)),
    refused("file", "use a pipe: quire run MODEL < FILE", short=("-f",)),
    renamed("system", "system_prompt", short=("-sys",)),
    accepted("conversation interactive interactive_first", _CHAT, _SWITCH, short=("-cnv", "-i")),
    accepted("keepalive", "the model is unloaded when the command ends"),
    accepted("nowordwrap hidethinking display_prompt", "the answer is printed as it comes", _SWITCH),
    by_value("format", {"json": {"json_schema": '{"type": "object"}'}}, "give --json-schema"),
    refused(
        "think",
        "the model's chat template decides; over HTTP set reasoning_effort (docs/chat.md)",
        (False,),
        _SWITCH,
    ),
)
"""Rows of `quire run` besides, by the names of llama-cli and `ollama run`."""
