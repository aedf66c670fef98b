# SPDX-License-Identifier: Apache-2.0
"""Decoder steps behind texts of any length are replayed from recordings, with the bits of eager ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.kernels import cpu
from quire.worker.recorded_forward import RecordedForward
from tests.fixtures.quick import quick
from tests.seq2seq.test_models import found
from tests.seq2seq.tiny import MODELS, START, save, texts

GREEDY = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True, logprobs=1)


@pytest.mark.skipif(not cpu.available(), reason="steps are recorded by the C++ kernels")
@pytest.mark.parametrize("name", quick(list(MODELS), ("t5", "bart", "marian")))
def test_recorded_steps_have_the_bits_of_eager_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    save(name, tmp_path)
    played: list[Any] = []
    player = RecordedForward.player
    monkeypatch.setattr(
        RecordedForward, "player", lambda self, inputs: (played.append(inputs), player(self, inputs))[1]
    )
    # The last prompt's decoder has more tokens than its encoder's text, and fewer than a step.
    prompts = [*texts(5, 33, 1, 20), {"prompt_token_ids": [5], "decoder_prompt": [START, 7, 8, 9]}]

    def run(**options: Any) -> list[Any]:
        llm = LLM(str(tmp_path), skip_tokenizer_init=True, dtype="float32", **options)
        outputs = found(llm.generate(prompts, GREEDY, use_tqdm=False))
        llm.llm_engine.reset_prefix_cache()
        outputs += [found(llm.generate([prompt], GREEDY, use_tqdm=False))[0] for prompt in prompts]
        llm.shutdown()
        return outputs

    eager = run(enforce_eager=True)
    assert not played
    recorded = run()
    assert len(played) > 5 * len(prompts)
    assert recorded == eager
    assert recorded[: len(prompts)] == recorded[len(prompts) :]
