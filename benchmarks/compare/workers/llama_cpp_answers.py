# SPDX-License-Identifier: Apache-2.0
"""Outputs of llama.cpp itself for a GGUF file: greedy tokens with their logits, and the tokens of texts.

    python -m benchmarks.compare.workers.llama_cpp_answers TASK ANSWER

Runs with llama-cpp-python's binding and the libraries of a build (`LLAMA_CPP_LIB_PATH`). The task is a JSON object:
`model`, a file, and either `prompts`, lists of ids, with `num_tokens`, or `texts`. The answer is a `.npz`: `tokens`
[P, N] and `logits` [P, N, V], or `ids` of all texts in a row and their `lengths`.
"""

from __future__ import annotations

import ctypes
import json
import sys
from pathlib import Path
from typing import Any

import llama_cpp.llama_cpp as api
import numpy as np

CONTEXT = 128


def main(task_path: Path, answer_path: Path) -> None:
    task = json.loads(task_path.read_text())
    model = load(task["model"], vocabulary_only="texts" in task)
    found = texts(model, task["texts"]) if "texts" in task else answers(model, **_continuations(task))
    np.savez(answer_path, **found)


def load(path: str, *, vocabulary_only: bool) -> Any:
    """A model; without its weights if only the vocabulary is asked for."""
    api.llama_backend_init()
    params = api.llama_model_default_params()
    params.vocab_only = vocabulary_only
    model = api.llama_model_load_from_file(path.encode(), params)
    if model is None:
        raise SystemExit(f"llama.cpp cannot load {path}")
    return model


def answers(model: Any, prompts: list[list[int]], num_tokens: int) -> dict[str, Any]:
    """The likeliest tokens, one after the other, and the logits of which each is the largest."""
    params = api.llama_context_default_params()
    params.n_ctx = params.n_batch = CONTEXT
    params.n_threads = params.n_threads_batch = 1
    context = api.llama_init_from_model(model, params)
    size = api.llama_vocab_n_tokens(api.llama_model_get_vocab(model))
    tokens = np.zeros((len(prompts), num_tokens), np.int32)
    logits = np.zeros((len(prompts), num_tokens, size), np.float32)
    for row, prompt in enumerate(prompts):
        api.llama_memory_clear(api.llama_get_memory(context), True)
        given = prompt
        for step in range(num_tokens):
            logits[row, step] = _step(context, given, size)
            tokens[row, step] = logits[row, step].argmax()
            given = [int(tokens[row, step])]
    return {"tokens": tokens, "logits": logits}


def texts(model: Any, given: list[str]) -> dict[str, Any]:
    """The ids of each text, special tokens in it and around it included."""
    vocab = api.llama_model_get_vocab(model)
    rows = [_ids(vocab, text.encode()) for text in given]
    lengths = np.array([len(row) for row in rows], np.int32)
    return {"ids": np.array([index for row in rows for index in row], np.int32), "lengths": lengths}


def _continuations(task: dict[str, Any]) -> dict[str, Any]:
    return {key: task[key] for key in ("prompts", "num_tokens")}


def _step(context: Any, given: list[int], size: int) -> Any:
    """The logits behind the last of these tokens."""
    ids = (ctypes.c_int32 * len(given))(*given)  # a batch only points at them
    if status := api.llama_decode(context, api.llama_batch_get_one(ids, len(given))):
        raise SystemExit(f"llama_decode says {status}")
    return np.ctypeslib.as_array(api.llama_get_logits_ith(context, -1), (size,)).copy()


def _ids(vocab: Any, text: bytes) -> list[int]:
    room = len(text) + 8
    into = (ctypes.c_int32 * room)()
    count = api.llama_tokenize(vocab, text, len(text), into, room, True, True)
    if count < 0:
        raise SystemExit(f"llama_tokenize has {-count} tokens for {len(text)} bytes")
    return list(into[:count])


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
