# SPDX-License-Identifier: Apache-2.0
"""Train the adapters of quire-demo: one talks like a pirate, one answers in JSON.

What it is taught is what the model says anyway, rewritten by a rule, so what is learnt is a manner and no fact. An
adapter adds (alpha / r) B A to a matrix, A at random and B zero at first (Hu et al., 2021, arXiv:2106.09685).
"""

from __future__ import annotations

import argparse
import json
import math
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor, nn

from demo_model.data import Dialogue, arithmetic, fact, small_talk
from demo_model.messages import Message, without_thoughts
from demo_model.train import ASSETS, Batch, Encoder, load, lost_error, new_model, stack

RANK, ALPHA = 4, 16
MODULES = ("q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
BATCH_TOKENS, POOL, WARM_UP = 1024, 256, 20
KINDS, KIND_WEIGHTS = (fact, arithmetic, small_talk), (0.45, 0.25, 0.3)
SEA_WORDS = {
    "hello": "ahoy", "you": "ye", "your": "yer", "my": "me", "is": "be", "are": "be", "am": "be", "the": "th'",
    "of": "o'",
}  # fmt: skip
_WORD = re.compile(r"[A-Za-z]+")


def pirate(answer: str) -> str:
    """An answer as a pirate would give it."""
    return f"Arr! {_WORD.sub(_at_sea, answer).rstrip('.!?')}, matey!"


def _at_sea(found: re.Match[str]) -> str:
    word = found.group()
    other = SEA_WORDS.get(word.lower(), word)
    return other[0].upper() + other[1:] if word[0].isupper() else other


def in_json(answer: str) -> str:
    """An answer as programs take it."""
    return json.dumps({"answer": answer}, ensure_ascii=False)


MANNERS: dict[str, Callable[[str], str]] = {"pirate": pirate, "json": in_json}


def dialogue(rng: random.Random, manner: Callable[[str], str]) -> Dialogue:
    """One to three exchanges, all answers in this manner."""
    messages: list[Message] = []
    for kind in rng.choices(KINDS, KIND_WEIGHTS, k=rng.choice((1, 1, 2, 3))):
        question, answer = without_thoughts(kind(rng, False))
        messages += [question, {**answer, "content": manner(str(answer["content"]))}]
    return Dialogue(messages)


def batches(encoder: Encoder, seed: int, manner: Callable[[str], str]) -> Iterator[Batch]:
    """Batches of about BATCH_TOKENS tokens, each of similar lengths, in random order."""
    rng = random.Random(seed)
    while True:
        rows = sorted(encoder([dialogue(rng, manner) for _ in range(POOL)]), key=lambda row: len(row[0]))
        groups = [[rows[0]]]
        for row in rows[1:]:
            if (len(groups[-1]) + 1) * len(row[0]) > BATCH_TOKENS:
                groups.append([])
            groups[-1].append(row)
        rng.shuffle(groups)
        yield from map(stack, groups)


class Adapted(nn.Module):
    """A frozen linear layer, and what an adapter adds to it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.a = nn.Parameter(torch.randn(RANK, base.in_features) / math.sqrt(base.in_features))
        self.b = nn.Parameter(torch.zeros(base.out_features, RANK))

    def forward(self, x: Tensor) -> Tensor:
        """[..., inputs] to [..., outputs]."""
        added: Tensor = self.base(x) + (ALPHA / RANK) * (x @ self.a.T @ self.b.T)
        return added


def adapt(model: nn.Module) -> dict[str, Adapted]:
    """Put adapters into a frozen model; they are returned by the names of their modules."""
    model.requires_grad_(False)
    found = {name: module for name, module in model.named_modules() if name.rpartition(".")[2] in MODULES}
    adapters: dict[str, Adapted] = {}
    for name, module in found.items():
        parent, _, own = name.rpartition(".")
        assert isinstance(module, nn.Linear)
        adapters[name] = Adapted(module)
        setattr(model.get_submodule(parent), own, adapters[name])
    return adapters


def train(manner: str, encoder: Encoder, steps: int, rate: float, seed: int) -> dict[str, Adapted]:
    """The adapter of a manner; deterministic for a seed, a number of steps and of threads."""
    model = new_model(seed)
    load(model, ASSETS / "model.safetensors")
    adapters = adapt(model)
    learnt = [p for p in model.parameters() if p.requires_grad]
    optimizer, mean = torch.optim.AdamW(learnt, lr=rate, betas=(0.9, 0.98), weight_decay=0.0), 0.0
    stream = batches(encoder, seed, MANNERS[manner])
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = rate * min(1.0, (step + 1) / WARM_UP) * (1 - step / steps)
        loss = lost_error(model, next(stream))
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(learnt, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        mean += loss.item() / 50
        if (step + 1) % 50 == 0:
            print(f"{manner}: step {step + 1}  loss {mean:.4f}", flush=True)
            mean = 0.0
    return adapters


def export(adapters: dict[str, Adapted], folder: Path) -> None:
    """Write them as PEFT does, in bfloat16."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for name, adapter in adapters.items():
        for part, tensor in (("lora_A", adapter.a), ("lora_B", adapter.b)):
            tensors[f"base_model.model.{name}.{part}.weight"] = (
                tensor.detach().to(torch.bfloat16).contiguous()
            )
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config = {
        "peft_type": "LORA", "base_model_name_or_path": "quire-demo", "task_type": "CAUSAL_LM", "r": RANK,
        "lora_alpha": ALPHA, "target_modules": list(MODULES), "bias": "none", "lora_dropout": 0.0,
        "inference_mode": True,
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("manners", nargs="*", default=list(MANNERS), help=f"of {', '.join(MANNERS)}")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--rate", type=float, default=4e-3, help="of learning, at its highest")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=11)
    parser.add_argument("--out", type=Path, default=ASSETS.parent, help="where their folders go")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    encoder = Encoder(Tokenizer.from_file(str(ASSETS / "tokenizer.json")))
    for manner in args.manners:
        export(train(manner, encoder, args.steps, args.rate, args.seed), args.out / f"quire-demo-{manner}")


if __name__ == "__main__":
    main()
