# SPDX-License-Identifier: Apache-2.0
"""Train quire-demo-vision: a LLaVA of a SigLIP tower and a Llama, both tiny, on pictures drawn as it learns.

A row of a batch is one picture with several conversations about it; each attends to the picture and to itself, so the
picture is encoded once for all. Some conversations see no picture and learn to ask for one. Beside the answers the
tower learns, for each patch, the kind and the color of the item whose center is there, at first that alone; these
heads are dropped afterwards. The same seed gives the same pictures and questions.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from transformers import LlavaConfig, LlavaForConditionalGeneration

from demo_model.data import dialogues
from demo_model.pictures import COLORS, KINDS, SIDE, Picture, draw, picture, question
from demo_model.train import (
    checkpoint,
    optimizers,
    position,
    progress_of,
    recipe_of,
    recipe_parser,
    set_rates,
)

ASSETS = Path(__file__).resolve().parent.parent / "quire" / "assets" / "quire-demo-vision"
SPECIAL = PAD, USER, ASSISTANT, SYSTEM, END, IMAGE = (
    "<|pad|>", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>", "<image>"
)  # fmt: skip
VOCAB_SIZE, PIXELS, PATCH = 640, 60, 10
GRID = PIXELS // PATCH
NUM_PATCHES = GRID**2
WORDS = r"\p{N}|\p{Lu}| ?\p{Ll}+|\p{L}+| ?[^\s\p{L}\p{N}]+|\s"
"""Digits and capitals are tokens of their own: words in pictures are read letter by letter."""
CHAT_TEMPLATE = """\
{%- for message in messages %}
{{- '<|' ~ message.role ~ '|>' }}
{%- if message.content is string %}{{- message.content }}
{%- else %}
{%- for part in message.content if part.type == 'image' %}{{- '<image>' }}{%- endfor %}
{%- for part in message.content if part.type == 'text' %}{{- part.text }}{%- endfor %}
{%- endif %}
{%- if message.role == 'assistant' %}{{- '<|end|>' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}
"""
GREETINGS = ("Hi", "Hello", "Hey", "Hello there", "Good morning", "hi")
GREETING = "Hello! Show me a picture and ask me about it."
NO_PICTURE = "I answer questions about pictures. Please show me one."
CONFIG: dict[str, Any] = {
    "architectures": ["LlavaForConditionalGeneration"], "model_type": "llava", "image_token_index": 5,
    "image_seq_length": NUM_PATCHES, "projector_hidden_act": "gelu", "vision_feature_layer": -1,
    "vision_feature_select_strategy": "full", "tie_word_embeddings": True, "torch_dtype": "bfloat16",
    "text_config": {
        "model_type": "llama", "vocab_size": VOCAB_SIZE, "hidden_size": 128, "intermediate_size": 256,
        "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 32,
        "rms_norm_eps": 1e-5, "rope_theta": 1e4, "max_position_embeddings": 1024, "tie_word_embeddings": True,
        "pad_token_id": 0, "bos_token_id": None, "eos_token_id": 4,
    },
    "vision_config": {
        "model_type": "siglip_vision_model", "hidden_size": 128, "intermediate_size": 384,
        "num_hidden_layers": 3, "num_attention_heads": 4, "image_size": PIXELS, "patch_size": PATCH,
        "vision_use_head": False,
    },
}  # fmt: skip
GENERATION = {"eos_token_id": 4, "pad_token_id": 0, "do_sample": True, "top_k": 1}
PREPROCESSOR = {
    "image_processor_type": "SiglipImageProcessor", "do_resize": True, "size": {"height": PIXELS, "width": PIXELS},
    "resample": 3, "do_rescale": True, "rescale_factor": 1 / 255, "do_normalize": True,
    "image_mean": [0.5] * 3, "image_std": [0.5] * 3, "do_convert_rgb": True,
}  # fmt: skip
PROCESSOR = {
    "processor_class": "LlavaProcessor", "image_token": IMAGE, "num_additional_image_tokens": 0,
    "patch_size": PATCH, "vision_feature_select_strategy": "full",
}  # fmt: skip
LABELS_WEIGHT = 1.0
EYES_FIRST = 0.35
"""Part of the training in which the tower learns alone."""
ROW = 124
"""Tokens of a row, those of its picture included; the last conversation ends where the row does."""


def train_tokenizer(seed: int = 1, count: int = 6000) -> Tokenizer:
    """Return a byte-level BPE that has learned what is said about pictures, and some chat."""
    rng = random.Random(seed)
    asked = (question(rng, picture(rng)) for _ in range(count))
    texts = [f"{one.text} {one.answer}" for one in asked]
    texts += [item.messages[0]["content"] for item in itertools.islice(dialogues(seed), count // 6)]
    texts += [GREETING, NO_PICTURE] * 50
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(WORDS), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        show_progress=False,
        special_tokens=[AddedToken(text, special=True, normalized=False) for text in SPECIAL],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


# Batches


@dataclass(frozen=True)
class Batch:
    """Pictures with what is said about them.

    Shapes: B pictures, S tokens of a row, P patches. `of` numbers the conversation of a token, 0 for what all see;
    `blind` ones see themselves only.
    """

    pixels: Tensor  # [B, 3, PIXELS, PIXELS] float32 in -1..1
    kinds: Tensor  # [B, P] int64; 0: no item has its center there.
    colors: Tensor  # [B, P] int64
    ids: Tensor  # [B, S] int64
    of: Tensor  # [B, S] int64
    blind: Tensor  # [B, S] bool
    positions: Tensor  # [B, S] int64
    learned: Tensor  # [B, S] bool: tokens that the model must produce.


@dataclass
class Row:
    """Tokens of one row, conversation by conversation."""

    ids: list[int]
    of: list[int]
    blind: list[bool]
    positions: list[int]
    learned: list[bool]

    def add(self, ids: list[int], of: int, learned: bool, blind: bool = False) -> None:
        """Append tokens to a conversation, which is the last one or new."""
        first = 0 if blind else 1 + NUM_PATCHES
        at = self.positions[-1] + 1 if of == self.of[-1] else first
        self.ids += ids
        self.of += [of] * len(ids)
        self.blind += [blind] * len(ids)
        self.positions += range(at, at + len(ids))
        self.learned += [learned] * len(ids)


class Batches:
    """Endless batches of fresh pictures."""

    def __init__(self, tokenizer: Tokenizer, seed: int, size: int) -> None:
        self._tokenizer, self._rng, self._size = tokenizer, random.Random(seed), size
        self._chats = dialogues(seed)
        self._encoded: dict[str, list[int]] = {}
        self._prefix = [tokenizer.token_to_id(USER)] + [tokenizer.token_to_id(IMAGE)] * NUM_PATCHES

    def __iter__(self) -> Iterator[Batch]:
        while True:
            shown = [picture(self._rng) for _ in range(self._size)]
            yield self._stacked(shown, [self._row(one) for one in shown])

    def _row(self, shown: Picture) -> Row:
        count = len(self._prefix)
        row = Row(list(self._prefix), [0] * count, [False] * count, list(range(count)), [False] * count)
        if self._rng.random() < 0.15:
            text, answer = self._chat(self._rng)
            row.add(self._ids(f"{USER}{text}{ASSISTANT}"), 1, False, blind=True)
            row.add(self._ids(f"{answer}{END}"), 1, True, blind=True)
        while len(row.ids) < ROW:
            of = row.of[-1] + 1
            for turn in range(self._rng.choice((1, 1, 2))):
                one = question(self._rng, shown)
                row.add(self._ids(f"{USER if turn else ''}{one.text}{ASSISTANT}"), of, False)
                row.add(self._ids(f"{one.answer}{END}"), of, True)
        return row

    def _chat(self, rng: random.Random) -> tuple[str, str]:
        """Return what a user says without a picture, and the reply."""
        if rng.random() < 0.3:
            return rng.choice(GREETINGS) + rng.choice("!. "), GREETING
        if rng.random() < 0.5:
            return question(rng, picture(rng)).text, NO_PICTURE
        return next(self._chats).messages[0]["content"][:24], NO_PICTURE

    def _ids(self, text: str) -> list[int]:
        if text not in self._encoded:
            if len(self._encoded) > 100_000:
                self._encoded.clear()
            self._encoded[text] = self._tokenizer.encode(text).ids
        return self._encoded[text]

    def _stacked(self, shown: list[Picture], rows: list[Row]) -> Batch:
        def cut(name: str) -> Tensor:
            return torch.tensor([getattr(row, name)[:ROW] for row in rows])

        sides = self._rng.choices((96, 128, 192), (5, 4, 1), k=len(shown))
        drawn = [pixels_of(draw(one, self._rng, side)) for one, side in zip(shown, sides, strict=True)]
        kinds, colors = (torch.zeros(len(shown), NUM_PATCHES, dtype=torch.long) for _ in range(2))
        for i, one in enumerate(shown):
            for item in one.items:
                at = int(item.y * GRID / SIDE) * GRID + int(item.x * GRID / SIDE)
                kinds[i, at], colors[i, at] = KINDS.index(item.kind) + 1, list(COLORS).index(item.color)
        pixels = torch.from_numpy(np.stack(drawn))
        return Batch(pixels, kinds, colors, *map(cut, ("ids", "of", "blind", "positions", "learned")))


def pixels_of(image: Image.Image) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Return pixels [3, PIXELS, PIXELS] as the model's image processor makes them."""
    small = image.resize((PIXELS, PIXELS), Image.Resampling.BICUBIC)
    return (np.asarray(small, np.float32) / 127.5 - 1).transpose(2, 0, 1)


# Learning


class Learner(nn.Module):
    """The model, and the heads that only help to train its tower."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        given = {k: v for k, v in CONFIG.items() if k not in ("model_type", "architectures", "torch_dtype")}
        self.model = LlavaForConditionalGeneration(LlavaConfig(**given))
        size = CONFIG["vision_config"]["hidden_size"]
        self.norm = nn.LayerNorm(size)
        self.kind_embed, self.color_embed = nn.Linear(size, 1 + len(KINDS)), nn.Linear(size, len(COLORS))

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the losses of the answers and of the patches' labels."""
        parts = self.model.model
        seen = self._seen(batch)
        embeds = parts.language_model.embed_tokens(batch.ids)
        patches = parts.multi_modal_projector(seen)
        embeds = torch.cat((embeds[:, :1], patches, embeds[:, 1 + NUM_PATCHES :]), 1)
        given = {"attention_mask": attended(batch), "position_ids": batch.positions, "use_cache": False}
        hidden = parts.language_model(inputs_embeds=embeds, **given).last_hidden_state
        learned = batch.learned[:, 1:]
        answers = F.cross_entropy(self.model.lm_head(hidden[:, :-1][learned]), batch.ids[:, 1:][learned])
        return answers, self._labels(seen, batch)

    def labels(self, batch: Batch) -> Tensor:
        """Return the loss of the patches' labels alone."""
        return self._labels(self._seen(batch), batch)

    def _seen(self, batch: Batch) -> Tensor:
        tower = self.model.model.vision_tower
        hidden: Tensor = tower(batch.pixels, output_hidden_states=True).hidden_states[-1]
        return hidden

    def _labels(self, seen: Tensor, batch: Batch) -> Tensor:
        seen, centers = self.norm(seen), batch.kinds > 0
        kinds, colors = self.kind_embed(seen), self.color_embed(seen[centers])
        weights = torch.where(centers, 4.0, 1.0)
        losses = F.cross_entropy(kinds.flatten(0, 1), batch.kinds.flatten(), reduction="none")
        return (losses * weights.flatten()).mean() + 0.3 * F.cross_entropy(colors, batch.colors[centers])


def attended(batch: Batch) -> Tensor:
    """Return [B, 1, S, S] of 0 where a token attends to another, else of the lowest number."""
    of, width = batch.of, batch.of.size(1)
    own = of[:, :, None] == of[:, None, :]
    shared = (of[:, None, :] == 0) & ~batch.blind[:, :, None]
    earlier = torch.ones(width, width, dtype=torch.bool).tril()
    allowed = (own | shared) & earlier
    return torch.zeros(allowed.shape).masked_fill(~allowed, torch.finfo(torch.float32).min)[:, None]


def optimizers_of(learner: Learner, eyes_only: bool) -> list[torch.optim.Optimizer]:
    named = [
        (name, p)
        for name, p in learner.named_parameters()
        if not (eyes_only and ("language_model" in name or "projector" in name))
    ]
    return optimizers(named)


def export(model: LlavaForConditionalGeneration, tokenizer: Tokenizer, folder: Path) -> None:
    """Write the model with bfloat16 weights, its tokenizer and its processor; the head is tied, so it is not stored."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {f"model.{k}": v.to(torch.bfloat16).contiguous() for k, v in model.model.state_dict().items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "pad_token": PAD, "bos_token": None,
        "unk_token": None, "model_max_length": 1024, "clean_up_tokenization_spaces": False,
    }  # fmt: skip
    for name, values in (
        ("config", CONFIG), ("generation_config", GENERATION), ("preprocessor_config", PREPROCESSOR),
        ("processor_config", PROCESSOR), ("tokenizer_config", tokenizer_config),
    ):  # fmt: skip
        (folder / f"{name}.json").write_text(json.dumps(values, indent=2) + "\n")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)


def resume(learner: Learner, folder: Path) -> tuple[int, float]:
    learner.load_state_dict(load_file(folder / "checkpoint.safetensors"), strict=False)
    return position(folder)


def train(args: argparse.Namespace, tokenizer: Tokenizer) -> None:
    """Run until the minutes or the steps are spent; checkpoint every few minutes."""
    learner = Learner(args.seed)
    step, before = resume(learner, args.work_dir) if args.resume else (0, 0.0)
    first, began, saved, eyes_only = step, time.monotonic(), before, None
    means = [0.0, 0.0]
    print(f"{sum(p.numel() for p in learner.model.parameters())} parameters", flush=True)
    for batch in Batches(tokenizer, args.seed + step, args.pictures):
        minutes = before + (time.monotonic() - began) / 60
        progress = progress_of(args, step, minutes)
        if progress >= 1:
            break
        if eyes_only != (progress < EYES_FIRST):
            eyes_only, first = progress < EYES_FIRST, step
            opts = optimizers_of(learner, eyes_only)
        set_rates(opts, args.rate, step - first, progress)
        losses = (torch.zeros(()), learner.labels(batch)) if eyes_only else learner(batch)
        torch.autograd.backward(losses[0] + LABELS_WEIGHT * losses[1])
        torch.nn.utils.clip_grad_norm_(learner.parameters(), 1.0)
        for opt in opts:
            opt.step()
            opt.zero_grad()
        step += 1
        means = [mean + loss.item() / 25 for mean, loss in zip(means, losses, strict=True)]
        if step % 25 == 0:
            print(
                f"{minutes:6.1f} min  step {step}  answers {means[0]:.4f}  labels {means[1]:.4f}", flush=True
            )
            means = [0.0, 0.0]
        if minutes - saved > 3:
            saved = minutes
            checkpoint(learner, args.work_dir, step, minutes)
            export(learner.model, tokenizer, args.work_dir / "model")
    checkpoint(learner, args.work_dir, step, minutes)
    export(learner.model, tokenizer, args.out)


def main() -> None:
    parser = recipe_parser(__doc__, threads=1, out=ASSETS)
    parser.add_argument("--pictures", type=int, default=32, help="pictures of a batch")
    args = recipe_of(parser)
    torch.set_num_threads(args.threads)
    torch.set_flush_denormal(True)
    kept = args.work_dir / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(kept)) if args.resume else train_tokenizer()
    args.work_dir.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(kept), pretty=False)
    train(args, tokenizer)


if __name__ == "__main__":
    main()
