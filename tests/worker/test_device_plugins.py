# SPDX-License-Identifier: Apache-2.0
"""Devices of other packages, whose names torch does not know."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from quire import LLM, SamplingParams
from quire.errors import ConfigError
from quire.worker.cpu import CpuDevice
from tests.fixtures.entry_points import Offer


class SlateDevice(CpuDevice):
    """A processor that torch calls cpu, under a name of its own."""


@pytest.mark.parametrize("draft", [False, True])
def test_device_plugin_with_its_own_name_loads_and_generates(
    offer: Offer, tiny_model: Callable[[str], Path], draft: bool
) -> None:
    offer("quire.devices", f"slate={__name__}:SlateDevice")
    directory = str(tiny_model("llama"))
    guesses = {"method": "draft_model", "model": directory, "num_speculative_tokens": 2}
    args = {"speculative_config": guesses} if draft else {}
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    prompt = {"prompt_token_ids": [5, 6, 7]}
    texts = []
    for device in ("cpu", "slate"):
        llm = LLM(directory, device=device, dtype="float32", **args)  # type: ignore[arg-type]
        texts.append(llm.generate(prompt, params)[0].outputs[0].token_ids)
        llm.shutdown()
    assert texts[0] == texts[1]


def test_unknown_device_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"cpu, cuda.*slate"):
        LLM(device="slate")
