# SPDX-License-Identifier: Apache-2.0
"""Adapters on ranks that share each layer say what they say on one."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch

from quire import LLM, LoRARequest, SamplingParams
from quire.layers import expert_exchange
from quire.lora.store import AdapterStore
from quire.outputs import RequestOutput
from tests.fixtures.quick import quick
from tests.fixtures.thread_ranks import ThreadRanks
from tests.fixtures.tiny_models import oracle_of
from tests.fixtures.wide_llama import write_wide_llama
from tests.lora.adapters import extend, linear_shapes, table_shapes, write_adapter
from tests.lora.test_experts import of_each_expert, write_stacked

PROMPTS = [[3, 1, 4, 1, 5] * 5, [2, 7, 1, 8], [99] * 30, [32, 101, 116, 7]]
PARAMS = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True, logprobs=2)
LIMITS = {"max_model_len": 64, "max_num_seqs": 8, "max_num_batched_tokens": 32, "num_gpu_blocks_override": 64}
CASES: dict[str, dict[str, Any]] = {
    "two": {"tensor_parallel_size": 2},
    "four, of two key-value heads": {"tensor_parallel_size": 4, "async_scheduling": True},
    "two, int8": {
        "tensor_parallel_size": 2,
        "quantization": "int8",
        "quantization_config": {"mode": "precise"},  # what rounds activations differs more than adapters may
    },
    "two stages of two": {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
    "two, kernel by kernel": {"tensor_parallel_size": 2, "enforce_eager": True},
}


@pytest.fixture(scope="module")
def wide(tiny_model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_wide_llama(tiny_model("llama"), tmp_path_factory.mktemp("wide"))


@pytest.fixture(scope="module")
def adapters(wide: Path, tmp_path_factory: pytest.TempPathFactory) -> list[LoRARequest]:
    """Return adapters of linears with biases, of tables with tokens, of DoRA's row lengths, and of whole tables."""
    oracle = oracle_of(wide)
    linears, tables = linear_shapes(oracle), table_shapes(oracle)
    layers = {name: shape for name, shape in linears.items() if name != "lm_head"}
    base, rows = tmp_path_factory.mktemp("adapters"), torch.randn(4, 256)
    vocab_size = oracle.config.vocab_size
    everything = write_adapter(base / "all", linears, rank=4, seed=1, lora_bias=True)
    of_tables = write_adapter(base / "tables", {**tables, "lm_head": linears["lm_head"]}, rank=8, seed=2)
    tokens = [7, 101, vocab_size - 1, vocab_size]
    extend(
        of_tables,
        {f"{name}.token_adapter.trainable_tokens_delta": rows for name in ("model.embed_tokens", "lm_head")},
        trainable_token_indices={"embed_tokens": tokens, "lm_head": tokens},
    )
    dora = write_adapter(base / "dora", layers, rank=2, seed=3, use_dora=True)
    return [
        LoRARequest(path.name, number, str(path))
        for number, path in enumerate((everything, of_tables, dora), 1)
    ] + [written_tables(base / "whole", wide, seed=4)]


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.executor.ranks.multiproc.Ranks", ThreadRanks)
    monkeypatch.setattr("quire.executor.ranks.multiproc.CallFuture", lambda ranks: Future())


def started(model: Path, **args: Any) -> LLM:
    return LLM(str(model), enable_lora=True, max_loras=5, cpu_threads=1, **LIMITS | args)


def said(llm: LLM, adapters: list[LoRARequest]) -> list[RequestOutput]:
    """Each prompt with each adapter and with none, in one batch."""
    each = [(prompt, adapter) for prompt in PROMPTS for adapter in (*adapters, None)]
    prompts, chosen = [list(prompt) for prompt, _ in each], [adapter for _, adapter in each]
    return llm.generate(prompts, PARAMS, lora_request=chosen, use_tqdm=False)


def numbers(outputs: list[RequestOutput]) -> torch.Tensor:
    steps = [step for output in outputs for step in output.outputs[0].logprobs or ()]
    return torch.tensor([[one.logprob for one in step.values()] for step in steps])


@pytest.mark.parametrize("case", quick(CASES, ("two", "four, of two key-value heads")))
@pytest.mark.usefixtures("threads")
def test_adapters_on_ranks_match_one_rank(case: str, wide: Path, adapters: list[LoRARequest]) -> None:
    options = CASES[case]
    one = started(wide, **options | {"tensor_parallel_size": 1, "pipeline_parallel_size": 1})
    alone = said(one, adapters)
    ranks = started(wide, **options)
    for _ in range(2):
        found = said(ranks, adapters)
        assert [output.outputs[0].token_ids for output in found] == [
            output.outputs[0].token_ids for output in alone
        ]
        assert torch.allclose(numbers(found).exp(), numbers(alone).exp(), atol=1e-4)
    assert len({tuple(output.outputs[0].token_ids) for output in found[:5]}) == 5, "adapters change tokens"
    ranks.llm_engine.remove_lora("tables")
    ranks.llm_engine.shutdown()


@pytest.mark.parametrize("quantization", [None, pytest.param("int8", marks=pytest.mark.more)])
@pytest.mark.usefixtures("threads")
def test_slices_have_the_same_bits_on_1_2_and_4_ranks(
    quantization: str | None, wide: Path, adapters: list[LoRARequest]
) -> None:
    options = {"tp_invariant": True, "quantization": quantization}
    one = said(started(wide, **options), adapters)
    assert len({tuple(output.outputs[0].token_ids) for output in one[:5]}) == 5, "adapters change tokens"
    if quantization is None:  # slices that are rounded by scales of their own may say other tokens
        plain = said(started(wide), adapters)
        assert torch.allclose(numbers(one).exp(), numbers(plain).exp(), atol=1e-3)
    for ranks in (2, 4):
        engine = started(wide, tensor_parallel_size=ranks, **options)
        found = said(engine, adapters)
        assert [output.outputs[0].token_ids for output in found] == [
            output.outputs[0].token_ids for output in one
        ]
        assert torch.equal(numbers(found), numbers(one))
        engine.llm_engine.shutdown()


@pytest.mark.usefixtures("threads")
def test_lengths_over_tokens_are_refused_where_sums_have_slices(wide: Path, tmp_path: Path) -> None:
    path = write_adapter(tmp_path / "dora", table_shapes(oracle_of(wide)), use_dora=True)
    llm = started(wide, tp_invariant=True)
    (output,) = llm.generate([[1, 2]], PARAMS, lora_request=LoRARequest("dora", 1, str(path)), use_tqdm=False)
    assert "is of a table, for which use_dora is not supported with --tp-invariant" in str(
        output.outputs[0].stop_reason
    )


@pytest.mark.parametrize("whole", [pytest.param(False, marks=pytest.mark.more), True])
@pytest.mark.usefixtures("threads")
def test_expert_adapters_on_ranks_match_one_rank(
    whole: bool, tiny_model: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rank has some features of every expert, and of what adapters add to it; or some experts as a whole."""
    model = tiny_model("qwen3moe")
    arch = oracle_of(model).config
    most = 4 * arch.num_experts_per_tok * arch.hidden_size
    monkeypatch.setattr(expert_exchange, "MAX_FLOATS", most)  # of larger steps, four tokens at a time
    stacked = write_stacked(tmp_path / "stacked", oracle_of(model))
    single = write_adapter(tmp_path / "single", of_each_expert("qwen3moe", tiny_model), seed=2)
    adapters = [LoRARequest(path.name, number, str(path)) for number, path in enumerate((stacked, single), 1)]
    one = started(model)
    ranks = started(model, tensor_parallel_size=2, enable_expert_parallel=whole)
    alone, found = said(one, adapters), said(ranks, adapters)
    assert [output.outputs[0].token_ids for output in found] == [
        output.outputs[0].token_ids for output in alone
    ]
    assert torch.allclose(numbers(found).exp(), numbers(alone).exp(), atol=1e-4)
    assert len({tuple(output.outputs[0].token_ids) for output in found[:3]}) == 3, "adapters change tokens"
    ranks.llm_engine.shutdown()


def stores(llm: LLM) -> list[AdapterStore]:
    """Return the adapter store of each rank, which is a thread or this process."""
    executor = llm.llm_engine._clients[0]._core.executor  # type: ignore[attr-defined]
    workers = (
        [rank.worker for rank in executor._ranks._ranks]
        if hasattr(executor, "_ranks")
        else [executor._worker]
    )
    return [worker.features["lora"].store for worker in workers]


def written_tables(directory: Path, model: Path, seed: int) -> LoRARequest:
    """An adapter with tables saved whole, two rows of which were trained, and one of a token behind the model's."""
    oracle = oracle_of(model)
    linears = {name: shape for name, shape in linear_shapes(oracle).items() if name.endswith("q_proj")}
    table, head = oracle.get_input_embeddings().weight, oracle.get_output_embeddings().weight
    tensors = {}
    for name, weight in (("model.embed_tokens", table), ("lm_head", head)):
        rows = torch.cat((weight.detach(), torch.randn(1, weight.shape[1])))
        rows[[7, 101]] += torch.randn(2, weight.shape[1])
        tensors[f"{name}.weight"] = rows
    path = extend(write_adapter(directory, linears, seed=seed), tensors)
    return LoRARequest(path.name, seed, str(path))


@pytest.mark.parametrize("tied", [pytest.param(False, marks=pytest.mark.more), True])
@pytest.mark.usefixtures("threads")
def test_stages_have_adapters_of_their_layers_and_equal_bits(
    tied: bool, tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    model = write_wide_llama(tiny_model("llama"), tmp_path / "model", tie_word_embeddings=tied)
    oracle = oracle_of(model)
    linears, tables = linear_shapes(oracle), table_shapes(oracle)
    everything = {
        name: shape for name, shape in {**linears, **tables}.items() if not (tied and name == "lm_head")
    }
    dora = {name: shape for name, shape in linears.items() if name != "lm_head"}
    paths = [
        write_adapter(tmp_path / "all", everything, rank=4, seed=1),
        write_adapter(tmp_path / "dora", dora, rank=2, seed=2, use_dora=True),
    ]
    tokens = [7, 101, oracle.config.vocab_size]
    names = ("model.embed_tokens",) if tied else ("model.embed_tokens", "lm_head")
    rows = torch.randn(3, 256)
    extend(
        paths[0],
        {f"{name}.token_adapter.trainable_tokens_delta": rows for name in names},
        trainable_token_indices={name.rpartition(".")[2]: tokens for name in names},
    )
    adapters = [LoRARequest(path.name, number, str(path)) for number, path in enumerate(paths, 1)]
    adapters.append(written_tables(tmp_path / "tables", model, seed=3))
    one = started(model)
    alone = said(one, adapters)
    assert len({tuple(output.outputs[0].token_ids) for output in alone[:4]}) == 4, "adapters change tokens"
    stages = started(model, pipeline_parallel_size=2, async_scheduling=True)
    for _ in range(2):
        found = said(stages, adapters)
        assert [output.outputs[0].token_ids for output in found] == [
            output.outputs[0].token_ids for output in alone
        ]
        assert torch.equal(numbers(found), numbers(alone))
    (whole,), parts = ([store.get(adapters[1]) for store in stores(llm)] for llm in (one, stages))
    assert sum(len(part.layers) for part in parts) == len(whole.layers), "each has what is of its layers"
    stages.llm_engine.shutdown()


@pytest.mark.usefixtures("threads")
def test_module_of_no_stage_is_refused_by_all_stages(
    wide: Path, adapters: list[LoRARequest], tmp_path: Path
) -> None:
    llm = started(wide, pipeline_parallel_size=2)
    for number, module in enumerate(("model.layers.9.self_attn.q_proj", "model.layers.0.self_attn.gate"), 7):
        path = write_adapter(tmp_path / str(number), {module: (256, 256)})
        request = LoRARequest(path.name, number, str(path))
        (output,) = llm.generate([[1, 2]], PARAMS, lora_request=request, use_tqdm=False)
        assert f"is for {module}, which adapters cannot change" in str(output.outputs[0].stop_reason)
    assert said(llm, adapters)
    llm.llm_engine.shutdown()


@pytest.mark.usefixtures("threads")
def test_adapter_refused_by_one_stage_is_kept_by_none(wide: Path, tmp_path: Path) -> None:
    oracle = oracle_of(wide)
    shapes = {name: shape for name, shape in linear_shapes(oracle).items() if name.endswith("o_proj")}
    path = write_adapter(tmp_path / "table", shapes)
    extend(path, {"model.embed_tokens.weight": torch.randn(oracle.config.vocab_size, 256)})
    llm = started(wide, pipeline_parallel_size=2, lora_extra_vocab_size=8)
    request = LoRARequest("table", 1, str(path))
    (output,) = llm.generate([[1, 2]], PARAMS, lora_request=request, use_tqdm=False)
    assert "--lora-extra-vocab-size is 8" in str(output.outputs[0].stop_reason)
    assert not any(store._kept for store in stores(llm))
    llm.llm_engine.shutdown()
