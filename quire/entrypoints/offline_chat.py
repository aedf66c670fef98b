# SPDX-License-Identifier: Apache-2.0
"""Conversations of `LLM.chat`: rendered before, and read after the model has answered."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from quire.adapters import AdapterRequest
from quire.entrypoints.chat.formats.model import ModelFormat, PromptEnd
from quire.entrypoints.chat.formats.scanning import Tools
from quire.entrypoints.chat.template import RenderedChat
from quire.entrypoints.text_form import TextForm
from quire.inputs import ChatMessage, PromptType
from quire.outputs import RequestOutput
from quire.sampling_params import SamplingParams


class ChatOptions(NamedTuple):
    """Arguments of `LLM.chat` that are the same for all conversations."""

    template: str | None
    add_generation_prompt: bool
    continue_final_message: bool
    tools: list[dict[str, Any]] | None
    template_kwargs: Mapping[str, Any]
    mm_processor_kwargs: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class OfflineChat:
    """Rendered conversation: the request for it, and the form of its answer."""

    prompt: PromptType
    params: SamplingParams
    adapter: AdapterRequest | None
    answer_format: ModelFormat
    end: PromptEnd
    tools: Tools | None

    def read(self, output: RequestOutput) -> RequestOutput:
        """Set the `answer` of each completion, and return the output."""
        for completion in output.outputs:
            completion.answer = self.answer_format.read(
                completion.text, self.end, self.tools, was_cut=completion.was_cut
            )
        return output


def compose_chat(
    form: TextForm,
    messages: Sequence[ChatMessage],
    params: SamplingParams,
    adapter: AdapterRequest | None,
    options: ChatOptions,
    tools: Tools | None,
    encode: Callable[[RenderedChat], PromptType],
) -> OfflineChat:
    """Render a conversation, whose text `encode` turns into a prompt.

    Raises:
        ValidationError: there is no chat template, or a message cannot be rendered.
    """
    chat = form.chat_template.compose(
        messages,
        tools=options.tools,
        add_generation_prompt=options.add_generation_prompt,
        continue_final_message=options.continue_final_message,
        **options.template_kwargs,
    )
    end = PromptEnd.of(
        chat.text,
        messages,
        continues=options.continue_final_message,
        may_think=not form.thinking.is_off(options.template_kwargs),
    )
    resolved = form.answer_format.with_format_options(params, end)
    return OfflineChat(encode(chat), resolved, adapter, form.answer_format, end, tools)
