# SPDX-License-Identifier: Apache-2.0
"""HTTP server, and many models behind one address; read by the API process or the router's only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from quire.config.fields import Config, hashed_key, option
from quire.errors import ConfigError


@dataclass(frozen=True)
class ServerConfig(Config):
    """Address, access and limits of the HTTP server; keys are stored as hashes (`quire.config.fields`)."""

    host: str = option("127.0.0.1", "Address to listen on; 0.0.0.0 opens the server to the network.")
    port: int = option(8000, "Port to listen on; 0: any free one.", ge=0, le=65535)
    uds: str | None = option(
        None,
        "Path of a Unix socket to listen on, for this user only, in place of --host and --port.",
        metavar="PATH",
    )
    headless: bool = option(
        False, "No server: run ranks for the server of another host (--nnodes, --node-rank, --master-addr)."
    )
    api_server_count: int = option(
        1,
        "Processes that speak HTTP, tokenize and stream, in front of one engine (see supervision.md).",
        ge=1,
        le=64,
    )
    api_key: tuple[str, ...] = option(
        (), "Key that requests must bring as a bearer token; may be given several times (or QUIRE_API_KEY)."
    )
    api_key_file: str | None = option(
        None, "YAML file of tenants with their keys, shares and limits (see security.md).", metavar="FILE"
    )
    allow_unauthenticated_metrics: bool = option(
        False, "Serve /metrics without a key, for a Prometheus that has none."
    )
    metrics_compat: str = option(
        "none",
        "vllm: metrics that vLLM has, too, are called vllm: instead of quire:, so that its dashboards fit.",
        choices=("none", "vllm"),
    )
    ssl_certfile: str | None = option(
        None, "PEM file with the server's TLS certificate and those that lead to its root.", metavar="FILE"
    )
    ssl_keyfile: str | None = option(
        None, "PEM file with the key of --ssl-certfile; default: it is in that file.", metavar="FILE"
    )
    ssl_ca_certs: str | None = option(
        None, "PEM file with the roots of clients' certificates (--ssl-cert-reqs).", metavar="FILE"
    )
    ssl_cert_reqs: int = option(
        0, "Certificate of clients: 0: none is asked for, 1: it may be given, 2: it is required.", ge=0, le=2
    )
    ssl_ciphers: str | None = option(
        None, "Ciphers below TLS 1.3, as OpenSSL lists them; default: OpenSSL's."
    )
    enable_ssl_refresh: bool = option(False, "Use a renewed certificate and key without a restart.")
    root_path: str = option("", "Path prefix under which a proxy offers the server.")
    allowed_origins: tuple[str, ...] = option((), "Origins that browsers may call from (CORS).")
    allowed_hosts: tuple[str, ...] = option(
        (),
        "Name or *.name for Host headers besides localhost and addresses; several times (see security.md).",
        metavar="NAME",
    )
    lora_modules: tuple[str, ...] = option(
        (),
        "Adapter that requests name as their model; may be given several times (see lora.md).",
        metavar="NAME=DIRECTORY",
    )
    lora_dir: str | None = option(
        None,
        "Directory of adapters, each in a subdirectory: a request that names one as its model loads it (see lora.md).",
        metavar="DIRECTORY",
    )
    chat_template: str | None = option(
        None,
        "File with the chat template, its text, or the name of one of the model's; default: the model's own.",
    )
    chat_template_content_format: str = option(
        "auto",
        "Message content given to the template: string, openai (a list of parts), or auto: as the template expects.",
        choices=("auto", "string", "openai"),
    )
    default_chat_template_kwargs: dict[str, Any] = option(
        {},
        'JSON object of options for the chat template that requests may override, e.g. {"enable_thinking": false}.',
    )
    chat_template_timeout: float = option(
        2.0, "Seconds that the chat template may take for a request; at start-up it has 30.", gt=0.0
    )
    tool_call_parser: str = option(
        "auto",
        "Format of the model's tool calls (docs/tool_calling.md); auto: detected from its chat template; or none.",
        metavar="NAME",
    )
    reasoning_parser: str = option(
        "auto",
        "Format of the model's reasoning (docs/tool_calling.md); auto: detected from its chat template; or none.",
        metavar="NAME",
    )
    max_tools: int = option(1024, "Most tools of one request.", ge=1)
    unknown_fields: str = option(
        "ignore",
        "What to do with request fields without effect: ignore them and name them in the reply, or reject (400).",
        choices=("ignore", "reject"),
    )
    max_request_bytes: int = option(16 * 2**20, "Largest request body in bytes.", ge=1024)
    max_audio_bytes: int = option(
        25 * 2**20,
        "Largest body of a request with a sound to transcribe, without its fields, and largest sound in a chat; bytes.",
        ge=1024,
    )
    max_receiving_bytes: int = option(
        256 * 2**20,
        "Most bytes of request bodies that a process receives at once; more is answered 503 (two bodies always fit).",
        ge=1024,
    )
    max_pooled_numbers: int = option(
        1 << 23,
        "Most numbers in one reply of a pooling model: the default is 2,048 embeddings of 4,096.",
        ge=1,
    )
    max_connections: int = option(
        0, "Most open connections; further ones are answered 503. 0: limited by open files.", ge=0
    )
    read_timeout: float = option(
        60.0,
        "Seconds that a client may take to send a request, from its connection or first byte on.",
        gt=0.0,
    )
    write_timeout: float = option(
        30.0, "Seconds after which a client that does not read its answer is cut off.", gt=0.0
    )
    sse_keep_alive_interval: float = option(
        5.0,
        "Seconds of silence after which a stream gets a keep-alive (a comment; a ping in the Messages API); 0: never.",
        ge=0.0,
    )
    request_timeout: float = option(
        0.0,
        "Seconds after which a request ends with its output so far, if it sets no timeout; 0: never.",
        ge=0.0,
    )
    shutdown_timeout: float = option(30.0, "Seconds that SIGTERM leaves running requests to finish.", ge=0.0)
    uvicorn_log_level: str = option(
        "info",
        "Log level of the HTTP server.",
        choices=("critical", "error", "warning", "info", "debug", "trace"),
    )
    disable_uvicorn_access_log: bool = option(False, "No log line per HTTP request.")
    disable_fastapi_docs: bool = option(False, "No /docs and /openapi.json.")
    admin_api_key: str | None = option(
        None,
        "Key of the routes that act on all requests (docs/endpoints.md), which exist only with it (or "
        "QUIRE_ADMIN_API_KEY).",
    )
    allow_pull: bool = option(
        False,
        "Clients may fetch models from Hugging Face into this machine's cache, and remove them from it (/api/pull, "
        "/api/delete).",
    )
    enable_tokenizer_info_endpoint: bool = option(
        False, "GET /tokenizer_info, which shows the chat template and the special tokens."
    )
    enable_force_include_usage: bool = option(False, "Send usage with every stream, asked for or not.")
    disable_access_log_for_endpoints: tuple[str, ...] = option(
        ("/health", "/livez", "/readyz", "/ping", "/metrics"),
        "Paths, with commas between, whose successful requests get no access line; none: every request gets one.",
        metavar="PATHS",
    )
    console: bool = option(True, "A page at / for browsers: chat, and the engine at work for the admin key.")

    def __post_init__(self) -> None:
        super().__post_init__()
        # The only way to replace a given value in a frozen dataclass.
        object.__setattr__(self, "api_key", tuple(map(hashed_key, self.api_key)))
        if self.admin_api_key:
            object.__setattr__(self, "admin_api_key", hashed_key(self.admin_api_key, "--admin-api-key"))

    @property
    def offers_adapters(self) -> bool:
        """True if adapters are given, or a directory of them."""
        return bool(self.lora_modules or self.lora_dir)

    @property
    def scheme(self) -> str:
        """Scheme of the server's URL."""
        return "https" if self.ssl_certfile else "http"

    def check_tls(self) -> None:
        """Reject TLS options without the one that they need.

        Raises:
            ConfigError: names both.
        """
        needs = (
            ("--ssl-keyfile", self.ssl_keyfile),
            ("--ssl-ca-certs", self.ssl_ca_certs),
            ("--ssl-cert-reqs", self.ssl_cert_reqs),
            ("--ssl-ciphers", self.ssl_ciphers),
            ("--enable-ssl-refresh", self.enable_ssl_refresh),
        )
        for flag, value in needs:
            if value and not self.ssl_certfile:
                raise ConfigError(f"{flag} needs --ssl-certfile, the server's certificate")
        if self.ssl_cert_reqs and not self.ssl_ca_certs:
            raise ConfigError("--ssl-cert-reqs needs --ssl-ca-certs, the roots of clients' certificates")


@dataclass(frozen=True)
class ModelRouterConfig(Config):
    """Several models behind one address, each in a server of its own (see many_models.md)."""

    models: str | None = option(
        None,
        "YAML file of models, or directory of checkpoints: serve all, loaded on demand, by the model of a request.",
        metavar="FILE|DIRECTORY",
    )
    models_memory: int = option(
        0, "Bytes that loaded models may take together; 0: what is available at the start.", ge=0
    )
    models_max: int = option(0, "Most models loaded at once; 0: as many as memory holds.", ge=0)
    models_autoload: bool = option(
        True, "Load a model when a request names it; else only POST /models/load does."
    )
    models_keep_alive: float = option(
        -1.0,
        "Idle seconds until a model is unloaded, unless its entry or a request says otherwise; negative: never.",
    )
    models_wait_timeout: float = option(
        300.0, "Seconds that a request may wait for its model, until it is answered 503.", gt=0.0
    )
    models_turn: float = option(
        10.0, "Seconds that a model in use keeps its place while requests for another one wait.", ge=0.0
    )
    models_max_waiting: int = option(
        512, "Most requests that wait for models at once; further ones are answered 503.", ge=1
    )
    models_load_timeout: float = option(
        600.0, "Seconds that a model may take to load until it counts as failed.", gt=0.0
    )
    models_spare: bool = option(
        True,
        "Keep one process without a model ready for the next load, while memory for it is left (320 MiB).",
    )
