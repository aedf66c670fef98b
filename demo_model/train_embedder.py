# SPDX-License-Identifier: Apache-2.0
"""Train quire-demo-embed: a small BERT whose mean over tokens puts a question next to the fact that answers it.

The world has few facts, so every step compares its questions with all of them: the loss is the cross entropy of the
right one among all (contrastive learning with every negative, van den Oord et al., 2018, arXiv:1807.03748).
"""

from __future__ import annotations

import argparse
import json
import math
import random
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor
from transformers import BertConfig, BertModel

from demo_model import facts
from demo_model.data import fact_turn, with_article

BESIDE = Path(__file__).resolve().parent.parent / "quire" / "assets"
CHAT_MODEL, ASSETS = BESIDE / "quire-demo", BESIDE / "quire-demo-embed"
BATCH, RATE, WARM_UP, TEMPERATURE, DROPPED = 192, 2e-3, 100, 0.05, 0.1

CONFIG: dict[str, Any] = {
    "architectures": ["BertModel"], "model_type": "bert", "vocab_size": 2304, "hidden_size": 64,
    "intermediate_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4, "hidden_act": "gelu",
    "max_position_embeddings": 256, "type_vocab_size": 1, "layer_norm_eps": 1e-12, "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0, "initializer_range": 0.02, "pad_token_id": 0, "torch_dtype": "bfloat16",
}  # fmt: skip
SENTENCE_TRANSFORMERS: dict[str, Any] = {
    "modules.json": [
        {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
        {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
        {"idx": 2, "name": "2", "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"},
    ],
    "1_Pooling/config.json": {
        "word_embedding_dimension": CONFIG["hidden_size"], "pooling_mode_cls_token": False,
        "pooling_mode_mean_tokens": True, "pooling_mode_max_tokens": False, "pooling_mode_mean_sqrt_len_tokens": False,
    },
    "sentence_bert_config.json": {"max_seq_length": CONFIG["max_position_embeddings"], "do_lower_case": False},
    "config_sentence_transformers.json": {"prompts": {}, "default_prompt_name": None, "similarity_fn_name": "cosine"},
}  # fmt: skip
Fact = tuple[facts.Relation, str]


def all_facts() -> list[Fact]:
    """Every fact of the world, in one order."""
    return [(relation, subject) for relation in facts.RELATIONS for subject in relation.table]


def sentence(fact: Fact) -> str:
    """Return the sentence that states a fact."""
    relation, subject = fact
    text = with_article(relation.answer.format(x=subject, y=relation.table[subject]))
    return text[0].upper() + text[1:]


def question(rng: random.Random, fact: Fact, *, held: bool) -> str:
    """One way to ask for a fact; `held`: one that is in no training text."""
    text: str = fact_turn(rng, held, *fact)[0]["content"]
    return text


class Embedder:
    """Texts to unit vectors [N, hidden], by transformers."""

    def __init__(self, model: BertModel, tokenizer: Tokenizer) -> None:
        self.model = model
        self._tokenizer = tokenizer

    def __call__(self, texts: Sequence[str], rng: random.Random | None = None) -> Tensor:
        """With `rng` some tokens are dropped, so that no single one decides."""
        rows = [self._ids(text, rng) for text in texts]
        ids = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.long)
        for place, row in enumerate(rows):
            ids[place, : len(row)] = torch.tensor(row)
        mask = torch.arange(ids.shape[1]) < torch.tensor([[len(row)] for row in rows])
        hidden = self.model(input_ids=ids, attention_mask=mask.long()).last_hidden_state
        mean = (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        return F.normalize(mean, dim=-1)

    def _ids(self, text: str, rng: random.Random | None) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text).ids
        kept = [one for one in ids if rng is None or rng.random() >= DROPPED]
        return kept or ids


def recall(embed: Callable[[Sequence[str]], Tensor], seed: int, *, times: int = 1) -> float:
    """Share of held-out questions, `times` for each fact, whose nearest fact is the right one.

    `embed` makes unit vectors [N, hidden].
    """
    rng, world = random.Random(seed), all_facts()
    with torch.inference_mode():
        known = embed([sentence(fact) for fact in world])
        asked = [question(rng, fact, held=True) for _ in range(times) for fact in world]
        best = (embed(asked) @ known.T).argmax(1)
    return float((best == torch.arange(len(world)).repeat(times)).float().mean())


def export(model: BertModel, folder: Path) -> None:
    """Write the files that sentence-transformers and quire load."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: value.to(torch.bfloat16).contiguous() for name, value in model.state_dict().items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    for name, content in {"config.json": CONFIG, **SENTENCE_TRANSFORMERS}.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(json.dumps(content, indent=2) + "\n")
    shutil.copy(CHAT_MODEL / "tokenizer.json", folder)
    named = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": CONFIG["max_position_embeddings"],
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(named, indent=2) + "\n")


def rate_of(step: int, steps: int) -> float:
    """Linear warm-up, then a cosine down to nothing."""
    return RATE * min(1.0, step / WARM_UP) * (0.5 + 0.5 * math.cos(math.pi * step / steps))


def lost_error(embed: Embedder, world: Sequence[Fact], rng: random.Random) -> Tensor:
    """Return the loss of one question for each of some facts."""
    wanted = rng.sample(range(len(world)), BATCH)
    known = embed([sentence(fact) for fact in world], rng)
    asked = embed([question(rng, world[place], held=False) for place in wanted], rng)
    return F.cross_entropy(asked @ known.T / TEMPERATURE, torch.tensor(wanted))


def train(args: argparse.Namespace) -> None:
    torch.manual_seed(args.seed)
    rng, world = random.Random(args.seed), all_facts()
    model = BertModel(BertConfig(**CONFIG), add_pooling_layer=False)
    embed = Embedder(model, Tokenizer.from_file(str(CHAT_MODEL / "tokenizer.json")))
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.98), weight_decay=0.01)
    began, mean = time.monotonic(), 0.0
    for step in range(1, args.steps + 1):
        optimizer.param_groups[0]["lr"] = rate_of(step, args.steps)
        loss = lost_error(embed, world, rng)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        mean += loss.item() / 100
        if step % 100 == 0:
            minutes, found = (time.monotonic() - began) / 60, recall(embed, step)
            print(f"{minutes:5.1f} min  step {step}  loss {mean:.4f}  recall {found:.3f}", flush=True)
            mean = 0.0
    export(model, args.out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--out", type=Path, default=ASSETS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    train(args)


if __name__ == "__main__":
    main()
