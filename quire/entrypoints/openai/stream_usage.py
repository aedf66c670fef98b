"""What each chunk of a stream tells of the whole: usage if the client asked for it, and all else at the end.

Invariant: exactly one chunk, the last, has what `UsageMeter.closing` gives. Usage that was asked for comes in a chunk
of its own behind the choices, as at OpenAI; otherwise the chunk that ends the last choice is the last.
"""

from __future__ import annotations

from typing import Any

from msgspec import UNSET

from quire.entrypoints.openai.protocol.requests import GenerationRequest
from quire.entrypoints.openai.usage import UsageMeter
from quire.outputs import CompletionOutput, RequestOutput


class StreamUsage:
    """Counts as the outputs pass, and knows what each chunk shows of it.

    Args:
        prompt_lengths: tokens of each prompt of the request.
        force: show usage in every chunk, asked for or not.
    """

    def __init__(self, request: GenerationRequest, prompt_lengths: list[int], *, force: bool) -> None:
        options = request.stream_options
        self.wanted = force or (options is not None and options.include_usage)
        self._in_every_chunk = self.wanted and (
            force or (options is not None and options.continuous_usage_stats)
        )
        self._notes = request.notes
        self._meter = UsageMeter(prompt_lengths)
        self._num_open = request.n * len(prompt_lengths)

    def add(self, prompt_index: int, output: RequestOutput) -> None:
        """Take in an output, before its chunks are made."""
        self._meter.add_prompt(prompt_index, output)

    def note_reasoning(self, num_tokens: int | None) -> None:
        """How many tokens so far were reasoning; None if the model does not reason."""
        self._meter.reasoning_tokens = num_tokens

    @property
    def shows_nothing_yet(self) -> bool:
        """Whether all chunks that end no choice tell the same."""
        return not self._in_every_chunk

    def pass_by(self, prompt_index: int, completion: CompletionOutput) -> None:
        """Take in news that ends no choice, of which no chunk tells anything. Its output is not the last."""
        self._meter.add_completion(prompt_index, completion)

    def of_opening(self) -> dict[str, Any]:
        """Fields of a chunk that has no tokens; OpenAI sends null with every chunk before the one with the usage."""
        if self._in_every_chunk:
            return {"usage": self._meter.usage()}
        return {"usage": None if self.wanted else UNSET}

    def of_chunk(self, prompt_index: int, completion: CompletionOutput) -> dict[str, Any]:
        """Fields of the chunk with this news of a choice."""
        self._meter.add_completion(prompt_index, completion)
        self._num_open -= completion.finished()
        return self.of_opening() if self._num_open or self.wanted else self.closing()

    def closing(self) -> dict[str, Any]:
        """Fields of the last chunk."""
        return self._meter.closing(self._notes)
