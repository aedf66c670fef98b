# SPDX-License-Identifier: Apache-2.0
"""Requests with media on their way to the core: checks in words, forks, beams, pooling, recording, and a dead core."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from quire.config import EngineConfig
from quire.config.arch import Multimodal
from quire.engine.async_llm import AsyncLLM
from quire.engine.front_end import FrontEnd
from quire.engine.input_processor import InputProcessor
from quire.engine.llm_engine import LLMEngine
from quire.engine.messages import AddRequest, CoreReady, EngineCoreRequest
from quire.engine.startup import load_tokenizer, prepare
from quire.engine.trace import read_trace, replay
from quire.errors import ValidationError
from quire.inputs import TokensPrompt
from quire.media import MediaItem
from quire.sampling_params import BeamSearchParams, SamplingParams
from tests.fixtures.media import digest_of, item

PLACEHOLDER = 9
PROMPT = [1, 2, PLACEHOLDER, PLACEHOLDER, PLACEHOLDER, 3, 4, 5]
MEDIA = [item(2, 5, kind="image")]
GREEDY = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)


def prompt_of(ids: list[int] = PROMPT, media: list[MediaItem] = MEDIA) -> TokensPrompt:
    return TokensPrompt(prompt_token_ids=ids, media=media)


def config_of(model_dir: Path, *, sees: bool = True, **args: Any) -> EngineConfig:
    """A model's configuration, as if it were a part of one with eyes."""
    config = prepare(EngineConfig.from_args(model=str(model_dir), **args), "offline")
    part_of = Multimodal("SeesForConditionalGeneration", {}, (), frozenset([PLACEHOLDER]))
    arch = dataclasses.replace(config.arch, part_of=part_of if sees else None)
    return dataclasses.replace(config, model_arch=arch)


def processed(config: EngineConfig, prompt: Any, params: SamplingParams = GREEDY) -> list[EngineCoreRequest]:
    processor = InputProcessor(config, load_tokenizer(config))
    return processor.process("r", processor.tokenize(prompt), params)


def test_media_reach_all_completions_of_a_prompt(null_model_dir: Path) -> None:
    params = SamplingParams(n=3, max_tokens=4, seed=1)
    requests = processed(config_of(null_model_dir), prompt_of(), params)
    assert [request.media for request in requests] == [MEDIA] * 3


def test_prompt_in_internal_form_keeps_its_media(null_model_dir: Path) -> None:
    config = config_of(null_model_dir)
    processor = InputProcessor(config, load_tokenizer(config))
    prompt = processor.tokenize(prompt_of())
    assert processor.tokenize(prompt.as_prompt()).media == tuple(MEDIA)


@pytest.mark.parametrize(
    ("prompt", "args", "problem"),
    [
        ({"prompt": "text", "media": MEDIA}, {}, "'media' needs 'prompt_token_ids'"),
        ({"prompt_token_ids": PROMPT, "media": [1]}, {}, "must be a sequence of MediaItem"),
        ({"prompt_token_ids": PROMPT, "media": 1}, {}, "must be a sequence of MediaItem"),
        (prompt_of(media=[]), {}, f"token {PLACEHOLDER}, in whose place SeesForConditionalGeneration"),
        (prompt_of([PLACEHOLDER, *PROMPT[1:]]), {}, f"token {PLACEHOLDER}, in whose place"),
        (prompt_of([*PROMPT, PLACEHOLDER]), {}, f"token {PLACEHOLDER}, in whose place"),
        (prompt_of(media=[item(2, 20, kind="image")]), {}, "positions 2 to 20"),
        (prompt_of(), {"sees": False}, "this model takes text only"),
        (prompt_of(), {"language_model_only": True}, "--language-model-only"),
        (prompt_of(media=[item(2, 5)]), {}, "--enable-prompt-embeds, --enable-mm-embeds"),
        (prompt_of(), {"limit_mm_per_prompt": {"image": 0}}, "has 1 inputs of kind 'image', the limit is 0"),
        (prompt_of(), {"limit_mm_per_prompt": {"image": {"count": 0}}}, "the limit is 0"),
        (prompt_of(), {"encoder_cache_gb": 100 / 2**30}, "192 bytes, .* has 100: .*--encoder-cache-gb"),
        (
            prompt_of(media=[item(2, 5, kind="image", both_ways=True)]),
            {"max_num_batched_tokens": 2, "max_num_seqs": 1},
            "image 0 of the prompt takes 3 tokens, .*--max-num-batched-tokens",
        ),
    ],
)
def test_unusable_media_are_refused_with_a_message(
    null_model_dir: Path, prompt: Any, args: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ValidationError, match=problem):
        processed(config_of(null_model_dir, **args), prompt)


def make_engine(model_dir: Path, **args: Any) -> LLMEngine:
    fixed = {"model": str(model_dir), "distributed_executor_backend": "null", "enable_prompt_embeds": True}
    return LLMEngine(EngineConfig.from_args(**fixed | args))


def embeds(content: int = 0) -> TokensPrompt:
    return TokensPrompt(prompt_token_ids=PROMPT, media=[item(2, 5, content)])


def results(engine: LLMEngine) -> dict[str, list[list[int]]]:
    found: dict[str, list[list[int]]] = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                found[output.request_id] = [list(one.token_ids) for one in output.outputs]
    return found


def test_beams_and_forks_share_the_items_of_their_prompt(null_model_dir: Path) -> None:
    engine = make_engine(null_model_dir)
    engine.add_request("beams", embeds(), BeamSearchParams(beam_width=3, max_tokens=5))
    engine.add_request("forks", embeds(1), SamplingParams(n=3, seed=1, max_tokens=5, ignore_eos=True))
    found = results(engine)
    assert [len(tokens) for tokens in found.values()] == [3, 3]
    assert engine.reset_encoder_cache()
    engine.shutdown()


def test_recorded_run_with_media_is_replayed(null_model_dir: Path, tmp_path: Path) -> None:
    engine = make_engine(null_model_dir, record_trace=str(tmp_path / "trace"), max_num_batched_tokens=6)
    for content in range(4):
        media = [item(2, 5, content, both_ways=True)]
        engine.add_request(f"r{content}", TokensPrompt(prompt_token_ids=PROMPT, media=media), GREEDY)
    assert len(results(engine)) == 4
    engine.shutdown()
    assert len(list(replay(read_trace(tmp_path / "trace")))) > 4


def test_request_with_media_continues_in_the_next_core(null_model_dir: Path) -> None:
    """The message to the new core names the same files; what the old one had encoded is encoded again."""
    config = prepare(EngineConfig.from_args(model=str(null_model_dir), enable_prompt_embeds=True), "offline")
    front_end = FrontEnd(config)
    front_end.take_in(0, CoreReady(100, 16, 1, 128, 0.0))
    prompt = front_end.input_processor.tokenize(embeds())
    front_end.submit("r", prompt, SamplingParams(n=2, max_tokens=4, seed=1), lambda _: None)
    ((_, message),) = front_end.unfinished(0)
    assert isinstance(message, AddRequest)
    assert [request.media for request in message.requests()] == [embeds()["media"]] * 2


async def test_core_in_another_process_gets_media(null_model_dir: Path) -> None:
    fixed = {"model": str(null_model_dir), "distributed_executor_backend": "null"}
    engine = AsyncLLM(EngineConfig.from_args(**fixed, enable_prompt_embeds=True))
    tokens = []
    for content in (0, 0, 1):
        async for output in engine.generate(embeds(content), GREEDY, f"r{len(tokens)}"):
            last = output
        tokens.append(list(last.outputs[0].token_ids))
    assert tokens[0] == tokens[1] != tokens[2]
    assert await engine.reset_encoder_cache()
    await engine.shutdown()


def test_digest_of_media_is_part_of_the_prefix(null_model_dir: Path) -> None:
    engine = make_engine(null_model_dir, block_size=1)
    for content in (0, 0, 1):
        engine.add_request("r", embeds(content), GREEDY)
        assert results(engine)
    stats = engine.call_core("stats")
    assert stats["prefix_cache_hits"] == 7 + 2
    assert digest_of(0) != digest_of(1)
    engine.shutdown()
