"""`OfflineEngine`: an engine in this process, whose requests are run all together, and what is asked of it as a whole.

Invariant: one thread at a time; an error leaves no request behind.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

from tqdm import tqdm

from quire.engine.llm_engine import LLMEngine, OneThread
from quire.engine.tokenizer import Tokenizer
from quire.errors import ValidationError
from quire.inputs import PromptType
from quire.outputs import RequestOutput
from quire.pooling_outputs import PoolingOutput, PoolingRequestOutput


class OfflineEngine:
    """Base of `LLM`."""

    def __init__(self, llm_engine: LLMEngine) -> None:
        self.llm_engine = llm_engine
        self._request_numbers = itertools.count()
        self._one_thread = OneThread()

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer.

        Raises:
            ValidationError: the engine was started without one.
        """
        if self.llm_engine.tokenizer is None:
            raise ValidationError("this engine works on token ids only (skip_tokenizer_init)")
        return self.llm_engine.tokenizer

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes; False, and nothing done, while requests are running."""
        return self.llm_engine.reset_prefix_cache()

    def sleep(self, level: int = 1) -> None:
        """Give memory back until `wake_up`: the KV cache's (level 1), the weights' too (2), or none (0).

        Raises:
            ValidationError: there is no such level.
            ConflictError: another thread is generating.
        """
        with self._one_thread:
            self.llm_engine.sleep(level)

    def wake_up(self, tags: Collection[str] | None = None) -> None:
        """Have everything again, or of "weights", "kv_cache" and "scheduling" these.

        Raises:
            ConflictError: one of them needs what would still sleep.
            EngineError: the weights cannot be loaded, or memory is short; what could not wake sleeps on.
        """
        with self._one_thread:
            self.llm_engine.wake_up(tags)

    def shutdown(self) -> None:
        """Release the engine."""
        self.llm_engine.shutdown()

    @contextmanager
    def _abort_on_error(self) -> Iterator[list[str]]:
        """Around requests, whose ids go into the list: an error leaves none of them behind."""
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
        """The last output of each request, in this order."""
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
    """Shows tokens per second behind a progress bar."""

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
    """One prompt, or several, as a list."""
    if isinstance(prompts, str | dict):
        return [cast(PromptType, prompts)]
    if prompts and all(isinstance(item, int) for item in prompts):
        return [cast(PromptType, list(prompts))]
    return list(cast(Sequence[PromptType], prompts))


def per_prompt(name: str, value: Any, prompts: Sequence[Any]) -> list[Any]:
    """A value for each prompt; raises ValidationError if there are several, but not so many."""
    if not isinstance(value, Sequence):
        return [value] * len(prompts)
    if len(value) != len(prompts):
        raise ValidationError(f"{name} has {len(value)} entries for {len(prompts)} prompts", param=name)
    return list(value)
