"""`OfflineEngine`: base of `LLM`; runs requests to completion on an engine in this process.

Invariant: one thread at a time; an error leaves no request behind.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

from tqdm import tqdm

from quire.engine.llm_engine import LLMEngine, SingleThreadGuard
from quire.engine.tokenizer import Tokenizer
from quire.errors import ValidationError
from quire.inputs import PromptType
from quire.outputs import RequestOutput
from quire.pooling.outputs import PoolingOutput, PoolingRequestOutput


class OfflineEngine:
    """Base of `LLM`: the engine, its tokenizer, sleep and shutdown."""

    def __init__(self, llm_engine: LLMEngine) -> None:
        self.llm_engine = llm_engine
        self._request_numbers = itertools.count()
        self._one_thread = SingleThreadGuard()

    def get_tokenizer(self) -> Tokenizer:
        """Return the model's tokenizer.

        Raises:
            ValidationError: the engine was started without one.
        """
        if self.llm_engine.tokenizer is None:
            raise ValidationError("this engine works on token ids only (skip_tokenizer_init)")
        return self.llm_engine.tokenizer

    def reset_prefix_cache(self) -> bool:
        """Drop all cached prefixes; return False, without effect, while requests are running."""
        return self.llm_engine.reset_prefix_cache()

    def reset_encoder_cache(self) -> bool:
        """Drop the embeddings of media that no request uses; return False if some are in use and stay."""
        return self.llm_engine.reset_encoder_cache()

    def sleep(self, level: int = 1) -> None:
        """Release memory until `wake_up`: the KV cache (level 1), also the weights (2), or none (0).

        Raises:
            ValidationError: the level does not exist.
            ConflictError: another thread is generating.
        """
        with self._one_thread:
            self.llm_engine.sleep(level)

    def wake_up(self, tags: Collection[str] | None = None) -> None:
        """Restore everything, or these of "weights", "kv_cache" and "scheduling".

        Raises:
            ConflictError: a tag depends on one that would stay asleep.
            EngineError: the weights cannot be loaded, or memory is short; what was not restored stays asleep.
        """
        with self._one_thread:
            self.llm_engine.wake_up(tags)

    def shutdown(self) -> None:
        """Release the engine."""
        self.llm_engine.shutdown()

    @contextmanager
    def _abort_on_error(self) -> Iterator[list[str]]:
        """Collect the ids of requests, and abort all of them after an error."""
        requests: list[str] = []
        try:
            yield requests
        except BaseException:
            self.llm_engine.abort_request(requests)
            self.llm_engine.step()
            raise

    def _request_id(self) -> str:
        return str(next(self._request_numbers))

    def _run(self, request_ids: list[str], use_tqdm: bool) -> list[Any]:
        """Run until all requests have finished; return the last output of each, in this order."""
        finished: dict[str, Any] = {}
        bar = tqdm(
            total=len(request_ids), desc="Processed prompts", unit="prompt", disable=not use_tqdm or None
        )
        speed = SpeedMeter(bar)
        with bar:
            while self.llm_engine.has_unfinished_requests():
                for output in self.llm_engine.step():
                    finished[output.request_id] = output
                    speed.add(output)
        return [finished[request_id] for request_id in request_ids]


class SpeedMeter:
    """Tokens per second as the postfix of a progress bar."""

    def __init__(self, bar: tqdm[Any]) -> None:
        self._bar = bar
        self._num_input = 0
        self._num_output = 0

    def add(self, output: RequestOutput | PoolingRequestOutput[PoolingOutput]) -> None:
        self._num_input += len(output.prompt_token_ids)
        if isinstance(output, RequestOutput):
            self._num_output += sum(len(completion.token_ids) for completion in output.outputs)
        elapsed = max(self._bar.format_dict["elapsed"], 1e-6)
        self._bar.set_postfix_str(
            f"est. speed input: {self._num_input / elapsed:.2f} toks/s, "
            f"output: {self._num_output / elapsed:.2f} toks/s",
            refresh=False,
        )
        self._bar.update(1)


def as_prompts(prompts: PromptType | Sequence[PromptType]) -> list[PromptType]:
    """Return one or several prompts as a list."""
    if isinstance(prompts, str | dict):
        return [cast(PromptType, prompts)]
    if prompts and all(isinstance(item, int) for item in prompts):
        return [cast(PromptType, list(prompts))]
    return list(cast(Sequence[PromptType], prompts))


def per_prompt(name: str, value: Any, prompts: Sequence[Any]) -> list[Any]:
    """Return a value for each prompt; raise ValidationError if there are several, but not one per prompt."""
    if not isinstance(value, Sequence):
        return [value] * len(prompts)
    if len(value) != len(prompts):
        raise ValidationError(f"{name} has {len(value)} entries for {len(prompts)} prompts", param=name)
    return list(value)
