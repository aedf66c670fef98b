# SPDX-License-Identifier: Apache-2.0
"""`quire disagg-proxy`: one address for prefill engines and decode engines."""

from __future__ import annotations

import signal

import click

from quire.entrypoints.cli.options import FiniteRange


@click.command("disagg-proxy")
@click.option(
    "--prefill", "prefill", metavar="URL", multiple=True, required=True, help="http://HOST:PORT; repeatable."
)
@click.option(
    "--decode", "decode", metavar="URL", multiple=True, required=True, help="http://HOST:PORT; repeatable."
)
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option(
    "--port", type=click.IntRange(0, 65535), default=8000, show_default=True, help="Port to listen on."
)
@click.option(
    "--max-connections", type=click.IntRange(1), default=512, show_default=True, help="Requests at a time."
)
@click.option(
    "--reply-timeout", type=FiniteRange(min=0, min_open=True), default=600.0, show_default=True,
    help="Seconds for a prefill, or for a reply that is no stream.",
)  # fmt: skip
@click.option(
    "--piece-timeout", type=FiniteRange(min=0, min_open=True), default=120.0, show_default=True,
    help="Seconds between two events of a stream.",
)  # fmt: skip
def disagg_proxy(
    prefill: tuple[str, ...],
    decode: tuple[str, ...],
    host: str,
    port: int,
    max_connections: int,
    reply_timeout: float,
    piece_timeout: float,
) -> None:
    """Have --prefill engines compute prompts and --decode engines generate, until SIGTERM.

    The engines are `quire serve` or vLLM with --kv-transfer-config. One that is lost is replaced by the next.
    """
    import uvicorn

    from quire.disagg.engines import ProxiedEngine, Timeouts
    from quire.disagg.proxy import DisaggProxy
    from quire.logging_setup import configure_logging

    configure_logging()
    signal.signal(signal.SIGTERM, lambda *_: None)  # uvicorn drains, and raises the signal again at its end
    proxy = DisaggProxy(
        [ProxiedEngine(url) for url in prefill],
        [ProxiedEngine(url) for url in decode],
        max_connections=max_connections,
        timeouts=Timeouts(reply_timeout, piece_timeout),
    )
    uvicorn.run(proxy, host=host, port=port, log_config=None, access_log=False, timeout_graceful_shutdown=30)
