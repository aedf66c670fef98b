"""What `LLM` does with a model that pools: embeddings, classes, scores, rewards."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from quire.engine.pooling_inputs import AS_THEY_ARE, PoolingInputs, TextOptions
from quire.engine.prompt_forms import TokenizedPrompt
from quire.entrypoints.offline import OfflineEngine, as_prompts, per_prompt
from quire.entrypoints.pooling.scoring import Scoring
from quire.errors import ValidationError
from quire.inputs import PromptType
from quire.lora_request import LoRARequest
from quire.pooling_outputs import (
    ClassificationRequestOutput,
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingRequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
)
from quire.pooling_params import CLASSIFY, EMBED, TOKEN_CLASSIFY, PoolingParams

Prompts = PromptType | Sequence[PromptType]
PerPrompt = PoolingParams | Sequence[PoolingParams] | None


class OfflinePooling(OfflineEngine):
    """The methods for pooling models; all raise a ValidationError if the model generates, or does not offer the task.

    `options` say how texts become tokens: whether long ones are cut, which of the model's prompts is put before them.
    All are computed with the adapter of `lora_request`, if there is one.
    """

    def encode(
        self,
        prompts: Prompts,
        pooling_params: PerPrompt = None,
        *,
        pooling_task: str | None = None,
        options: TextOptions = AS_THEY_ARE,
        lora_request: LoRARequest | None = None,
        use_tqdm: bool = True,
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """What is pooled of each prompt, in order.

        Args:
            pooling_params: for all, or one for each prompt.
            pooling_task: of `POOLING_TASKS`; None: what the parameters say, else the model.

        Raises:
            ValidationError: a prompt or a parameter cannot be honoured; nothing was computed.
            EngineError: a prompt could not be pooled.
        """
        tokenize = self.llm_engine.input_processor.tokenize
        tokenized = [tokenize(prompt, options) for prompt in as_prompts(prompts)]
        return self._pool(
            tokenized, pooling_params, pooling_task, lora_request=lora_request, use_tqdm=use_tqdm
        )

    def embed(
        self,
        prompts: Prompts,
        *,
        pooling_params: PerPrompt = None,
        options: TextOptions = AS_THEY_ARE,
        lora_request: LoRARequest | None = None,
        use_tqdm: bool = True,
    ) -> list[EmbeddingRequestOutput]:
        """The embedding of each prompt. Raises as `encode` does."""
        pooled = self.encode(
            prompts,
            pooling_params,
            pooling_task=EMBED,
            options=options,
            lora_request=lora_request,
            use_tqdm=use_tqdm,
        )
        return list(map(EmbeddingRequestOutput.from_base, pooled))

    def classify(
        self,
        prompts: Prompts,
        *,
        pooling_params: PerPrompt = None,
        options: TextOptions = AS_THEY_ARE,
        lora_request: LoRARequest | None = None,
        use_tqdm: bool = True,
    ) -> list[ClassificationRequestOutput]:
        """The classes of each prompt. Raises as `encode` does."""
        pooled = self.encode(
            prompts,
            pooling_params,
            pooling_task=CLASSIFY,
            options=options,
            lora_request=lora_request,
            use_tqdm=use_tqdm,
        )
        return list(map(ClassificationRequestOutput.from_base, pooled))

    def reward(
        self,
        prompts: Prompts,
        *,
        pooling_params: PerPrompt = None,
        options: TextOptions = AS_THEY_ARE,
        lora_request: LoRARequest | None = None,
        use_tqdm: bool = True,
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """The rewards of each prompt: of its tokens or steps, or of all of it. Raises as `encode` does."""
        by_token = TOKEN_CLASSIFY in self._pooling_inputs.spec.tasks
        task = TOKEN_CLASSIFY if by_token else CLASSIFY
        return self.encode(
            prompts,
            pooling_params,
            pooling_task=task,
            options=options,
            lora_request=lora_request,
            use_tqdm=use_tqdm,
        )

    def score(
        self,
        data_1: str | Sequence[str],
        data_2: str | Sequence[str],
        /,
        *,
        use_activation: bool | None = None,
        options: TextOptions = AS_THEY_ARE,
        lora_request: LoRARequest | None = None,
        use_tqdm: bool = True,
    ) -> list[ScoringRequestOutput]:
        """How well texts go together: one with one, one with each of several, or several with as many.

        A cross-encoder reads each pair as one prompt; of other models the embeddings are compared.

        Raises:
            ValidationError: the model does neither, the texts are not so many, or one is empty or too long.
            EngineError: a prompt could not be pooled.
        """
        scoring = Scoring(self._pooling_inputs, _texts(data_1), _texts(data_2), options)
        params = scoring.params(use_activation)
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

    @property
    def _pooling_inputs(self) -> PoolingInputs:
        inputs = self.llm_engine.input_processor.pooling
        if inputs is None:
            raise ValidationError(
                "this model generates, and nothing is pooled; --runner pooling would do that"
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
