# SPDX-License-Identifier: Apache-2.0
"""Random Whisper checkpoint with windows of 0.6 s and a vocabulary of bytes."""

from __future__ import annotations

from pathlib import Path

import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers
from transformers import GenerationConfig, WhisperConfig, WhisperForConditionalGeneration

SPECIAL = (
    *("<|endoftext|>", "<|startoftranscript|>", "<|en|>", "<|de|>", "<|translate|>", "<|transcribe|>"),
    *("<|startoflm|>", "<|startofprev|>", "<|nospeech|>", "<|notimestamps|>"),
)
FRAMES = 60


def save_tiny_whisper(target: Path) -> Path:
    """Write the checkpoint, and return its folder."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE({letter: at for at, letter in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([tokenizers.AddedToken(token, special=True) for token in SPECIAL])
    end = backend.token_to_id("<|endoftext|>")
    torch.manual_seed(0)
    config = WhisperConfig(
        vocab_size=len(alphabet) + len(SPECIAL) + FRAMES // 2 + 1,
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        num_mel_bins=8,
        max_source_positions=FRAMES // 2,
        max_target_positions=40,
        pad_token_id=end,
        bos_token_id=end,
        eos_token_id=end,
        decoder_start_token_id=end + 1,
        suppress_tokens=None,
        begin_suppress_tokens=None,
    )
    model = WhisperForConditionalGeneration(config)
    model.generation_config = GenerationConfig(
        eos_token_id=end, pad_token_id=end, decoder_start_token_id=end + 1
    )
    model.save_pretrained(target)
    backend.save(str(target / "tokenizer.json"))
    return target
