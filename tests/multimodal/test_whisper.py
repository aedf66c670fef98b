# SPDX-License-Identifier: Apache-2.0
"""Whisper's encoder and decoder against transformers, in any chunks and company, and with a shared encoder's output."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import transformers
from safetensors.torch import save_file

from quire import LLM, SamplingParams
from quire.errors import StartupError, ValidationError
from quire.inputs import TokensPrompt
from quire.media import MediaItem

LENGTH, POSITIONS, BINS = 30, 64, 8  # Rows of the encoder's output, positions that they fill, mel bins.
FORCED = [3, 10, 11]
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=1)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    torch.manual_seed(0)
    config = transformers.WhisperConfig(
        vocab_size=96,
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        num_mel_bins=BINS,
        max_source_positions=LENGTH,
        max_target_positions=40,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=3,
        suppress_tokens=None,
        begin_suppress_tokens=None,
    )
    model = transformers.WhisperForConditionalGeneration(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            is_norm = "layer_norm" in name
            parameter.normal_(1.0 if is_norm and name.endswith("weight") else 0.0, 0.1 if is_norm else 0.4)
    model.tie_weights()
    path = tmp_path_factory.mktemp("whisper")
    model.save_pretrained(path)
    return path, model


def sound(path: Path, seed: int, frames: int = 2 * LENGTH) -> tuple[torch.Tensor, MediaItem]:
    """Return a random spectrogram, and the item whose file has it."""
    features = torch.randn(1, BINS, frames, generator=torch.Generator().manual_seed(seed))
    file = path / f"sound-{seed}-{frames}.safetensors"
    save_file({"input_features": features}, file)
    digest = hashlib.sha256(file.name.encode()).digest()
    return features, MediaItem(digest, "audio", 0, POSITIONS, [(0, POSITIONS)], str(file))


def prompt_of(item: MediaItem, forced: list[int] = FORCED) -> TokensPrompt:
    return TokensPrompt(prompt_token_ids=[0] * POSITIONS + forced, media=[item])


@torch.inference_mode()
def expected(model: Any, features: torch.Tensor, forced: list[int] = FORCED) -> tuple[list[int], list[float]]:
    """Return transformers' greedy tokens and their logprobs."""
    ids, logprobs = list(forced), []
    for _ in range(12):
        logits = model(input_features=features, decoder_input_ids=torch.tensor([ids])).logits[0, -1]
        best = logits.log_softmax(-1).max(-1)
        ids.append(int(best.indices))
        logprobs.append(float(best.values))
    return ids[len(forced) :], logprobs


@pytest.fixture(scope="module", params=[16, 24, 2048], ids="chunks-of-{}".format)
def llm(request: pytest.FixtureRequest, checkpoint: tuple[Path, Any]) -> Iterator[LLM]:
    found = LLM(
        str(checkpoint[0]), skip_tokenizer_init=True, dtype="float32", max_num_batched_tokens=request.param
    )
    yield found
    found.shutdown()


def outputs_of(llm: LLM, prompts: list[TokensPrompt]) -> list[tuple[list[int], list[float]]]:
    found = []
    for output in llm.generate(list(prompts), GREEDY, use_tqdm=False):
        completion = output.outputs[0]
        assert completion.logprobs is not None
        ids = list(completion.token_ids)
        found.append(
            (ids, [each[token].logprob for each, token in zip(completion.logprobs, ids, strict=True)])
        )
    return found


def test_whisper_tokens_equal_transformers(llm: LLM, checkpoint: tuple[Path, Any]) -> None:
    path, model = checkpoint
    sounds = [sound(path, seed) for seed in range(3)]
    together = outputs_of(llm, [prompt_of(item) for _, item in sounds])
    for (features, _), (ids, logprobs) in zip(sounds, together, strict=True):
        wanted, wanted_logprobs = expected(model, features)
        assert ids == wanted
        assert logprobs == pytest.approx(wanted_logprobs, abs=2e-4)


def test_whisper_bits_do_not_depend_on_company(llm: LLM, checkpoint: tuple[Path, Any]) -> None:
    path, _ = checkpoint
    prompts = [prompt_of(sound(path, seed)[1]) for seed in range(3)]
    together = outputs_of(llm, prompts)
    llm.llm_engine.reset_prefix_cache()
    assert [outputs_of(llm, [one])[0] for one in reversed(prompts)][::-1] == together
    assert outputs_of(llm, prompts) == together  # from the prefix cache


def test_requests_with_one_sound_share_its_positions(llm: LLM, checkpoint: tuple[Path, Any]) -> None:
    path, model = checkpoint
    features, item = sound(path, 7)
    outputs_of(llm, [prompt_of(item)])
    (output,) = llm.generate([prompt_of(item, [3, 20])], GREEDY, use_tqdm=False)
    assert output.num_cached_tokens == POSITIONS
    assert list(output.outputs[0].token_ids) == expected(model, features, [3, 20])[0]


def test_spectrogram_of_wrong_shape_costs_its_request(llm: LLM, checkpoint: tuple[Path, Any]) -> None:
    path, model = checkpoint
    _, bad = sound(path, 1, frames=10)
    features, good = sound(path, 0)
    outputs = llm.generate([prompt_of(bad), prompt_of(good)], GREEDY, use_tqdm=False)
    assert outputs[0].outputs[0].finish_reason == "error"
    assert "a spectrogram must be [1, 8, 60], got [1, 8, 10]" in str(outputs[0].outputs[0].stop_reason)
    assert list(outputs[1].outputs[0].token_ids) == expected(model, features)[0]


@pytest.mark.parametrize("start", [None, 1])
def test_prompt_without_a_sound_at_its_start_is_refused(
    llm: LLM, checkpoint: tuple[Path, Any], start: int | None
) -> None:
    prompt = TokensPrompt(prompt_token_ids=FORCED)
    if start is not None:
        _, item = sound(checkpoint[0], 0)
        moved = msgspec.structs.replace(
            item, start=start, end=start + POSITIONS, runs=[(start, start + POSITIONS)]
        )
        prompt = TokensPrompt(prompt_token_ids=[0] * (POSITIONS + 4), media=[moved])
    with pytest.raises(ValidationError, match="begins with one sound in its first 64 positions"):
        llm.generate([prompt], GREEDY, use_tqdm=False)


def test_block_size_that_does_not_divide_is_refused(checkpoint: tuple[Path, Any]) -> None:
    with pytest.raises(StartupError, match="must divide the 64 positions"):
        LLM(str(checkpoint[0]), skip_tokenizer_init=True, dtype="float32", block_size=128)
