# SPDX-License-Identifier: Apache-2.0
"""Prompts of models whose encoder reads an image: the image's rows and the decoder's first tokens to one prompt.

Invariant: torch-free. A prompt's text and token ids are the decoder's; its first positions take the encoder's output,
of which an image has as many rows as any other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from quire.config import EngineConfig
from quire.engine.prompt_forms import TokenizedPrompt
from quire.engine.tokenizer import Tokenizer
from quire.errors import ValidationError
from quire.models.vision_rows import SWIN
from quire.seq2seq.florence_prompts import FlorencePrompts
from quire.seq2seq.prompts import DECODER, ENCODER, EncoderPrompts, PromptOptions
from quire.seq2seq.settings import whole_config

_OWN_PROMPTS: dict[str, type[EncoderPrompts]] = {"Florence2ForConditionalGeneration": FlorencePrompts}
"""Architecture -> prompts of a kind of its own."""


def prompts_of(config: EngineConfig, tokenizer: Tokenizer | None) -> EncoderPrompts:
    """Return the prompts of a model. Raises ModelLoadError: its generation config is malformed."""
    part_of = config.arch.part_of
    assert part_of is not None, "an encoder belongs to a whole model"
    usual = ImagePrompts if part_of.reads_images else EncoderPrompts
    return _OWN_PROMPTS.get(part_of.architecture, usual)(config, tokenizer)


class ImagePrompts(EncoderPrompts):
    """Prompts of one model that reads images. Donut's tasks begin its decoder in place of the start token."""

    def __init__(self, config: EngineConfig, tokenizer: Tokenizer | None) -> None:
        super().__init__(config, tokenizer)
        encoder = whole_config(config).get("encoder")
        self.begins_with_start = not isinstance(encoder, dict) or encoder.get("model_type") != SWIN

    def split(self, prompt: Any) -> tuple[Any, PromptOptions]:
        """Return the prompt without what names its decoder's part, and that part.

        Raises:
            ValidationError: there is no image, or the decoder's prompt is given twice.
        """
        if not isinstance(prompt, Mapping) or not prompt.get("media"):
            raise ValidationError(
                f"{self._whole.architecture} reads one image per prompt, got none; send it in 'multi_modal_data' "
                "(LLM.generate) or as a part of a message (/v1/chat/completions)",
                param="prompt",
            )
        options = PromptOptions(self._decoder(prompt))
        rest = {name: value for name, value in prompt.items() if name not in (ENCODER, DECODER)}
        if options.decoder is not None and rest.get("prompt_token_ids"):
            raise ValidationError(
                f"the prompt of a model that reads images is its decoder's, and {DECODER!r} is, too; give one",
                param=DECODER,
            )
        return rest, options

    def joined(self, prompt: TokenizedPrompt, options: PromptOptions) -> TokenizedPrompt:
        """Return the whole prompt. Raises ValidationError: the decoder's is too long."""
        if options.decoder is None:
            options = PromptOptions(prompt.token_ids)
        decoder, num_forced = self._decoder_ids(options)
        end = self._whole.encoder_positions
        return replace(
            prompt,
            token_ids=[*[self._settings.start] * end, *decoder],
            num_forced=num_forced,
            num_encoded=end,
        )
