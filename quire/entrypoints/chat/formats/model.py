"""`ModelFormat`: the formats of one model, and what its tokenizer makes of their markers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from quire.entrypoints.chat.answer_grammar import AnswerGrammar
from quire.entrypoints.chat.formats.answer import AnswerReader
from quire.entrypoints.chat.formats.choice import AnswerFormat
from quire.entrypoints.chat.formats.events import Reasoning, Tools
from quire.entrypoints.chat.formats.thought_counter import ThoughtCounter, TokenIds
from quire.inputs import Conversation
from quire.outputs import Answer, ToolCall
from quire.sampling_params import SamplingParams, ThinkingMarkers
from quire.structured_output.params import StructuredOutputsParams
from quire.structured_output.structural_tag import as_format, as_tag


class MarkerTokenizer(Protocol):
    """What is needed of a tokenizer."""

    @property
    def special_tokens(self) -> Iterable[str]: ...

    def encode(
        self, text: str, *, add_special_tokens: bool = True, allow_special: bool = True
    ) -> list[int]: ...


END_CHARS = 256
"""Of a prompt that say where its answer begins."""


@dataclass(frozen=True)
class PromptEnd:
    """Where an answer begins: the end of its prompt, and of the message that it goes on with, if there is one.

    `may_think` is false if thinking was turned off, so that only the prompt itself can begin reasoning.
    """

    text: str = ""
    continued: str = ""
    may_think: bool = True

    @staticmethod
    def of(prompt: str, messages: Conversation, *, continues: bool, may_think: bool) -> PromptEnd:
        """The end of a rendered conversation; `continues` if the answer goes on with the last message."""
        content = messages[-1].get("content") if continues else None
        return PromptEnd(prompt[-END_CHARS:], content if isinstance(content, str) else "", may_think)


class ModelFormat:
    """How one model's answers are read."""

    def __init__(self, formats: AnswerFormat, tokenizer: MarkerTokenizer) -> None:
        self.formats = formats
        shown = formats.shown_tokens(tokenizer.special_tokens)
        self.shown_ids = tuple(token_id for token in sorted(shown) for token_id in _ids(tokenizer, token))
        """Special tokens that must be in the text for it to be read."""
        reasoning = formats.reasoning
        self._opens = [_ids(tokenizer, marker) for marker in (reasoning.opens if reasoning else ())]
        self._closes = [_ids(tokenizer, marker) for marker in (reasoning.closes if reasoning else ())]
        self._calls = [_ids(tokenizer, marker) for marker in self._calls_that_end_reasoning()]

    def reader(self, begin: PromptEnd, tools: Tools | None) -> AnswerReader:
        """Reads one answer; `tools` are those of a request that may be answered with calls."""
        return self.formats.reader(begin.text, tools, continued=begin.continued, may_think=begin.may_think)

    def grammar(self, begin: PromptEnd) -> AnswerGrammar:
        """Makes the constraints of one answer."""
        return self.formats.grammar(begin.text, continued=begin.continued, may_think=begin.may_think)

    def read(self, text: str, begin: PromptEnd, tools: Tools | None, *, was_cut: bool = False) -> Answer:
        """Read a whole answer; `was_cut` as for `AnswerReader.finish`."""
        reader = self.reader(begin, tools)
        found = reader.feed(text) + reader.finish(was_cut=was_cut)
        return Answer(
            "".join(event for event in found if isinstance(event, str)),
            "".join(event.text for event in found if isinstance(event, Reasoning)),
            tuple(event for event in found if isinstance(event, ToolCall)),
        )

    def counter(self, begin: PromptEnd, tools: Tools | None) -> ThoughtCounter | None:
        """Counts the reasoning of one answer, beside its reader; None if the model does not reason."""
        reasoning = self.formats.reasoning
        if reasoning is None:
            return None
        is_open = reasoning.is_open_after(begin.text, begin.continued, may_think=begin.may_think)
        calls = self._calls if tools is not None else ()
        return ThoughtCounter(self._opens, self._closes, calls, is_open=is_open)

    def settled(self, params: SamplingParams, begin: PromptEnd) -> SamplingParams:
        """Sampling parameters of an answer that begins there, so that it can be read and its reasoning ended."""
        params = params.settled(
            shown_special_token_ids=self.shown_ids,
            structured_outputs=self.text_constraint(params.structured_outputs, begin),
        )
        if params.thinking_token_budget is None or params.thinking_markers is not None:
            return params
        return params.settled(thinking_markers=self.thinking_markers(begin))

    def text_constraint(
        self, wanted: StructuredOutputsParams | None, begin: PromptEnd
    ) -> StructuredOutputsParams | None:
        """The constraint on an answer whose text is wanted to be this; where that is all of it, as the client has it.

        Raises:
            ValidationError: it has no valid form, or cannot be enforced from there on.
        """
        if wanted is None:
            return None
        text = as_format(wanted)
        answer = self.grammar(begin).text(text)
        return wanted if answer is text else as_tag(answer, wanted)

    def thinking_markers(self, begin: PromptEnd) -> ThinkingMarkers | None:
        """What opens and closes the reasoning of an answer that begins there; None if the model does not reason."""
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
