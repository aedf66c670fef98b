# SPDX-License-Identifier: Apache-2.0
"""Engines of embeddings and of scores of pairs, behind one interface."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.embeddings.shapes import LONGEST, Shape

BATCH_SIZE = 32
"""What sentence-transformers takes by default."""
Texts = Sequence[str]


class Engine(Protocol):
    """A model that is loaded."""

    def embed(self, texts: Texts) -> NDArray[Any]:
        """Vectors [N, H] of length 1."""

    def score(self, query: str, documents: Texts) -> NDArray[Any]:
        """A number for each document."""


class Quire:
    """Ours."""

    def __init__(self, directory: Path, shape: Shape, **options: Any) -> None:
        from quire import LLM

        self._llm = LLM(str(directory), enable_prefix_caching=False, **options)

    def embed(self, texts: Texts) -> NDArray[Any]:
        return np.array([one.outputs.embedding for one in self._llm.embed(list(texts), use_tqdm=False)])

    def score(self, query: str, documents: Texts) -> NDArray[Any]:
        found = self._llm.score(query, list(documents), use_tqdm=False)
        return np.array([one.outputs.score for one in found])


class SentenceTransformers:
    """The package, as its own documentation calls it."""

    def __init__(self, directory: Path, shape: Shape, **options: Any) -> None:
        from sentence_transformers import CrossEncoder, SentenceTransformer

        is_pair = shape.class_name.endswith("Classification")
        make: Callable[..., Any] = CrossEncoder if is_pair else SentenceTransformer
        self._model = make(str(directory), device="cpu")

    def embed(self, texts: Texts) -> NDArray[Any]:
        found: NDArray[Any] = self._model.encode(list(texts), batch_size=BATCH_SIZE, show_progress_bar=False)
        return found

    def score(self, query: str, documents: Texts) -> NDArray[Any]:
        pairs = [(query, one) for one in documents]
        found: NDArray[Any] = self._model.predict(pairs, batch_size=BATCH_SIZE, show_progress_bar=False)
        return found


class Padded:
    """Batches of texts of like lengths, padded to the longest: what `run` computes of ids and masks [N, T]."""

    def __init__(self, directory: Path, shape: Shape) -> None:
        from tokenizers import Tokenizer

        self._shape = shape
        self._tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
        self._tokenizer.enable_truncation(LONGEST)
        self._tokenizer.enable_padding()

    def run(self, ids: NDArray[np.int64], mask: NDArray[np.int64]) -> NDArray[Any]:
        """Hidden states [N, T, H], or scores [N, 1]."""
        raise NotImplementedError

    def embed(self, texts: Texts) -> NDArray[Any]:
        return self._in_batches(list(texts), self._pooled)

    def score(self, query: str, documents: Texts) -> NDArray[Any]:
        pairs = [(query, one) for one in documents]
        logits = self._in_batches(pairs, lambda ids, mask: self.run(ids, mask)[:, 0])
        found: NDArray[Any] = 1 / (1 + np.exp(-logits))
        return found

    def _in_batches(self, inputs: list[Any], compute: Callable[..., NDArray[Any]]) -> NDArray[Any]:
        order = sorted(range(len(inputs)), key=lambda place: -len(inputs[place]))
        parts = []
        for start in range(0, len(order), BATCH_SIZE):
            chosen = [inputs[place] for place in order[start : start + BATCH_SIZE]]
            encoded = self._tokenizer.encode_batch(chosen)
            ids = np.array([one.ids for one in encoded], np.int64)
            parts.append(compute(ids, np.array([one.attention_mask for one in encoded], np.int64)))
        found = np.concatenate(parts)
        return found[np.argsort(order)]

    def _pooled(self, ids: NDArray[np.int64], mask: NDArray[np.int64]) -> NDArray[Any]:
        hidden = self.run(ids, mask)
        if self._shape.pooling == "lasttoken":
            vectors = hidden[np.arange(len(hidden)), mask.sum(1) - 1]
        else:
            vectors = (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdims=True)
        unit: NDArray[Any] = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
        return unit


class Transformers(Padded):
    """The model by itself, with torch's fused attention."""

    def __init__(self, directory: Path, shape: Shape, **options: Any) -> None:
        import transformers

        super().__init__(directory, shape)
        self._model = getattr(transformers, shape.class_name).from_pretrained(directory).eval()

    def run(self, ids: NDArray[np.int64], mask: NDArray[np.int64]) -> NDArray[Any]:
        with torch.inference_mode():
            given = self._model(input_ids=torch.from_numpy(ids), attention_mask=torch.from_numpy(mask))
        found: NDArray[Any] = (given.logits if "logits" in given else given.last_hidden_state).numpy()
        return found


class OnnxRuntime(Padded):
    """The same model exported; with `quantization` its matrices in 8 bits, quantized as the package does it."""

    def __init__(
        self, directory: Path, shape: Shape, quantization: str | None = None, **options: Any
    ) -> None:
        import onnxruntime
        import transformers

        super().__init__(directory, shape)
        model = getattr(transformers, shape.class_name).from_pretrained(
            directory, attn_implementation="eager"
        )
        self._folder = tempfile.TemporaryDirectory()
        path = Path(self._folder.name) / "model.onnx"
        _export(model.eval(), path)
        if quantization:
            from onnxruntime.quantization import quantize_dynamic

            quantize_dynamic(path, path := path.with_name("int8.onnx"))
        settings = onnxruntime.SessionOptions()
        settings.intra_op_num_threads = torch.get_num_threads()
        self._session = onnxruntime.InferenceSession(str(path), settings, providers=["CPUExecutionProvider"])

    def run(self, ids: NDArray[np.int64], mask: NDArray[np.int64]) -> NDArray[Any]:
        found: NDArray[Any]
        (found,) = self._session.run(None, {"ids": ids, "mask": mask})
        return found


class _FirstOutput(torch.nn.Module):
    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.model(input_ids=ids, attention_mask=mask)[0]
        return found


def _export(model: torch.nn.Module, path: Path) -> None:
    ids = torch.ones(2, 8, dtype=torch.long)
    axes = {name: {0: "texts", 1: "tokens"} for name in ("ids", "mask")}
    torch.onnx.export(
        _FirstOutput(model),
        (ids, torch.ones_like(ids)),
        str(path),
        input_names=["ids", "mask"],
        output_names=["out"],
        dynamic_axes={**axes, "out": {0: "texts"}},
        dynamo=False,
    )


ENGINES: dict[str, Callable[..., Engine]] = {
    "quire": Quire,
    "transformers": Transformers,
    "sentence-transformers": SentenceTransformers,
    "onnxruntime": OnnxRuntime,
}
