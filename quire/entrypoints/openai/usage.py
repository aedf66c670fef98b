"""Counts the tokens of one HTTP request."""

from __future__ import annotations

from quire.entrypoints.openai.protocol.responses import PromptTokensDetails, Usage
from quire.outputs import RequestOutput


class UsageMeter:
    """Adds up outputs; each must carry only tokens that no earlier one carried."""

    def __init__(self) -> None:
        self._prompt_tokens: dict[int, int] = {}
        self._cached_tokens: dict[int, int] = {}
        self._completion_tokens = 0

    def add(self, prompt_index: int, output: RequestOutput) -> None:
        self._prompt_tokens[prompt_index] = len(output.prompt_token_ids)
        cached = self._cached_tokens.get(prompt_index, 0)
        self._cached_tokens[prompt_index] = max(cached, output.num_cached_tokens)
        self._completion_tokens += sum(len(completion.token_ids) for completion in output.outputs)

    def usage(self) -> Usage:
        num_prompt_tokens = sum(self._prompt_tokens.values())
        return Usage(
            prompt_tokens=num_prompt_tokens,
            completion_tokens=self._completion_tokens,
            total_tokens=num_prompt_tokens + self._completion_tokens,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=sum(self._cached_tokens.values())),
        )
