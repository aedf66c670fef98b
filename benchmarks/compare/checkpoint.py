# SPDX-License-Identifier: Apache-2.0
"""The checkpoint that all engines are given: random weights in a shape, by default a half-billion-parameter Qwen 2's.

Made once, from a fixed seed, by transformers; with a tokenizer of one token per byte, because converters ask for one.
Run as a program, so that the memory it takes is free again when engines are measured.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

SHAPES = Path(__file__).parents[1] / "models"
DENSE = "dummy-0.5b"
SEED = 0
_SPECIALS = ("<pad>", "<bos>", "<eos>")
_WEIGHTS = "model.safetensors"


def ensure(directory: Path, shape: str = DENSE) -> Path:
    """Write the checkpoint unless it is there; returns its directory."""
    if not (directory / _WEIGHTS).exists():
        subprocess.run([sys.executable, "-m", __name__, str(directory), "--shape", shape], check=True)
    return directory


def write(directory: Path, shape: str = DENSE) -> None:
    """Draw the weights, in bfloat16, and save them; the weights come last, so a directory with them is complete."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(SEED)
    config = AutoConfig.from_pretrained(SHAPES / shape)
    factory: Any = AutoModelForCausalLM
    model = factory.from_config(config, dtype=torch.bfloat16)
    write_tokenizer(directory)
    model.save_pretrained(directory, max_shard_size="100GB")


def write_tokenizer(directory: Path) -> None:
    """One token per byte after the special ones; the rest of the vocabulary is unused."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    symbols = [*_SPECIALS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(symbols)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(symbol, special=True) for symbol in _SPECIALS])
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    names = dict(zip(("pad_token", "bos_token", "eos_token"), _SPECIALS, strict=True))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **names}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description="Write the checkpoint of benchmarks.compare: random weights."
    )
    parser.add_argument("directory", type=Path)
    parser.add_argument("--shape", default=DENSE, help="A directory of benchmarks/models.")
    args = parser.parse_args()
    write(args.directory, args.shape)
