# SPDX-License-Identifier: Apache-2.0
"""vLLM's environment variables (`VLLM_*`).

A command copies those that quire reads under another name, and logs a sentence about every other one that is set.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping

from quire.vllm_names.row import Fate, accepted, log_once, refused, renamed, table_of

PREFIX = "VLLM_"

ENVIRONMENT = table_of(
    renamed("VLLM_API_KEY", "QUIRE_API_KEY"),
    renamed("VLLM_LOGGING_LEVEL", "QUIRE_LOG_LEVEL"),
    renamed("VLLM_PLUGINS", "QUIRE_PLUGINS"),
    refused("VLLM_LOGGING_CONFIG_PATH VLLM_CONFIGURE_LOGGING VLLM_LOGGING_PREFIX", "use --log-level and --log-format"),
    refused("VLLM_LOG_STATS_INTERVAL", "use --log-stats-interval"),
    refused("VLLM_CPU_KVCACHE_SPACE", "use --kv-cache-memory-bytes, in bytes: 4G is 4 GiB"),
    refused(
        "VLLM_CPU_OMP_THREADS_BIND VLLM_CPU_NUM_OF_RESERVED_CPU",
        "use --cpu-threads, --cpu-pin-threads and --cpu-numa",
    ),
    refused("VLLM_ATTENTION_BACKEND", "use --attention-backend"),
    refused("VLLM_BATCH_INVARIANT", "use --batch-invariant; on a CPU results always are"),
    refused("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "change max_position_embeddings or rope_scaling by --hf-overrides"),
    refused("VLLM_SERVER_DEV_MODE VLLM_ALLOW_RUNTIME_LORA_UPDATING", "those routes need --admin-api-key"),
    refused("VLLM_TORCH_PROFILER_DIR", "give the directory as torch_profiler_dir of --profiler-config"),
    refused("VLLM_CHAT_TEMPLATE_RENDER_TIMEOUT", "use --chat-template-timeout"),
    refused("VLLM_MAX_AUDIO_CLIP_FILESIZE_MB", "use --max-audio-bytes"),
    refused("VLLM_MM_INPUT_CACHE_GIB", "use --mm-processor-cache-gb and --encoder-cache-gb"),
    refused("VLLM_HOST_IP VLLM_PORT", "use --host, --port, --master-addr and --master-port"),
    refused("VLLM_DP_RANK VLLM_DP_SIZE VLLM_DP_MASTER_IP VLLM_DP_MASTER_PORT", "use the flags --data-parallel-*"),
    refused("VLLM_CACHE_ROOT VLLM_CONFIG_ROOT VLLM_ASSETS_CACHE", "use --packed-weights-cache and --download-dir"),
    refused("VLLM_USE_MODELSCOPE", "models come from Hugging Face or a directory"),
    refused("VLLM_MAX_N_SEQUENCES VLLM_MAX_STOP_STRINGS VLLM_MAX_COMPLETION_PROMPTS VLLM_MAX_NUM_BAD_WORDS", (
        "limits of requests are fixed (docs/sampling.md)"
    )),
    refused("VLLM_SKIP_MODEL_NAME_VALIDATION", "name the model as GET /v1/models does, or leave it out"),
    refused("VLLM_IMAGE_FETCH_TIMEOUT VLLM_AUDIO_FETCH_TIMEOUT VLLM_VIDEO_FETCH_TIMEOUT", "time-outs are fixed"),
    refused("VLLM_NIXL_SIDE_CHANNEL_HOST VLLM_NIXL_SIDE_CHANNEL_PORT", (
        "give kv_ip and kv_port in --kv-transfer-config (docs/kv_store.md)"
    )),
    refused("VLLM_ENABLE_COHERE_API", "chats have the APIs of OpenAI, Anthropic and Ollama (docs/endpoints.md)"),
    refused("VLLM_KEEP_ALIVE_ON_ENGINE_DEATH", "use --on-core-death"),
    accepted("VLLM_USE_V1 VLLM_USE_V2_MODEL_RUNNER VLLM_ENABLE_V1_MULTIPROCESSING", "there is one engine"),
    accepted("VLLM_WORKER_MULTIPROC_METHOD", "processes are always spawned"),
    accepted("VLLM_NO_USAGE_STATS VLLM_DO_NOT_TRACK", "quire sends no usage statistics"),
    accepted("VLLM_ENABLE_RESPONSES_API_STORE", "responses are stored as the request says"),
    accepted("VLLM_ENGINE_READY_TIMEOUT_S VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS VLLM_RPC_TIMEOUT", (
        "see --core-heartbeat-timeout"
    )),
    accepted("VLLM_HTTP_TIMEOUT_KEEP_ALIVE", "idle connections are closed after a fixed time"),
    accepted("VLLM_MEDIA_URL_ALLOW_REDIRECTS", "redirects are followed, and checked as the address is"),
    accepted("VLLM_ALL2ALL_BACKEND", "experts are exchanged in one way"),
    accepted("VLLM_FLASH_ATTN_VERSION VLLM_USE_TRITON_FLASH_ATTN", "see --attention-backend"),
    accepted("VLLM_USE_RUST_FRONTEND VLLM_USE_RUST_BENCH VLLM_TARGET_DEVICE", "there is one program"),
)  # fmt: skip
"""Rows by variable; those renamed name one of quire's variables."""

_UNKNOWN = "quire does not read it (docs/coming_from_vllm.md)"


def adopt_environment(environment: MutableMapping[str, str] = os.environ) -> None:
    """Set quire's variables from vLLM's, unless they are set, and log what happens to every variable of vLLM's."""
    for name in sorted(key for key in environment if key.startswith(PREFIX)):
        row = ENVIRONMENT.get(name)
        if row is None:
            log_once(name, _UNKNOWN)
        elif row.fate is Fate.RENAMED:
            if environment.setdefault(row.to, environment[name]) == environment[name]:
                log_once(name, f"is {row.to} in quire")
            else:
                log_once(name, f"has no effect, since {row.to} is set")
        else:
            effect = "has no effect" if row.fate is Fate.ACCEPTED else "is not read"
            log_once(name, f"{effect}: {row.why}")
