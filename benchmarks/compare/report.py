# SPDX-License-Identifier: Apache-2.0
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
from benchmarks.compare.perplexity import CHUNK
from benchmarks.compare.processes import ProgramError
from benchmarks.compare.records import Accuracy, Record, Score
from benchmarks.compare.reference import REAL_MODELS
from benchmarks.compare.summary import Medians, Ratio, medians, probe_shares, ratios


def page(
    results: Sequence[Record],
    engines: Mapping[str, Engine],
    isa: Isa,
    date: str,
    shape: str = DENSE,
    scores: Sequence[Score] = (),
) -> str:
    """Return the page of a session."""
    rates = medians(results)
    scores = [score for score in scores if score.text == scores[-1].text]
    num_rounds = 1 + max((record.round for record in results), default=0)
    parts = [
        f"# quire and its peers, {date}, {isa.title}",
        f"{shape}; {cpu()}; {NUM_THREADS} threads; up to {num_rounds} rounds in which the engines took turns; medians.",
        f"{machine_line(rates)}. Absolute figures are not stable: ratios count.",
        *_rate_part(results, rates, engines, scores),
        *_accuracy_part(scores, engines),
        *_ratio_part(list(ratios(rates, engines, shape)), engines),
        *_failure_part(results, scores),
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
    """Return a line with the machine's peak rates and the share of them that a decode step reaches."""
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


def _rate_part(
    results: Sequence[Record], rates: Medians, engines: Mapping[str, Engine], scores: Sequence[Score]
) -> list[str]:
    rows = rates_rows(results, rates, engines, scores)
    return ["## Tokens per second", table(rows)] if results else []


def rates_rows(
    results: Iterable[Record],
    rates: Medians,
    engines: Mapping[str, Engine],
    scores: Sequence[Score] = (),
) -> Iterator[Sequence[str]]:
    """Yield the head and a row per engine and weight format: rates, then the RMS dp of each model that has scores."""
    found, models = _by_row(scores), _models(scores)
    titles = (case.title for case in CASES.values())
    yield ("engine", "weights", *titles, *(f"RMS dp, %, {model}" for model in models))
    failed = {(record.engine, record.precision, record.case) for record in results if record.error}
    for name, engine in engines.items():
        for precision in engine.precisions:
            keys = [(name, precision, case) for case in CASES]
            if any(key in rates or key in failed for key in keys):
                cells = [_cell(rates.get(key), key in failed) for key in keys]
                changes = [_accuracy_cells(found.get((name, precision, model)))[0] for model in models]
                yield (engine.name, precision, *cells, *changes)


def _cell(rate: float | None, failed: bool) -> str:
    if rate is None:
        return "failed" if failed else ""
    return f"{rate:.1f}" if rate < 100 else f"{rate:.0f}"


def _by_row(scores: Iterable[Score]) -> dict[tuple[str, str, str], Score]:
    return {(score.engine, score.precision, score.model): score for score in scores}


def _models(scores: Iterable[Score]) -> list[str]:
    return list(dict.fromkeys(score.model for score in scores))


def _accuracy_part(scores: Sequence[Score], engines: Mapping[str, Engine]) -> list[str]:
    if not scores:
        return []
    explained = (
        "RMS dp: root of the mean square of the change of the probability of the text's own token; same top: share of "
        "positions with the same likeliest token; perplexity: its change. The reference is float32 on the same weights."
    )
    text = f"- text: {scores[0].text}; chunks of {CHUNK} tokens, whose second halves count"
    facts = "\n".join([text, *_references(scores)])
    return ["## Accuracy", table(accuracy_rows(scores, engines)), explained, facts]


def _references(scores: Sequence[Score]) -> Iterator[str]:
    """Yield a line per model: its package, and its perplexity in float32 by quire and by llama.cpp."""
    packages = {model.title: model.package for model in REAL_MODELS.values()}
    for name in _models(scores):
        perplexities = {
            score.engine.removesuffix(", files"): score.accuracy.reference_perplexity
            for score in scores
            if score.model == name and score.accuracy
        }
        listed = ", ".join(f"{value:.3f} ({engine})" for engine, value in perplexities.items())
        yield f"- {name}: from {packages[name]}; perplexity in float32 {listed or 'unknown'}"


def accuracy_rows(scores: Sequence[Score], engines: Mapping[str, Engine]) -> Iterator[Sequence[str]]:
    """Yield the head and a row per engine and weight format that has a score, with three cells per model."""
    found, models = _by_row(scores), _models(scores)
    titles = ("RMS dp, %", "same top, %", "perplexity")
    yield ("engine", "weights", *(f"{title}, {model}" for model in models for title in titles))
    for engine, precision in dict.fromkeys((score.engine, score.precision) for score in scores):
        cells = (cell for model in models for cell in _accuracy_cells(found.get((engine, precision, model))))
        yield (engines[engine].name, precision, *cells)


def _accuracy_cells(score: Score | None) -> tuple[str, str, str]:
    if score is None:
        return ("", "", "")
    one = score.accuracy
    return _numbers(one) if one else ("failed", "", "")


def _numbers(one: Accuracy) -> tuple[str, str, str]:
    return (
        f"{one.rms_change_percent:.2f}",
        f"{one.same_top_percent:.1f}",
        f"{100 * one.perplexity_change:+.2f} %",
    )


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


def _failure_part(results: Iterable[Record], scores: Iterable[Score]) -> list[str]:
    lines = [
        f"- {record.engine} {record.precision} {record.case or '(set up)'}: {record.error}"
        for record in results
        if record.error
    ]
    lines += [
        f"- {score.engine} {score.precision}, accuracy of {score.model}: {score.error}"
        for score in scores
        if score.error
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
