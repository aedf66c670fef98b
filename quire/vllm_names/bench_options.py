# SPDX-License-Identifier: Apache-2.0
"""vLLM's flags of `bench`; the commands that start an engine have its options beside them."""

from __future__ import annotations

from quire.vllm_names.row import Takes, accepted, by_value, refused, renamed, table_of

_SWITCH = Takes.NOTHING
_RANDOM = "prompts are random token ids (docs/cli.md)"
_JSON = "use --json FILE"

BENCH_OPTIONS = table_of(
    by_value(
        "backend",
        {
            "openai": {},
            "vllm": {},
            "openai-chat": {"endpoint": "/v1/chat/completions"},
        },
        "other routes are not measured",
    ),
    by_value("dataset_name", {"random": {}}, _RANDOM),
    refused("dataset_path hf_name hf_split hf_subset", _RANDOM),
    refused("random_range_ratio random_prefix_len", "all prompts have --random-input-len tokens", (0, "0.0")),
    renamed("served_model_name", "model"),
    accepted("tokenizer tokenizer_mode", "prompts are sent as token ids"),
    accepted("trust_remote_code", "no remote code is run", _SWITCH),
    refused("save_result append_result", _JSON, (False,), _SWITCH),
    refused("result_dir result_filename output_json", _JSON),
    refused("save_detailed", "--json FILE has sums, means and percentiles only", (False,), _SWITCH),
    accepted("percentile_metrics", "all times are shown"),
    refused("metric_percentiles", "shown are mean, median and P99", (99,)),
    refused("goodput", "requests are not counted by their speed; shown are mean, median and P99"),
    refused("burstiness", "requests arrive as a Poisson process", (1,)),
    refused("ramp_up_strategy ramp_up_start_rps ramp_up_end_rps", "the rate is --request-rate throughout"),
    refused("extra_body", "set the server's defaults by --override-generation-config", ("{}",)),
    refused("top_p top_k min_p", "set the server's defaults by --override-generation-config"),
    refused("profile", "start the server with --profiler-config (docs/observability.md)", (False,), _SWITCH),
    accepted("disable_tqdm async_engine", "the result is the same", _SWITCH),
    accepted("label metadata request_id_prefix", "name the file of --json instead"),
    refused("num_iters_cold num_iters_warm", "use --num-iters, the timed starts, and --num-iters-warmup"),
)
"""Rows by vLLM's name, with underscores."""
