# SPDX-License-Identifier: Apache-2.0
"""vLLM's engine options: keywords of `LLM(...)` and `EngineArgs(...)`, flags, and keys of `--config FILE`."""

from __future__ import annotations

from quire.vllm_names.row import Takes, accepted, by_value, refused, renamed, table_of

_SWITCH, _MANY = Takes.NOTHING, Takes.MANY
_FALSE = (False, "")

_MODEL = (
    accepted("trust_remote_code", "no remote code is run; models are built from quire's own layers", _SWITCH),
    accepted("code_revision", "no remote code is run"),
    accepted("enable_sleep_mode", "sleep needs no switch (docs/sleep.md)", _SWITCH),
    accepted("allow_deprecated_quantization", "the checkpoint names its format", _SWITCH),
    accepted("config_format", "config.json and GGUF are recognized by themselves"),
    accepted("disable_sliding_window", "sliding windows cost no cache beyond the window", _SWITCH),
    accepted(
        "tokenizer_pool_size tokenizer_pool_type tokenizer_pool_extra_config", "tokenizing needs no pool"
    ),
    by_value(
        "task",
        {
            "auto": {},
            "generate": {"runner": "generate"},
            "embed": {"runner": "pooling", "convert": "embed"},
            "embedding": {"runner": "pooling", "convert": "embed"},
            "classify": {"runner": "pooling", "convert": "classify"},
            "score": {"runner": "pooling"},
            "reward": {"runner": "pooling", "convert": "reward"},
        },
        "the task is --runner and --convert, and by default the checkpoint's",
    ),
    renamed("rope_scaling", "hf_overrides.rope_scaling"),
    renamed("rope_theta", "hf_overrides.rope_theta"),
    renamed("override_pooler_config", "pooler_config"),
    refused(
        "tokenizer_mode",
        "the tokenizer is read from the model's files; drop it, or name another tokenizer with --tokenizer",
        ("auto", "hf", "slow", "fast"),
    ),
    refused(
        "tokenizer_revision",
        "--revision applies to the tokenizer as well; for another one give its directory with --tokenizer",
        ("main",),
    ),
    refused("hf_config_path", "put config.json beside the weights, or change keys with --hf-overrides"),
    refused("hf_token", "set the environment variable HF_TOKEN, which downloads read"),
    refused(
        "logits_processor_pattern", "name the classes with --logits-processors MODULE:CLASS", harmless=("",)
    ),
    refused("override_neuron_config", "quire has no Neuron device"),
    refused("override_attention_dtype", "activations are float32 on a CPU and --dtype on a GPU"),
    refused(
        "enable_return_routed_experts return_sampling_mask", "such outputs do not exist", _FALSE, _SWITCH
    ),
    refused("renderer_num_workers", "set --api-server-count, whose processes render and tokenize", (1,)),
)

_LOADING = (
    accepted("use_tqdm_on_load", "the bar is shown on a terminal only", _SWITCH),
    accepted("pt_load_map_location", "weights are read from safetensors, to the device"),
    accepted("safetensors_load_strategy", "weights are mapped, or read by several threads, by itself"),
    accepted("ignore_patterns", "only the files that the model needs are fetched", _MANY),
    refused("model_loader_extra_config", "loaders have no further options", ({}, "{}", "")),
    refused(
        "qlora_adapter_name_or_path", "give the adapter with --enable-lora --lora-modules NAME=DIRECTORY"
    ),
    accepted(
        "weight_transfer_config",
        "each update names its source: directory, segment or address (docs/training.md)",
    ),
)

_CACHE = (
    accepted("prefix_caching_hash_algo", "blocks are named by one kind of hash"),
    accepted(
        "kv_sharing_fast_prefill", "layers that share a cache skip its computation by themselves", _SWITCH
    ),
    accepted("use_v2_block_manager", "there is one block manager", _SWITCH),
    accepted(
        "mamba_block_size mamba_cache_mode mamba_backend mamba_ssm_cache_dtype mamba_cache_dtype",
        ("states of recurrent layers have blocks of their own (docs/kv_cache.md)"),
    ),
    accepted("calculate_kv_scales", "scales are those of the checkpoint, or made for each block", _SWITCH),
    accepted("kv_cache_dtype_skip_layers", "a layer that cannot use the dtype is named at start-up", _MANY),
    accepted("kv_cache_metrics kv_cache_metrics_sample", "metrics of the cache are always there", _SWITCH),
    accepted("num_lookahead_slots", "slots for drafts follow from --speculative-config"),
    refused(
        "cpu_offload_gb",
        "weights are not offloaded layer by layer; quantize them (--quantization int4), or use more ranks",
        (0,),
    ),
    refused(
        "offload_backend offload_group_size offload_num_in_group offload_prefetch_step offload_params "
        "cpu_offload_params",
        "weights are not offloaded layer by layer; quantize them with --quantization int4",
        (0, 1, "auto", ""),
    ),
    refused(
        "kv_offloading_size kv_offloading_backend",
        "use --swap-space for host memory, or --kv-store for a disk or other hosts (docs/kv_store.md)",
    ),
    refused("cpu_kvcache_space", "use --kv-cache-memory-bytes"),
    refused("ec_transfer_config", "encoders run in the server that answers", ("", "{}")),
)

_SCHEDULER = (
    accepted(
        "max_num_partial_prefills max_long_partial_prefills",
        "any number of prompts may be in chunks, within --max-num-batched-tokens",
    ),
    accepted("scheduler_delay_factor", "a prompt is scheduled as soon as there is room"),
    accepted("disable_async_output_proc", "see --async-scheduling", _SWITCH),
    accepted("disable_chunked_mm_input", "inputs of encoders are never split", _SWITCH),
    accepted("scheduler_reserve_full_isl prefill_schedule_interval", "prompts are admitted by free blocks"),
    accepted("watermark", "blocks of running requests are kept in reserve by themselves"),
    renamed("multi_step_stream_outputs", "multi_step_streams", takes=_SWITCH),
)

_SPECULATION = (
    renamed("speculative_model", "speculative_config.model"),
    renamed("spec_model", "speculative_config.model"),
    renamed("spec_method", "speculative_config.method"),
    renamed("spec_tokens", "speculative_config.num_speculative_tokens"),
    renamed("num_speculative_tokens", "speculative_config.num_speculative_tokens"),
    renamed("ngram_prompt_lookup_max", "speculative_config.prompt_lookup_max"),
    renamed("ngram_prompt_lookup_min", "speculative_config.prompt_lookup_min"),
    renamed("speculative_model_quantization", "speculative_config.quantization"),
    refused(
        "speculative_draft_tensor_parallel_size",
        "the draft model has the ranks of the model, or is whole on each (docs/speculative.md)",
        (1,),
    ),
    accepted(
        "spec_decoding_acceptance_method speculative_disable_by_batch_size "
        "typical_acceptance_sampler_posterior_threshold typical_acceptance_sampler_posterior_alpha",
        "drafts never change a text, and their number follows the load",
    ),
)

_PARALLEL = (
    accepted("disable_custom_all_reduce", "all-reduce of this device is chosen at start-up", _SWITCH),
    by_value(
        "worker_use_ray",
        {True: {"distributed_executor_backend": "ray"}, False: {}},
        "ray is a value of --distributed-executor-backend",
        _SWITCH,
    ),
    accepted("engine_use_ray", "the engine core of a server has its own process", _SWITCH),
    accepted("ray_workers_use_nsight", "start the whole command under nsys", _SWITCH),
    accepted("max_parallel_loading_workers", "each rank reads its own part of the weights"),
    accepted("enable_dbo", "experts are exchanged in one way", _SWITCH),
    accepted(
        "all2all_backend dbo_decode_token_threshold dbo_prefill_token_threshold moe_backend",
        "experts are exchanged and computed in one way",
    ),
    accepted("ubatch_size", "--max-num-batched-tokens is the size of a step", short=("-ub",)),
    accepted("disable_nccl_for_dp_synchronization", "replicas are not synchronized", _SWITCH),
    accepted("distributed_timeout_seconds", "ranks that end or hang are noticed; see --core-heartbeat-timeout"),
    accepted(
        "dcp_kv_cache_interleave_size cp_kv_cache_interleave_size dcp_comm_backend",
        "heads are split, and contexts are not",
    ),
    renamed("numa_bind", "cpu_pin_threads", takes=_SWITCH),
    refused("numa_bind_nodes numa_bind_cpus", "use --cpu-numa, or start the command under numactl", takes=_MANY),
    accepted("data_parallel_multi_port_external_lb", "each replica has a --port of its own", _SWITCH),
    renamed("data_parallel_master_ip", "data_parallel_address"),
    renamed("data_parallel_master_port", "data_parallel_rpc_port"),
    accepted("performance_mode", "batch sizes follow --max-num-seqs and --max-num-batched-tokens"),
    refused("decode_context_parallel_size", "split heads with --tensor-parallel-size", (1,), short=("-dcp",)),
    refused("prefill_context_parallel_size", "split heads with --tensor-parallel-size", (1,), short=("-pcp",)),
    refused("enable_eplb enable_elastic_ep", "experts stay on their ranks", _FALSE, _SWITCH),
    refused("eplb_config num_redundant_experts expert_placement_strategy", "experts stay on their ranks", (
        0, {}, "{}", "linear"
    )),
    refused(
        "worker_cls",
        "the worker is chosen by --device; another device is a plug-in of quire.devices (docs/plugins.md)",
        ("auto",),
    ),
)  # fmt: skip

_COMPILATION = (
    accepted(
        "compilation_config",
        "nothing is compiled by torch.compile; steps are recorded graphs (--enforce-eager switches them off)",
        short=("-cc",),
    ),
    accepted("optimization_level", "there is one level, the fastest", short=("-O",)),
    accepted("kernel_config attention_config", "kernels are chosen at start-up; see --attention-backend"),
    accepted("disable_cascade_attn enable_flashinfer_autotune enable_mfu_metrics", "there is none", _SWITCH),
    renamed("cuda_graph_sizes", "cudagraph_capture_sizes", takes=_MANY),
    accepted(
        "max_seq_len_to_capture max_context_len_to_capture max_cudagraph_capture_size",
        "graphs are recorded for every length, and for the batches of --cudagraph-capture-sizes",
    ),
    refused("additional_config", "there are no platforms with options of their own", ({}, "{}", "")),
)

_OUTPUT = (
    accepted("enable_reasoning", "the format of the reasoning is detected; see --reasoning-parser", _SWITCH),
    renamed("guided_decoding_backend", "structured_outputs_config.backend"),
    renamed(
        "guided_decoding_disable_any_whitespace",
        "structured_outputs_config.disable_any_whitespace",
        takes=_SWITCH,
    ),
    renamed(
        "guided_decoding_disable_additional_properties",
        "structured_outputs_config.disable_additional_properties",
        takes=_SWITCH,
    ),
    accepted("guided_decoding_disable_fallback", "there is no fallback to another backend", _SWITCH),
    accepted("enable_trace_replay", "every request can be replayed; see --record-trace", _SWITCH),
    accepted("reasoning_config", "see --reasoning-start-str and --reasoning-end-str"),
    refused("watermark_config", "texts are not watermarked"),
)

_ADAPTERS = (
    accepted("fully_sharded_loras", "adapters are sharded as their layers are", _SWITCH),
    accepted("enable_lora_bias", "biases of adapters are read where there are any", _SWITCH),
    accepted("long_lora_scaling_factors", "scales are those of the adapter", _MANY),
    accepted("enable_tower_connector_lora", "an adapter applies to the layers that its files name", _SWITCH),
    accepted("specialize_active_lora", "rows without an adapter skip it", _SWITCH),
    refused("enable_prompt_adapter", "use a LoRA adapter (docs/lora.md)", _FALSE, _SWITCH),
    refused(
        "max_prompt_adapters max_prompt_adapter_token prompt_adapters", "use a LoRA adapter (docs/lora.md)"
    ),
    refused("lora_target_modules", "an adapter applies to the layers that its files name"),
)

_MULTIMODAL = (
    accepted(
        "disable_mm_preprocessor_cache mm_processor_cache_type mm_shm_cache_max_object_size_mb",
        "prepared inputs are cached with the encoder's outputs; see --encoder-cache-gb",
    ),
    accepted("mm_encoder_tp_mode mm_encoder_attn_backend", "the encoder runs whole on each rank"),
    accepted("skip_mm_profiling", "memory is measured after loading, with nothing run in vain", _SWITCH),
    refused("mm_encoder_only", "encoders run in the server that answers", _FALSE, _SWITCH),
    refused("interleave_mm_strings", "media are where the messages put them", _FALSE, _SWITCH),
    refused("video_pruning_rate media_io_kwargs", "media are read as they are", (0, {}, "{}")),
    accepted("image_input_type image_token_id image_input_shape image_feature_size", "the model knows them"),
)

_OBSERVABILITY = (
    accepted("disable_log_requests", "requests are never logged", _SWITCH),
    accepted("show_hidden_metrics_for_version", "no metric is hidden"),
    accepted("collect_detailed_traces", "spans have all the times (docs/observability.md)"),
    accepted("enable_layerwise_nvtx_tracing cudagraph_metrics", "there are none", _SWITCH),
    accepted(
        "aggregate_engine_logging enable_logging_iteration_details enable_mm_processor_stats",
        "see --log-stats-interval, and the metrics (docs/observability.md)",
        _SWITCH,
    ),
    accepted("fail_on_environ_validation", "a variable without effect is named in the log", _SWITCH),
)

OPTIONS = table_of(
    *_MODEL,
    *_LOADING,
    *_CACHE,
    *_SCHEDULER,
    *_SPECULATION,
    *_PARALLEL,
    *_COMPILATION,
    *_OUTPUT,
    *_ADAPTERS,
    *_MULTIMODAL,
    *_OBSERVABILITY,
)
"""Rows by vLLM's name, with underscores."""

NAMED_PATHS = frozenset({"lora_modules"})
"""Options with entries NAME=DIRECTORY, which vLLM also writes as objects of name and path."""
