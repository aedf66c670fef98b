# SPDX-License-Identifier: Apache-2.0
"""vLLM's flags of the HTTP server; they are accepted or refused by every command with an engine."""

from __future__ import annotations

from quire.vllm_names.row import Takes, accepted, refused, table_of

_SWITCH, _MANY = Takes.NOTHING, Takes.MANY
_FALSE = (False, "")

SERVER_OPTIONS = table_of(
    accepted("enable_auto_tool_choice", 'tool_choice "auto" is always allowed', _SWITCH),
    accepted("tool_strict_level", 'a function with "strict": true is enforced (docs/tool_calling.md)'),
    accepted(
        "exclude_tools_when_tool_choice_none", 'with tool_choice "none" the model sees no tools', _SWITCH
    ),
    accepted(
        "enable_log_requests enable_log_outputs enable_log_deltas",
        "texts of requests are never logged; --otlp-traces-endpoint has their times",
        _SWITCH,
    ),
    accepted("max_log_len", "texts of requests are never logged"),
    accepted("log_error_stack", "tracebacks of internal errors are always logged", _SWITCH),
    accepted("enable_prompt_tokens_details", "usage always has the cached tokens", _SWITCH),
    accepted("enable_server_load_tracking", "GET /load always counts", _SWITCH),
    accepted("enable_request_id_headers", "every response has X-Request-Id", _SWITCH),
    accepted("enable_per_request_metrics", "times of requests are spans (docs/observability.md)", _SWITCH),
    accepted("disable_frontend_multiprocessing", "the engine core of a server has its own process", _SWITCH),
    accepted("fingerprint_mode", "system_fingerprint is quire's version"),
    accepted(
        "h11_max_incomplete_event_size h11_max_header_count",
        "headers have limits of their own; bodies have --max-request-bytes",
    ),
    accepted("custom_histogram_buckets", "buckets of metrics are vLLM's defaults (docs/observability.md)"),
    accepted(
        "disable_uvicorn_metrics_access_log",
        "requests of /metrics get no access line; see --disable-access-log-for-endpoints",
        _SWITCH,
    ),
    accepted("uvicorn_log_config", "see --log-level, --log-format and --uvicorn-log-level"),
    refused("response_role", "answers have the role assistant", ("assistant",)),
    refused(
        "allow_credentials",
        "no cookie is read; clients send their key as a bearer token, so drop it",
        _FALSE,
        _SWITCH,
    ),
    refused(
        "allowed_methods allowed_headers",
        "every method and header of the API is allowed to --allowed-origins",
        ("*", "['*']", '["*"]'),
        _MANY,
    ),
    refused("middleware", "put a proxy before the server", ("",), _MANY),
    refused("log_config_file", "use --log-level and --log-format"),
    refused(
        "tool_parser_plugin",
        "a format is an entry point of the group quire.tool_formats (docs/plugins.md)",
        ("",),
    ),
    refused(
        "reasoning_parser_plugin",
        "a format is an entry point of the group quire.reasoning_formats (docs/plugins.md)",
        ("",),
    ),
    refused("tool_server", "the server runs no tools; the client runs those that the model calls", ("",)),
    refused("return_tokens_as_token_ids", "set the field of this name in each request", _FALSE, _SWITCH),
    refused(
        "trust_request_chat_template",
        "templates are the operator's: set --chat-template",
        _FALSE,
        _SWITCH,
    ),
    refused("trust_request_mm_kwargs", "set --mm-processor-kwargs for all requests", _FALSE, _SWITCH),
    refused("grpc", "the server speaks HTTP only", _FALSE, _SWITCH),
    refused(
        "enable_scale_out tokens_only", "prompts and answers are processed in the server", _FALSE, _SWITCH
    ),
    refused("enable_offline_docs", "GET /docs needs no outside resource, so drop it", _FALSE, _SWITCH),
    refused("output_tmp_dir", "answers are written to --output-file as they finish"),
    refused(
        "enable_metrics", "a batch job prints its progress; metrics are those of quire serve", _FALSE, _SWITCH
    ),
)
"""Rows by vLLM's name, with underscores."""
