# SPDX-License-Identifier: Apache-2.0
"""`ModelFormat`: a model's answer formats, with the token ids of their markers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from quire.entrypoints.chat.formats.answer import AnswerReader
from quire.entrypoints.chat.formats.reasoning import ReasoningCounter, TokenIds
from quire.entrypoints.chat.formats.scanning import Reasoning, Tools
from quire.entrypoints.chat.formats.selection import AnswerFormat
from quire.entrypoints.chat.tool_grammar import AnswerGrammar
from quire.inputs import Conversation
from quire.json_schema.structural_tag import as_format, as_tag
from quire.outputs import ChatAnswer, ToolCall
from quire.sampling_params import SamplingParams, ThinkingMarkers
from quire.structured_outputs_params import StructuredOutputsParams

END_CHARS = 256  # Length of a prompt's end that determines the state in which its answer begins.


class MarkerTokenizer(Protocol):
    """Tokenizer that encodes markers."""

    @property
    def special_tokens(self) -> Iterable[str]: ...

    def encode(
        self, text: str, *, add_special_tokens: bool = True, allow_special: bool = True
    ) -> list[int]: ...


@dataclass(frozen=True)
class PromptEnd:
    """State in which an answer begins: the prompt's end, and the message that the answer continues, if any.

    `may_think` is False if thinking is disabled, so that only the prompt itself can open reasoning.
    """

    text: str = ""
    continued: str = ""
    may_think: bool = True

    @staticmethod
    def of(prompt: str, messages: Conversation, *, continues: bool, may_think: bool) -> PromptEnd:
        """Return the state after a rendered conversation; `continues`: the answer continues the last message."""
        content = messages[-1].get("content") if continues else None
        return PromptEnd(prompt[-END_CHARS:], content if isinstance(content, str) else "", may_think)


class ModelFormat:
    """Reading and constraining of one model's answers."""

    def __init__(self, formats: AnswerFormat, tokenizer: MarkerTokenizer) -> None:
        self.formats = formats
        shown = formats.shown_tokens(tokenizer.special_tokens)
        # Special tokens that must be kept in the text to parse it.
        self.shown_ids = tuple(token_id for token in sorted(shown) for token_id in _ids(tokenizer, token))
        reasoning = formats.reasoning
        self._opens = [_ids(tokenizer, marker) for marker in (reasoning.opens if reasoning else ())]
        self._closes = [_ids(tokenizer, marker) for marker in (reasoning.closes if reasoning else ())]
        self._calls = [_ids(tokenizer, marker) for marker in self._calls_that_end_reasoning()]

    def reader(self, begin: PromptEnd, tools: Tools | None) -> AnswerReader:
        """Return the reader of one answer; `tools` are the request's, if calls are allowed."""
        return self.formats.reader(begin.text, tools, continued=begin.continued, may_think=begin.may_think)

    def grammar(self, begin: PromptEnd) -> AnswerGrammar:
        """Return the grammar of one answer."""
        return self.formats.grammar(begin.text, continued=begin.continued, may_think=begin.may_think)

    def read(self, text: str, begin: PromptEnd, tools: Tools | None, *, was_cut: bool = False) -> ChatAnswer:
        """Parse a whole answer; `was_cut` as for `AnswerReader.finish`."""
        reader = self.reader(begin, tools)
        found = reader.feed(text) + reader.finish(was_cut=was_cut)
        return ChatAnswer(
            "".join(event for event in found if isinstance(event, str)),
            "".join(event.text for event in found if isinstance(event, Reasoning)),
            tuple(event for event in found if isinstance(event, ToolCall)),
        )

    def counter(self, begin: PromptEnd, tools: Tools | None) -> ReasoningCounter | None:
        """Return the counter of one answer's reasoning tokens; None if the model does not reason."""
        reasoning = self.formats.reasoning
        if reasoning is None:
            return None
        is_open = reasoning.is_open_after(begin.text, begin.continued, may_think=begin.may_think)
        calls = self._calls if tools is not None else ()
        return ReasoningCounter(self._opens, self._closes, calls, is_open=is_open)

    def with_format_options(self, params: SamplingParams, begin: PromptEnd) -> SamplingParams:
        """Return sampling parameters with what parsing the answer and limiting its reasoning need."""
        params = params.replace_unchecked(
            shown_special_token_ids=self.shown_ids,
            structured_outputs=self.text_constraint(params.structured_outputs, begin),
        )
        if params.thinking_token_budget is None or params.thinking_markers is not None:
            return params
        return params.replace_unchecked(thinking_markers=self.thinking_markers(begin))

    def text_constraint(
        self, wanted: StructuredOutputsParams | None, begin: PromptEnd
    ) -> StructuredOutputsParams | None:
        """Return the constraint on an answer with constrained text, unchanged if the answer is that text alone.

        Raises:
            ValidationError: it is malformed, or cannot be enforced from this state.
        """
        if wanted is None:
            return None
        text = as_format(wanted)
        answer = self.grammar(begin).text(text)
        return wanted if answer is text else as_tag(answer, wanted)

    def thinking_markers(self, begin: PromptEnd) -> ThinkingMarkers | None:
        """Return the markers of the reasoning of an answer that begins in this state; None if the model does not
        reason.
        """
        reasoning = self.formats.reasoning
        if reasoning is None or not self._opens or not self._closes:
            return None
        is_open = reasoning.is_open_after(begin.text, begin.continued, may_think=begin.may_think)
        return ThinkingMarkers(tuple(self._opens[0]), tuple(self._closes[0]), is_open)

    def _calls_that_end_reasoning(self) -> Sequence[str]:
        reasoning, tools = self.formats.reasoning, self.formats.tools
        return tools.opens if reasoning and tools and reasoning.ends_at_calls else ()


def _ids(tokenizer: MarkerTokenizer, text: str) -> TokenIds:
    return tuple(tokenizer.encode(text, add_special_tokens=False))
