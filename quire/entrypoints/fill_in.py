# SPDX-License-Identifier: Apache-2.0
"""Fill-in-the-middle prompts for the `suffix` of completions.

Invariant: the model's tokenizer has all markers of a known layout; text that spells a marker is encoded as plain text.
"""

from __future__ import annotations

from typing import NamedTuple

from quire.engine.tokenizer import Tokenizer
from quire.errors import ValidationError

PREFIX, SUFFIX = object(), object()


class FillInLayout(NamedTuple):
    """Order of the single-token markers and of the two texts in a prompt."""

    parts: tuple[object, ...]
    # Token with which the model ends the middle, if it is not its end-of-sequence token.
    end: str | None = None


LAYOUTS = (
    # Qwen-Coder, CodeGemma; StarCoder, Granite; DeepSeek-Coder; CodeLlama; Codestral
    FillInLayout(("<|fim_prefix|>", PREFIX, "<|fim_suffix|>", SUFFIX, "<|fim_middle|>")),
    FillInLayout(("<fim_prefix>", PREFIX, "<fim_suffix>", SUFFIX, "<fim_middle>")),
    FillInLayout(("<｜fim▁begin｜>", PREFIX, "<｜fim▁hole｜>", SUFFIX, "<｜fim▁end｜>")),
    FillInLayout(("▁<PRE>", PREFIX, "▁<SUF>", SUFFIX, "▁<MID>"), "▁<EOT>"),
    FillInLayout(("[SUFFIX]", SUFFIX, "[PREFIX]", PREFIX)),
)


class FillIn:
    """Encoder of fill-in-the-middle prompts.

    Raises:
        ValidationError: the model has no known layout.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._layout = next((one for one in LAYOUTS if self._has(one)), None)
        if self._layout is None:
            known = ", ".join(str(one.parts[0]) for one in LAYOUTS)
            raise ValidationError(
                f"suffix needs a fill-in-the-middle model; this model's tokenizer has none of {known}",
                param="suffix",
            )

    @property
    def end_ids(self) -> list[int]:
        """Ids of tokens with which the model ends the middle."""
        end = (
            None
            if self._layout is None or self._layout.end is None
            else self._tokenizer.id_of(self._layout.end)
        )
        return [] if end is None else [end]

    def encode(self, prefix: str, suffix: str, *, add_special_tokens: bool) -> list[int]:
        """Return the token ids of the prompt."""
        assert self._layout is not None
        texts = {PREFIX: prefix, SUFFIX: suffix}
        bos = self._tokenizer.bos_token_id
        starts = add_special_tokens and self._tokenizer.encode("a")[:1] == [bos]
        ids = [bos] if starts and bos is not None else []
        for part in self._layout.parts:
            if isinstance(part, str):
                mark = self._tokenizer.id_of(part)
                assert mark is not None
                ids.append(mark)
            elif texts[part]:
                ids += self._tokenizer.encode(texts[part], add_special_tokens=False, allow_special=False)
        return ids

    def _has(self, layout: FillInLayout) -> bool:
        return all(self._tokenizer.id_of(part) is not None for part in layout.parts if isinstance(part, str))
