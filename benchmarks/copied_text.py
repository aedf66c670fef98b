# SPDX-License-Identifier: Apache-2.0
"""Gain of drafts from the text for a model that copies its prompt: tokens per second with and without, in turns.

    python -m benchmarks.copied_text [--quantization int8] [--method ngram] [--num-tokens 128] [--num-rounds 3]
                                     [--peer llama.cpp [--folder DIR] [--isa native]]

The model has the shape of `models/dummy-0.5b` and weights by hand: two of its layers are an induction head (C. Olsson
et al., "In-context Learning and Induction Heads", 2022), which says what came behind the last token when it stood in
the text before; all other layers are computed and add nothing. Prompts are random tokens, and one of the first again.
With `--peer`, llama.cpp guesses from the same text with the same weights in as many bits (`llama-lookup`), in turn with
quire. Its tokens are characters; it starts anew for each prompt, and the start is not counted.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from benchmarks.compare.engines.llama_cpp import LlamaCpp
from benchmarks.compare.isa import ISAS
from benchmarks.compare.lookup import Lookup
from benchmarks.compare.workers.characters import NUM_RESERVED, text_of
from quire import LLM, SamplingParams

PEERS = Path(__file__).parent / "compare" / ".peers"
SHAPE = Path(__file__).parent / "models" / "dummy-0.5b" / "config.json"
HEAD = 64
"""Size of a head, and of the code, of plus and minus ones, that tells a token from others."""
PAIRS = HEAD // 2
PREVIOUS = 12.0
"""Of each turned pair of a query and a key whose scores are highest one token apart."""
MATCH = 40.0
"""The score of two tokens that are the same; others have less than two thirds of it."""
COPIED = 4.0
"""What a copied token weighs beside the one that is there."""
Weights = dict[str, Tensor]


def write_copier(directory: Path, shape: dict[str, Any]) -> Path:
    """A Qwen 2 of at least two layers and 128 channels, with heads of 64, that copies."""
    draw = torch.Generator().manual_seed(0)
    weights = {"model.norm.weight": torch.ones(shape["hidden_size"])}
    weights["model.embed_tokens.weight"] = codes = torch.zeros(shape["vocab_size"], shape["hidden_size"])
    codes[:, :HEAD] = torch.randint(0, 2, (shape["vocab_size"], HEAD), generator=draw) * 2.0 - 1
    for layer in range(shape["num_hidden_layers"]):
        for name, size in _sizes(shape).items():
            adds = name in ("self_attn.o_proj.weight", "mlp.down_proj.weight")
            weights[f"model.layers.{layer}.{name}"] = torch.zeros(size) if adds else _drawn(name, size, draw)
    _attend_to_the_token_before(weights, shape)
    _attend_behind_the_same_token(weights, shape)
    directory.mkdir(parents=True, exist_ok=True)
    config = shape | {"rope_theta": 1e6, "tie_word_embeddings": True, "torch_dtype": "bfloat16"}
    (directory / "config.json").write_text(json.dumps(config))
    save_file({name: weight.bfloat16() for name, weight in weights.items()}, directory / "model.safetensors")
    return directory


def _sizes(shape: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, inner = shape["hidden_size"], shape["intermediate_size"]
    queries, keys = HEAD * shape["num_attention_heads"], HEAD * shape["num_key_value_heads"]
    return {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (queries, hidden),
        "self_attn.q_proj.bias": (queries,),
        "self_attn.k_proj.weight": (keys, hidden),
        "self_attn.k_proj.bias": (keys,),
        "self_attn.v_proj.weight": (keys, hidden),
        "self_attn.v_proj.bias": (keys,),
        "self_attn.o_proj.weight": (hidden, queries),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
    }


def _drawn(name: str, size: tuple[int, ...], draw: torch.Generator) -> Tensor:
    return torch.ones(size) if "norm" in name else 0.02 * torch.randn(size, generator=draw)


def _attend_to_the_token_before(weights: Weights, shape: dict[str, Any]) -> None:
    """The first head of layer 0 writes the code of the token before behind that of each token."""
    part = "model.layers.0.self_attn."
    for kind in "qkv":
        weights[f"{part}{kind}_proj.weight"][:HEAD] = 0
        weights[f"{part}{kind}_proj.bias"][:HEAD] = 0
    angles = 1e6 ** (-torch.arange(PAIRS) / PAIRS)
    weights[f"{part}q_proj.bias"][:PAIRS] = PREVIOUS
    weights[f"{part}k_proj.bias"][:PAIRS] = PREVIOUS * angles.cos()
    weights[f"{part}k_proj.bias"][PAIRS:HEAD] = PREVIOUS * angles.sin()
    length = (shape["hidden_size"] / HEAD) ** 0.5  # what the norm makes of an entry of a code
    weights[f"{part}v_proj.weight"][:HEAD, :HEAD] = torch.eye(HEAD) / length
    weights[f"{part}o_proj.weight"][HEAD : 2 * HEAD, :HEAD] = torch.eye(HEAD)


def _attend_behind_the_same_token(weights: Weights, shape: dict[str, Any]) -> None:
    """The first head of layer 1 finds the token behind one like this, and says it."""
    part = "model.layers.1.self_attn."
    for kind in "qkv":
        weights[f"{part}{kind}_proj.weight"][:HEAD] = 0
        weights[f"{part}{kind}_proj.bias"][:HEAD] = 0
    length = (shape["hidden_size"] / (2 * HEAD)) ** 0.5  # what the norm makes of an entry of the two codes
    slow = torch.cat((torch.arange(PAIRS // 2, PAIRS), torch.arange(PAIRS + PAIRS // 2, HEAD)))
    compared = torch.arange(len(slow))  # by pairs that hardly turn within a prompt
    weight = (MATCH * HEAD**0.5 / len(slow)) ** 0.5 / length
    weights[f"{part}q_proj.weight"][slow, compared] = weight
    weights[f"{part}k_proj.weight"][slow, HEAD + compared] = weight
    weights[f"{part}v_proj.weight"][:HEAD, :HEAD] = torch.eye(HEAD) / length
    weights[f"{part}o_proj.weight"][:HEAD, :HEAD] = COPIED * torch.eye(HEAD)


def prompt_to_copy(length: int, vocab_size: int, seed: int) -> tuple[list[int], list[int]]:
    """A prompt of different tokens, of which the second stands at its end again, and the `length` that follow it.

    Before the first one is none, so it stands for its own predecessor.
    """
    tokens = random.Random(seed).sample(range(NUM_RESERVED, vocab_size), 2 + length)
    return [*tokens, tokens[1]], tokens[2:]


def measure(args: argparse.Namespace, model: str, vocab_size: int, peer: Lookup | None = None) -> str:
    """A line for people.

    Raises:
        AssertionError: something else than the prompt was said, or guesses changed it.
        ProgramError: llama.cpp failed.
    """
    options: dict[str, Any] = {
        "skip_tokenizer_init": True,
        "max_model_len": 4 * args.num_tokens,
        "max_num_seqs": 1,
    }
    options |= {"quantization": args.quantization, "enable_prefix_caching": False}
    engines = [LLM(model, **options, speculative_config=given) for given in ({}, {"method": args.method})]
    rates: list[list[float]] = [[], []]
    others: list[float] = []
    params = SamplingParams(temperature=0, max_tokens=args.num_tokens, ignore_eos=True, detokenize=False)
    for number in range(1 + args.num_rounds):
        prompt, copied = prompt_to_copy(args.num_tokens, vocab_size, seed=number)
        for engine, each in zip(engines, rates, strict=True):
            started = time.perf_counter()
            (output,) = engine.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)
            each.append(args.num_tokens / (time.perf_counter() - started))
            assert output.outputs[0].token_ids == copied
        if peer is not None:
            said = peer.generate(prompt, args.num_tokens)
            assert said.text.strip().startswith(text_of([*prompt, *copied])), "llama.cpp said something else"
            others.append(said.rate)
    plain, guessed = (statistics.median(each[1:]) for each in rates)
    line = (
        f"{args.method}: {guessed / plain:.2f}x ({plain:.1f} -> {guessed:.1f} tokens/s, the prompt included)"
    )
    if others:
        other = statistics.median(others[1:])
        line += f"; {guessed / other:.2f}x llama-lookup ({other:.1f} tokens/s)"
    return line


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quantization", choices=("int8", "int4"))
    parser.add_argument("--method", default="ngram")
    parser.add_argument("--num-tokens", type=int, default=128)
    parser.add_argument("--num-rounds", type=int, default=3)
    parser.add_argument("--peer", choices=("llama.cpp",), help="Who else guesses from the same text.")
    parser.add_argument("--folder", type=Path, default=PEERS, help="That of benchmarks.compare.")
    parser.add_argument("--isa", choices=ISAS, default="native", help="What the peer is built for.")
    args = parser.parse_args()
    shape = json.loads(SHAPE.read_text())
    with tempfile.TemporaryDirectory() as directory:
        model, peer = write_copier(Path(directory) / "copier", shape), None
        if args.peer:
            engine = LlamaCpp(args.folder.resolve() / args.peer)
            peer = Lookup(engine, ISAS[args.isa], model, Path(directory), args.quantization)
        print(measure(args, str(model), shape["vocab_size"], peer))


if __name__ == "__main__":
    main()
