# SPDX-License-Identifier: Apache-2.0
"""Ranks that are threads compute together what one computes alone, and say all the same."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.distributed.group import ALONE
from quire.distributed.shared_memory import share_memory
from quire.errors import ConfigError
from quire.kernels.cpu import library
from quire.layers.kv_cache import kv_cache_specs, why_not_captured
from quire.layers.shard import Shard
from quire.models import rwkv7
from quire.models.base import CausalLM
from quire.models.encoder import EncoderModel
from quire.models.loader import load_model, without_weights
from tests.fixtures.foreign_models import FOREIGN
from tests.fixtures.plain_models import PLAIN
from tests.fixtures.quick import quick, quick_models
from tests.fixtures.thread_ranks import InProcess
from tests.fixtures.tiny_families import TINY_FAMILIES
from tests.models.harness import load_tiny, logits_of, prepared_config
from tests.models.test_encoders import scores_of, states_of, texts

SEQUENCES = [[5, 9, 31, 7, 12, 80, 3, 44, 21, 18, 6], [3, 1, 4], [250, 17, 99, 100, 101, 102, 8]]
CHUNKS = (3, 1, 5)
FAMILIES = ["llama", "llama-tied-bias", "mistral", "qwen2", "qwen3", "gemma2", "gpt2"]
KINDS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16", "matmul_precision": "highest"},
}
_SIZES = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64, "num_hidden_layers": 2}
_OF_EXPERTS = {"moe_intermediate_size": 256, "shared_expert_intermediate_size": 256}
_WIDE = {"load_format": "dummy", "hf_overrides": _SIZES}
"""Of four ranks each has whole groups of inputs."""
ROUNDED: dict[str, dict[str, Any]] = {
    "int8": _WIDE | {"quantization": "int8", "quantization_config": {"mode": "precise"}},
    "int4": _WIDE | {"quantization": "int4", "quantization_config": {"mode": "precise", "head": "int4"}},
    "int8-fast": _WIDE | {"quantization": "int8"},
    "int4-fast": _WIDE | {"quantization": "int4-plain", "quantization_config": {"symmetric": False}},
}
_SPARSE_INT8 = ROUNDED["int8"] | {"hf_overrides": _SIZES | _OF_EXPERTS}
CASES = [(name, kind) for name in FAMILIES for kind in KINDS] + [("llama", kind) for kind in ROUNDED]
OTHERS = [("qwen2moe", "bfloat16"), ("qwen2moe", "int8-experts")]
OTHERS += [(name, "float32") for name in ("gptoss", "deepseekv3", "jamba", "qwen3next", "falconh1", "lfm2")]
OPTIONS = KINDS | ROUNDED | {"int8-experts": _SPARSE_INT8}
QUICK_IN_ANY_ORDER = [case for case in CASES if case[1] != "bfloat16"]
QUICK_IN_SLICES = [case for case in CASES if case[1] != "float32"]
EVERY_FAMILY = TINY_FAMILIES.keys() | FOREIGN.keys() | PLAIN.keys()

needs_kernels = pytest.mark.skipif(library.loaded() is None, reason=library.status())


def together(directory: Path, size: int, work: Callable[[CausalLM], Any], **args: Any) -> list[Any]:
    """Load a model's shard on each rank and return the results of `work` by rank."""
    config, groups = prepared_config(directory, **args), InProcess.group(size)

    def rank(group: InProcess) -> Any:
        try:
            return work(load_model(config, Shard.of_group(group)))
        except BaseException as error:
            group.close(str(error))
            raise

    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(rank, groups))


def logits(model: CausalLM) -> Tensor:
    return torch.cat(logits_of(model, SEQUENCES, chunk_sizes=CHUNKS))


@needs_kernels
@pytest.mark.parametrize(
    ("name", "kind"), [*quick([case for case in CASES if "fast" not in case[1]], QUICK_IN_ANY_ORDER), *OTHERS]
)
def test_ranks_match_one_rank(name: str, kind: str, tiny_model: Callable[[str], Path]) -> None:
    """But for the order of the sums that cross ranks; among the ranks it is the same, bit for bit."""
    directory, options = tiny_model(name), OPTIONS[kind]
    alone = logits(load_tiny(directory, **options))
    for size in (2, 4):
        first, *others = together(directory, size, logits, **options)
        assert all(torch.equal(other, first) for other in others)
        torch.testing.assert_close(first, alone, rtol=2e-4, atol=2e-4)
        assert torch.equal(first.argmax(1), alone.argmax(1))


@needs_kernels
@pytest.mark.parametrize(
    "name", quick_models(sorted(EVERY_FAMILY), {"diffllama", "gemma3n", "jetmoe", "zamba2-adapted"})
)
def test_every_family_is_shared_out(name: str, tiny_model: Callable[[str], Path]) -> None:
    first, second = together(tiny_model(name), 2, logits)
    assert torch.equal(first, second)
    torch.testing.assert_close(first, logits(load_tiny(tiny_model(name))), rtol=2e-4, atol=2e-4)


@needs_kernels
@pytest.mark.parametrize(("name", "kind"), quick(CASES, QUICK_IN_SLICES))
def test_fixed_slice_sums_have_the_same_bits_for_any_rank_count(
    name: str, kind: str, tiny_model: Callable[[str], Path]
) -> None:
    """Quantized activations keep the bits too: each slice has scales of its own."""
    directory, options = tiny_model(name), OPTIONS[kind] | {"tp_invariant": True}
    alone = logits(load_tiny(directory, **options))
    for size in (2, 4):
        assert all(torch.equal(rank, alone) for rank in together(directory, size, logits, **options))
    plain = logits(load_tiny(directory, **OPTIONS[kind]))
    if kind not in ("int8-fast", "int4-fast"):
        torch.testing.assert_close(alone, plain, rtol=2e-4, atol=2e-4)
    assert not torch.equal(alone, plain), "one sum in the order of k is another one"


@needs_kernels
@pytest.mark.parametrize(
    "name", quick_models(sorted(EVERY_FAMILY), {"olmo2", "mamba2", "diffllama", "gemma3n", "zamba2"})
)
def test_every_family_has_the_same_bits_at_every_number_of_ranks(
    name: str, tiny_model: Callable[[str], Path]
) -> None:
    """With experts that are shared out whole, as `test_expert_parallel.py` does; here those that have none."""
    if prepared_config(tiny_model(name)).arch.experts is not None:
        with pytest.raises(ConfigError, match=r"--tp-invariant: .* does not support tensor parallelism"):
            without_weights(prepared_config(tiny_model(name), tp_invariant=True))
        return
    alone = logits(load_tiny(tiny_model(name), tp_invariant=True))
    torch.testing.assert_close(alone, logits(load_tiny(tiny_model(name))), rtol=2e-4, atol=2e-4)
    assert all(torch.equal(rank, alone) for rank in together(tiny_model(name), 2, logits, tp_invariant=True))


@needs_kernels
@pytest.mark.parametrize(
    ("name", "kind"), [("gpt2", "float32"), ("llama-tied-bias", "int8"), ("llama", "int4-fast")]
)
def test_tokens_that_ranks_cannot_share_evenly_are_all_there(
    name: str, kind: str, tiny_model: Callable[[str], Path]
) -> None:
    options = _WIDE | OPTIONS[kind] | {"tp_invariant": True}
    options["hf_overrides"] = {"vocab_size": 261} | (_SIZES if name != "gpt2" else {})
    alone = logits(load_tiny(tiny_model(name), **options))
    assert alone.shape[1] == 261
    for size in (2, 4):
        assert all(torch.equal(rank, alone) for rank in together(tiny_model(name), size, logits, **options))


def test_a_rank_without_a_token_is_refused(tiny_model: Callable[[str], Path]) -> None:
    group = InProcess.group(4)[0]
    config = prepared_config(tiny_model("llama"), load_format="dummy", hf_overrides={"vocab_size": 9})
    with pytest.raises(ConfigError, match=r"embed_tokens: 9 outputs cannot be divided evenly among 4 ranks"):
        without_weights(config, Shard.of_group(group))


def test_more_ranks_than_slices_are_refused(tiny_model: Callable[[str], Path]) -> None:
    group = InProcess.group(3)[0]
    with pytest.raises(
        ConfigError,
        match="--tp-invariant forms sums of 4 slices, which cannot be divided evenly among 3 ranks",
    ):
        without_weights(prepared_config(tiny_model("llama"), tp_invariant=True), Shard.of_group(group))


def test_experts_are_not_sliced(tiny_model: Callable[[str], Path]) -> None:
    with pytest.raises(
        ConfigError, match=r"--tp-invariant: model\.layers\.0\.mlp \(SparseMLP\) does not support"
    ):
        without_weights(prepared_config(tiny_model("qwen2moe"), tp_invariant=True))


def test_a_rank_holds_its_share(tiny_model: Callable[[str], Path]) -> None:
    """Also of the cache, where ranks beyond the two heads of keys and values share one."""

    def weights(model: CausalLM) -> tuple[int, int]:
        heads = {spec.num_kv_heads for spec in kv_cache_specs(model).values()}  # type: ignore[attr-defined]
        return sum(
            part.nbytes for _, layer in model.checkpoint_layers() for part in layer.tensors().values()
        ), *heads

    whole, _ = weights(load_tiny(tiny_model("llama")))
    for size, heads in ((2, 1), (4, 1)):
        for share, own_heads in together(tiny_model("llama"), size, weights):
            assert share < 1.3 * whole / size  # norms are whole, and so is a shared head's part
            assert own_heads == heads


def test_steps_are_recorded_only_if_kernels_communicate(tiny_model: Callable[[str], Path]) -> None:
    """Any other graph would play the kernels and leave out what crosses."""
    shared, alone = share_memory(ALONE), prepared_config(tiny_model("llama"))
    assert why_not_captured(load_model(alone, Shard(0, 2, shared))) is None
    assert (
        together(tiny_model("llama"), 2, why_not_captured)
        == ["communication between ranks uses system calls"] * 2
    )


@pytest.mark.parametrize(
    ("name", "size", "words"),
    [
        ("llama", 3, r"self_attn\.qkv_proj: 4 units of 16 outputs cannot be divided evenly among 3 ranks"),
        ("llama", 8, r"self_attn\.qkv_proj: 4 units of 16 outputs cannot be divided evenly among 8 ranks"),
    ],
)
def test_a_number_of_ranks_that_divides_no_heads_is_refused(
    name: str, size: int, words: str, tiny_model: Callable[[str], Path]
) -> None:
    group = InProcess.group(size)[0]
    with pytest.raises(ConfigError, match=words):
        without_weights(prepared_config(tiny_model(name)), Shard.of_group(group))


def test_module_without_sharding_declaration_is_refused(
    tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Be it what is fine but for something more."""
    monkeypatch.setattr(rwkv7, "ChannelMix", type("WiderMix", (rwkv7.ChannelMix,), {}))
    config = prepared_config(tiny_model("rwkv7"))
    with pytest.raises(ConfigError, match=r"layers\.0\.ffn \(WiderMix\) does not support tensor parallelism"):
        without_weights(config, Shard.of_group(InProcess.group(2)[0]))


SLICES: dict[str, Any] = {"tp_invariant": True}
ENCODERS = ("bert-texts", "modernbert-tokens", "mpnet", "nomic", "embedding-gemma")
"""A head of texts and of tokens, biases by distance, rotated positions, and what is made of a decoder."""


@needs_kernels
@pytest.mark.parametrize("name", ENCODERS)
def test_encoders_have_the_same_bits_at_every_number_of_ranks(
    name: str, tiny_encoder: Callable[[str], Path]
) -> None:
    """And as a whole what they make without slices, but for the order of sums."""
    plain, alone = (said_of_texts(load_tiny(tiny_encoder(name), **args)) for args in ({}, SLICES))
    torch.testing.assert_close(alone, plain, rtol=2e-4, atol=2e-4)
    for size in (2, 4):
        for rank in together(tiny_encoder(name), size, said_of_texts, **SLICES):
            assert torch.equal(rank, alone)


def said_of_texts(model: CausalLM) -> Tensor:
    """Hidden states of some texts, and what the model's head makes of them."""
    assert isinstance(model, EncoderModel)
    states = torch.cat(states_of(model, texts((1, 5, 17, 40))))
    return states if model.head is None else torch.cat((states.flatten(), scores_of(model, states).flatten()))
