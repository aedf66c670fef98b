# SPDX-License-Identifier: Apache-2.0
"""`quire simulate`: throughput and latencies of an engine under a load that nobody sends."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from quire.entrypoints.cli.options import EngineCommand, HumanInt, Rate, engine_config
from quire.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from quire.simulate.load import SimulatedRequest
    from quire.simulate.report import Summary
    from quire.simulate.simulator import SimulatedRun
    from quire.simulate.sweep import Scenario

FILE = click.Path(path_type=Path)
COUNT = HumanInt(minimum=1)
COUNT_OR_ZERO = HumanInt(minimum=0)


@click.group()
def simulate() -> None:
    """Run the real scheduler and KV cache in virtual time, with the measured step costs of a machine."""


@simulate.command(cls=EngineCommand)
@click.option("--output", type=FILE, required=True, help="Machine file to write.")
@click.option(
    "--trace", "trace_file", type=FILE, help="Measure no engine: read a run that --record-trace wrote."
)
def calibrate(output: Path, trace_file: Path | None, **params: Any) -> None:
    """Measure the step costs of an engine on this machine, for `quire simulate run`; takes a minute or two."""
    from quire.engine.trace import read_trace
    from quire.simulate.calibrate import calibrate as measure
    from quire.simulate.machine import machine_of, write_machine

    machine = measure(engine_config(params)) if trace_file is None else machine_of(read_trace(trace_file))
    write_machine(machine, output)
    costs = machine.costs
    click.echo(
        f"{machine.model}: {1e3 * (costs.plan_s + costs.pass_s):.2f} ms a step, {1e6 * costs.sample_s:.0f} us a "
        f"request, {1e6 * costs.row_s:.0f} us a token of a long prompt, {1e9 * costs.position_s:.1f} ns a position, "
        f"{1e3 * machine.front_end_s:.2f} ms outside the core; "
        f"mean error {costs.error:.0%} over {costs.num_steps} steps"
    )


@simulate.command()
@click.argument("machine_file", metavar="MACHINE", type=FILE)
@click.option(
    "--load", "load_file", type=FILE, help="JSONL of requests, or a recorded run, in place of a description."
)
@click.option("--num-requests", type=COUNT, default=200, show_default=True, help="Requests of the load.")
@click.option(
    "--rate", type=Rate(), default=math.inf, show_default=True, help="Arrivals per second (Poisson)."
)
@click.option(
    "--prompt-tokens", default="512", show_default=True, help="512, 100-900 (uniform) or ~512 (log-normal)."
)
@click.option("--output-tokens", default="128", show_default=True, help="The same for the generated tokens.")
@click.option(
    "--prefix-tokens", type=COUNT_OR_ZERO, default=0, show_default=True, help="Tokens of a shared beginning."
)
@click.option(
    "--prefix-groups", type=COUNT, default=1, show_default=True, help="Different shared beginnings."
)
@click.option(
    "--concurrency", type=COUNT_OR_ZERO, default=0, show_default=True, help="Most in flight; 0: no limit."
)
@click.option("--seed", type=COUNT_OR_ZERO, default=0, show_default=True, help="Seed of all that is drawn.")
@click.option(
    "--vary",
    metavar="OPTION=V1,V2,...",
    multiple=True,
    help="Simulate each value of an option; the last one varies.",
)
@click.option("--json", "json_file", type=FILE, help="Write the numbers to this file.")
@click.option("--page", "page_file", type=FILE, help="Write an HTML page with charts to this file.")
def run(
    machine_file: Path,
    load_file: Path | None,
    concurrency: int,
    vary: tuple[str, ...],
    json_file: Path | None,
    page_file: Path | None,
    **description: Any,
) -> None:
    """Simulate a load on MACHINE, a file of `quire simulate calibrate`.

    --vary may be given several times: options with one value are set, and one may have several.
    """
    from quire.simulate.load import LoadDescription
    from quire.simulate.machine import read_machine
    from quire.simulate.report import summarize, table
    from quire.simulate.sweep import Scenario

    machine = read_machine(machine_file)
    load = LoadDescription(**description) if load_file is None else _load(load_file, description["seed"])
    scenarios = _scenarios(Scenario.from_machine(machine, load, concurrency), vary)
    runs = []
    for scenario in scenarios:
        result = scenario.run(machine)
        runs.append((summarize(scenario.name, result), result))
    click.echo("\n".join(table([summary for summary, _ in runs])))
    for summary, result in runs:
        if result.refused:
            click.echo(
                f"{summary.name}: {len(result.refused)} refused, the first: {result.refused[0]}", err=True
            )
    _write(runs, json_file, page_file, f"quire simulate: {machine.model}")


def _load(path: Path, seed: int) -> list[SimulatedRequest]:
    from quire.engine.trace import MAGIC, read_trace
    from quire.simulate.load import read_load, recorded_load

    try:
        with path.open("rb") as file:
            is_trace = file.read(len(MAGIC)) == MAGIC
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    return recorded_load(read_trace(path)) if is_trace else read_load(path, seed)


def _scenarios(scenario: Scenario, vary: Sequence[str]) -> list[Scenario]:
    """Return the scenarios: options with one value are set in all of them."""
    from quire.simulate.sweep import sweep

    swept: tuple[str, list[str]] | None = None
    for text in vary:
        option, sign, values = text.partition("=")
        listed = [value for value in values.split(",") if value]
        if not sign or not listed:
            raise ConfigError(f"--vary {text}: write an option and its values, such as max_num_seqs=8,16,32")
        if len(listed) == 1:
            scenario = scenario.with_option(option, listed[0])
        elif swept is None:
            swept = option, listed
        else:
            raise ConfigError(
                f"--vary: {swept[0]} and {option} have several values each; vary one option at a time"
            )
    return [scenario] if swept is None else list(sweep(scenario, *swept))


def _write(
    runs: Sequence[tuple[Summary, SimulatedRun]], json_file: Path | None, page_file: Path | None, title: str
) -> None:
    from quire.simulate.page import page

    try:
        if json_file is not None:
            json_file.write_text(json.dumps([summary.as_dict() for summary, _ in runs], indent=2) + "\n")
        if page_file is not None:
            page_file.write_text(page(title, runs), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {error.filename}: {error.strerror}") from None
