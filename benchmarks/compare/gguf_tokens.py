# SPDX-License-Identifier: Apache-2.0
"""Holds quire's reading of GGUF to llama.cpp's: greedy tokens, logits, and the tokens of 5,000 texts.

    python -m benchmarks.compare.gguf_tokens [--folder DIR] [--record] [--only NAME ...]

Writes tiny random models and vocabularies, asks llama.cpp and quire, and prints where they differ. With `--record` the
answers of llama.cpp become the file that the tests hold quire to, `tests/models/gguf/llama_cpp.json.gz`. With `--only`
it is asked about these ways to cut words alone, and all else stays as it was recorded.
"""

from __future__ import annotations

import argparse
import gzip
import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.compare.engines.llama_cpp import VERSION, LlamaCpp
from benchmarks.compare.isa import ISAS
from quire import LLM, SamplingParams
from quire.engine.tokenizer import Tokenizer
from tests.fixtures import llama_cpp as asked

NUM_PROMPTS, NUM_KEPT = 256, 6
"""Of so many prompts those are kept whose tokens are furthest from a tie: llama.cpp rounds activations."""
LIMIT_S = 600.0


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, default=Path(__file__).parent / ".peers")
    parser.add_argument("--isa", choices=ISAS, default="native")
    parser.add_argument("--record", action="store_true")
    parser.add_argument("--only", nargs="+", choices=[name for name, _, _ in asked.tokenizers()])
    args = parser.parse_args()
    peer = LlamaCpp(args.folder.resolve() / "llama.cpp")
    peer.set_up(ISAS[args.isa])
    with tempfile.TemporaryDirectory() as directory:
        record = _again(peer, Path(directory), args.only) if args.only else _everything(peer, Path(directory))
    if args.record:
        packed = gzip.compress(json.dumps(record).encode(), mtime=0)
        asked.RECORDED.write_bytes(packed)
        print(f"{asked.RECORDED}: {len(packed)} bytes")


def _everything(peer: LlamaCpp, directory: Path) -> dict[str, Any]:
    vocabularies = asked.learned_vocabularies()
    names = [name for name, _, _ in asked.tokenizers()]
    return {
        "llama-cpp-python": VERSION,
        "models": dict(_models(peer, directory)),
        "vocabularies": vocabularies,
        "ids": _texts(peer, directory, vocabularies, names),
    }


def _again(peer: LlamaCpp, directory: Path, names: Sequence[str]) -> dict[str, Any]:
    """Return the record, with the token ids of these pre-tokenizers asked for again."""
    before = asked.recorded()
    if before["llama-cpp-python"] != VERSION:
        raise SystemExit(
            f"the record is of {before['llama-cpp-python']}, not of {VERSION}: record everything"
        )
    found = _texts(peer, directory, before["vocabularies"], names)
    order = [name for name, _, _ in asked.tokenizers()]
    ids = before["ids"] | found
    return before | {"ids": {name: ids[name] for name in order if name in ids}}


def _models(peer: LlamaCpp, directory: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    prompts = asked.prompts(NUM_PROMPTS)
    for family in asked.FAMILIES:
        for form in asked.FORMATS:
            path = asked.write_model(family, form, directory / f"{family}-{form}.gguf")
            found = _answer(peer, path, {"prompts": prompts, "num_tokens": asked.NUM_TOKENS})
            tokens, margins = found["tokens"].tolist(), _margins(found["logits"])
            for mode in ("fast", "precise"):
                print(f"{path.stem} {mode}: {_agreement(tokens, _greedy(path, prompts, mode), margins)}")
            kept = sorted(np.argsort(-margins.min(axis=1))[:NUM_KEPT].tolist())
            plain = asked.write_model(family, form, directory / f"{family}-{form}-plain.gguf", plain=True)
            exact = _answer(peer, plain, {"prompts": [prompts[index] for index in kept], "num_tokens": 1})
            yield (
                path.stem,
                {
                    "digest": asked.digest_of(path),
                    "prompts": [prompts[index] for index in kept],
                    "tokens": [tokens[index] for index in kept],
                    "logits": [[round(each, 4) for each in row[0]] for row in exact["logits"].tolist()],
                },
            )


def _greedy(path: Path, prompts: list[list[int]], mode: str) -> list[list[int]]:
    options: dict[str, Any] = {"dtype": "float32", "max_model_len": 128, "max_num_seqs": 16}
    llm = LLM(str(path), skip_tokenizer_init=True, quantization_config={"mode": mode}, **options)
    params = SamplingParams(temperature=0, max_tokens=asked.NUM_TOKENS, ignore_eos=True, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def _margins(logits: Any) -> Any:
    """Between the two largest logits of each token [P, N], in standard deviations."""
    second, first = np.moveaxis(np.sort(logits, axis=-1)[..., -2:], -1, 0)
    return (first - second) / logits.std(axis=-1)


def _agreement(theirs: list[list[int]], ours: list[list[int]], margins: Any) -> str:
    equal, at = 0, []
    for row, (left, right) in enumerate(zip(theirs, ours, strict=True)):
        places = [place for place, pair in enumerate(zip(left, right, strict=True)) if len(set(pair)) > 1]
        equal += not places
        at += [float(margins[row, places[0]])] if places else []
    where = f", the others at margins of at most {max(at):.3f} deviations" if at else ""
    return f"{equal} of {len(theirs)} answers are equal{where}"


def _texts(
    peer: LlamaCpp, directory: Path, vocabularies: Mapping[str, Any], names: Sequence[str]
) -> dict[str, list[str]]:
    """The digests of what llama.cpp makes of the texts with these ways of reading them."""
    digests: dict[str, list[str]] = {}
    for name, kind, keys in asked.tokenizers():
        if name not in names:
            continue
        path = asked.write_tokenizer(kind, vocabularies[kind], keys, directory / "vocabulary.gguf")
        texts = asked.texts_for(name)
        theirs = _rows(_answer(peer, path, {"texts": texts}))
        tokenizer = Tokenizer.from_dir(path)
        ours = [tokenizer.encode(text) for text in texts]
        unlike = [index for index, row in enumerate(theirs) if row != ours[index]]
        print(f"{name}: {len(unlike)} of {len(texts)} texts differ")
        for index in unlike[:3]:
            print(f"  {texts[index]!r}")
        digests[name] = asked.digests(theirs)
    return digests


def _answer(peer: LlamaCpp, path: Path, task: Mapping[str, Any]) -> Any:
    todo, done = path.with_suffix(".json"), path.with_suffix(".npz")
    todo.write_text(json.dumps({"model": str(path), **task}))
    peer.ask(todo, done, LIMIT_S)
    return np.load(done)


def _rows(found: Any) -> list[list[int]]:
    ends = [0, *np.cumsum(found["lengths"]).tolist()]
    ids = found["ids"].tolist()
    return [ids[first:last] for first, last in pairwise(ends)]


if __name__ == "__main__":
    main()
