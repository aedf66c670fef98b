"""A drafter that knows the answers, to see what speculation would give if so many guesses were right."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import msgspec

from quire.config import EngineConfig
from quire.errors import ConfigError
from quire.spec_decode.drafter import NO_DRAFT, Draft, Text


class RecordedOutput(msgspec.Struct, frozen=True):
    """What a request said when it was asked before."""

    prompt_token_ids: list[int]
    token_ids: list[int]


class RecordedDrafter:
    """Guesses from a file of recorded outputs, each token right with a given probability.

    Raises:
        ConfigError: there is no such file, or it is none of recorded outputs.
    """

    keys: ClassVar[frozenset[str]] = frozenset({"model", "synthetic_acceptance_rate"})

    def __init__(self, config: EngineConfig) -> None:
        settings = config.speculative.settings
        self._rate = settings.synthetic_acceptance_rate
        self._vocab_size = config.arch.vocab_size
        self._outputs = {tuple(output.prompt_token_ids): output.token_ids for output in _read(settings.model)}
        self._by_request: dict[str, list[int]] = {}

    def propose(self, texts: Sequence[Text], most: int) -> list[Draft]:
        return [self._propose(text, most) for text in texts]

    def forget(self, request_id: str) -> None:
        self._by_request.pop(request_id, None)

    def _propose(self, text: Text, most: int) -> Draft:
        output = self._by_request.get(text.request_id)
        if output is None:
            prompt = tuple(text.token_ids[: text.num_prompt_tokens].tolist())
            output = self._by_request[text.request_id] = self._outputs.get(prompt, [])
        place = len(text.token_ids) - text.num_prompt_tokens
        right = output[place : place + most]
        if not right:
            return NO_DRAFT
        draw = random.Random(place)
        wrong = ((token_id + 1) % self._vocab_size for token_id in right)
        return Draft(
            [good if draw.random() < self._rate else bad for good, bad in zip(right, wrong, strict=True)]
        )


def write_recorded(path: Path, outputs: Sequence[RecordedOutput]) -> None:
    """Write a file for this drafter."""
    path.write_bytes(msgspec.json.encode(outputs))


def _read(path: str | None) -> list[RecordedOutput]:
    if path is None:
        raise ConfigError(
            '--speculative-config: method "recorded" needs a "model", a file of recorded outputs'
        )
    try:
        return msgspec.json.decode(Path(path).read_bytes(), type=list[RecordedOutput])
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"--speculative-config: model {path!r} has no recorded outputs: {error}") from None
