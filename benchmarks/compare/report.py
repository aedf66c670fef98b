"""The page of results, in Markdown."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from benchmarks.compare.cases import CASES, NUM_THREADS
from benchmarks.compare.checkpoint import DENSE
from benchmarks.compare.engines.base import Engine
from benchmarks.compare.goals import PROBE_SHARES
from benchmarks.compare.isa import Isa
from benchmarks.compare.processes import ProgramError
from benchmarks.compare.records import Record
from benchmarks.compare.summary import Medians, Ratio, medians, probe_shares, ratios


def page(
    results: Sequence[Record], engines: Mapping[str, Engine], isa: Isa, date: str, shape: str = DENSE
) -> str:
    """Everything there is to say about a session."""
    rates = medians(results)
    num_rounds = 1 + max((record.round for record in results), default=0)
    parts = [
        f"# quire and its peers, {date}, {isa.title}",
        f"{shape}; {cpu()}; {NUM_THREADS} threads; up to {num_rounds} rounds in which the engines took turns; medians.",
        f"{machine_line(rates)}. Absolute figures are not stable: ratios count.",
        "## Tokens per second",
        table(rates_rows(results, rates, engines)),
        *_ratio_part(list(ratios(rates, engines, shape)), engines),
        *_failure_part(results),
        "## How it was measured",
        "\n".join(method_lines(engines, isa, shape)),
    ]
    return "\n\n".join(parts) + "\n"


def cpu(path: Path = Path("/proc/cpuinfo")) -> str:
    """The processor's name and the vector instructions it lists."""
    facts = dict(line.split(":", 1) for line in path.read_text().splitlines() if ":" in line)
    facts = {key.strip(): value.strip() for key, value in facts.items()}
    starts = ("avx", "fma", "f16c", "amx", "bmi2")
    flags = [flag for flag in facts.get("flags", "").split() if flag.startswith(starts)]
    identity = f"family {facts.get('cpu family')}, model {facts.get('model')}"
    return f"{facts.get('model name', 'unknown')} ({identity}; {' '.join(flags)})"


def machine_line(rates: Medians) -> str:
    """What the machine can do and what a decode step makes of it."""
    limits = [
        f"{rates[key] / 1e9:.1f} {unit}"
        for key, unit in (
            (("machine", "fp32", "flops"), "GFLOP/s multiply-add"),
            (("machine", "fp32", "read"), "GB/s read"),
        )
        if key in rates
    ]
    limits += [
        f"decoding one request, quire {precision} reads {share:.0%} of what a probe beside it does "
        f"(goal: {PROBE_SHARES[precision]:.0%} or more)"
        for precision, share in probe_shares(rates).items()
    ]
    return "; ".join(limits) or "machine not probed"


def rates_rows(
    results: Iterable[Record], rates: Medians, engines: Mapping[str, Engine]
) -> Iterator[Sequence[str]]:
    """A row per engine and weight format."""
    yield ("engine", "weights", *(case.title for case in CASES.values()))
    failed = {(record.engine, record.precision, record.case) for record in results if record.error}
    for name, engine in engines.items():
        for precision in engine.precisions:
            keys = [(name, precision, case) for case in CASES]
            if any(key in rates or key in failed for key in keys):
                yield (engine.name, precision, *(_cell(rates.get(key), key in failed) for key in keys))


def _cell(rate: float | None, failed: bool) -> str:
    if rate is None:
        return "failed" if failed else ""
    return f"{rate:.1f}" if rate < 100 else f"{rate:.0f}"


def ratio_rows(found: Iterable[Ratio], engines: Mapping[str, Engine]) -> Iterator[Sequence[str]]:
    """A row per pair of formats; a goal and its outcome stand beside the ratio that it is about."""
    yield ("quire", "against", *(case.title for case in CASES.values()))
    rows: dict[tuple[str, str], dict[str, str]] = defaultdict(dict)
    for one in found:
        against = f"{engines[one.peer].name} {one.peer_precision}"
        rows[one.precision, against][one.case] = _ratio_cell(one)
    for (precision, against), cells in rows.items():
        yield (precision, against, *(cells.get(case, "") for case in CASES))


def _ratio_cell(one: Ratio) -> str:
    if one.goal is None:
        return f"{one.ratio:.2f}"
    return f"{one.ratio:.2f} ({'reached' if one.reached else 'missed'}: {one.goal.ratio})"


def _ratio_part(found: Sequence[Ratio], engines: Mapping[str, Engine]) -> list[str]:
    return ["## quire, times as fast", table(ratio_rows(found, engines))] if found else []


def _failure_part(results: Iterable[Record]) -> list[str]:
    lines = [
        f"- {record.engine} {record.precision} {record.case or '(set up)'}: {record.error}"
        for record in results
        if record.error
    ]
    return ["## Not measured", "\n".join(lines)] if lines else []


def method_lines(engines: Mapping[str, Engine], isa: Isa, shape: str) -> Iterator[str]:
    """Instruction set, versions and notes of every engine."""
    settings = " ".join(f"{name}={value}" for name, value in isa.environment.items())
    command = f"python -m benchmarks.compare --isa {isa.name} --shape {shape}"
    yield f"- `{command}`; environment of every engine: `{settings}`"
    yield f"- llama.cpp built with `{' '.join(isa.cmake_options)}`"
    for engine in engines.values():
        yield f"- {engine.name}{_versions(engine)}: {engine.notes}"


def _versions(engine: Engine) -> str:
    try:
        versions = engine.versions()
    except ProgramError:
        return " (not set up)"
    return f" ({', '.join(f'{name} {version}' for name, version in versions.items())})" if versions else ""


def table(rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table; the first row is its head."""
    head, *body = rows
    lines = [head, ["---"] * len(head), *body]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
