# SPDX-License-Identifier: Apache-2.0
"""Translation beside CTranslate2 and transformers, in turn, of the same random weights and texts.

    python -m benchmarks.translators [--shape marian] [--texts 1 16] [--beams 1 4] [--quantization int8 --group-size 0]

The shapes are those of Marian's models of OPUS-MT and of T5; checkpoints are made in transformers' form, and
CTranslate2's own converter reads them. Every text has a length of its own and an answer of exactly `--output` tokens.
Prints the median seconds of all texts, quire's ratio to each peer (the median of the rounds'), and how many answers
are equal: all in float32, while rounding changes many of random weights, whose logits are alike.
CTranslate2 has to be installed; without it the others are measured. transformers computes in float32 always, and
CTranslate2's int8 has one scale per output: `--group-size 0` gives quire the same.
"""

from __future__ import annotations

import argparse
import itertools
import operator
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

SHORTEST, LONGEST = 12, 40
"""Tokens of a text."""
NUM_BLOCKS = 1024
"""Blocks of quire's KV cache: so few that each has been used, as in a server that runs for a while."""
REST_S = 0.3
"""After an engine's turn, so that no threads of its still wait for more on the processors of the next."""
Texts = Sequence[Sequence[int]]
Translate = Callable[[Texts, int], list[list[int]]]
"""Texts and a number of beams -> answers."""

_T5: dict[str, Any] = {
    "vocab_size": 32128,
    "decoder_start_token_id": 0,
    "pad_token_id": 0,
    "eos_token_id": 1,
}
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "marian": (
        "MarianMTModel",
        {
            "vocab_size": 58101,
            "d_model": 512,
            "encoder_layers": 6,
            "decoder_layers": 6,
            "encoder_attention_heads": 8,
            "decoder_attention_heads": 8,
            "encoder_ffn_dim": 2048,
            "decoder_ffn_dim": 2048,
            "max_position_embeddings": 512,
            "activation_function": "swish",
            "scale_embedding": True,
            "static_position_embeddings": True,
            "init_std": 0.05,
            "pad_token_id": 58100,
            "eos_token_id": 0,
            "decoder_start_token_id": 58100,
        },
    ),
    "t5-small": (
        "T5ForConditionalGeneration",
        _T5 | {"d_model": 512, "d_kv": 64, "d_ff": 2048, "num_layers": 6, "num_heads": 8},
    ),
    "t5-base": (
        "T5ForConditionalGeneration",
        _T5 | {"d_model": 768, "d_kv": 64, "d_ff": 3072, "num_layers": 12, "num_heads": 12},
    ),
}
"""Class of transformers and sizes, by name."""


def make(shape: str) -> Any:
    """Return a random model of transformers."""
    import torch
    import transformers

    torch.manual_seed(1)
    name, sizes = SHAPES[shape]
    kind = getattr(transformers, name)
    model = kind(kind.config_class(**sizes)).eval()
    model.config.forced_eos_token_id = model.generation_config.forced_eos_token_id = None
    return model


def texts(random: np.random.Generator, count: int) -> list[list[int]]:
    """Return random texts of token ids."""
    lengths = random.integers(SHORTEST, LONGEST + 1, count)
    return [random.integers(10, 30000, length).tolist() for length in lengths]


def quire(folder: Path, args: argparse.Namespace) -> Translate:
    from quire import LLM, BeamSearchParams, SamplingParams

    options: dict[str, Any] = {"dtype": args.dtype, "quantization": args.quantization}
    if args.group_size is not None:
        options["quantization_config"] = {"group_size": args.group_size}
    options |= {"max_num_seqs": 64, "num_gpu_blocks_override": NUM_BLOCKS}
    llm = LLM(str(folder), skip_tokenizer_init=True, **options)
    length: dict[str, Any] = {"max_tokens": args.output, "ignore_eos": True}
    greedy = SamplingParams(temperature=0.0, detokenize=False, **length)

    def translate(of: Texts, beams: int) -> list[list[int]]:
        prompts = [{"prompt_token_ids": list(ids)} for ids in of]
        if beams > 1:
            search = BeamSearchParams(beam_width=beams, **length)
            return [list(one.sequences[0].tokens) for one in llm.beam_search(prompts, search)]
        return [list(one.outputs[0].token_ids) for one in llm.generate(prompts, greedy, use_tqdm=False)]

    return translate


class _Ids:
    """The tokenizer that CTranslate2's converter asks: every token but the padding is named by its id."""

    def __init__(self, sizes: dict[str, Any]) -> None:
        self.pad_token, self._pad = "<pad>", sizes["pad_token_id"]
        self._names = {self.convert_ids_to_tokens(token): token for token in range(sizes["vocab_size"])}
        self.eos_token = self.bos_token = str(sizes["eos_token_id"])
        self.unk_token = "2"

    def get_vocab(self) -> dict[str, int]:
        return self._names

    def convert_ids_to_tokens(self, token: int) -> str:
        return self.pad_token if token == self._pad else str(token)


def ctranslate2(model: Any, folder: Path, args: argparse.Namespace, num_threads: int) -> Translate:
    import ctranslate2 as peer
    from ctranslate2.converters import Converter
    from ctranslate2.converters.transformers import _MODEL_LOADERS

    class FromMemory(Converter):  # type: ignore[misc]
        """Converter of a model that is loaded."""

        def _load(self) -> Any:
            loader = _MODEL_LOADERS[type(model.config).__name__]
            return loader(model, _Ids(SHAPES[args.shape][1]))

    kind = args.quantization or "float32"
    FromMemory().convert(str(folder), quantization=kind)
    translator = peer.Translator(str(folder), device="cpu", compute_type=kind, intra_threads=num_threads)
    length = {"min_decoding_length": args.output, "max_decoding_length": args.output}
    names = _Ids(SHAPES[args.shape][1])
    ids, end = names.get_vocab(), names.eos_token

    def translate(of: Texts, beams: int) -> list[list[int]]:
        named = [[*map(str, text)] for text in of]
        found = translator.translate_batch(named, beam_size=beams, end_token=end, **length)
        return [[ids[name] for name in one.hypotheses[0]] for one in found]

    return translate


def transformers(model: Any, args: argparse.Namespace) -> Translate:
    import torch

    pad = SHAPES[args.shape][1]["pad_token_id"]

    @torch.inference_mode()
    def translate(of: Texts, beams: int) -> list[list[int]]:
        longest = max(map(len, of))
        ids = torch.tensor([[*text, *[pad] * (longest - len(text))] for text in of])
        mask = torch.tensor([[1] * len(text) + [0] * (longest - len(text)) for text in of])
        found = model.generate(
            input_ids=ids, attention_mask=mask, num_beams=beams, do_sample=False,
            min_new_tokens=args.output, max_new_tokens=args.output,
        )  # fmt: skip
        return [one[1:] for one in found.tolist()]

    return translate


def engines(args: argparse.Namespace, folder: Path) -> dict[str, Translate]:
    """Load each engine that is there; quire is the first."""
    import torch

    model = make(args.shape)
    model.save_pretrained(folder / "model")
    found = {"quire": quire(folder / "model", args)}
    try:
        found["CTranslate2"] = ctranslate2(model, folder / "converted", args, torch.get_num_threads())
    except ImportError as error:
        print(f"without CTranslate2: {error}")
    if not args.without_transformers:
        found["transformers"] = transformers(model, args)
    return found


def measure(found: dict[str, Translate], num_texts: int, beams: int, num_rounds: int) -> None:
    """Warm all up, let them take turns, and print the table."""
    random = np.random.default_rng(1)
    first = texts(random, num_texts)
    said = {name: engine(first, beams) for name, engine in found.items()}
    times: dict[str, list[float]] = {name: [] for name in found}
    for number in range(num_rounds):
        new = texts(random, num_texts)
        for name in sorted(found, reverse=bool(number % 2)):
            time.sleep(REST_S)
            start = time.perf_counter()
            found[name](new, beams)
            times[name].append(time.perf_counter() - start)
    print(f"{num_texts} texts, {beams} beams")
    for name, each in times.items():
        same = sum(map(operator.eq, said[name], said["quire"]))
        ratio = statistics.median(theirs / ours for theirs, ours in zip(each, times["quire"], strict=True))
        ours = f"   {same} of {num_texts} answers are equal; quire is {ratio:.2f} times as fast"
        print(f"  {name:14} {statistics.median(each):8.3f} s" + ("" if name == "quire" else ours), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="marian")
    parser.add_argument("--texts", type=int, nargs="+", default=[16], help="translated by one call")
    parser.add_argument("--output", type=int, default=32, help="tokens of each answer")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--beams", type=int, nargs="+", default=[1])
    parser.add_argument("--dtype", default="float32", help="of quire's activations, and of weights in none")
    parser.add_argument("--quantization", choices=("int8",), help="of quire and CTranslate2; else float32")
    parser.add_argument("--group-size", type=int, help="of quire's int8")
    parser.add_argument("--without-transformers", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        found = engines(args, Path(name))
        for num_texts, beams in itertools.product(args.texts, args.beams):
            measure(found, num_texts, beams, args.rounds)


if __name__ == "__main__":
    main()
