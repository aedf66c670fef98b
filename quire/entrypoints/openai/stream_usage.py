"""When a stream tells its usage: in a last chunk, in every chunk, or not at all."""

from __future__ import annotations

from msgspec import UNSET, UnsetType

from quire.entrypoints.openai.protocol.requests import StreamOptions
from quire.entrypoints.openai.protocol.responses import Usage
from quire.entrypoints.openai.usage import UsageMeter
from quire.outputs import RequestOutput


class StreamUsage:
    """Counts as the outputs pass, and knows what each chunk shows of it."""

    def __init__(self, options: StreamOptions | None, *, force: bool) -> None:
        self.wanted = force or (options is not None and options.include_usage)
        self._in_every_chunk = self.wanted and (
            force or (options is not None and options.continuous_usage_stats)
        )
        self._meter = UsageMeter()

    def add(self, prompt_index: int, output: RequestOutput) -> None:
        self._meter.add(prompt_index, output)

    def of_chunk(self) -> Usage | UnsetType | None:
        """OpenAI sends null with every chunk before the one that has the usage."""
        if self._in_every_chunk:
            return self._meter.usage()
        return None if self.wanted else UNSET

    def total(self) -> Usage:
        return self._meter.usage()
