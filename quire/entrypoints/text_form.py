# SPDX-License-Identifier: Apache-2.0
"""`TextForm`: tokenizer, chat template and answer formats of one model or adapter."""

from __future__ import annotations

import dataclasses
import functools
import weakref
from dataclasses import dataclass
from pathlib import Path

from quire.engine.tokenizer import Tokenizer
from quire.engine.tokenizer_cache import TokenizerContext
from quire.entrypoints.chat.formats.examples import examples_of
from quire.entrypoints.chat.formats.model import ModelFormat
from quire.entrypoints.chat.formats.selection import AnswerFormat, choose
from quire.entrypoints.chat.messages import MediaTexts
from quire.entrypoints.chat.template import ChatTemplate
from quire.entrypoints.chat.thinking_switch import ThinkingSwitch
from quire.entrypoints.fill_in import FillIn
from quire.errors import ValidationError


@dataclass(frozen=True)
class FormOptions:
    """Operator's options for texts.

    Args:
        chat_template: replaces the model's; an adapter's own template takes precedence unless `for_adapters`.
        content_format: see `ChatTemplate`.
        tool_call_parser, reasoning_parser: answer formats; "auto" selects them by the chat template.
        media: texts of the model's media; None if it takes text only.
    """

    chat_template: str | Path | None = None
    content_format: str = "auto"
    tool_call_parser: str = "auto"
    reasoning_parser: str = "auto"
    for_adapters: bool = False
    media: MediaTexts | None = None


class TextForm:
    """Text form of one tokenizer with its templates, all compiled lazily."""

    def __init__(self, tokenizer: Tokenizer | None, vocab_size: int, options: FormOptions) -> None:
        self._tokenizer = tokenizer
        self.vocab_size = vocab_size
        self._options = options
        self.is_made = False

    @property
    def tokenizer(self) -> Tokenizer:
        """Tokenizer of the model.

        Raises:
            ValidationError: the engine works on token ids only.
        """
        if self._tokenizer is None:
            raise ValidationError("this server has no tokenizer (--skip-tokenizer-init); send token ids")
        return self._tokenizer

    def make(self) -> None:
        """Compile the templates now, if there are any, and select the answer formats.

        Raises:
            ConfigError: as `answer_format`.
        """
        if self.has_chat:
            self.thinking.is_off({})
        self.is_made = True

    @property
    def has_chat(self) -> bool:
        """True if there is a chat template."""
        tokenizer, media = self._tokenizer, self._options.media
        own = media is not None and media.template
        return tokenizer is not None and bool(self._options.chat_template or tokenizer.chat_template or own)

    @functools.cached_property
    def chat_template(self) -> ChatTemplate:
        """Compiled chat template.

        Raises:
            ValidationError: the model has none.
            ConfigError: it is invalid.
        """
        options, chosen = self._options, self._options.chat_template
        if chosen is None and options.media is not None and not self.tokenizer.chat_template:
            chosen = options.media.template or None
        return ChatTemplate.from_tokenizer(self.tokenizer, chosen, options.content_format, options.media)

    @functools.cached_property
    def answer_format(self) -> ModelFormat:
        """Formats of tool calls and reasoning.

        Raises:
            ConfigError: a parser does not exist; also as `chat_template`.
        """
        options, template = self._options, self.chat_template
        examples = examples_of(template)
        formats = choose(options.tool_call_parser, options.reasoning_parser, template.all_sources, examples)
        return ModelFormat(formats, self.tokenizer)

    @functools.cached_property
    def as_text(self) -> TextForm:
        """Text form without tool calls and reasoning; needs no template."""
        plain = TextForm(self._tokenizer, self.vocab_size, self._options)
        plain.answer_format = ModelFormat(AnswerFormat(), self.tokenizer)
        return plain

    @functools.cached_property
    def thinking(self) -> ThinkingSwitch:
        """Detector of disabled thinking. Raises ConfigError as `answer_format`."""
        return ThinkingSwitch(self.chat_template, self.answer_format.formats.reasoning)

    @property
    def fills_in(self) -> bool:
        """True if the model supports fill-in-the-middle."""
        try:
            return bool(self.fill_in)
        except ValidationError:
            return False

    @functools.cached_property
    def fill_in(self) -> FillIn:
        """Encoder of fill-in-the-middle prompts.

        Raises:
            ValidationError: the model does not support them.
        """
        return FillIn(self.tokenizer)


class TextForms:
    """Text forms of a model and of its adapters."""

    def __init__(self, model: TokenizerContext, options: FormOptions) -> None:
        self.model = TextForm(model.tokenizer, model.vocab_size, options)
        self._model_context = model
        self._options = options
        self._others: weakref.WeakKeyDictionary[TokenizerContext, TextForm] = weakref.WeakKeyDictionary()

    def of(self, tokenizer_context: TokenizerContext) -> TextForm:
        """Return the text form of a tokenizer context, cached as long as the context lives."""
        if tokenizer_context is self._model_context:
            return self.model
        form = self._others.get(tokenizer_context)
        if form is None:
            options = self._options_of(tokenizer_context)
            form = self._others[tokenizer_context] = TextForm(
                tokenizer_context.tokenizer, tokenizer_context.vocab_size, options
            )
        return form

    def _options_of(self, tokenizer_context: TokenizerContext) -> FormOptions:
        """Return the options of an adapter, whose own template overrides the operator's."""
        model, own = self._model_context.tokenizer, tokenizer_context.tokenizer
        has_own = model is not None and own is not None and own.chat_templates != model.chat_templates
        if not has_own or self._options.for_adapters:
            return self._options
        return dataclasses.replace(self._options, chat_template=None)
