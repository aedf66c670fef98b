# SPDX-License-Identifier: Apache-2.0
"""Real models, a text, and what is made of them once: weights in floats, quantized files, reference logits.

The reference is float32 on the weights that a package's GGUF file stands for, and all engines get the token ids into
which llama.cpp cuts the text.
Invariant: a file is complete or not there.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.compare import perplexity
from benchmarks.compare.engines.llama_cpp import LlamaCpp
from benchmarks.compare.isa import Isa
from benchmarks.compare.processes import ROOT, ProgramError
from tests.real import fetch

FLOATS = "F32"
DEFAULT_TEXT = tuple(ROOT / name for name in ("LICENSE", "docs/life_of_a_request.md", "docs/kv_cache.md"))
NUM_CHUNKS = 10


@dataclass(frozen=True)
class RealModel:
    """A GGUF file that packages ship; the folder is one of `tests.real.fetch`."""

    title: str
    folder: str
    file: str
    package: str


REAL_MODELS = {
    model.folder: model
    for model in (
        RealModel("SmolLM2-135M", "smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf", fetch.SMOLLM2),
        RealModel(
            "Gemma 3 270M", "gemma3", "gemma-3-270m-q4_k_m.gguf", f"{fetch.GEMMA}=={fetch.GEMMA_VERSION}"
        ),
    )
}


@dataclass(frozen=True)
class Text:
    """The beginning of some files, read one after the other: at most `num_chunks` chunks of it count."""

    names: tuple[str, ...]
    content: str
    num_chunks: int

    @property
    def digest(self) -> str:
        """The first digits of the SHA-256 of the content and the number of chunks."""
        return hashlib.sha256(f"{self.num_chunks}\n{self.content}".encode()).hexdigest()[:12]

    def __str__(self) -> str:
        """Return what tells it from other texts, for people and in raw results."""
        return f"{', '.join(self.names)} (up to {self.num_chunks} chunks, {self.digest})"


def text_of(files: Sequence[Path], num_chunks: int) -> Text:
    """Return the text of these files; those of the tree are named by their path in it."""
    paths = [path.resolve() for path in files]
    root = ROOT.resolve()
    names = (path.relative_to(root) if path.is_relative_to(root) else path.name for path in paths)
    content = "\n".join(path.read_text(encoding="utf-8") for path in paths)
    return Text(tuple(map(str, names)), content, num_chunks)


class Reference:
    """A model and a text; every method makes a file unless it is there, and raises ProgramError if it cannot."""

    def __init__(self, model: RealModel, text: Text, folder: Path, isa: Isa) -> None:
        """Keep files in `folder`, in which engines have their folders, too."""
        self.model, self.text, self.isa = model, text, isa
        self._folder = folder / "accuracy" / model.folder

    @functools.cached_property
    def peer(self) -> LlamaCpp:
        """llama.cpp, built."""
        found = LlamaCpp(self._folder.parents[1] / "llama.cpp")
        found.set_up(self.isa)
        return found

    def weights(self, precision: str) -> Path:
        """Return the model's file with weights of a type of llama.cpp's, each made of the one with floats."""
        target = self._folder / f"{precision}.gguf"
        if not target.exists():
            self._folder.mkdir(parents=True, exist_ok=True)
            full = self._shipped() if precision == FLOATS else self.weights(FLOATS)
            self.peer.quantize(full, target, precision)
        return target

    def logits(self) -> Path:
        """Return llama-perplexity's file of the text's tokens and llama.cpp's logits on weights in floats."""
        target = self.of_text("logits")
        if not target.exists():
            weights, unfinished = self.weights(FLOATS), target.with_suffix(".unfinished")
            text = self.of_text("txt")
            text.write_text(self.text.content, encoding="utf-8")
            found = perplexity.save_logits(
                self.peer, self.isa, weights, text, self.text.num_chunks, unfinished
            )
            self.of_text("perplexity").write_text(json.dumps(found))
            unfinished.rename(target)
        return target

    def perplexity(self) -> float:
        """Return llama.cpp's perplexity on weights in floats."""
        self.logits()
        found: float = json.loads(self.of_text("perplexity").read_text())
        return found

    def of_text(self, kind: str) -> Path:
        """Return the path of what is kept of the text and the model."""
        return self._folder / f"{self.text.digest}.{kind}"

    def _shipped(self) -> Path:
        path = fetch.folder() / self.model.folder / self.model.file
        if not path.exists() and (missing := fetch.fetch(fetch.folder(), [self.model.folder])):
            raise ProgramError(f"not to be had: {missing[0]}")
        return path
