# SPDX-License-Identifier: Apache-2.0
"""Train quire-demo: a plain loop, loss on assistant tokens only, deterministic for a seed and step count.

Matrices learn with Muon, the embedding and the norms with AdamW: on this data that reaches the same held-out
accuracy in a fraction of the steps of AdamW alone.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import jinja2.sandbox
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from demo_model.data import Dialogue, dialogues
from demo_model.muon import Muon
from demo_model.tokenizer import CHAT_TEMPLATE, IM_END, IM_START, THINK, save, train_tokenizer

ASSETS = Path(__file__).resolve().parent.parent / "quire" / "assets" / "quire-demo"
BATCH_TOKENS, MAX_LENGTH, POOL = 3072, 1024, 768
MUON_RATE, ADAMW_RATE, WARM_UP = 0.02, 3e-3, 60
Batch = tuple[torch.Tensor, torch.Tensor]

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 2304, "hidden_size": 192,
    "intermediate_size": 512, "num_hidden_layers": 5, "num_attention_heads": 6, "num_key_value_heads": 2,
    "head_dim": 32, "hidden_act": "silu", "rms_norm_eps": 1e-05, "rope_theta": 10000.0, "rope_scaling": None,
    "max_position_embeddings": 2048, "tie_word_embeddings": True, "attention_bias": False, "mlp_bias": False,
    "initializer_range": 0.02, "bos_token_id": None, "eos_token_id": 2, "pad_token_id": 0, "use_cache": True,
    "torch_dtype": "bfloat16",
}  # fmt: skip
GENERATION = {"eos_token_id": [2, 0], "pad_token_id": 0, "do_sample": True, "temperature": 0.3, "top_p": 0.95}


def new_model(seed: int) -> LlamaForCausalLM:
    """A fresh float32 model of the shipped shape."""
    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(**{k: v for k, v in CONFIG.items() if k not in ("model_type", "torch_dtype")})
    )


def chat_renderer() -> jinja2.Template:
    """The chat template under the environment that chat servers use."""
    env = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    env.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    return env.from_string(CHAT_TEMPLATE)


def answer_mask(ids: list[int], start: int, headers: list[list[int]], end: int) -> list[int]:
    """One for every token the assistant has to produce, its end mark included.

    Args:
        headers: what the prompt may hold of a turn; the first that a turn begins with is left out.
    """
    mask, inside, i = [0] * len(ids), False, 0
    while i < len(ids):
        if ids[i] == start:
            header = next((one for one in headers if ids[i + 1 : i + 1 + len(one)] == one), None)
            inside = header is not None
            i += len(header or [])
        elif inside:
            mask[i] = 1
            inside = ids[i] != end
        i += 1
    return mask


def results_mask(ids: list[int], equals: int, stop: int) -> list[int]:
    """One for every token of a result and the full stop after it."""
    mask, inside = [0] * len(ids), False
    for i, token in enumerate(ids):
        mask[i] = int(inside)
        inside = token == equals or (inside and token != stop)
    return mask


class Encoder:
    """Turns dialogues into token ids and masks."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer, self.template = tokenizer, chat_renderer()
        self.start, self.end = tokenizer.encode(IM_START).ids[0], tokenizer.encode(IM_END).ids[0]
        self.headers = [tokenizer.encode(f"assistant\n{opening}").ids for opening in (f"{THINK}\n", "")]
        self.equals, self.stop = tokenizer.encode(" =").ids[0], tokenizer.encode(".").ids[0]

    def __call__(self, items: list[Dialogue]) -> list[tuple[list[int], list[int]]]:
        texts = [self.template.render(messages=item.messages, tools=item.tools) for item in items]
        encoded = [entry.ids for entry in self.tokenizer.encode_batch(texts)]
        pairs = zip(encoded, items, strict=True)
        return [(ids, self.mask(ids, item)) for ids, item in pairs if len(ids) <= MAX_LENGTH]

    def mask(self, ids: list[int], item: Dialogue) -> list[int]:
        if item.results_only:
            return results_mask(ids, self.equals, self.stop)
        return answer_mask(ids, self.start, self.headers, self.end)


def stack(rows: list[tuple[list[int], list[int]]]) -> Batch:
    """Pad rows on the right; causal attention never sees the padding."""
    width = max(len(ids) for ids, _ in rows)
    ids = torch.tensor([row + [0] * (width - len(row)) for row, _ in rows])
    return ids, torch.tensor([mask + [0] * (width - len(mask)) for _, mask in rows]).bool()


def batches(encoder: Encoder, seed: int, num_tokens: int = BATCH_TOKENS) -> Iterator[Batch]:
    """Batches of about so many tokens, each of similar lengths, in random order."""
    stream, rng = dialogues(seed), random.Random(seed)
    while True:
        rows = sorted(encoder([next(stream) for _ in range(POOL)]), key=lambda row: len(row[0]))
        groups: list[list[tuple[list[int], list[int]]]] = [[]]
        for row in rows:
            if groups[-1] and (len(groups[-1]) + 1) * len(row[0]) > num_tokens:
                groups.append([])
            groups[-1].append(row)
        rng.shuffle(groups)
        yield from map(stack, groups)


def lost_error(model: LlamaForCausalLM, batch: Batch) -> torch.Tensor:
    """Mean cross entropy of the assistant tokens; only their rows reach the vocabulary."""
    ids, mask = batch
    hidden = model.model(input_ids=ids[:, :-1], use_cache=False).last_hidden_state
    wanted = mask[:, 1:]
    return F.cross_entropy(model.lm_head(hidden[wanted]), ids[:, 1:][wanted])


def descend(model: LlamaForCausalLM, opts: list[torch.optim.Optimizer], batch: Batch) -> float:
    """Learn from a batch; returns the loss before that."""
    loss = lost_error(model, batch)
    torch.autograd.backward(loss)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for opt in opts:
        opt.step()
        opt.zero_grad()
    return loss.item()


def optimizers(named: Iterable[tuple[str, nn.Parameter]]) -> list[torch.optim.Optimizer]:
    """Muon for matrices, AdamW for all others, embeddings among them."""
    named = list(named)
    matrices = [p for name, p in named if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in named if p.ndim != 2 or "embed" in name]
    return [Muon(matrices, lr=MUON_RATE, weight_decay=0.01),
            torch.optim.AdamW(others, lr=ADAMW_RATE, betas=(0.9, 0.98), weight_decay=0.01)]  # fmt: skip


def set_rates(opts: list[torch.optim.Optimizer], peak: float, step: int, progress: float) -> None:
    """Linear warm-up to `peak` times the usual rates, then a cosine down to one percent of it."""
    factor = (
        peak
        * min(1.0, (step + 1) / WARM_UP)
        * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * min(1.0, progress))))
    )
    for opt, rate in zip(opts, (MUON_RATE, ADAMW_RATE), strict=True):
        opt.param_groups[0]["lr"] = rate * factor


def export(model: LlamaForCausalLM, folder: Path) -> None:
    """Write config and bfloat16 weights; the head is tied, so it is not stored."""
    weights = {
        k: v.to(torch.bfloat16).contiguous() for k, v in model.state_dict().items() if k != "lm_head.weight"
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(CONFIG, indent=2) + "\n")
    (folder / "generation_config.json").write_text(json.dumps(GENERATION, indent=2) + "\n")


def checkpoint(model: nn.Module, folder: Path, step: int, minutes: float) -> None:
    """Full-precision weights but the head's, which is the embedding's, and how far the schedule is."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {k: v for k, v in model.state_dict().items() if not k.endswith("lm_head.weight")}
    save_file(weights, folder / "checkpoint.safetensors")
    (folder / "state.json").write_text(json.dumps({"step": step, "minutes": minutes}))


def resume(model: LlamaForCausalLM, folder: Path) -> tuple[int, float]:
    load(model, folder / "checkpoint.safetensors")
    return position(folder)


def position(folder: Path) -> tuple[int, float]:
    """The step and the minutes of a checkpoint."""
    state = json.loads((folder / "state.json").read_text())
    return state["step"], state["minutes"]


def load(model: LlamaForCausalLM, path: Path) -> None:
    """All weights but the head, which is the embedding's."""
    weights = {name: value.float() for name, value in load_file(path).items()}
    missing = model.load_state_dict(weights, strict=False).missing_keys
    if missing != ["lm_head.weight"]:
        raise ValueError(f"{path} lacks {', '.join(missing)}")


def train(args: argparse.Namespace, encoder: Encoder) -> None:
    """Run until the steps or the minutes are spent; checkpoint now and then."""
    model = new_model(args.seed)
    if args.start:
        load(model, args.start / "model.safetensors")
    step, before = resume(model, args.work_dir) if args.resume else (0, 0.0)
    first = step
    opts, began, saved, tokens, mean = optimizers(model.named_parameters()), time.monotonic(), 0.0, 0, 0.0
    print(f"{sum(p.numel() for p in model.parameters())} parameters", flush=True)
    for batch in batches(encoder, args.seed + step):
        minutes = before + (time.monotonic() - began) / 60
        progress = progress_of(args, step, minutes)
        if progress >= 1:
            break
        set_rates(opts, args.rate, step - first, progress)
        loss = descend(model, opts, batch)
        step, tokens, mean = step + 1, tokens + batch[0].numel(), mean + loss / 50
        if step % 50 == 0:
            print(
                f"{minutes:6.1f} min  step {step}  loss {mean:.4f}  {tokens / 1e6:.2f} M tokens", flush=True
            )
            mean = 0.0
        if minutes - saved > 2:
            saved = minutes
            checkpoint(model, args.work_dir, step, minutes)
            export(model, args.work_dir)
    checkpoint(model, args.work_dir, step, minutes)
    export(model, args.out)


def progress_of(args: argparse.Namespace, step: int, minutes: float) -> float:
    """Return the part of the training that is done, by the limit that comes first."""
    return max(step / args.steps if args.steps else 0.0, minutes / args.minutes if args.minutes else 0.0)


def recipe_parser(description: str | None, *, threads: int, out: Path) -> argparse.ArgumentParser:
    """Return a parser with the options of every training that is limited by steps or by time."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--steps", type=int, default=0, help="stop after so many steps (0: no limit)")
    parser.add_argument("--minutes", type=float, default=0.0, help="stop after so many minutes (0: no limit)")
    parser.add_argument("--threads", type=int, default=threads)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--rate", type=float, default=1.0, help="times the usual learning rates")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint in --work-dir")
    parser.add_argument("--work-dir", type=Path, required=True, help="where checkpoints go")
    parser.add_argument("--out", type=Path, default=out)
    return parser


def recipe_of(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Return the options of the command line."""
    args = parser.parse_args()
    if not args.steps and not args.minutes:
        parser.error("give --steps or --minutes")
    return args


def main() -> None:
    parser = recipe_parser(__doc__, threads=2, out=ASSETS)
    parser.add_argument("--start", type=Path, help="begin with the weights and the tokenizer of this model")
    args = recipe_of(parser)
    if args.resume and args.start:
        parser.error("give --resume or --start, not both")
    torch.set_num_threads(args.threads)
    kept = args.work_dir if args.resume else args.start
    tokenizer = Tokenizer.from_file(str(kept / "tokenizer.json")) if kept else train_tokenizer()
    for folder in (args.work_dir, args.out):
        save(tokenizer, folder)
    train(args, Encoder(tokenizer))


if __name__ == "__main__":
    main()
