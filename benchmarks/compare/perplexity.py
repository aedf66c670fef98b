# SPDX-License-Identifier: Apache-2.0
"""llama.cpp's own measure of what quantization changes (`llama-perplexity --kl-divergence`).

The tool counts the second half of each chunk: positions CHUNK / 2 + 1 to CHUNK - 1, each given all before it in its
chunk. Where the model's texts begin with a BOS token, the first token of every chunk is replaced with it.
"""

from __future__ import annotations

import array
import re
import struct
from collections.abc import Iterable
from pathlib import Path

from benchmarks.compare import processes
from benchmarks.compare.cases import NUM_THREADS
from benchmarks.compare.engines.base import SET_UP_LIMIT_S
from benchmarks.compare.engines.llama_cpp import LlamaCpp
from benchmarks.compare.isa import Isa
from benchmarks.compare.processes import ProgramError
from benchmarks.compare.records import Accuracy

CHUNK = 512
"""Tokens of a chunk."""
COUNTED = range(CHUNK // 2 + 1, CHUNK)
"""Places in a chunk whose tokens count."""
_PASSIVE = {"OMP_WAIT_POLICY": "passive"}
"""No time is measured, and threads that spin take twice as long beside other programs."""
_MAGIC = b"_logits_"
_HEADER = "=8sIii"
_RUNNING = re.compile(r"\[\d+\](\d+\.\d+),")
_STATISTICS = {
    "rms": re.compile(r"RMS \S*p *: *([\d.]+)"),
    "same_top": re.compile(r"Same top p: *([\d.]+)"),
    "perplexity": re.compile(r"Mean PPL\(Q\) *: *([\d.]+)"),
}


def save_logits(peer: LlamaCpp, isa: Isa, model: Path, text: Path, num_chunks: int, target: Path) -> float:
    """Write the tokens of a text and a model's logits, with a float32 KV cache, and return the perplexity.

    Raises:
        ProgramError: llama-perplexity fails, or the text has fewer than two chunks.
    """
    given: list[str | Path] = ["-f", text, "--chunks", str(num_chunks), "-ctk", "f32", "-ctv", "f32"]
    command = [*_command(peer, model), *given, "--kl-divergence-base", target]
    return perplexity_in(processes.lines(command, SET_UP_LIMIT_S, {**isa.environment, **_PASSIVE}))


def compared_with(
    logits: Path,
    perplexity: float,
    peer: LlamaCpp,
    isa: Isa,
    model: Path,
    limit_s: float,
    cache: str | None = None,
) -> Accuracy:
    """Return the accuracy of a model against logits that `save_logits` has written.

    `cache` is the type of keys and values, by llama.cpp's name; None: its default, f16.

    Raises:
        ProgramError: llama-perplexity fails, or takes longer than `limit_s` seconds.
    """
    # Values are cached in a quantized type with flash attention only.
    kept = [] if cache is None else ["-ctk", cache, "-ctv", cache, "-fa", "on"]
    command = [*_command(peer, model), *kept, "--kl-divergence-base", logits, "--kl-divergence"]
    found = statistics_in(processes.lines(command, limit_s, {**isa.environment, **_PASSIVE}))
    return Accuracy(found["rms"], found["same_top"], found["perplexity"], perplexity)


def _command(peer: LlamaCpp, model: Path) -> list[str | Path]:
    return [peer.tool("llama-perplexity"), "-m", model, "-t", str(NUM_THREADS), "-c", str(CHUNK)]


def perplexity_in(lines: Iterable[str]) -> float:
    """Return the perplexity of all chunks, the last of the running values that the tool prints."""
    found = _RUNNING.findall("".join(lines))
    if not found:
        raise ProgramError("llama-perplexity printed no perplexity: the text may be shorter than two chunks")
    return float(found[-1])


def statistics_in(lines: Iterable[str]) -> dict[str, float]:
    """Return what `llama-perplexity --kl-divergence` has printed; it ends with 0 even where it fails."""
    printed = "".join(lines)
    found = {name: pattern.search(printed) for name, pattern in _STATISTICS.items()}
    values = {name: float(match[1]) for name, match in found.items() if match}
    if missing := [name for name in found if name not in values]:
        raise ProgramError(f"llama-perplexity printed no {', '.join(missing)}")
    return values


def chunks_in(logits: Path) -> list[list[int]]:
    """Return the token ids of each chunk of a file of logits, as the text has them.

    Raises:
        ProgramError: the file is none of llama-perplexity's, or has chunks of another size.
    """
    with logits.open("rb") as file:
        magic, size, _, count = struct.unpack(_HEADER, file.read(struct.calcsize(_HEADER)))
        if (magic, size) != (_MAGIC, CHUNK):
            raise ProgramError(f"{logits} has no logits of chunks of {CHUNK} tokens")
        ids = array.array("i", file.read(4 * size * count))
    return [ids[start : start + CHUNK].tolist() for start in range(0, len(ids), CHUNK)]
