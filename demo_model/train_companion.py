# SPDX-License-Identifier: Apache-2.0
"""Train quire-demo-draft: a Llama of 0.4 M parameters that guesses what quire-demo says next.

It learns the answers that quire-demo learnt, from the same texts, with the same loss. Its embedding begins as the main
directions of quire-demo's. Fixed for a seed, a number of steps and of threads.
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

from demo_model.train import ASSETS as TEACHER
from demo_model.train import CONFIG as TEACHER_CONFIG
from demo_model.train import (
    GENERATION,
    Encoder,
    batches,
    descend,
    load,
    new_model,
    optimizers,
    set_rates,
)

ASSETS = TEACHER.parent / "quire-demo-draft"
BATCH_TOKENS = 1536
"""Half of what quire-demo learns from at a time: it has few minutes, and so takes many small steps."""
SHARED_FILES = ("tokenizer.json", "tokenizer_config.json")

CONFIG: dict[str, Any] = TEACHER_CONFIG | {
    "hidden_size": 96, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 3,
    "num_key_value_heads": 1,
}  # fmt: skip


def new_companion(teacher: LlamaForCausalLM, seed: int) -> LlamaForCausalLM:
    """A fresh float32 model, whose embedding is what of the teacher's varies most."""
    torch.manual_seed(seed)
    kept = {name: value for name, value in CONFIG.items() if name not in ("model_type", "torch_dtype")}
    model = LlamaForCausalLM(LlamaConfig(**kept))
    learnt = teacher.get_input_embeddings().weight.detach()
    _, _, directions = torch.linalg.svd(learnt, full_matrices=False)
    projected = learnt @ directions[: CONFIG["hidden_size"]].T
    model.get_input_embeddings().weight.data.copy_(
        projected * (CONFIG["initializer_range"] / projected.std())
    )
    return model


def export(model: LlamaForCausalLM, folder: Path) -> None:
    """Config, bfloat16 weights without the tied head, and quire-demo's tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {
        name: value.to(torch.bfloat16).contiguous()
        for name, value in model.state_dict().items()
        if name != "lm_head.weight"
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    for name, content in (("config.json", CONFIG), ("generation_config.json", GENERATION)):
        (folder / name).write_text(json.dumps(content, indent=2) + "\n")
    for name in SHARED_FILES:
        shutil.copy(TEACHER / name, folder)


def train(args: argparse.Namespace) -> None:
    teacher = new_model(args.seed)
    load(teacher, TEACHER / "model.safetensors")
    model = new_companion(teacher, args.seed)
    encoder = Encoder(Tokenizer.from_file(str(TEACHER / "tokenizer.json")))
    opts, began, mean = optimizers(model.named_parameters()), time.monotonic(), 0.0
    print(f"{sum(p.numel() for p in model.parameters())} parameters", flush=True)
    for step, batch in zip(range(args.steps), batches(encoder, args.seed, BATCH_TOKENS), strict=False):
        set_rates(opts, 1.0, step, step / args.steps)
        loss = descend(model, opts, batch)
        mean += loss / 50
        if (step + 1) % 50 == 0:
            minutes = (time.monotonic() - began) / 60
            print(f"{minutes:5.1f} min  step {step + 1}  loss {mean:.4f}", flush=True)
            mean = 0.0
            export(model, args.out)
    export(model, args.out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--out", type=Path, default=ASSETS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    train(args)


if __name__ == "__main__":
    main()
