# SPDX-License-Identifier: Apache-2.0
"""Adapters in the engine: a request's results do not depend on the batch."""

from __future__ import annotations

import os
import shutil
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from quire import LLM, LoRARequest, SamplingParams
from quire.errors import ConfigError, ValidationError
from quire.inputs import PromptType
from quire.lora.peft_config import adapter_request
from quire.lora.store import NICENESS, AdapterStore
from quire.lora.targets import Targets
from quire.sampling_params import BeamSearchParams
from quire.structured_outputs_params import StructuredOutputsParams
from tests.end_to_end.test_determinism import GREEDY, RANDOM, Result, prompts, result_of
from tests.fixtures.tiny_models import oracle_of
from tests.lora.adapters import extend, linear_shapes, table_shapes, write_adapter
from tests.models.harness import load_tiny

TABLES = ("model.embed_tokens", "lm_head")


@pytest.fixture(scope="module")
def adapters(
    tiny_model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> list[LoRARequest]:
    """Four adapters of the tiny Llama, of several ranks and modules, the last with tokens that were trained."""
    oracle = oracle_of(tiny_model("llama"))
    shapes = linear_shapes(oracle) | table_shapes(oracle)
    base, ends = tmp_path_factory.mktemp("adapters"), ("", "q_proj", ("lm_head", "up_proj"), "embed_tokens")
    requests = []
    for number, end in enumerate(ends, 1):
        some = {name: shape for name, shape in shapes.items() if name.endswith(end)}
        directory = write_adapter(base / str(number), some, rank=2 * number, seed=number)
        requests.append(LoRARequest(f"adapter-{number}", number, str(directory)))
    rows = {f"{name}.token_adapter.trainable_tokens_delta": torch.randn(3, 64) for name in TABLES}
    extend(directory, rows, trainable_token_indices={"embed_tokens": [32, 101, 116], "lm_head": [32, 7, 200]})
    return requests


@pytest.fixture
def engine(tiny_model: Callable[[str], Path]) -> Callable[..., LLM]:
    def make(**args: Any) -> LLM:
        options = {
            "max_model_len": 128,
            "cpu_threads": 1,
            "enable_lora": True,
            "max_loras": 2,
            "max_cpu_loras": 3,
        }
        return LLM(str(tiny_model("llama")), **options | args)

    return make


def of_each(adapters: list[LoRARequest]) -> list[LoRARequest | None]:
    """Return the adapters of eight prompts."""
    first, second, third, fourth = adapters
    return [first, None, second, first, third, None, fourth, second]


def run(llm: LLM, adapters: list[LoRARequest | None]) -> Result:
    """Each prompt with its adapter, greedily and at random, all at once."""
    requests = prompts()
    params = [GREEDY] * len(requests) + [RANDOM] * len(requests)
    outputs = llm.generate(
        [*requests, *requests], params, lora_request=[*adapters, *adapters], use_tqdm=False
    )
    return [result_of(output) for output in outputs]


WEIGHTS: dict[str, dict[str, Any]] = {
    "float32": {},
    "int8": {"quantization": "int8"},
    "int4": {"dtype": "bfloat16", "quantization": "int4"},
}
MORE = [pytest.param(name, marks=pytest.mark.more) for name in ("int8", "int4")]


@pytest.mark.parametrize("name", ["float32", *MORE])
def test_request_in_a_batch_matches_it_alone(
    name: str, engine: Callable[..., LLM], adapters: list[LoRARequest]
) -> None:
    weights = WEIGHTS[name]
    plain, each = engine(**weights), of_each(adapters)
    triples = [
        (prompt, adapter, params)
        for params in (GREEDY, RANDOM)
        for prompt, adapter in zip(prompts(), each, strict=True)
    ]
    expected = [
        result_of(plain.generate([prompt], params, lora_request=adapter, use_tqdm=False)[0])
        for prompt, adapter, params in triples
    ]
    without = engine(enable_lora=False, **weights)
    for index, (prompt, adapter, params) in enumerate(triples):
        base = result_of(without.generate([prompt], params, use_tqdm=False)[0])
        assert (base == expected[index]) == (adapter is None)
    assert run(plain, each) == expected, "in a batch, the prefix cache warm"
    assert run(engine(max_loras=4, max_cpu_loras=4, **weights), each) == expected, "all adapters in a step"
    assert run(engine(enforce_eager=True, **weights), each) == expected, "kernel by kernel"
    assert run(engine(max_num_batched_tokens=7, max_num_seqs=7, **weights), each) == expected, "chunks of 7"
    scarce = engine(
        num_gpu_blocks_override=20, async_scheduling=True, max_loras=4, max_cpu_loras=4, **weights
    )
    for adapter in adapters:  # requests that wait until theirs is read would come one after the other
        scarce.llm_engine.add_lora(adapter)
    assert run(scarce, each) == expected, "preempted and overlapped"
    assert scarce.llm_engine.call_core("stats")["num_preemptions"] > 0


@pytest.mark.parametrize("method", ["ngram", "draft_model"])
def test_drafts_change_no_output_of_adapters(
    method: str, engine: Callable[..., LLM], adapters: list[LoRARequest], tiny_model: Callable[[str], Path]
) -> None:
    settings = {"method": method, "num_speculative_tokens": 3, "adaptive": False}
    if method == "draft_model":
        settings["model"] = str(tiny_model("llama"))
    guessing = engine(speculative_config=settings)
    assert run(guessing, of_each(adapters)) == run(engine(), of_each(adapters))
    assert guessing.llm_engine.call_core("stats")["spec_decoding"]["num_draft_tokens"] > 0


@pytest.mark.parametrize(("name", "is_told"), [("meta/Llama", False), ("x/Other-7B", True), ("", False)])
def test_adapter_of_another_base_is_logged(
    name: str,
    is_told: bool,
    adapters: list[LoRARequest],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    tiny_model: Callable[[str], Path],
) -> None:
    shutil.copytree(adapters[0].lora_path, tmp_path / "own")
    extend(tmp_path / "own", {}, base_model_name_or_path=name)
    store = AdapterStore(16, torch.float32, max_rows=0, max_added=0, base_model="path/to/llama/")
    store.use_targets(Targets(load_tiny(tiny_model("llama"))))
    store.prepare(LoRARequest("own", 1, str(tmp_path / "own"))).result()
    assert ("was trained on 'x/Other-7B'" in caplog.text) == is_told
    store.close()


def test_adapter_read_again_with_changed_files_is_refused(
    adapters: list[LoRARequest], tmp_path: Path, tiny_model: Callable[[str], Path]
) -> None:
    shutil.copytree(adapters[0].lora_path, tmp_path / "own")
    request = adapter_request("own", 1, str(tmp_path / "own"))
    store = AdapterStore(16, torch.float32, max_rows=0, max_added=0)
    store.use_targets(Targets(load_tiny(tiny_model("llama"))))
    store.prepare(request).result()
    store.drop(request.key)
    extend(tmp_path / "own", {}, lora_alpha=3)
    with pytest.raises(
        ValidationError, match="'own': its files have changed since it was loaded; load it again"
    ):
        store.prepare(request).result()
    store.prepare(adapter_request("own", 2, request.lora_path)).result()
    store.close()


@pytest.mark.skipif(sys.platform != "linux", reason="threads have no niceness of their own")
def test_adapter_loader_yields_to_steps(
    adapters: list[LoRARequest], tiny_model: Callable[[str], Path]
) -> None:
    def niceness(thread: int) -> int:
        return os.getpriority(os.PRIO_PROCESS, thread)

    store = AdapterStore(16, torch.float32, max_rows=0, max_added=0)
    store.use_targets(Targets(load_tiny(tiny_model("llama"))))
    before = set(threading.enumerate())
    store.prepare(adapters[1]).result()
    (reader,) = set(threading.enumerate()) - before
    assert reader.native_id is not None
    own = niceness(threading.get_native_id())
    assert niceness(reader.native_id) == min(own + NICENESS, 19)
    store.close()


def test_forks_have_the_adapter_of_their_request(
    engine: Callable[..., LLM], adapters: list[LoRARequest]
) -> None:
    llm, params = engine(), SamplingParams(n=3, seed=5, max_tokens=6, ignore_eos=True, logprobs=2)
    prompt = prompts()[3]
    together = llm.generate(
        [prompt] * 3, params, lora_request=[adapters[0], None, adapters[1]], use_tqdm=False
    )
    for output, adapter in zip(together, (adapters[0], None, adapters[1]), strict=True):
        alone = engine().generate([prompt], params, lora_request=adapter, use_tqdm=False)[0]
        for index in range(3):
            assert result_of(output, index) == result_of(alone, index)
    assert len({tuple(output.outputs[0].token_ids) for output in together}) == 3


def test_more_adapters_than_memory_keeps_are_served_in_turn(
    engine: Callable[..., LLM], adapters: list[LoRARequest]
) -> None:
    """With one place in a step and one on the host, and twice in turn, so each is read again."""
    llm, wide = engine(max_loras=1, max_cpu_loras=1), engine(max_loras=4, max_cpu_loras=4)
    for _ in range(2):
        assert run(llm, of_each(adapters)) == run(wide, of_each(adapters))
    llm.llm_engine.call_core("check_integrity")


def test_an_adapter_that_cannot_be_used_ends_its_requests_alone(
    engine: Callable[..., LLM], adapters: list[LoRARequest], tmp_path: Path
) -> None:
    llm, params = engine(max_lora_rank=4), SamplingParams(max_tokens=3)
    missing = LoRARequest("missing", 9, str(tmp_path / "nothing"))
    each = [adapters[0], missing, adapters[3], None]
    good, bad, large, base = llm.generate(prompts()[:4], params, lora_request=each, use_tqdm=False)
    assert good.outputs[0].finish_reason == base.outputs[0].finish_reason == "length"
    assert bad.outputs[0].finish_reason == large.outputs[0].finish_reason == "error"
    assert bad.outputs[0].refused
    assert large.outputs[0].refused
    with pytest.raises(ValidationError, match=r"adapter .missing.: adapter_config\.json: no such file"):
        llm.llm_engine.add_lora(missing)
    assert llm.llm_engine.add_lora(adapters[1])
    assert llm.llm_engine.list_loras() == {1, 2}
    assert (llm.llm_engine.remove_lora(1), llm.llm_engine.remove_lora(9)) == (True, False)
    assert llm.llm_engine.list_loras() == {2}
    assert bad.outputs[0].stop_reason == "adapter 'missing': adapter_config.json: no such file"
    assert "has rank 8; --max-lora-rank is 4" in str(large.outputs[0].stop_reason)
    assert str(tmp_path) not in str(bad.outputs[0].stop_reason)


def test_unsupported_adapter_request_is_refused(
    engine: Callable[..., LLM], adapters: list[LoRARequest]
) -> None:
    with pytest.raises(ValidationError, match="enable-lora"):
        engine(enable_lora=False).generate("a", lora_request=adapters[0], use_tqdm=False)
    with pytest.raises(ValidationError, match="lora_int_id must be an integer from 1"):
        LoRARequest("name", 0, "path")
    with pytest.raises(ConfigError, match="--max-cpu-loras is 1, but --max-loras 2"):
        engine(max_cpu_loras=1)


@pytest.mark.parametrize("level", [1, 2])
def test_adapters_are_there_again_after_sleep(
    level: int, engine: Callable[..., LLM], adapters: list[LoRARequest]
) -> None:
    llm, params = engine(), SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=2)
    each = [adapters[0], None, adapters[1]]

    def results() -> Result:
        return [
            result_of(output)
            for output in llm.generate(prompts()[:3], params, lora_request=each, use_tqdm=False)
        ]

    expected = results()
    llm.sleep(level)
    llm.wake_up()
    assert results() == expected


def test_beams_have_the_adapter_of_their_search(
    engine: Callable[..., LLM], adapters: list[LoRARequest]
) -> None:
    llm, params, pair = engine(), BeamSearchParams(beam_width=3, max_tokens=6), prompts()[:2]

    def tokens(adapter: LoRARequest | None, prompt: PromptType) -> list[list[int]]:
        (found,) = llm.beam_search(prompt, params, adapter)
        return [one.tokens for one in found.sequences]

    for each in ([adapters[0], None], [adapters[1], adapters[0]]):
        together = llm.beam_search(pair, params, each)
        alone = [tokens(adapter, prompt) for adapter, prompt in zip(each, pair, strict=True)]
        assert [[one.tokens for one in found.sequences] for found in together] == alone
    assert tokens(None, pair[0]) != tokens(adapters[0], pair[0])


def test_grammars_and_forced_tokens_work_with_adapters(
    engine: Callable[..., LLM], adapters: list[LoRARequest]
) -> None:
    form = StructuredOutputsParams(regex="(never more|never again) [a-f]{3,9}")
    params = SamplingParams(temperature=0.0, max_tokens=20, structured_outputs=form, logprobs=2)
    llm, each, prompt = engine(), [adapters[0], None, adapters[1]], "Say it:"
    together = llm.generate([prompt] * 3, params, lora_request=each, use_tqdm=False)
    for output, adapter in zip(together, each, strict=True):
        (alone,) = llm.generate(prompt, params, lora_request=adapter, use_tqdm=False)
        assert result_of(output) == result_of(alone)
        assert output.outputs[0].text.startswith("never ")
