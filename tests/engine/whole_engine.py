# SPDX-License-Identifier: Apache-2.0
"""A whole engine over the null executor, watched step by step, and the same requests run alone as its oracle."""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from quire.config import EngineConfig
from quire.engine.core import EngineCore
from quire.engine.llm_engine import LLMEngine
from quire.engine.messages import AbortRequests, AddRequest, EngineCoreOutputs, EngineCoreRequest
from quire.executor.null import NullExecutor
from quire.inputs import TokensPrompt
from quire.media import MediaItem
from quire.metrics.stats import IterationStats, StatLogger
from quire.multimodal.holds import MediaHolds
from quire.outputs import CompletionOutput, RequestOutput
from quire.pooling_params import PoolingParams
from quire.sampling_params import RequestOutputKind, SamplingParams
from quire.scheduler.output import ModelRunnerOutput, Pooled, RequestUpdate, SchedulerStats
from tests.engine.holder import Holder

MAX_MODEL_LEN = 40
LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLM"
VOCAB_SIZE = len(LETTERS) + 1
EOS_ID = len(LETTERS)
FAULT = "numbers went bad"
Media = Sequence[MediaItem]
_FOLDERS: list[TemporaryDirectory[str]] = []
"""Of checkpoints, which go when this process ends."""


@functools.cache
def letters_model(window: int | None) -> Path:
    """A checkpoint without weights whose tokens are letters and an end token.

    It has a layer of full attention and, if there is a window, one with it.
    """
    folder = TemporaryDirectory(prefix="letters-")
    _FOLDERS.append(folder)
    directory = Path(folder.name)
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(LETTERS)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True)])
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>"}))
    config = {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2 if window else 1,
        "use_sliding_window": bool(window),
        "max_window_layers": 1,
        "sliding_window": window,
        "num_attention_heads": 2,
        "max_position_embeddings": MAX_MODEL_LEN,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "eos_token_id": EOS_ID,
    }
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def make_engine(window: int | None = None, **args: Any) -> LLMEngine:
    fixed = {"model": str(letters_model(window)), "distributed_executor_backend": "null"}
    return LLMEngine(EngineConfig.from_args(**fixed, **args))


class WholeEngine(StatLogger):
    """Runs steps and collects each request's outputs; what must hold after every step is checked here."""

    def __init__(self, max_drafts: int = 0, **args: Any) -> None:
        self.engine = make_engine(**args)
        self.core: EngineCore = self.engine._clients[0]._core  # type: ignore[attr-defined]
        assert isinstance(self.core.executor, NullExecutor)
        self.executor = self.core.executor
        self.media = next(one for one in self.core._features if isinstance(one, MediaHolds))
        self.holder = Holder(self.core)
        self.executor.max_drafts = max_drafts
        self.outputs: dict[str, list[RequestOutput]] = {}
        self.pooled: dict[str, RequestUpdate | None] = {}
        self.num_steps = 0
        self.num_accepted = 0
        self.num_generated = 0
        self.engine.add_stat_logger(self)
        self._kinds: dict[str, RequestOutputKind] = {}
        self._failing: set[str] = set()
        self._ended: set[str] = set()
        self._collect, self._core_step = self.executor.collect, self.core.step
        self.executor.collect = self._collect_with_faults  # type: ignore[method-assign]
        self.core.step = self._checked_core_step  # type: ignore[method-assign]

    def add(
        self, name: str, prompt: list[int], params: SamplingParams, media: Media = (), **fields: Any
    ) -> None:
        whole = TokensPrompt(prompt_token_ids=list(prompt), media=media)
        self.engine.add_request(name, whole, params.clone(), **fields)
        self.outputs[name], self._kinds[name] = [], params.output_kind

    def pool(self, name: str, prompt: list[int], **fields: Any) -> None:
        """Ask the core, which alone knows how, for what is pooled of a prompt."""
        self.pooled[name] = None
        params, pooling = SamplingParams(), PoolingParams()
        message = EngineCoreRequest(
            f"{name}-0", prompt, params, time.monotonic(), pooling_params=pooling, **fields
        )
        self.core.handle(AddRequest(message))

    def abort(self, name: str) -> None:
        if name in self.pooled:
            self.core.handle(AbortRequests([f"{name}-0"]))
        else:
            self.engine.abort_request(name)

    def is_running(self, name: str) -> bool:
        if name in self.pooled:
            return f"{name}-0" in self.core.scheduler._queues.by_id
        return not any(output.finished for output in self.outputs[name])

    def step(self) -> None:
        self.num_steps += 1
        if not self.engine.has_unfinished_requests() and self.core.has_work():
            self.core.step()
        for output in self.engine.step():
            assert self.is_running(output.request_id), "an output after the last"
            self.outputs[output.request_id].append(output)
        self.core.scheduler.check_integrity()
        self.media.check_integrity()

    def record(self, iteration: IterationStats, scheduler: SchedulerStats | None, core: int) -> None:
        """As a logger of statistics."""
        self.num_generated += iteration.num_generation_tokens

    def fail(self, name: str) -> None:
        """The next token that a sequence of this request samples, or what is pooled, turns out to be unusable."""
        self._failing.add(name)

    def _collect_with_faults(self) -> ModelRunnerOutput:
        output = self._collect()
        self.num_accepted += sum(map(output.num_accepted, output.sampled_token_ids))
        failed = {
            core_id: FAULT
            for core_id in (*output.sampled_token_ids, *output.pooled)
            if self._request_of(core_id) in self._failing
        }
        self._failing -= {self._request_of(core_id) for core_id in failed}
        sampled = {name: ids for name, ids in output.sampled_token_ids.items() if name not in failed}
        pooled = {name: numbers for name, numbers in output.pooled.items() if name not in failed}
        return msgspec.structs.replace(output, sampled_token_ids=sampled, pooled=pooled, failed=failed)

    def _checked_core_step(self) -> EngineCoreOutputs:
        """The core too reports on no sequence after its end; the front end would not notice."""
        outputs = self._core_step()
        for update in outputs.updates:
            assert update.request_id not in self._ended
            if update.finish_reason is not None:
                self._ended.add(update.request_id)
            name = update.request_id.rpartition("-")[0]
            if name in self.pooled:
                self.pooled[name] = update
        return outputs

    def _request_of(self, core_id: str) -> str | None:
        name = core_id.rpartition("-")[0]
        return name if name in self.engine._front_end or name in self.pooled else None

    def drain(self, max_steps: int) -> None:
        """Step until nothing is left; then nothing must be held anywhere."""
        while self.engine.has_unfinished_requests():
            assert max_steps > 0, "the engine does not come to an end"
            max_steps -= 1
            self.step()
        self.step()  # for the outputs of requests that were aborted last
        while self.core.has_work():
            self.engine.call_core("check_integrity")
        stats = self.core.scheduler.stats()
        assert (stats.num_running, stats.num_waiting) == (0, 0)
        assert (stats.kv_cache_usage, stats.host_cache_usage) == (0.0, 0.0)
        assert not self.executor._rows
        assert not +self.executor._holders
        assert self.media.reset(), "embeddings are used by a request that has ended"
        assert not self.executor.embeddings
        assert not self.executor._slices
        assert self.engine.get_num_unfinished_requests() == 0

    def result(self, name: str) -> RequestOutput:
        """Return a request's final output, joined from its outputs of any kind."""
        outputs, kind = self.outputs[name], self._kinds[name]
        assert kind is not RequestOutputKind.FINAL_ONLY or len(outputs) == 1
        if kind is not RequestOutputKind.DELTA:
            return outputs[-1]
        joined, *rest = outputs
        for output in rest:
            joined.add(output)
        joined.outputs.sort(key=lambda completion: completion.index)
        return joined


@functools.cache
def _oracle() -> WholeEngine:
    """Room for all, a budget for all, one step after the other, nothing shared."""
    return WholeEngine(
        max_num_seqs=8, max_num_batched_tokens=1000, enable_prefix_caching=False, enable_prompt_embeds=True
    )


_alone: dict[bytes, RequestOutput] = {}
_pooled_alone: dict[bytes, Pooled] = {}


def alone(prompt: list[int], params: SamplingParams, media: Media = ()) -> RequestOutput:
    """Return the result of a request in an engine of its own, one completion after the other."""
    key = msgspec.msgpack.encode((prompt, params, media))
    if key not in _alone:
        first, *others = [_completion_alone(prompt, params, index, media) for index in range(params.n)]
        for other in others:
            first.add(other)
        _alone[key] = first
    return _alone[key]


def pooled_alone(prompt: list[int], media: Media = ()) -> Pooled:
    """Return the pooled output of a prompt in an engine of its own."""
    key = msgspec.msgpack.encode((prompt, media))
    if key not in _pooled_alone:
        oracle = _oracle()
        name = f"p{len(oracle.pooled)}"
        oracle.pool(name, prompt, media=list(media))
        oracle.drain(max_steps=100)
        update = oracle.pooled[name]
        assert update is not None
        assert update.pooled is not None
        _pooled_alone[key] = update.pooled
    return _pooled_alone[key]


def _completion_alone(prompt: list[int], params: SamplingParams, index: int, media: Media) -> RequestOutput:
    oracle, seed = _oracle(), None if params.seed is None else params.seed + index
    name = f"{len(oracle.outputs)}"
    own = params.clone(n=1, seed=seed, output_kind=RequestOutputKind.FINAL_ONLY)
    oracle.add(name, prompt, own, media)
    oracle.drain(max_steps=100)
    result = oracle.result(name)
    result.outputs[0].index = index
    return result


def check_result(result: RequestOutput, expected: RequestOutput, *, disturbed: bool) -> None:
    """Equal to what it is alone; a sequence that was aborted or failed has the beginning of it."""
    assert result.finished
    assert [completion.index for completion in result.outputs] == list(range(len(expected.outputs)))
    for got, want in zip(result.outputs, expected.outputs, strict=True):
        if disturbed and got.finish_reason in ("abort", "error"):
            check_beginning(got, want)
        else:
            assert got == want
    if not disturbed:
        assert result.prompt_logprobs == expected.prompt_logprobs


def check_beginning(got: CompletionOutput, want: CompletionOutput) -> None:
    assert got.token_ids == want.token_ids[: len(got.token_ids)]
    assert (got.logprobs is None) == (want.logprobs is None)
    assert got.logprobs is None or got.logprobs == (want.logprobs or [])[: len(got.logprobs)]
