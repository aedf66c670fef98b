"""`TextForm`: what texts look like that a model is given, and those that it gives."""

from __future__ import annotations

import dataclasses
import functools
import weakref
from dataclasses import dataclass
from pathlib import Path

from quire.engine.lexicons import Lexicon
from quire.engine.tokenizer import Tokenizer
from quire.entrypoints.chat.formats.choice import AnswerFormat, choose
from quire.entrypoints.chat.formats.examples import examples_of
from quire.entrypoints.chat.formats.model import ModelFormat
from quire.entrypoints.chat.template import ChatTemplate
from quire.entrypoints.chat.thinking import ThinkingSwitch
from quire.entrypoints.fill_in import FillIn
from quire.errors import ValidationError


@dataclass(frozen=True)
class FormOptions:
    """What an operator says of texts.

    Args:
        chat_template: in place of the model's; an adapter that brings one has its own, unless it is `for_adapters`.
        content_format: see `ChatTemplate`.
        tool_call_parser, reasoning_parser: how answers are written; "auto" goes by the chat template.
    """

    chat_template: str | Path | None = None
    content_format: str = "auto"
    tool_call_parser: str = "auto"
    reasoning_parser: str = "auto"
    for_adapters: bool = False


class TextForm:
    """That of one tokenizer with its templates; what is made of them is made when it is asked for."""

    def __init__(self, tokenizer: Tokenizer | None, vocab_size: int, options: FormOptions) -> None:
        self._tokenizer = tokenizer
        self.vocab_size = vocab_size
        self._options = options
        self.is_made = False

    @property
    def tokenizer(self) -> Tokenizer:
        """Raises ValidationError if the engine works on token ids only."""
        if self._tokenizer is None:
            raise ValidationError("this server has no tokenizer (--skip-tokenizer-init); send token ids")
        return self._tokenizer

    def make(self) -> None:
        """Compile the templates now, if there are any, and choose the formats of answers.

        Raises:
            ConfigError: as `answer_format`.
        """
        if self.has_chat:
            self.thinking.is_off({})
        self.is_made = True

    @property
    def has_chat(self) -> bool:
        """Whether there is a chat template."""
        tokenizer = self._tokenizer
        return tokenizer is not None and bool(self._options.chat_template or tokenizer.chat_template)

    @functools.cached_property
    def chat_template(self) -> ChatTemplate:
        """Raises ValidationError if the model has none, ConfigError if it is not valid."""
        options = self._options
        return ChatTemplate.from_tokenizer(self.tokenizer, options.chat_template, options.content_format)

    @functools.cached_property
    def answer_format(self) -> ModelFormat:
        """How the model writes tool calls and reasoning.

        Raises:
            ConfigError: a parser is named that is none; and as `chat_template`.
        """
        options, template = self._options, self.chat_template
        examples = examples_of(template)
        formats = choose(options.tool_call_parser, options.reasoning_parser, template.all_sources, examples)
        return ModelFormat(formats, self.tokenizer)

    @functools.cached_property
    def as_text(self) -> TextForm:
        """The form of answers that are text alone, without tool calls and reasoning; needs no template."""
        plain = TextForm(self._tokenizer, self.vocab_size, self._options)
        plain.answer_format = ModelFormat(AnswerFormat(), self.tokenizer)
        return plain

    @functools.cached_property
    def thinking(self) -> ThinkingSwitch:
        """What the template makes of its options about thinking. Raises ConfigError as `answer_format`."""
        return ThinkingSwitch(self.chat_template, self.answer_format.formats.reasoning)

    @property
    def fills_in(self) -> bool:
        """Whether the model was made to fill in the middle."""
        try:
            return bool(self.fill_in)
        except ValidationError:
            return False

    @functools.cached_property
    def fill_in(self) -> FillIn:
        """Raises ValidationError if the model was not made to fill in the middle."""
        return FillIn(self.tokenizer)


class TextForms:
    """That of a model, and those of its adapters."""

    def __init__(self, model: Lexicon, options: FormOptions) -> None:
        self.model = TextForm(model.tokenizer, model.vocab_size, options)
        self._lexicon = model
        self._options = options
        self._others: weakref.WeakKeyDictionary[Lexicon, TextForm] = weakref.WeakKeyDictionary()

    def of(self, lexicon: Lexicon) -> TextForm:
        """The form of texts in its tokens, as long as anybody has it."""
        if lexicon is self._lexicon:
            return self.model
        form = self._others.get(lexicon)
        if form is None:
            options = self._options_of(lexicon)
            form = self._others[lexicon] = TextForm(lexicon.tokenizer, lexicon.vocab_size, options)
        return form

    def _options_of(self, lexicon: Lexicon) -> FormOptions:
        """An adapter's own template goes before one that is in place of the model's."""
        model, own = self._lexicon.tokenizer, lexicon.tokenizer
        has_own = model is not None and own is not None and own.chat_templates != model.chat_templates
        if not has_own or self._options.for_adapters:
            return self._options
        return dataclasses.replace(self._options, chat_template=None)
