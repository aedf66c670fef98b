# SPDX-License-Identifier: Apache-2.0
"""Models that are pooled, by the whole engine core: against transformers, and the same bits however prompts are cut."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from quire.errors import StartupError
from quire.kernels import cpu
from quire.pooling.models.sentence_transformers import _FLAGS
from quire.pooling_params import PoolingParams
from tests.fixtures.pooled import pool, pooling_core, write_json, write_model, write_sentence_transformer
from tests.fixtures.tiny_models import VOCAB_SIZE

TOLERANCE = 1e-5
CUT = {"max_num_batched_tokens": 7, "max_num_seqs": 4}
"""Limits under which prompts are computed in chunks."""


def prompts(lengths: tuple[int, ...] = (1, 5, 17, 40, 96)) -> list[list[int]]:
    draw = random.Random(1)
    return [[draw.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in lengths]


@torch.inference_mode()
def hidden_states(model: nn.Module, sequences: list[list[int]]) -> list[Tensor]:
    """Those of a base model of transformers, [tokens, H] each."""
    return [model(torch.tensor([one]), use_cache=False).last_hidden_state[0] for one in sequences]


def assert_close(ours: list[NDArray[np.float32]], theirs: list[Tensor]) -> None:
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(torch.tensor(mine), other, rtol=0.0, atol=TOLERANCE)


def _weights(hidden: Tensor) -> Tensor:
    return torch.arange(1, len(hidden) + 1)[:, None] / (len(hidden) * (len(hidden) + 1) / 2)


POOLED: dict[str, Callable[[Tensor], Tensor]] = {
    "cls_token": lambda hidden: hidden[0],
    "max_tokens": lambda hidden: hidden.amax(0),
    "mean_tokens": lambda hidden: hidden.mean(0),
    "mean_sqrt_len_tokens": lambda hidden: hidden.sum(0) / len(hidden) ** 0.5,
    "weightedmean_tokens": lambda hidden: (hidden * _weights(hidden)).sum(0),
    "lasttoken": lambda hidden: hidden[-1],
}
"""As sentence-transformers' files call it -> what it is, in the order in which sentence-transformers joins several."""


def test_every_way_of_pooling_is_tested() -> None:
    assert {f"pooling_mode_{name}" for name in POOLED} == _FLAGS.keys()


@pytest.mark.parametrize("pooling", [*sorted(POOLED), "lasttoken+mean_tokens+cls_token"])
def test_embedder_has_oracle_vectors_and_same_bits_in_any_batch(pooling: str, tmp_path: Path) -> None:
    """Qwen 3 as Qwen3-Embedding publishes it: an architecture with an output head, and sentence-transformers' files."""
    model = write_model("qwen3", tmp_path, "Qwen3ForCausalLM")
    ways = [name for name in POOLED if name in pooling.split("+")]
    dense = [nn.Linear(64 * len(ways), 40), nn.Linear(40, 32, bias=False)]
    write_sentence_transformer(tmp_path, pooling=pooling, dense=dense, normalizes=True)
    texts = prompts()
    with torch.inference_mode():
        vectors = torch.stack(
            [torch.cat([POOLED[way](one) for way in ways]) for one in hidden_states(model.model, texts)]
        )
        for layer in dense:
            vectors = torch.tanh(layer(vectors))
        expected = list(nn.functional.normalize(vectors))
    core = pooling_core(tmp_path)
    whole = pool(core, texts)
    assert_close(whole, expected)
    if not cpu.available():
        return  # sums of the reference depend on how a batch is cut
    cut = pooling_core(tmp_path, **CUT)
    for others in (pool(core, texts, together=False), pool(cut, texts), pool(cut, texts[::-1])[::-1]):
        assert [one.tobytes() for one in others] == [one.tobytes() for one in whole]


@pytest.mark.parametrize("pooling", ["mean_tokens+cls_token", "lasttoken+max_tokens"])
def test_an_instruction_is_read_and_not_pooled(pooling: str, tmp_path: Path) -> None:
    model = write_model("qwen3", tmp_path, "Qwen3ForCausalLM")
    write_sentence_transformer(tmp_path, pooling=pooling)
    ways, length = [name for name in POOLED if name in pooling.split("+")], 10
    texts = prompts((11, 17, 40))
    hidden = [one[length:] for one in hidden_states(model.model, texts)]
    whole = pool(pooling_core(tmp_path), texts, instruction_length=length)
    assert_close(whole, [torch.cat([POOLED[way](one) for way in ways]) for one in hidden])
    cut = pool(pooling_core(tmp_path, **CUT), texts, instruction_length=length)
    assert not cpu.available() or [one.tobytes() for one in cut] == [one.tobytes() for one in whole]


def test_prompt_of_an_instruction_alone_pools_its_last_token(tmp_path: Path) -> None:
    model = write_model("qwen3", tmp_path, "Qwen3ForCausalLM")
    write_sentence_transformer(tmp_path)
    (text,) = prompts((5,))
    found = pool(pooling_core(tmp_path), [text], instruction_length=9)
    assert_close(found, [hidden_states(model.model, [text])[0][-1]])


def test_a_prefix_is_used_for_the_last_token_and_not_for_all(tmp_path: Path) -> None:
    write_model("qwen3", tmp_path, "Qwen3Model")
    core = pooling_core(tmp_path)
    (text,) = prompts((40,))
    first, again = pool(core, [text])[0], pool(core, [text])[0]
    assert core.scheduler.stats().prefix_cache_hits == 36
    of_tokens = pool(core, [text], PoolingParams(task="token_embed"))[0]
    assert of_tokens.shape == (40, 64)
    if cpu.available():
        assert first.tobytes() == again.tobytes() == of_tokens[-1].tobytes()


BASES = {
    "llama": "LlamaModel",
    "mistral": "MistralModel",
    "qwen2": "Qwen2Model",
    "qwen3": "Qwen3Model",
    "gpt2": "GPT2Model",
    "opt": "OPTModel",
    "gemma2": "Gemma2Model",
}


@pytest.mark.parametrize(("name", "class_name"), BASES.items(), ids=BASES.values())
def test_a_checkpoint_without_an_output_head_embeds(name: str, class_name: str, tmp_path: Path) -> None:
    model = write_model(name, tmp_path, class_name)
    texts = prompts((3, 30))
    expected = [nn.functional.normalize(hidden[-1], dim=0) for hidden in hidden_states(model, texts)]
    assert_close(pool(pooling_core(tmp_path), texts), expected)


@pytest.mark.parametrize("name", ["llama", "qwen2", "opt-post-norm"])
@pytest.mark.parametrize("model_impl", ["quire", "transformers"])
def test_any_language_model_pools_on_request(
    name: str, model_impl: str, tiny_model: Callable[[str], Path]
) -> None:
    from transformers import AutoModelForCausalLM

    directory, texts = tiny_model(name), prompts((3, 30))
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    base = model.model.decoder if name.startswith("opt") else model.base_model
    expected = [nn.functional.normalize(hidden[-1], dim=0) for hidden in hidden_states(base, texts)]
    core = pooling_core(directory, runner="pooling", model_impl=model_impl)
    assert_close(pool(core, texts), expected)


@pytest.mark.parametrize("class_name", ["LlamaForSequenceClassification", "Qwen2ForSequenceClassification"])
@pytest.mark.parametrize("num_labels", [1, 3])
def test_a_sequence_classifier_gives_the_oracles_classes(
    class_name: str, num_labels: int, tmp_path: Path
) -> None:
    name = class_name.removesuffix("ForSequenceClassification").lower()
    model = write_model(name, tmp_path, class_name, num_labels=num_labels)
    texts = prompts((3, 30))
    with torch.inference_mode():
        logits = [model(torch.tensor([one])).logits[0] for one in texts]
    core = pooling_core(tmp_path)
    assert_close(pool(core, texts, PoolingParams(use_activation=False)), logits)
    function = torch.sigmoid if num_labels == 1 else lambda one: torch.softmax(one, -1)
    assert_close(pool(core, texts), [function(one) for one in logits])


@pytest.mark.parametrize(
    ("name", "class_name"), [("qwen3", "Qwen3ForTokenClassification"), ("gpt2", "GPT2ForTokenClassification")]
)
def test_a_token_classifier_gives_the_oracles_classes(name: str, class_name: str, tmp_path: Path) -> None:
    model = write_model(name, tmp_path, class_name, num_labels=5)
    texts = prompts((3, 30))
    with torch.inference_mode():
        expected = [model(torch.tensor([one])).logits[0].softmax(-1) for one in texts]
    assert_close(pool(pooling_core(tmp_path), texts), expected)
    assert_close(pool(pooling_core(tmp_path, **CUT), texts), expected)


def rewarding(tmp_path: Path, architecture: str, num_labels: int) -> tuple[nn.Module, nn.Sequential]:
    """A Qwen 2 with the head of its rewards, which transformers has not: base and head."""
    from safetensors.torch import load_file, save_file

    model = write_model("qwen2", tmp_path, "Qwen2ForCausalLM")
    torch.manual_seed(0)
    score = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, num_labels))
    file = tmp_path / "model.safetensors"
    tensors = load_file(file) | {f"score.{key}": one.detach() for key, one in score.named_parameters()}
    tensors.pop("lm_head.weight", None)
    save_file(tensors, file)
    config = model.config.to_dict() | {"architectures": [architecture], "num_labels": num_labels}
    for key in ("id2label", "label2id"):
        config.pop(key, None)
    write_json(tmp_path / "config.json", config)
    return model.model, score


def test_a_reward_model_scores_every_token(tmp_path: Path) -> None:
    base, score = rewarding(tmp_path, "Qwen2ForRewardModel", 1)
    texts = prompts((3, 30))
    with torch.inference_mode():
        expected = [score(hidden) for hidden in hidden_states(base, texts)]
    assert_close(pool(pooling_core(tmp_path), texts), expected)
    last = pooling_core(tmp_path, pooler_config={"pooling_type": "LAST"})
    assert_close(pool(last, texts), [rewards[-1] for rewards in expected])


def test_a_process_reward_model_scores_steps(tmp_path: Path) -> None:
    base, score = rewarding(tmp_path, "Qwen2ForProcessRewardModel", 2)
    texts, tag = [[5, 6, 9, 7, 9, 8], [9, *prompts((20,))[0], 9]], 9
    with torch.inference_mode():
        all_tokens = [score(hidden).softmax(-1) for hidden in hidden_states(base, texts)]
    expected = [rewards[torch.tensor(text) == tag] for rewards, text in zip(all_tokens, texts, strict=True)]
    core = pooling_core(tmp_path, pooler_config={"step_tag_id": tag}, **CUT)
    assert_close(pool(core, texts), expected)
    assert_close(pool(core, texts, PoolingParams(returned_token_ids=[1])), [one[:, 1:] for one in expected])
    assert pool(core, [[5, 6]])[0].shape == (0, 2)


def renamed_for_internlm2(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """A Llama's tensors as InternLM 2 has them: q, k and v of a key-value head side by side (4 and 2 heads of 16)."""
    names = {
        "self_attn.o_proj": "attention.wo",
        "mlp.gate_proj": "feed_forward.w1",
        "mlp.up_proj": "feed_forward.w3",
        "mlp.down_proj": "feed_forward.w2",
        "input_layernorm": "attention_norm",
        "post_attention_layernorm": "ffn_norm",
        "embed_tokens": "tok_embeddings",
    }
    out = {}
    for name, tensor in tensors.items():
        new = name
        for own, other in names.items():
            new = new.replace(own, other)
        if "q_proj" in name:
            q = tensor.view(2, 2, 16, -1)
            k, v = (
                tensors[name.replace("q_proj", other)].view(2, 1, 16, -1) for other in ("k_proj", "v_proj")
            )
            new, tensor = (
                new.replace("self_attn.q_proj", "attention.wqkv"),
                torch.cat((q, k, v), 1).flatten(0, 2),
            )
        if "k_proj" not in name and "v_proj" not in name:
            out[new] = tensor.contiguous()
    return out


@pytest.mark.parametrize(
    ("architecture", "head"), [("InternLM2ForRewardModel", "v_head"), ("LlamaForRewardModel", "score")]
)
def test_other_reward_models_score_every_token(architecture: str, head: str, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    model = write_model("llama", tmp_path, "LlamaForCausalLM", tie_word_embeddings=False)
    weight = torch.randn(1, 64) / 8
    tensors = load_file(tmp_path / "model.safetensors")
    tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith("lm_head")}
    if architecture.startswith("InternLM2"):
        tensors = renamed_for_internlm2(tensors)
    save_file(tensors | {f"{head}.weight": weight}, tmp_path / "model.safetensors")
    config = model.config.to_dict() | {"architectures": [architecture], "bias": False}
    for key in ("id2label", "label2id"):
        config.pop(key, None)
    write_json(tmp_path / "config.json", config)
    texts = prompts((3, 30))
    expected = [hidden @ weight.t() for hidden in hidden_states(model.model, texts)]
    assert_close(pool(pooling_core(tmp_path, **CUT), texts), expected)


@pytest.mark.parametrize("name", ["mistral", "llama-tied-bias", "gpt2"])
def test_a_language_models_own_head_rewards_steps(name: str, tiny_model: Callable[[str], Path]) -> None:
    """Math-Shepherd: how likely a token of good steps is, against one of bad steps, at each token that ends one."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_model(name), dtype=torch.float32)
    texts, tag, tokens = [[5, 6, 9, 7, 9, 8], [9, *prompts((20,))[0], 9]], 9, [200, 7]
    with torch.inference_mode():
        logits = [model(torch.tensor([text])).logits[0] for text in texts]
    at_steps = [one[torch.tensor(text) == tag] for one, text in zip(logits, texts, strict=True)]
    wanted = {"pooling_type": "STEP", "step_tag_id": tag, "returned_token_ids": tokens}
    core = pooling_core(tiny_model(name), convert="reward", pooler_config=wanted, **CUT)
    assert_close(pool(core, texts), [one[:, tokens].softmax(-1) for one in at_steps])
    plain = PoolingParams(use_activation=False, returned_token_ids=[1])
    assert_close(pool(core, texts, plain), [one[:, tokens[1:]] for one in at_steps])


@pytest.mark.parametrize("name", ["qwen2", "qwen3"])
@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        (
            {"classifier_from_token": ["b", "a"], "method": "from_2_way_softmax"},
            lambda b, a: (a - b).sigmoid(),
        ),
        (
            {"classifier_from_token": ["b", "a"], "is_original_qwen3_reranker": True},
            lambda b, a: (a - b).sigmoid(),
        ),
        ({"classifier_from_token": ["a"], "method": "no_post_processing"}, lambda b, a: a.sigmoid()),
        ({"classifier_from_token": ["a"]}, lambda b, a: a.sigmoid()),
        ({"classifier_from_token": ["b", "a"]}, lambda b, a: torch.cat((b, a), 1).softmax(1)),
    ],
)
def test_language_model_scores_by_token_logits(
    name: str,
    keys: dict[str, Any],
    expected: Callable[[Tensor, Tensor], Tensor],
    tiny_model: Callable[[str], Path],
) -> None:
    """Qwen 3's rerankers and their like; tied tables (Qwen 2) and others."""
    from transformers import AutoModelForCausalLM

    directory = tiny_model(name)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    vocabulary = json.loads((directory / "tokenizer.json").read_text())["model"]["vocab"]
    texts = prompts((5, 20, 1))
    with torch.inference_mode():
        logits = torch.stack([model(torch.tensor([text])).logits[0, -1] for text in texts])
    wanted = expected(*(logits[:, vocabulary[token], None] for token in ("b", "a")))
    overrides = {
        "architectures": [f"{type(model).__name__.removesuffix('ForCausalLM')}ForSequenceClassification"]
    }
    core = pooling_core(directory, hf_overrides=overrides | keys, **CUT)
    assert_close(pool(core, texts), list(wanted))
    core = pooling_core(directory, convert="classify", hf_overrides=keys, **CUT)
    assert_close(pool(core, texts), list(wanted))


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"classifier_from_token": ["yes!"]}, "a list of tokens of the vocabulary"),
        ({"classifier_from_token": []}, "a list of tokens of the vocabulary"),
        ({"classifier_from_token": [7]}, "classifier_from_token"),
        (
            {"classifier_from_token": ["a"], "method": "from_2_way_softmax"},
            "a list of two tokens, no and yes",
        ),
        ({"classifier_from_token": ["a"], "method": "magic"}, "method"),
    ],
)
def test_tokens_that_make_no_score_are_refused(
    keys: dict[str, Any], words: str, tiny_model: Callable[[str], Path]
) -> None:
    with pytest.raises(StartupError, match=words):
        pooling_core(tiny_model("qwen3"), convert="classify", hf_overrides=keys)


def test_dimensions_cut_before_the_norm(tmp_path: Path) -> None:
    model = write_model("qwen3", tmp_path, "Qwen3Model", matryoshka_dimensions=[16, 32])
    texts = prompts((3, 30))
    expected = [nn.functional.normalize(one[-1, :16], dim=0) for one in hidden_states(model, texts)]
    assert_close(pool(pooling_core(tmp_path), texts, PoolingParams(dimensions=16)), expected)


BOTH_WAYS = ("llama", "mistral", "qwen2", "qwen3")


@pytest.mark.parametrize("name", BOTH_WAYS)
@pytest.mark.parametrize("pooling", ["mean_tokens", "lasttoken"])
def test_bidirectional_decoder_has_oracle_vectors_and_same_bits(
    name: str, pooling: str, tmp_path: Path
) -> None:
    """GTE-Qwen2 and its like: `is_causal` is false, and nothing is cached."""
    class_name = BASES[name]
    model = write_model(name, tmp_path, class_name, is_causal=False, sliding_window=None)
    write_sentence_transformer(tmp_path, pooling=pooling, normalizes=True)
    model.set_attn_implementation("eager")  # torch's own attention would look at no mask, and be causal
    texts = prompts()
    hidden = hidden_states(model, texts)
    assert (hidden[1][0] - hidden_states(model, [texts[1][:-1]])[0][0]).abs().max() > 0.01
    core = pooling_core(tmp_path)
    whole = pool(core, texts)
    assert_close(whole, [nn.functional.normalize(POOLED[pooling](one), dim=0) for one in hidden])
    if not cpu.available():
        return
    for others in (pool(core, texts, together=False), pool(core, texts[::-1])[::-1]):
        assert [one.tobytes() for one in others] == [one.tobytes() for one in whole]


def test_bidirectional_decoder_classifies_by_its_last_token(tmp_path: Path) -> None:
    model = write_model("qwen2", tmp_path, "Qwen2ForSequenceClassification", num_labels=3, is_causal=False)
    model.set_attn_implementation("eager")
    texts = prompts((3, 30))
    with torch.inference_mode():
        expected = [model(torch.tensor([one])).logits[0].softmax(-1) for one in texts]
    assert_close(pool(pooling_core(tmp_path), texts), expected)
