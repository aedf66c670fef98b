# SPDX-License-Identifier: Apache-2.0
"""`LLM` with models that pool: which numbers come back, in which form, and how pairs are scored."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire import LLM, PairPrompt, PoolingOutput, PoolingParams, PoolingRequestOutput, TextOptions
from quire.config.pooling import PoolingSpec
from quire.errors import ValidationError
from quire.inputs import DataPrompt, PromptType
from quire.io_processors import IOProcessor
from quire.pooling.outputs import RequestError
from quire.pooling.server.scoring import SIMILARITIES, TOKEN_SIMILARITIES, Scoring
from tests.fixtures.pooling import (
    CLASSIFIER,
    CROSS_ENCODER,
    EMBEDDER,
    REWARDS,
    TOKEN_EMBEDDER,
    Pools,
)

TEXTS = ["abc", "d", "hello world", "abc"]


@contextmanager
def made(pools: Pools, spec: PoolingSpec, directory: Path) -> Iterator[LLM]:
    pools(spec)
    llm = LLM(str(directory), distributed_executor_backend="null", num_gpu_blocks_override=65)
    yield llm
    llm.shutdown()


def test_embeddings_come_in_the_order_of_their_prompts(pools: Pools, pair_model_dir: Path) -> None:
    with made(pools, EMBEDDER, pair_model_dir) as llm:
        outputs = llm.embed(list(TEXTS), use_tqdm=False)
        assert [one.prompt for one in outputs] == TEXTS
        vectors = [one.outputs.embedding for one in outputs]
        assert vectors[0] == vectors[3] != vectors[1]
        assert outputs[0].outputs.hidden_size == len(vectors[0]) == 8
        ids = outputs[0].prompt_token_ids
        assert llm.embed(ids, use_tqdm=False)[0].outputs == outputs[0].outputs
        raw = llm.encode("abc", pooling_task="embed", use_tqdm=False)[0].outputs.data
        assert raw.tolist() == vectors[0]
        query = llm.embed("abc", options=TextOptions(prompt_name="query"), use_tqdm=False)[0]
        assert len(query.prompt_token_ids) == len(ids) + 3
        with pytest.raises(ValidationError, match="task is classify"):
            llm.classify("abc", use_tqdm=False)
        with pytest.raises(ValidationError, match="pooling_params has 2 entries for 1 prompts"):
            llm.embed("abc", pooling_params=[PoolingParams()] * 2, use_tqdm=False)
        with pytest.raises(ValidationError, match="the task is embed, and pooling_params say token_embed"):
            llm.embed("abc", pooling_params=PoolingParams(task="token_embed"), use_tqdm=False)
        with pytest.raises(ValidationError, match="does not generate"):
            llm.generate("abc", use_tqdm=False)
        assert not llm.llm_engine.has_unfinished_requests()


def test_classes_and_rewards(pools: Pools, pair_model_dir: Path) -> None:
    with made(pools, CLASSIFIER, pair_model_dir) as llm:
        (one,) = llm.classify("abc", use_tqdm=False)
        assert one.outputs.num_classes == len(one.outputs.probs) == 3
        pair: PairPrompt = {"prompt": "a", "second_prompt": "b"}
        assert len(llm.classify(pair, use_tqdm=False)[0].prompt_token_ids) == 5
        assert llm.reward("abc", use_tqdm=False)[0].outputs.data.tolist() == one.outputs.probs
        with pytest.raises(ValidationError, match="cannot score pairs"):
            llm.score("a", "b", use_tqdm=False)
    with made(pools, REWARDS, pair_model_dir) as llm:
        assert llm.reward("abc", use_tqdm=False)[0].outputs.data.size == 2


@pytest.mark.parametrize("similarity", list(SIMILARITIES))
def test_embeddings_are_compared_by_the_models_metric(
    similarity: str, pools: Pools, pair_model_dir: Path
) -> None:
    spec = dataclasses.replace(EMBEDDER, similarity=similarity)
    with made(pools, spec, pair_model_dir) as llm:
        scores = [one.outputs.score for one in llm.score("abc", TEXTS, use_tqdm=False)]
        query, *documents = (
            np.array(
                llm.embed(text, options=TextOptions(prompt_name=name), use_tqdm=False)[0].outputs.embedding
            )
            for text, name in [("abc", "query"), *((text, "passage") for text in TEXTS)]
        )
        oracle: dict[str, Any] = {
            "cosine": lambda a, b: a @ b / np.sqrt((a @ a) * (b @ b)),
            "dot": lambda a, b: sum(a * b),
            "euclidean": lambda a, b: -(sum((a - b) ** 2) ** 0.5),
            "manhattan": lambda a, b: -sum(abs(a - b)),
        }
        assert scores == pytest.approx([oracle[similarity](query, one) for one in documents])
        alone = [
            llm.score(f, s, use_tqdm=False)[0].outputs.score for f, s in zip(TEXTS, TEXTS[::-1], strict=True)
        ]
        assert [one.outputs.score for one in llm.score(TEXTS, TEXTS[::-1], use_tqdm=False)] == alone


def test_a_cross_encoder_reads_each_pair_as_one_prompt(pools: Pools, pair_model_dir: Path) -> None:
    with made(pools, CROSS_ENCODER, pair_model_dir) as llm:
        scores = llm.score("abc", TEXTS, use_tqdm=False)
        pairs: list[Any] = [{"prompt": "abc", "second_prompt": text} for text in TEXTS]
        assert [one.outputs.score for one in scores] == [
            one.outputs.probs[0] for one in llm.classify(pairs, use_tqdm=False)
        ]
        assert len(scores[1].prompt_token_ids) == 3 + 1 + 3
        for firsts, seconds in (([], ["a"]), (["a", "b"], ["c"]), (["a", "b"], ["c", "d", "e"])):
            with pytest.raises(ValidationError, match="there must be one first text, or as many"):
                llm.score(firsts, seconds, use_tqdm=False)
        with pytest.raises(ValidationError, match="must not be empty"):
            llm.score("a", ["b", ""], use_tqdm=False)


def test_generating_model_is_reported(pair_model_dir: Path) -> None:
    llm = LLM(str(pair_model_dir), distributed_executor_backend="null", num_gpu_blocks_override=65)
    for call in (llm.embed, llm.encode, llm.classify, llm.reward, lambda text, **_: llm.score(text, text)):
        with pytest.raises(ValidationError, match="this is a generating model without pooling"):
            call("abc", use_tqdm=False)
    llm.shutdown()


def test_late_interaction_adds_up_the_best_match_of_each_token() -> None:
    query, document = np.array([[1.0, 0.0], [0.0, 2.0]]), np.array([[0.5, 0.5], [1.0, 0.0], [0.0, 3.0]])
    assert TOKEN_SIMILARITIES["maxsim"](query, document) == 1.0 + 6.0
    assert TOKEN_SIMILARITIES["meanmaxsim"](query, document) == 3.5
    assert TOKEN_SIMILARITIES["maxsim"](query, document[:0]) == 0.0
    assert TOKEN_EMBEDDER.tasks == ("token_embed",)


def test_skipped_words_match_nothing_and_sides_have_own_lengths(pools: Pools, pair_model_dir: Path) -> None:
    spec = dataclasses.replace(TOKEN_EMBEDDER, skipped_words=("b", "no token"), side_lengths=(4, 5))
    draw = np.random.default_rng(1)
    with made(pools, spec, pair_model_dir) as llm:
        inputs = llm.llm_engine.input_processor.pooling
        assert inputs is not None
        for asked, lengths, kept in (((None, None), (4, 5), [0, 2, 4]), ((3, 4), (3, 4), [0, 2, 3])):
            options = TextOptions(max_tokens_per_text=asked)
            scoring = Scoring(inputs, ["abcdef"], ["bcbdefghi"], options)
            query, document = scoring.prompts()  # [CLS] a b [SEP] and [CLS] b c b [SEP], or less
            assert (len(query.token_ids), len(document.token_ids)) == lengths
            pooled = [
                PoolingRequestOutput("", PoolingOutput(draw.normal(size=(length, 4))), prompt.token_ids)
                for length, prompt in zip(lengths, (query, document), strict=True)
            ]
            ((score, _),) = scoring.outputs(pooled)
            first, second = (one.outputs.data for one in pooled)
            assert score == (first @ second[kept].T).max(axis=1).sum()


def test_tokenization_kwargs_control_tokenization(pools: Pools, pair_model_dir: Path) -> None:
    with made(pools, EMBEDDER, pair_model_dir) as llm:

        def ids(**kwargs: Any) -> list[int]:
            return llm.embed("hello", tokenization_kwargs=kwargs, use_tqdm=False)[0].prompt_token_ids

        def same(**options: Any) -> list[int]:
            return llm.embed("hello", options=TextOptions(**options), use_tqdm=False)[0].prompt_token_ids

        assert ids(add_special_tokens=False) == same(add_special_tokens=False) != ids()
        cut = same(truncate_prompt_tokens=4, truncation_side="left")
        assert len(cut) == 4
        assert ids(truncate_prompt_tokens=4, truncation_side="left") == cut
        assert ids(truncation=True, max_length=4, truncation_side="left") == cut
        assert ids(truncation=False) == ids(truncation=True) == ids()
        for kwargs, problem in (
            ({"padding": True}, "has 'padding'; known are add_special_tokens"),
            ({"max_length": 4}, "max_length, which needs truncation: true"),
            ({"truncate_prompt_tokens": 0}, "must be at least 1"),
        ):
            with pytest.raises(ValidationError, match=problem):
                ids(**kwargs)


def test_scores_take_parameters_and_a_template_of_pairs(
    pools: Pools, pair_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    template = "{% for message in messages %}{{ message.role[0] }}: {{ message.content }} {% endfor %}"
    with made(pools, CROSS_ENCODER, pair_model_dir) as llm:
        found = llm.score("ab", ["c", "d"], chat_template=template, use_tqdm=False)
        tokenizer = llm.get_tokenizer()
        texts = [f"q: ab d: {document} " for document in "cd"]
        prompts = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
        assert [one.prompt_token_ids for one in found] == prompts
        expected = [one.outputs.probs[0] for one in llm.classify(prompts, use_tqdm=False)]
        assert [one.outputs.score for one in found] == expected
        wanted: list[PoolingParams] = []

        def pool(prompts: Any, params: PoolingParams, *_: Any, **__: Any) -> list[Any]:
            wanted.append(params)
            return []

        monkeypatch.setattr(llm, "_pool", pool)
        llm.score("a", "b", pooling_params=PoolingParams(use_activation=False))
        llm.score("a", "b", use_activation=False)
        assert wanted == [PoolingParams(use_activation=False, task="classify")] * 2
        with pytest.raises(ValidationError, match="the task is classify, and pooling_params say embed"):
            llm.score("a", "b", pooling_params=PoolingParams(task="embed"), use_tqdm=False)
    with (
        made(pools, EMBEDDER, pair_model_dir) as llm,
        pytest.raises(ValidationError, match="chat_template needs a cross-encoder"),
    ):
        llm.score("a", "b", chat_template=template, use_tqdm=False)


class Lengths(IOProcessor):
    """IO processor that returns the number of tokens of each word."""

    def prompts(self, data: Any) -> list[PromptType]:
        return list(data["text"].split())

    def reply(self, data: Any, outputs: Sequence[PoolingRequestOutput[PoolingOutput]]) -> Any:
        return [len(one.prompt_token_ids) for one in outputs]


def test_an_io_processor_reads_data_offline_too(
    pools: Pools, pair_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data: DataPrompt = {"data": {"text": "a bc def"}}
    with made(pools, EMBEDDER, pair_model_dir) as llm:
        with pytest.raises(ValidationError, match="data needs an IO processor"):
            llm.encode(data, use_tqdm=False)
        monkeypatch.setattr("quire.pooling.offline.make_io_processor", lambda config: Lengths(config))
        (output,) = llm.encode(data, pooling_task="plugin", use_tqdm=False)
        assert output.outputs == [3, 4, 5]
        assert len(output.prompt_token_ids) == 12
        for task, prompt in (("embed", data), ("plugin", "abc")):
            with pytest.raises(ValidationError, match="the task"):
                llm.encode(prompt, pooling_task=task, use_tqdm=False)


def test_request_without_numbers_has_the_error_of_vllm() -> None:
    def output(**fields: Any) -> PoolingRequestOutput[PoolingOutput]:
        return PoolingRequestOutput("a", PoolingOutput(np.zeros(1, np.float32)), [1], **fields)

    assert output().error is None
    assert output(finish_reason="timeout").error == RequestError(
        504, "the request's time was over before its prompt was pooled", True
    )
    failed = output(finish_reason="error", stop_reason="not finite").error
    assert failed is not None
    assert (failed.code, failed.retryable) == (500, False)
    assert failed.message.endswith("before it was complete: not finite")


def test_windows_of_long_texts_are_averaged_on_request(pools: Pools, pair_model_dir: Path) -> None:
    with made(pools, EMBEDDER, pair_model_dir) as llm:
        with pytest.raises(ValidationError, match="maximum context length"):
            llm.embed("a" * 50, use_tqdm=False)
        (long, short) = llm.embed(["abc" * 30, "abc"], average_windows=True, use_tqdm=False)
        assert short.outputs == llm.embed("abc", use_tqdm=False)[0].outputs
        windows = llm.llm_engine.input_processor.pooling.windows("abc" * 30)  # type: ignore[union-attr]
        parts = llm.embed([one.token_ids for one in windows], use_tqdm=False)
        assert len(parts) > 1
        assert long.prompt_token_ids == [token for one in windows for token in one.token_ids]
        weights = [len(one.prompt_token_ids) for one in parts]
        mean = np.average([one.outputs.embedding for one in parts], axis=0, weights=weights)
        np.testing.assert_allclose(long.outputs.embedding, mean / np.linalg.norm(mean), rtol=1e-6)
        with pytest.raises(ValidationError, match="average_windows needs texts"):
            llm.embed([1] * 50, average_windows=True, use_tqdm=False)


def test_repeated_word_keeps_its_largest_weight() -> None:
    weights = PoolingOutput(np.array([[0.5], [0.0], [0.75], [0.25]], np.float32))
    assert PoolingRequestOutput("a", weights, [7, 8, 7, 9]).lexical_weights() == {7: 0.75, 9: 0.25}
    with pytest.raises(ValueError, match="one weight per token"):
        PoolingRequestOutput("a", weights, [7, 8, 7]).lexical_weights()
