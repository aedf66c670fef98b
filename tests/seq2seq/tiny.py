# SPDX-License-Identifier: Apache-2.0
"""Tiny random checkpoints of encoder-decoder models, and what transformers makes of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

VOCAB, LENGTH = 96, 40  # LENGTH: positions that BART's relatives have learned.
START, PAD, END = 2, 1, 2
_BART: dict[str, Any] = {
    "vocab_size": VOCAB,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": LENGTH,
    "pad_token_id": PAD,
    "bos_token_id": 0,
    "eos_token_id": END,
    "decoder_start_token_id": START,
    "forced_eos_token_id": END,
}
_T5: dict[str, Any] = {
    "vocab_size": VOCAB,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": 2,
    "num_decoder_layers": 3,
    "num_heads": 4,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 20,
    "decoder_start_token_id": 0,
    "pad_token_id": 0,
    "eos_token_id": 1,
}


def _made(name: str, sizes: dict[str, Any], **options: Any) -> Callable[[], Any]:
    def make() -> Any:
        config = getattr(transformers, f"{name}Config")(**sizes, **options)
        kind = "MarianMTModel" if name == "Marian" else f"{name}ForConditionalGeneration"
        return getattr(transformers, kind)(config)

    return make


MODELS: dict[str, Callable[[], Any]] = {
    "bart": _made("Bart", _BART, scale_embedding=True, forced_bos_token_id=0),
    "mbart": _made("MBart", _BART),
    "pegasus": _made("Pegasus", _BART, activation_function="relu", scale_embedding=True),
    "marian": _made("Marian", _BART, activation_function="swish", scale_embedding=True),
    "marian-apart": _made("Marian", _BART, decoder_vocab_size=80, share_encoder_decoder_embeddings=False),
    "m2m100": _made("M2M100", _BART),
    "t5": _made("T5", _T5),
    "flan": _made("T5", _T5, feed_forward_proj="gated-gelu", tie_word_embeddings=False),
    "mt5": _made("MT5", _T5),
    "umt5": _made("UMT5", _T5),
}


def save(name: str, path: Path) -> Any:
    """Write a checkpoint whose weights are large enough to tell models apart; return the model."""
    torch.manual_seed(3)
    model = MODELS[name]().eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "embed_positions" in parameter_name and not name.endswith("bart"):
                continue  # sines
            is_norm = "norm" in parameter_name
            mean = 1.0 if is_norm and parameter_name.endswith("weight") else 0.0
            parameter.normal_(mean, 0.1 if is_norm else 0.3)
        if hasattr(model, "final_logits_bias"):
            model.final_logits_bias.normal_(0.0, 0.5)
    model.tie_weights()
    model.save_pretrained(path)
    return model


def texts(*lengths: int, seed: int = 1) -> list[list[int]]:
    """Return random texts of token ids."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, 80, (length,), generator=generator).tolist() for length in lengths]


def decoder_start(model: Any) -> list[int]:
    """Return the tokens with which a model's decoder begins."""
    own = model.generation_config
    return [
        own.decoder_start_token_id,
        *([] if own.forced_bos_token_id is None else [own.forced_bos_token_id]),
    ]


@torch.inference_mode()
def greedy(
    model: Any, text: Sequence[int], count: int, start: Sequence[int] = ()
) -> tuple[list[int], list[float]]:
    """Return transformers' greedy tokens and their logprobs, ends included."""
    start = list(start) or decoder_start(model)
    ids, logprobs = list(start), []
    for _ in range(count):
        logits = model(input_ids=torch.tensor([text]), decoder_input_ids=torch.tensor([ids])).logits[0, -1]
        best = logits.log_softmax(-1).max(-1)
        ids.append(int(best.indices))
        logprobs.append(float(best.values))
    return ids[len(start) :], logprobs
