# SPDX-License-Identifier: Apache-2.0
"""Offline generation.

Invariant: outputs are in prompt order; the engine core runs in this process.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any, Self, cast

from quire.adapters import LoRARequest
from quire.config import DEMO_MODEL, EngineArgs, EngineConfig, engine_fields
from quire.engine.llm_engine import LLMEngine
from quire.entrypoints.chat.formats.scanning import Tools
from quire.entrypoints.chat.formats.selection import choose
from quire.entrypoints.chat.media import ENCODER_PROMPT, PROMPT_FIELDS, OfflineMedia, has_data
from quire.entrypoints.chat.template import RenderedChat
from quire.entrypoints.chat.tool_schemas import check_names, tool_schemas
from quire.entrypoints.offline import OfflineRequest, as_prompts, each_with, per_prompt
from quire.entrypoints.offline_chat import ChatOptions, OfflineChat, compose_chat
from quire.entrypoints.text_form import FormOptions, TextForm, TextForms
from quire.errors import ValidationError
from quire.features import OFFLINE_METHODS
from quire.inputs import ChatMessage, PromptType
from quire.outputs import RequestOutput
from quire.plugins import import_place
from quire.sampling_params import RequestOutputKind, SamplingParams
from quire.vllm_names.parameters import with_vllm_keywords

if TYPE_CHECKING:
    from quire.pooling.offline import OfflinePooling
else:
    OfflinePooling = import_place(OFFLINE_METHODS.get("pooling", "quire.entrypoints.offline:OfflineEngine"))

# One for all prompts, or one or None per prompt.
Adapters = LoRARequest | Sequence[LoRARequest | None] | None


class OfflineLLM(OfflinePooling):
    """Base of `LLM`: prompts and conversations in, outputs in their order."""

    def __init__(
        self,
        model: str = DEMO_MODEL,
        *,
        chat_template: str | None = None,
        tool_call_parser: str = "auto",
        reasoning_parser: str = "auto",
        **engine_args: Any,
    ) -> None:
        choose(tool_call_parser, reasoning_parser, None)  # report an unknown name before the model is loaded
        super().__init__(LLMEngine(EngineConfig.from_args(model=model, **engine_args)))
        self._media = OfflineMedia(self.llm_engine.config)
        if engine_args.get("disable_log_stats") is False:
            self.count_metrics()
        self._form_options = FormOptions(
            chat_template,
            tool_call_parser=tool_call_parser,
            reasoning_parser=reasoning_parser,
            media=self._media.gate.texts,
        )
        self._forms: dict[str | None, TextForms] = {}

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> Self:
        """Build from flat arguments; raises as the constructor does."""
        return cls(**{name: getattr(engine_args, name) for name in engine_fields()})

    @with_vllm_keywords("LLM.generate")
    def generate(
        self,
        prompts: PromptType | Sequence[PromptType],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        lora_request: Adapters = None,
        priority: int | Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Complete each prompt; return one output per prompt, in order.

        Args:
            prompts: one prompt or a list; a prompt is text, a list of token ids, or a dict (see `quire.inputs`).
                A dict may have `multi_modal_data`, for example `{"image": [PIL image, uint8 array, path or URL]}`, with
                `mm_processor_kwargs` and `multi_modal_uuids`; the prompt has a marker for each item. A "video" is a
                path, a URL, uint8 frames [T, H, W, 3] or a pair of frames and a dict of metadata.
            sampling_params: one for all or one per prompt; None uses the model's own defaults.
            lora_request: adapter of all prompts, or one or None per prompt (needs `enable_lora=True`).

        Raises:
            ValidationError: a prompt or a parameter is invalid; nothing was generated.
            ConflictError: another thread is generating; use `AsyncLLM` for several callers.
        """
        all_prompts = list(map(self._with_media, as_prompts(prompts)))
        all_params = per_prompt("sampling_params", self._params_or_default(sampling_params), all_prompts)
        priorities = per_prompt("priority", priority or 0, all_prompts)
        adapters = per_prompt("lora_request", lora_request, all_prompts)
        with self._one_thread, self._abort_on_error() as requests:
            for prompt, params, urgency, adapter in zip(
                all_prompts, all_params, priorities, adapters, strict=True
            ):
                requests.append(self._add(_request(prompt, params, urgency, adapter)))
            return self._run(requests, use_tqdm)

    def generate_iter(
        self,
        prompts: PromptType | Iterable[PromptType],
        sampling_params: SamplingParams | Iterable[SamplingParams] | None = None,
        *,
        lora_request: LoRARequest | Iterable[LoRARequest | None] | None = None,
        priority: int | Iterable[int] = 0,
    ) -> Iterator[tuple[int, RequestOutput]]:
        """Complete each prompt; yield (number of the prompt, output) as outputs finish.

        The prompts may come from a generator of any length: twice as many as there are rows (`max_num_seqs`) are read
        ahead. Outputs are those of `generate`. Until the iterator is exhausted or closed, which aborts what is left,
        the engine takes no other call.

        Args: as of `generate`; each may be an iterable with a value per prompt.

        Raises:
            ValidationError: while iterating: a prompt or a parameter is invalid; the prompts in flight are aborted.
            ConflictError: while iterating: the engine is in use.
        """
        rows = each_with(
            "sampling_params",
            self._params_or_default(sampling_params),
            map(self._with_media, _stream_of(prompts)),
        )
        with_adapter = each_with("lora_request", lora_request, rows)
        return self._run_each(
            _request(prompt, params, urgency, adapter)
            for ((prompt, params), adapter), urgency in each_with("priority", priority, with_adapter)
        )

    @with_vllm_keywords("LLM.chat")
    def chat(
        self,
        messages: Sequence[ChatMessage] | Sequence[Sequence[ChatMessage]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        lora_request: Adapters = None,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        mm_processor_kwargs: dict[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one or several conversations, rendered by the chat template of the model or its adapter.

        `chat_template` overrides all others. Each completion has an `answer`: its text parsed into content, reasoning
        and tool calls. Images are parts of the type `image_url` or `image_pil` in a content.

        Raises:
            ValidationError: the model has no chat template, or a message cannot be rendered.
        """
        compose = self._chat_composer(
            ChatOptions(
                chat_template,
                add_generation_prompt,
                continue_final_message,
                tools,
                chat_template_kwargs or {},
                mm_processor_kwargs,
            )
        )
        conversations = _as_conversations(messages)
        adapters = per_prompt("lora_request", lora_request, conversations)
        all_params = per_prompt("sampling_params", self._params_or_default(sampling_params), conversations)
        chats = list(map(compose, conversations, all_params, adapters))
        outputs = self.generate(
            [chat.prompt for chat in chats],
            [chat.params for chat in chats],
            use_tqdm=use_tqdm,
            lora_request=adapters,
        )
        return [chat.read(output) for chat, output in zip(chats, outputs, strict=True)]

    def chat_iter(
        self,
        conversations: Iterable[Sequence[ChatMessage]],
        sampling_params: SamplingParams | Iterable[SamplingParams] | None = None,
        *,
        lora_request: LoRARequest | Iterable[LoRARequest | None] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        mm_processor_kwargs: dict[str, Any] | None = None,
    ) -> Iterator[tuple[int, RequestOutput]]:
        """Answer each conversation; yield (number of the conversation, output) as outputs finish.

        Memory and errors are as of `generate_iter`, outputs and arguments as of `chat`.
        """
        compose = self._chat_composer(
            ChatOptions(
                chat_template,
                add_generation_prompt,
                continue_final_message,
                tools,
                chat_template_kwargs or {},
                mm_processor_kwargs,
            )
        )
        rows = each_with("sampling_params", self._params_or_default(sampling_params), conversations)
        return self._answer_each(
            compose(messages, params, adapter)
            for (messages, params), adapter in each_with("lora_request", lora_request, rows)
        )

    def _answer_each(self, chats: Iterable[OfflineChat]) -> Iterator[tuple[int, RequestOutput]]:
        in_flight: dict[int, OfflineChat] = {}

        def requests() -> Iterator[OfflineRequest]:
            for index, chat in enumerate(chats):
                in_flight[index] = chat
                yield _request(chat.prompt, chat.params, 0, chat.adapter)

        with closing(self._run_each(requests())) as outputs:
            for index, output in outputs:
                yield index, in_flight.pop(index).read(output)

    def _chat_composer(
        self, options: ChatOptions
    ) -> Callable[[Sequence[ChatMessage], SamplingParams, LoRARequest | None], OfflineChat]:
        """Return a function that renders a conversation.

        Raises:
            ValidationError: a tool is invalid; from the function: a message cannot be rendered.
        """
        schemas = None if options.tools is None else tool_schemas(options.tools)

        def compose(
            messages: Sequence[ChatMessage], params: SamplingParams, adapter: LoRARequest | None
        ) -> OfflineChat:
            form = self._form(adapter, options.template, schemas)
            taken = self._media.admit(messages, options.mm_processor_kwargs)

            def encode(chat: RenderedChat) -> PromptType:
                return self._media.gate.encode(chat, form.tokenizer, taken.admitted).as_prompt()

            return compose_chat(form, list(taken.messages), params, adapter, options, schemas, encode)

        return compose

    def _with_media(self, prompt: PromptType) -> PromptType:
        """Return a prompt, tokenized if it has `multi_modal_data`."""
        if isinstance(prompt, dict) and has_data(prompt.get(ENCODER_PROMPT)):
            outer: dict[str, Any] = dict(prompt)  # vLLM's form of an image that an encoder reads
            nested = outer.pop(ENCODER_PROMPT)
            prompt = cast(PromptType, {**outer, **nested})
        if not (isinstance(prompt, dict) and has_data(prompt)):
            return prompt
        rest: Any = {name: value for name, value in prompt.items() if name not in PROMPT_FIELDS}
        encoded: Any = self._media.prompt(dict(prompt), self.get_tokenizer()).as_prompt()
        return cast(PromptType, {**rest, **encoded})

    def shutdown(self) -> None:
        """Release the engine, and the processes and files of media."""
        self._media.close()
        super().shutdown()

    def _params_or_default(self, given: Any) -> Any:
        return given or self.get_default_sampling_params()

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the model's own sampling defaults (generation_config.json with overrides)."""
        return SamplingParams(**self.llm_engine.input_processor.default_sampling_params)

    def _form(self, adapter: LoRARequest | None, chat_template: str | None, tools: Tools | None) -> TextForm:
        """Return the text form of a chat in which these tools can be called."""
        self.get_tokenizer()
        tokenizers, options = self.llm_engine.input_processor.tokenizers, self._form_options
        if chat_template not in self._forms:
            if chat_template is not None:
                options = dataclasses.replace(options, chat_template=chat_template, for_adapters=True)
            self._forms[chat_template] = TextForms(tokenizers.model, options)
        form = self._forms[chat_template].of(tokenizers.of(adapter))
        if tools and (tool_format := form.answer_format.formats.tools) is not None:
            check_names(tools, tool_format)
        return form


def _request(
    prompt: PromptType, params: SamplingParams, priority: int, adapter: LoRARequest | None
) -> OfflineRequest:
    return OfflineRequest(prompt, params.clone(output_kind=RequestOutputKind.FINAL_ONLY), priority, adapter)


def _stream_of(prompts: PromptType | Iterable[PromptType]) -> Iterable[PromptType]:
    """Return prompts one by one; a list of numbers is one prompt."""
    is_list = isinstance(prompts, str | dict | Sequence)
    return as_prompts(cast(PromptType, prompts)) if is_list else cast(Iterable[PromptType], prompts)


def _as_conversations(messages: Sequence[Any]) -> list[Sequence[ChatMessage]]:
    if isinstance(messages, str | dict):
        kind = "a text" if isinstance(messages, str) else "one message"
        raise ValidationError(f'messages must be a list of {{"role": ..., "content": ...}}, got {kind}')
    return [messages] if messages and isinstance(messages[0], dict) else list(messages)
