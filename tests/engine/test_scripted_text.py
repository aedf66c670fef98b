# SPDX-License-Identifier: Apache-2.0
"""Text of an engine with scripted tokens, as its caller reads it, for each kind of tokenizer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quire.config import EngineConfig
from quire.engine.llm_engine import LLMEngine
from quire.entrypoints.openai.logprobs import chat_logprobs, completion_logprobs, naming_of
from quire.executor.null import NullExecutor
from quire.outputs import CompletionOutput, RequestOutput
from quire.sampling_params import RequestOutputKind, SamplingParams
from tests.engine.tokenizer_kinds import Kind, write_model_dir

SENTENCE = ["▁the", "▁", "é", "ö😀日", "本", ",", "▁a", "b"]
SAID = {
    "byte_level": ["Ġthe", "Ġ", "éö😀日", "本", ",", "Ġa", "b"],
    "llama_2": SENTENCE,
    "gemma": SENTENCE,
    "unigram_with_bytes": SENTENCE,
    "unigram": ["▁the", "▁", "é", "日本", ",", "▁a", "b"],
    "wordpiece": ["the", "b", "##é", "日本", ",", "don", "##n't"],
}
"""Tokens; what the vocabulary has not is said in byte tokens."""
TEXTS = dict.fromkeys(SAID, " the éö😀日本, ab")
TEXTS |= {"unigram": " the é日本, ab", "wordpiece": " the bé 日本, donn't"}

NAMING = naming_of(as_ids=None)


class Speaker:
    """An engine over the null executor whose sampled tokens are a given script."""

    def __init__(self, kind: Kind, directory: Path) -> None:
        config = EngineConfig.from_args(
            model=str(write_model_dir(kind, directory)),
            distributed_executor_backend="null",
            num_gpu_blocks_override=65,
        )
        self.kind, self.engine = kind, LLMEngine(config)
        self._script: list[int] = []
        executor = self.engine._clients[0]._core.executor  # type: ignore[attr-defined]
        assert isinstance(executor, NullExecutor)
        executor._next_token = lambda row: self._script[len(row.token_ids) - row.num_prompt_tokens]  # type: ignore[method-assign]

    def say(self, ids: list[int], output_kind: RequestOutputKind, **fields: Any) -> list[RequestOutput]:
        """Return the engine's outputs for these sampled tokens after the prompt "ab the"."""
        self._script = ids
        params = SamplingParams(max_tokens=len(ids), ignore_eos=True, output_kind=output_kind, **fields)
        self.engine.add_request("spoken", self.ids(["a", "b", SAID[self.kind.name][0]]), params)
        outputs = []
        while self.engine.has_unfinished_requests():
            outputs += self.engine.step()
        return outputs

    def say_once(self, **fields: Any) -> tuple[RequestOutput, CompletionOutput]:
        (output,) = self.say(self.said, RequestOutputKind.FINAL_ONLY, **fields)
        return output, output.outputs[0]

    def ids(self, parts: list[str]) -> list[int]:
        known = [(self.kind.backend.token_to_id(part), part) for part in parts]
        return [
            i for token_id, part in known for i in (self.kind.spell(part) if token_id is None else [token_id])
        ]

    @property
    def said(self) -> list[int]:
        return self.ids(SAID[self.kind.name])

    @property
    def text(self) -> str:
        return TEXTS[self.kind.name]


@pytest.fixture(scope="module", params=SAID)
def speaker(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Speaker]:
    speaker = Speaker(Kind(request.param), tmp_path_factory.mktemp(request.param))
    yield speaker
    speaker.engine.shutdown()


@pytest.mark.item(38)
def test_streamed_text_equals_whole_text(speaker: Speaker) -> None:
    streamed = speaker.say(speaker.said, RequestOutputKind.DELTA)
    _, whole = speaker.say_once()
    assert len(streamed) == len(speaker.said)
    assert "".join(output.outputs[0].text for output in streamed) == whole.text == speaker.text


def test_logprobs_carry_the_bytes_of_the_text(speaker: Speaker) -> None:
    _, completion = speaker.say_once(logprobs=2)
    assert completion.logprobs is not None
    entries = chat_logprobs(completion.logprobs, 2, NAMING).content
    assert b"".join(bytes(entry.bytes or []) for entry in entries).decode() == completion.text == speaker.text
    shown = [*entries, *(top for entry in entries for top in entry.top_logprobs)]
    assert all(bytes(entry.bytes or []).decode(errors="replace") == entry.token for entry in shown)


def test_completion_logprob_offsets_count_each_character_once(speaker: Speaker) -> None:
    _, completion = speaker.say_once(logprobs=0)
    logprobs, end = completion_logprobs(completion.token_ids, completion.logprobs or [], 0, 0, str, NAMING)
    assert end == len(speaker.text)
    for offset, token in zip(logprobs.text_offset, logprobs.tokens, strict=True):
        assert "\ufffd" in token or speaker.text.startswith(token, offset)


def test_prompt_logprobs_keep_leading_spaces(speaker: Speaker) -> None:
    output, _ = speaker.say_once(prompt_logprobs=0)
    assert output.prompt_logprobs is not None
    (last,) = (output.prompt_logprobs[-1] or {}).values()
    assert (last.decoded_token, last.token_bytes) == (" the", b" the")


@pytest.mark.parametrize("stop", ["é", "日本", "😀日"])
def test_stop_strings_of_characters_in_bytes_match(speaker: Speaker, stop: str) -> None:
    _, completion = speaker.say_once(stop=[stop])
    before, found, _ = speaker.text.partition(stop)
    assert (completion.text, completion.stop_reason) == (before, found or None)
