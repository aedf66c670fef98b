# SPDX-License-Identifier: Apache-2.0
"""quire's logprobs of the text's tokens and its likeliest tokens.

    python -m benchmarks.compare.workers.quire_reading MODEL PRECISION LOGITS TARGET

The token ids are those of a file of llama-perplexity's. The target is a JSON object with the fields of
`accuracy.Reading`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.compare.accuracy import FILES, TRUTH, Reading
from benchmarks.compare.cases import NUM_THREADS
from benchmarks.compare.engines.quire import Quire
from benchmarks.compare.perplexity import CHUNK, COUNTED, chunks_in
from benchmarks.compare.workers.quire import FORMATS
from quire import LLM, SamplingParams
from quire.engine.tokenizer import Tokenizer

_BF16 = {"dtype": "bfloat16"}
"""The type of the checkpoint whose speed is measured."""
_PRECISE = {"quantization_config": {"mode": "precise"}}
OPTIONS: Mapping[str, Mapping[str, Any]] = {
    TRUTH: {"dtype": "float32"},
    **{name: {**_BF16, **FORMATS[name]} for name in Quire.precisions},
    "bf16, int8 cache": {**_BF16, "kv_cache_dtype": "int8"},
    "int8, int8 cache": {**_BF16, "quantization": "int8", "kv_cache_dtype": "int8"},
    "int8, precise": {**_BF16, "quantization": "int8", **_PRECISE},
    "int4, precise": {**_BF16, "quantization": "int4", **_PRECISE},
    "int4-plain": {**_BF16, "quantization": "int4-plain"},
    **{name: {} for name in FILES},
    **{f"{name}, precise": _PRECISE for name in FILES},
}
"""Weight format -> arguments of the engine; those of `workers.quire` where speed is measured, too."""


def with_bos(model: Path, chunks: Sequence[list[int]]) -> list[list[int]]:
    """Return chunks that begin with the BOS token, if the model's texts do, as llama-perplexity gives them."""
    begin = Tokenizer.from_dir(model).encode("")[:1]
    return [[*begin, *chunk[len(begin) :]] for chunk in chunks]


def read(model: Path, precision: str, chunks: Sequence[list[int]]) -> Reading:
    """Return what an engine makes of the chunks."""
    llm = LLM(
        str(model),
        **OPTIONS[precision],
        device="cpu",
        cpu_threads=NUM_THREADS,
        max_model_len=CHUNK + 8,
        enable_prefix_caching=False,
        skip_tokenizer_init=True,
        disable_log_stats=True,
    )
    params = SamplingParams(max_tokens=1, prompt_logprobs=1, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": chunk} for chunk in chunks], params, use_tqdm=False)
    llm.shutdown()
    logprobs, tops = [], []
    for chunk, output in zip(chunks, outputs, strict=True):
        assert output.prompt_logprobs is not None
        for place in COUNTED:
            entry = output.prompt_logprobs[place]
            assert entry is not None
            logprobs.append(entry[chunk[place]].logprob)
            tops.append(max(entry, key=lambda token_id: entry[token_id].logprob))
    return Reading(logprobs, tops)


def main(model: Path, precision: str, logits: Path, target: Path) -> None:
    """Read the chunks and write the reading."""
    found = read(model, precision, with_bos(model, chunks_in(logits)))
    target.write_text(json.dumps(asdict(found)))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]), Path(sys.argv[4]))
