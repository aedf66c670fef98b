# SPDX-License-Identifier: Apache-2.0
"""Accuracy of every row of the table, on real weights and a real text, beside its speed.

For each row: the root of the mean square of the change of the probability of the text's own token (RMS dp), the share
of positions with the same likeliest token, and the perplexity, against float32 on the same weights. llama.cpp's numbers
are its own tool's. quire's are computed likewise, on the same token ids.

Invariant: a score is appended to the session's file as soon as it is known; a row that failed is left out from then on.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.compare import perplexity, processes, records
from benchmarks.compare.engines.llama_cpp import NOT_PURE
from benchmarks.compare.engines.quire import Quire
from benchmarks.compare.isa import Isa
from benchmarks.compare.processes import ProgramError
from benchmarks.compare.records import Accuracy, Score
from benchmarks.compare.reference import FLOATS, REAL_MODELS, Reference, Text

TRUTH = "float32"
FILES = ("Q8_0", "Q4_0", NOT_PURE, "Q4_K_M")
"""Types of files that both llama.cpp and quire read; speed is not measured of the one that is not pure."""
PEER_CACHES: Mapping[str, tuple[str, str]] = {"BF16, q8_0 cache": ("BF16", "q8_0")}
"""llama.cpp's rows with a KV cache that is not the default: the type of the file, and that of keys and values."""
ROWS: Mapping[str, Sequence[str]] = {
    "quire": (*Quire.precisions, "bf16, int8 cache", "int8, int8 cache"),
    "llama.cpp": ("BF16", *FILES, *PEER_CACHES),
    "quire, files": FILES,
}
"""Engine -> weight formats whose accuracy is measured."""
MORE_ROWS: Mapping[str, Sequence[str]] = {
    "quire": ("int8, precise", "int4, precise", "int4-plain"),
    "quire, files": tuple(f"{name}, precise" for name in FILES),
}
"""Weight formats whose accuracy is measured only if they are named."""
FORMATS = tuple(
    dict.fromkeys(name for rows in (ROWS, MORE_ROWS) for names in rows.values() for name in names)
)


@dataclass(frozen=True)
class Reading:
    """Logprob of the text's token, and likeliest token, of every position that counts."""

    logprobs: list[float]
    tops: list[int]

    @property
    def perplexity(self) -> float:
        """The perplexity of the text."""
        return math.exp(-sum(self.logprobs) / len(self.logprobs))


def compared(ours: Reading, truth: Reading) -> Accuracy:
    """Return how near a reading is to the truth."""
    pairs = list(zip(ours.logprobs, truth.logprobs, strict=True))
    squares = sum((math.exp(a) - math.exp(b)) ** 2 for a, b in pairs)
    same = sum(a == b for a, b in zip(ours.tops, truth.tops, strict=True))
    rms, same_top = 100 * math.sqrt(squares / len(pairs)), 100 * same / len(pairs)
    return Accuracy(rms, same_top, ours.perplexity, truth.perplexity)


def _read(reference: Reference, model: Path, precision: str, limit_s: float) -> Reading:
    """Return what quire makes of the text."""
    target = reference.of_text("reading")
    worker = "benchmarks.compare.workers.quire_reading"
    command: list[str | Path] = [sys.executable, "-m", worker, model, precision, reference.logits(), target]
    processes.run(command, limit_s, reference.isa.environment)
    found = Reading(**json.loads(target.read_text()))
    target.unlink()
    return found


def _truth(reference: Reference, limit_s: float) -> Reading:
    """Return quire's reading in float32, made once."""
    target = reference.of_text("truth")
    if not target.exists():
        found = _read(reference, reference.weights(FLOATS), TRUTH, limit_s)
        unfinished = reference.of_text("unfinished")
        unfinished.write_text(json.dumps(asdict(found)))
        unfinished.rename(target)
    return Reading(**json.loads(target.read_text()))


def _score_quire(reference: Reference, precision: str, limit_s: float) -> Accuracy:
    truth = _truth(reference, limit_s)
    return compared(_read(reference, reference.weights(FLOATS), precision, limit_s), truth)


def _score_files(reference: Reference, precision: str, limit_s: float) -> Accuracy:
    truth = _truth(reference, limit_s)
    file = reference.weights(precision.removesuffix(", precise"))
    return compared(_read(reference, file, precision, limit_s), truth)


def _score_llama_cpp(reference: Reference, precision: str, limit_s: float) -> Accuracy:
    logits, its = reference.logits(), reference.perplexity()
    weights, cache = PEER_CACHES.get(precision, (precision, None))
    file = reference.weights(weights)
    return perplexity.compared_with(logits, its, reference.peer, reference.isa, file, limit_s, cache)


Scorer = Callable[[Reference, str, float], Accuracy]
SCORERS: Mapping[str, Scorer] = {
    "quire": _score_quire,
    "llama.cpp": _score_llama_cpp,
    "quire, files": _score_files,
}


@dataclass(frozen=True)
class Session:
    """Rows, models and text of which scores are wanted, and the file in which they gather."""

    engines: Sequence[str]
    models: Sequence[str]
    formats: Sequence[str]
    """If none are named: all of `ROWS`."""
    text: Text
    isa: Isa
    folder: Path
    limit_s: float
    results: Path
    scorers: Mapping[str, Scorer]
    say: Callable[[str], None] = print


def measure(session: Session, max_runs: int = 0) -> bool:
    """Score what is still missing, at most `max_runs` rows (0: all); return whether anything is left."""
    references = {
        name: Reference(REAL_MODELS[name], session.text, session.folder, session.isa)
        for name in session.models
    }
    for count, (model, engine, precision) in enumerate(list(missing(session))):
        if max_runs and count >= max_runs:
            return True
        score = _scored(session, references[model], engine, precision)
        records.append(session.results, [score])
        session.say(_line(score))
    return False


def missing(session: Session) -> Iterator[tuple[str, str, str]]:
    """Yield model, engine and weight format of which the session's file has neither a score nor a failure."""
    known = {
        (one.model, one.engine, one.precision)
        for one in records.read_scores(session.results)
        if one.text == str(session.text)
    }
    for model in session.models:
        for engine in (name for name in SCORERS if name in session.engines):
            for precision in _rows(engine, session.formats):
                if (REAL_MODELS[model].title, engine, precision) not in known:
                    yield model, engine, precision


def _rows(engine: str, formats: Sequence[str]) -> list[str]:
    every = (*ROWS[engine], *MORE_ROWS.get(engine, ()))
    return [name for name in every if name in (formats or ROWS[engine])]


def _scored(session: Session, reference: Reference, engine: str, precision: str) -> Score:
    started, found, reason = time.perf_counter(), None, ""
    try:
        found = session.scorers[engine](reference, precision, session.limit_s)
    except ProgramError as error:
        reason = str(error)
    seconds = round(time.perf_counter() - started, 1)
    return Score(engine, precision, reference.model.title, str(session.text), found, reason, seconds)


def _line(score: Score) -> str:
    found = score.accuracy
    outcome = (
        f"RMS dp {found.rms_change_percent:.2f} %, same top {found.same_top_percent:.1f} %, "
        f"perplexity {found.perplexity:.3f} ({found.perplexity_change:+.1%})"
        if found
        else score.error
    )
    return f"{score.model} {score.engine} {score.precision}: {outcome}, {score.seconds:.0f} s"
