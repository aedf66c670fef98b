# SPDX-License-Identifier: Apache-2.0
"""`quire trace`: summary and replay of a recorded run."""

from __future__ import annotations

from pathlib import Path

import click


@click.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option(
    "--replay",
    "replays",
    is_flag=True,
    help="Also run its events again and check that the plans come out equal.",
)
def trace(file: Path, replays: bool) -> None:
    """Summarize FILE, which an engine wrote with --record-trace: steps, tokens, times and waits by cause."""
    from quire.bench.recorded_run import summarize
    from quire.engine.trace import read_trace, replay

    recorded = read_trace(file)
    click.echo("\n".join(summarize(recorded).lines()))
    if replays:
        num_plans = sum(1 for _ in replay(recorded))
        click.echo(f"replayed  {num_plans} plans, all equal")
