# SPDX-License-Identifier: Apache-2.0
"""llama.cpp's prompt lookup (`llama-lookup`), for `benchmarks.copied_text`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.compare import processes
from benchmarks.compare.cases import NUM_THREADS
from benchmarks.compare.engines.llama_cpp import LlamaCpp
from benchmarks.compare.isa import Isa
from benchmarks.compare.workers.characters import text_of

FORMATS = {None: "BF16", "int8": "Q8_0", "int4": "Q4_0"}
"""A file's type by what quire quantizes to: as many bits."""
_LIMIT_S = 600.0
_TIMES = re.compile(r"(?:encoded|decoded) +(\d+) tokens in +([\d.]+) seconds")


@dataclass(frozen=True)
class Said:
    """Result of a prompt: the text, prompt included, and tokens per second, the prompt's time included."""

    text: str
    rate: float


class Lookup:
    """One model, whose tokens are characters."""

    def __init__(
        self, peer: LlamaCpp, isa: Isa, checkpoint: Path, folder: Path, quantization: str | None
    ) -> None:
        """Set llama.cpp up and convert the checkpoint into `folder`."""
        self._peer, self._isa, self._folder = peer, isa, folder
        peer.set_up(isa)
        self._model = folder / "BF16.gguf"
        peer.convert(checkpoint, self._model, "characters")
        if (form := FORMATS[quantization]) != "BF16":
            full, self._model = self._model, folder / f"{form}.gguf"
            peer.quantize(full, self._model, form)

    def generate(self, prompt: Sequence[int], num_tokens: int) -> Said:
        """Go on behind these tokens by so many.

        Raises:
            ProgramError: it failed, or took too long.
        """
        given, log = self._folder / "prompt.txt", self._folder / "lookup.log"
        given.write_text(text_of(prompt))
        log.unlink(missing_ok=True)
        size = str(len(prompt) + 2 * num_tokens)
        options = ["-m", self._model, "-f", given, "-n", str(num_tokens - 1), "-c", size]
        options += ["-t", str(NUM_THREADS), "--temp", "0", "--no-escape", "--log-file", log]
        command = [self._peer.tool("llama-lookup"), *options]
        printed = "".join(processes.lines(command, _LIMIT_S, self._isa.environment))
        return Said(printed, rate_in(log.read_text()))


def rate_in(log: str) -> float:
    """Tokens per second of what `llama-lookup` has written down: those of the answer by the time of all."""
    (_, encoding), (count, decoding) = _TIMES.findall(log)
    return int(count) / (float(encoding) + float(decoding))
