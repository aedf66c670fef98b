# SPDX-License-Identifier: Apache-2.0
"""Pooling methods of `LLM`: embeddings, classes, scores, rewards."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import msgspec

from quire.adapters import LoRARequest
from quire.engine.prompt_forms import TokenizedPrompt, parts_of
from quire.entrypoints.chat.template import ChatTemplate
from quire.entrypoints.offline import OfflineEngine, as_prompts, per_prompt
from quire.errors import ValidationError
from quire.inputs import DataPrompt, PromptType
from quire.io_processors import IOProcessor, make_io_processor
from quire.pooling.inputs import Compose, PoolingInputs
from quire.pooling.outputs import (
    ClassificationRequestOutput,
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingRequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
)
from quire.pooling.server.scoring import Scoring, TextWindows, is_normalized, template_composer
from quire.pooling_params import (
    CLASSIFY,
    DEFAULT_TEXT_OPTIONS,
    EMBED,
    TOKEN_CLASSIFY,
    PoolingParams,
    TextOptions,
)
from quire.vllm_names.parameters import with_vllm_keywords

Prompts = PromptType | Sequence[PromptType]
PerPrompt = PoolingParams | Sequence[PoolingParams] | None
Kwargs = Mapping[str, Any] | None
PLUGIN = "plugin"  # Task of a prompt {"data": ...} for the engine's IO processor.


class OfflinePooling(OfflineEngine):
    """Methods for pooling models; all raise ValidationError if the model generates or does not offer the task.

    `options` control tokenization: truncation, and which of the model's prompts is prepended. `tokenization_kwargs` are
    the same under vLLM's names, and override them. `lora_request` selects an adapter.
    """

    _io_processor: IOProcessor | None = None

    @with_vllm_keywords("LLM.encode")
    def encode(
        self,
        prompts: Prompts | DataPrompt,
        pooling_params: PerPrompt = None,
        *,
        pooling_task: str | None = None,
        options: TextOptions = DEFAULT_TEXT_OPTIONS,
        tokenization_kwargs: Kwargs = None,
        lora_request: LoRARequest | None = None,
        use_tqdm: bool = True,
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """Return the pooled output of each prompt, in order.

        Args:
            prompts: may have `multi_modal_data`, as in `LLM.generate`; or {"data": ...}, from which the IO processor
                makes prompts, and from their outputs the only output.
            pooling_params: for all, or one for each prompt.
            pooling_task: of `POOLING_TASKS`; None: the parameters' task, else the model's; "plugin" for such data.

        Raises:
            ValidationError: a prompt or a parameter is invalid; nothing was computed.
            EngineError: a prompt could not be pooled.
        """
        if isinstance(prompts, dict) and "data" in prompts:
            data = cast(DataPrompt, prompts)["data"]
            return [self._by_plugin(data, pooling_params, pooling_task, lora_request, use_tqdm)]
        if pooling_task == PLUGIN:
            raise ValidationError('the task plugin needs a prompt {"data": ...}', param="task")
        tokenize, options = self.llm_engine.input_processor.tokenize, options.with_kwargs(tokenization_kwargs)
        tokenized = [tokenize(self._with_media(prompt), options) for prompt in as_prompts(prompts)]
        return self._pool(
            tokenized, pooling_params, pooling_task, lora_request=lora_request, use_tqdm=use_tqdm
        )

    @with_vllm_keywords("LLM.embed")
    def embed(
        self,
        prompts: Prompts,
        *,
        pooling_params: PerPrompt = None,
        average_windows: bool = False,
        options: TextOptions = DEFAULT_TEXT_OPTIONS,
        tokenization_kwargs: Kwargs = None,
        lora_request: LoRARequest | None = None,
        use_tqdm: bool = True,
    ) -> list[EmbeddingRequestOutput]:
        """Return the embedding of each prompt.

        With `average_windows`, longer prompts than the context are split into windows, whose embeddings are averaged by
        tokens and normalized if theirs are. Raises as `encode` does.
        """
        if average_windows:
            options = options.with_kwargs(tokenization_kwargs)
            pooled = self._of_windows(as_prompts(prompts), pooling_params, options, lora_request, use_tqdm)
        else:
            pooled = self.encode(
                prompts,
                pooling_params,
                pooling_task=EMBED,
                options=options,
                tokenization_kwargs=tokenization_kwargs,
                lora_request=lora_request,
                use_tqdm=use_tqdm,
            )
        return list(map(EmbeddingRequestOutput.from_base, pooled))

    @with_vllm_keywords("LLM.classify")
    def classify(
        self,
        prompts: Prompts,
        *,
        pooling_params: PerPrompt = None,
        options: TextOptions = DEFAULT_TEXT_OPTIONS,
        tokenization_kwargs: Kwargs = None,
        lora_request: LoRARequest | None = None,
        use_tqdm: bool = True,
    ) -> list[ClassificationRequestOutput]:
        """Return the classes of each prompt. Raises as `encode` does."""
        pooled = self.encode(
            prompts,
            pooling_params,
            pooling_task=CLASSIFY,
            options=options,
            tokenization_kwargs=tokenization_kwargs,
            lora_request=lora_request,
            use_tqdm=use_tqdm,
        )
        return list(map(ClassificationRequestOutput.from_base, pooled))

    def reward(
        self,
        prompts: Prompts,
        *,
        pooling_params: PerPrompt = None,
        options: TextOptions = DEFAULT_TEXT_OPTIONS,
        tokenization_kwargs: Kwargs = None,
        lora_request: LoRARequest | None = None,
        use_tqdm: bool = True,
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """Return the rewards of each prompt, per token or step, or for all of it. Raises as `encode` does."""
        by_token = TOKEN_CLASSIFY in self._pooling_inputs.spec.tasks
        task = TOKEN_CLASSIFY if by_token else CLASSIFY
        return self.encode(
            prompts,
            pooling_params,
            pooling_task=task,
            options=options,
            tokenization_kwargs=tokenization_kwargs,
            lora_request=lora_request,
            use_tqdm=use_tqdm,
        )

    @with_vllm_keywords("LLM.score")
    def score(
        self,
        data_1: str | Sequence[str],
        data_2: str | Sequence[str],
        /,
        *,
        use_activation: bool | None = None,
        pooling_params: PoolingParams | None = None,
        chat_template: str | None = None,
        options: TextOptions = DEFAULT_TEXT_OPTIONS,
        tokenization_kwargs: Kwargs = None,
        lora_request: LoRARequest | None = None,
        use_tqdm: bool = True,
    ) -> list[ScoringRequestOutput]:
        """Score pairs of texts: one with one, one with each of several, or several with equally many.

        A cross-encoder reads each pair as one prompt; otherwise embeddings are compared. `chat_template` (as in
        `LLM.chat`) renders a pair as two messages of the roles query and document. A language model that
        sentence-transformers uses for scoring has such a template of its own.

        Raises:
            ValidationError: the model does neither, the numbers of texts do not match, or a text is empty or too long.
            EngineError: a prompt could not be pooled.
        """
        options, compose = options.with_kwargs(tokenization_kwargs), self._composer(chat_template)
        scoring = Scoring(self._pooling_inputs, _texts(data_1), _texts(data_2), options, compose)
        params = _with_task(pooling_params or PoolingParams(), scoring.task)
        if use_activation is not None:
            params = msgspec.structs.replace(params, use_activation=use_activation)
        pooled = self._pool(scoring.prompts(), params, None, lora_request=lora_request, use_tqdm=use_tqdm)
        return [
            ScoringRequestOutput(
                parts[-1].request_id,
                ScoringOutput(score),
                [token_id for one in parts for token_id in one.prompt_token_ids],
                sum(one.num_cached_tokens for one in parts),
            )
            for score, parts in scoring.outputs(pooled)
        ]

    @abstractmethod
    def _with_media(self, prompt: PromptType) -> PromptType:
        """Return a prompt, tokenized if it has `multi_modal_data`."""

    def _of_windows(
        self,
        prompts: Sequence[PromptType],
        params: PerPrompt,
        options: TextOptions,
        lora_request: LoRARequest | None,
        use_tqdm: bool,
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """Return the mean of each prompt's windows, as an output with the tokens of all of them."""
        inputs, wanted = self._pooling_inputs, params or PoolingParams()
        if not isinstance(wanted, PoolingParams):
            raise ValidationError(
                "average_windows needs one pooling_params for all prompts", param="pooling_params"
            )
        texts = [one for one in prompts if isinstance(one, str | list)]
        if len(texts) < len(prompts):
            raise ValidationError(
                "average_windows needs texts, or token ids within the context", param="prompt"
            )
        windows = TextWindows(inputs, options)
        pooled = self._pool(
            windows.prompts(texts), wanted, EMBED, lora_request=lora_request, use_tqdm=use_tqdm
        )
        normalized = is_normalized(inputs.spec, wanted.use_activation)
        vectors = windows.joined(pooled, normalized=normalized)
        return [
            replace(
                first,
                outputs=PoolingOutput(vector),
                prompt_token_ids=[token_id for one in (first, *others) for token_id in one.prompt_token_ids],
                num_cached_tokens=sum(one.num_cached_tokens for one in (first, *others)),
            )
            for vector, (first, *others) in zip(vectors, windows.of_each(pooled), strict=True)
        ]

    def _composer(self, chat_template: str | None) -> Compose | None:
        """Return the composer of pairs by a template: the given one, or the model's own."""
        options = self._pooling_inputs.spec.template_options
        if chat_template is None and options is None:
            return None
        tokenizer = self.get_tokenizer()
        return template_composer(
            ChatTemplate.from_tokenizer(tokenizer, chat_template), tokenizer, dict(options or ())
        )

    def _by_plugin(
        self, data: Any, params: PerPrompt, task: str | None, lora_request: LoRARequest | None, use_tqdm: bool
    ) -> PoolingRequestOutput[Any]:
        if task not in (None, PLUGIN):
            raise ValidationError(f'the task of {{"data": ...}} must be plugin, got {task}', param="task")
        if self._io_processor is None:
            self._io_processor = make_io_processor(self.llm_engine.config)
        if self._io_processor is None:
            raise ValidationError(
                "data needs an IO processor, and this engine has none (io_processor_plugin)", param="data"
            )
        prompts = [self._pooling_inputs.tokenize(parts_of(one)) for one in self._io_processor.prompts(data)]
        wanted = self._io_processor.params(data) if params is None else params
        pooled = self._pool(prompts, wanted, None, lora_request=lora_request, use_tqdm=use_tqdm)
        token_ids = [token_id for one in pooled for token_id in one.prompt_token_ids]
        cached = sum(one.num_cached_tokens for one in pooled)
        reply = self._io_processor.reply(data, pooled)
        return PoolingRequestOutput(self._request_id(), reply, token_ids, cached)

    @property
    def _pooling_inputs(self) -> PoolingInputs:
        inputs = self.llm_engine.input_processor.pooling
        if not isinstance(inputs, PoolingInputs):
            raise ValidationError(
                "this is a generating model without pooling; start it with --runner pooling to pool"
            )
        return inputs

    def _pool(
        self,
        prompts: list[TokenizedPrompt],
        params: PerPrompt,
        task: str | None,
        *,
        lora_request: LoRARequest | None,
        use_tqdm: bool,
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        all_params = per_prompt("pooling_params", params or PoolingParams(), prompts)
        with self._one_thread, self._abort_on_error() as requests:
            for prompt, wanted in zip(prompts, all_params, strict=True):
                request_id = self._request_id()
                self.llm_engine.add_request(
                    request_id, prompt.as_prompt(), _with_task(wanted, task), lora_request=lora_request
                )
                requests.append(request_id)
            outputs: list[PoolingRequestOutput[PoolingOutput]] = self._run(requests, use_tqdm)
        for output in outputs:
            output.check()
        return outputs


def _with_task(params: PoolingParams, task: str | None) -> PoolingParams:
    if task is None or params.task == task:
        return params
    if params.task is not None:
        raise ValidationError(f"the task is {task}, and pooling_params say {params.task}", param="task")
    return msgspec.structs.replace(params, task=task)


def _texts(data: str | Sequence[str]) -> list[str]:
    return [data] if isinstance(data, str) else list(data)
