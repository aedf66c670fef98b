"""`suffix` of completions: a prompt that asks a model to fill in the middle.

Invariant: only a model whose tokenizer has the marks of a known layout is asked; text that spells a mark is plain text.
"""

from __future__ import annotations

from typing import NamedTuple

from quire.engine.tokenizer import Tokenizer
from quire.errors import ValidationError

PREFIX, SUFFIX = object(), object()


class Layout(NamedTuple):
    """What stands behind each other: marks, each one token, and the two texts."""

    parts: tuple[object, ...]
    end: str | None = None
    """A token with which the model ends the middle, if it is not its end of sequence."""


LAYOUTS = (
    # Qwen-Coder, CodeGemma; StarCoder, Granite; DeepSeek-Coder; CodeLlama; Codestral
    Layout(("<|fim_prefix|>", PREFIX, "<|fim_suffix|>", SUFFIX, "<|fim_middle|>")),
    Layout(("<fim_prefix>", PREFIX, "<fim_suffix>", SUFFIX, "<fim_middle>")),
    Layout(("<｜fim▁begin｜>", PREFIX, "<｜fim▁hole｜>", SUFFIX, "<｜fim▁end｜>")),
    Layout(("▁<PRE>", PREFIX, "▁<SUF>", SUFFIX, "▁<MID>"), "▁<EOT>"),
    Layout(("[SUFFIX]", SUFFIX, "[PREFIX]", PREFIX)),
)


class FillIn:
    """Makes prompts of a prefix and a suffix.

    Raises:
        ValidationError: the model has no layout for this.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._layout = next((one for one in LAYOUTS if self._has(one)), None)
        if self._layout is None:
            known = ", ".join(str(one.parts[0]) for one in LAYOUTS)
            raise ValidationError(
                f"suffix needs a model that was made to fill in the middle; this one's tokenizer has none of {known}",
                param="suffix",
            )

    @property
    def end_ids(self) -> list[int]:
        """Tokens with which the model ends the middle."""
        end = (
            None
            if self._layout is None or self._layout.end is None
            else self._tokenizer.id_of(self._layout.end)
        )
        return [] if end is None else [end]

    def encode(self, prefix: str, suffix: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of the prompt."""
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

    def _has(self, layout: Layout) -> bool:
        return all(self._tokenizer.id_of(part) is not None for part in layout.parts if isinstance(part, str))
