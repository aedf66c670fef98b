# SPDX-License-Identifier: Apache-2.0
"""Input processor: caller's prompt and parameters to core requests.

Invariant: its requests have been checked against the model: every id is in the vocabulary, the prompt leaves
room for at least one token, a random request has a seed. All entry points pass through `InputProcessor`.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from quire.adapters import ENABLE_FLAG, AdapterRequest, adapter_error
from quire.config import EngineConfig
from quire.config.arch import encoder_positions
from quire.config.pooling import PoolingSpec
from quire.engine.messages import AddRequest, EngineCoreRequest, Fork
from quire.engine.params_checks import make_params_checks
from quire.engine.prompt_forms import (
    PromptParts,
    TokenizedPrompt,
    check_cut_text,
    check_length,
    check_prompt_media,
    parts_of,
)
from quire.engine.tokenizer import Tokenizer
from quire.engine.tokenizer_cache import (
    TokenizerCache,
    TokenizerContext,
    bad_words_token_ids,
    dry_breakers,
    indexed_ids,
)
from quire.errors import ValidationError
from quire.features import ENCODER_PROMPTS, POOLING_INPUTS, PROMPT_EMBEDS
from quire.inputs import PromptType
from quire.kv_transfer_params import read_transfer
from quire.plugins import import_place, plugin_names
from quire.pooling_params import DEFAULT_TEXT_OPTIONS, PoolingParams, TextOptions
from quire.sampling_params import BeamSearchParams, SamplingParams

PARAM_EMBEDS = "prompt_embeds"
MAX_SALT_CHARS = 128
MAX_TENANT_CHARS = 256
# Token ids that all sequences of a request may list; each sequence has a table of them.
MAX_LISTED_IDS = 2**20
MAX_TOKENS = ("max_tokens", "max_new_tokens")
INT64_RANGE = range(-(2**63), 2**63)
NOTHING_SAMPLED = SamplingParams(max_tokens=None, detokenize=False)  # Parameters of pooling requests.


class PoolingReader(Protocol):
    """Reader of the requests of a pooling model; thread-safe."""

    config: EngineConfig
    spec: PoolingSpec

    def tokenize(self, parts: PromptParts, options: TextOptions = ...) -> TokenizedPrompt:
        """Tokenize a prompt.

        Raises:
            ValidationError: a text is empty or too long in any tokenization, or the model has no such prompt.
        """

    def validated(self, params: PoolingParams) -> PoolingParams:
        """Return the parameters with their task, checked against the model.

        Raises:
            ValidationError: the model does not support them.
        """


class InputProcessor:
    """Tokenizer and validator of requests; owns the seeds of requests that bring none.

    Args:
        takes_callables: the core is in this process, so that requests may bring code of their own.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        config: EngineConfig,
        tokenizer: Tokenizer | None,
        *,
        takes_callables: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.default_sampling_params = _default_params(config)
        self._takes_callables = takes_callables
        # Once: plug-in discovery reads files of every installed package, milliseconds that would delay requests.
        self.reads_extra_args = bool(config.model.logits_processors or plugin_names("quire.logits_features"))
        self.tokenizers = TokenizerCache(config, tokenizer)
        self._clock = clock
        self._seeds = random.Random(config.model.seed)
        self.constraints = make_params_checks(config, tokenizer, self.tokenizers.model.end_ids)
        self._embeds = import_place(PROMPT_EMBEDS)() if config.multimodal.enable_prompt_embeds else None
        part_of = config.arch.part_of
        is_prompted = part_of is not None and part_of.is_prompted
        self.encoder_prompts = import_place(ENCODER_PROMPTS)(config, tokenizer) if is_prompted else None
        self.pooling: PoolingReader | None = None
        if config.pooling is not None:
            self.pooling = import_place(POOLING_INPUTS)(config, config.pooling, tokenizer)

    def tokenize(
        self,
        prompt: PromptType,
        options: TextOptions = DEFAULT_TEXT_OPTIONS,
        *,
        adapter: AdapterRequest | None = None,
    ) -> TokenizedPrompt:
        """Convert any form of prompt to token ids; safe to call from several threads.

        Args:
            options: for a pooling model.
            adapter: the request's adapter.

        Raises:
            ValidationError: the prompt has no valid form, is empty, is text without a tokenizer, or text that is
                too long however it is tokenized, or the adapter's tokenizer cannot be used.
        """
        if isinstance(prompt, dict) and PARAM_EMBEDS in prompt:
            prompt = self._embedded(dict(prompt))
        encoder, options_of_decoder = self.encoder_prompts, None
        if encoder is not None:
            prompt, options_of_decoder = encoder.split(prompt)
        parts, tokenizer_context = parts_of(prompt), self.tokenizers.of(adapter)
        if self.pooling is not None:
            if parts.kv_transfer_params is not None:
                raise ValidationError("'kv_transfer_params' is for models that generate", param="prompt")
            return self.pooling.tokenize(parts, options)
        if parts.second_text is not None or parts.second_text_start is not None:
            raise ValidationError(
                "pairs of texts are for pooling models, and this model generates", param="prompt"
            )
        if parts.instruction_length is not None:
            raise ValidationError(
                "'instruction_length' is for pooling models, and this model generates", param="prompt"
            )
        token_ids = parts.token_ids
        token_ids = (
            self._encode(parts.text or "", tokenizer_context.tokenizer)
            if token_ids is None
            else list(token_ids)
        )
        found = TokenizedPrompt(
            token_ids,
            parts.text,
            parts.cache_salt,
            tokenizer_context=tokenizer_context,
            media=parts.media,
            leases=parts.leases,
            kv_transfer_params=parts.kv_transfer_params,
        )
        return found if encoder is None else encoder.joined(found, options_of_decoder)

    def _embedded(self, prompt: dict[str, Any]) -> PromptType:
        """Return a prompt of embeddings as token ids and an item."""
        if self._embeds is None:
            raise ValidationError(
                "prompt_embeds are not accepted here (--enable-prompt-embeds)", param=PARAM_EMBEDS
            )
        found: PromptType = self._embeds.tokens_prompt(self.config, prompt)
        return found

    def _encode(self, text: str, tokenizer: Tokenizer | None) -> list[int]:
        if tokenizer is None:
            raise ValidationError("text prompts need a tokenizer; pass token ids", param="prompt")
        if not text:
            raise ValidationError("the prompt must not be empty", param="prompt")
        self.check_text(text, tokenizer)
        return tokenizer.encode(text)

    def check_text(self, text: str, tokenizer: Tokenizer | None) -> None:
        """Check, before tokenizing, that a prompt's text can fit at all.

        Raises:
            ValidationError: it has too many characters, however it is tokenized.
        """
        # A shorter text fits even with one token per character.
        if tokenizer is not None and len(text) >= self.config.model.max_model_len:
            check_length(self.config, tokenizer.min_num_tokens(text), "at least ")

    def check_cut_text(self, text: str, name: str = "prompt") -> None:
        """Check a text, of the field `name`, that is truncated or only counted.

        Raises:
            ValidationError: it has too many characters; names the limit.
        """
        check_cut_text(self.config, text, name)

    def process(
        self,
        request_id: str,
        prompt: TokenizedPrompt,
        params: SamplingParams,
        *,
        priority: int = 0,
        tenant: str = "",
        adapter_request: AdapterRequest | None = None,
    ) -> list[EngineCoreRequest]:
        """Return one core request per completion, after all checks against the model; the first computes the shared
        prompt.

        Only the first reports prompt logprobs.

        Raises:
            ValidationError: names the field, its value's problem and the limit.
        """
        if self.pooling is not None:
            raise ValidationError(
                f"this model does not generate; its tasks are {', '.join(self.pooling.spec.tasks)}",
                param="model",
            )
        tokenizer_context = prompt.tokenizer_context or self.tokenizers.model
        self._check_prompt(prompt, tokenizer_context.vocab_size)
        self.check_terms(priority, tenant, adapter_request)
        if self.encoder_prompts is not None:
            params = self.encoder_prompts.sampled(params)
        params = self._resolve_params(params, prompt, tokenizer_context)
        self._check_params(params, tokenizer_context)
        is_predicted = not prompt.num_encoded and all(item.kind != "embeds" for item in prompt.media)
        if params.prompt_logprobs is not None and not is_predicted:
            raise ValidationError(
                "prompt_logprobs are of tokens that the model predicts, and the prompt has others: embeddings, or the "
                "text that an encoder reads or its image",
                param="prompt_logprobs",
            )
        if params.structured_outputs is not None:
            self._check_constrained(tokenizer_context)
            self.constraints.check_prompt(prompt.token_ids)
        first = EngineCoreRequest(
            request_id=f"{request_id}.0" if params.n > 1 else request_id,
            prompt_token_ids=prompt.token_ids,
            sampling_params=params if params.n == 1 else params.replace_unchecked(n=1),
            arrival_time=self._clock(),
            eos_token_ids=tokenizer_context.end_ids,
            priority=priority,
            cache_salt=prompt.cache_salt,
            tenant=tenant,
            adapter_request=adapter_request,
            media=list(prompt.media),
            kv_transfer=read_transfer(prompt.kv_transfer_params, self.config.kv_store.transfer),
        )
        forks = [
            Fork(f"{request_id}.{index}", _completion_seed(params, index)) for index in range(1, params.n)
        ]
        return AddRequest(first, forks).requests()

    def beam_search_params(self, params: BeamSearchParams | None = None) -> BeamSearchParams:
        """Return parameters with the special tokens that belong to the model's texts.

        Args:
            params: None: those of an encoder-decoder checkpoint's generation config.

        Raises:
            ValidationError: there are none, and the model is no such one.
        """
        encoder = self.encoder_prompts
        if encoder is None:
            if params is None:
                raise ValidationError(
                    "beam search needs parameters: this model has no encoder", param="params"
                )
            return params
        found: BeamSearchParams = encoder.shown(encoder.default_search() if params is None else params)
        return found

    def process_pooling(
        self,
        request_id: str,
        prompt: TokenizedPrompt,
        params: PoolingParams,
        *,
        priority: int = 0,
        tenant: str = "",
        adapter_request: AdapterRequest | None = None,
    ) -> EngineCoreRequest:
        """Return the core request for pooling a prompt, after all checks against the model.

        Raises:
            ValidationError: names the field, its value's problem and the limit.
        """
        if self.pooling is None:
            raise ValidationError(
                "this is a generating model without pooling; start it with --runner pooling to pool",
                param="model",
            )
        self._check_prompt(prompt, self.config.arch.vocab_size)
        self.check_terms(priority, tenant, adapter_request)
        if self.pooling.spec.head_of_adapters and adapter_request is None:
            raise ValidationError(
                "the model has no head of its own, only its adapters have one: name an adapter", param="model"
            )
        return EngineCoreRequest(
            request_id=request_id,
            prompt_token_ids=prompt.token_ids,
            sampling_params=NOTHING_SAMPLED,
            arrival_time=self._clock(),
            priority=priority,
            cache_salt=prompt.cache_salt,
            tenant=tenant,
            pooling_params=self.pooling.validated(params),
            second_text_start=prompt.second_text_start,
            instruction_length=prompt.instruction_length,
            adapter_request=adapter_request,
            media=list(prompt.media),
        )

    def room(self, num_prompt_tokens: int, num_encoded: int | None = None) -> int:
        """Return the tokens that can follow a prompt of this length, which caps `max_tokens`.

        Its first `num_encoded` positions take an encoder's output; None: it is the encoder's text, if there is one.
        """
        part_of = self.config.arch.part_of
        if part_of is None or not part_of.decoder_length:
            return self.config.model.max_model_len - num_prompt_tokens
        if num_encoded is None:
            num_encoded = (
                part_of.encoder_positions if part_of.reads_images else encoder_positions(num_prompt_tokens)
            )
            num_prompt_tokens = num_encoded + (num_prompt_tokens if part_of.reads_images else 1)
        most = min(self.config.model.max_model_len, num_encoded + part_of.decoder_length)
        return most - num_prompt_tokens

    def close(self) -> None:
        """Release threads and files; may be called twice."""
        self.constraints.close()
        if self._embeds is not None:
            self._embeds.close()

    def update_config(self, config: EngineConfig) -> None:
        """Adopt the limits that the core has resolved."""
        self.config = config
        self.default_sampling_params = _default_params(config)
        if self.pooling is not None:
            self.pooling.config = config

    def _check_prompt(self, prompt: TokenizedPrompt, vocab_size: int) -> None:
        ids = prompt.token_ids
        if not ids:
            raise ValidationError("the prompt must not be empty", param="prompt")
        check_length(self.config, len(ids))
        _check_ids("prompt", ids, vocab_size)
        check_prompt_media(self.config, ids, prompt.media)
        salt = prompt.cache_salt
        if salt is not None and (not isinstance(salt, str) or not 0 < len(salt) <= MAX_SALT_CHARS):
            raise ValidationError(f"cache_salt must be 1 to {MAX_SALT_CHARS} characters", param="cache_salt")

    def check_terms(self, priority: int, tenant: str, adapter_request: AdapterRequest | None) -> None:
        """Raise ValidationError if this engine cannot honor one of them."""
        if adapter_request is not None and not self.config.serves_adapters:
            raise adapter_error(f"adapters are not served here ({ENABLE_FLAG})")
        if len(tenant) > MAX_TENANT_CHARS:
            raise ValidationError(f"tenant must be at most {MAX_TENANT_CHARS} characters", param="tenant")
        scheduler = self.config.scheduler
        if priority != 0 and scheduler.scheduling_policy != "priority" and not scheduler.scheduler_cls:
            raise ValidationError(
                f"priority has no effect under the {scheduler.scheduling_policy} policy; leave it 0",
                param="priority",
            )
        if priority not in INT64_RANGE:
            raise ValidationError(f"priority must fit in 64 bits, got {priority}", param="priority")

    def _resolve_params(
        self, params: SamplingParams, prompt: TokenizedPrompt, tokenizer_context: TokenizerContext
    ) -> SamplingParams:
        max_tokens = params.max_tokens
        room = self.room(len(prompt.token_ids), prompt.num_encoded)
        max_tokens = max(room if max_tokens is None else min(max_tokens, room), params.min_tokens)
        seed = params.seed
        if seed is None and params.needs_seed:
            seed = self._seeds.getrandbits(62)
        params = params.replace_unchecked(max_tokens=max_tokens, seed=seed)
        if params.bad_words:
            params = params.replace_unchecked(
                bad_words_token_ids=bad_words_token_ids(params, tokenizer_context.tokenizer)
            )
        if params.uses_dry and not params.dry_breakers:
            params = params.replace_unchecked(dry_breakers=dry_breakers(params, tokenizer_context))
        if params.thinking_token_budget is not None and params.thinking_markers is None:
            params = params.replace_unchecked(thinking_markers=tokenizer_context.thinking_markers)
        return params

    def _check_params(self, params: SamplingParams, tokenizer_context: TokenizerContext) -> None:
        limit = self.config.model.max_logprobs
        for name in ("logprobs", "prompt_logprobs"):
            wanted = getattr(params, name)
            if name == "logprobs" and params.logprob_token_ids is not None:
                continue
            if wanted is not None and limit >= 0 and not 0 <= wanted <= limit:
                raise ValidationError(
                    f"{name} is {wanted}, the limit is {limit} (--max-logprobs)", param=name
                )
        if params.stop and self.tokenizer is None:
            raise ValidationError("stop strings need a tokenizer", param="stop")
        check_num_listed_ids(params.num_listed_ids, params.n)
        for name, ids in indexed_ids(params).items():
            _check_ids(name, ids, tokenizer_context.vocab_size)
        _check_stop_tokens_leave_some(params, tokenizer_context)
        self._check_custom(params)
        if params.thinking_token_budget is not None and params.thinking_markers is None:
            raise ValidationError(
                "thinking_token_budget needs the markers of this model's reasoning, and its tokenizer has no <think> "
                "and </think>; set --reasoning-start-str and --reasoning-end-str",
                param="thinking_token_budget",
            )

    def _check_custom(self, params: SamplingParams) -> None:
        """Reject extra_args without a reader, and callables for a core in another process."""
        own = params.logits_processors
        if own and not self._takes_callables:
            raise ValidationError(
                "logits_processors are callables, which cannot be sent to the engine core's process: name classes with "
                "--logits-processors, which it imports",
                param="logits_processors",
            )
        if own and self.config.observability.record_trace:
            raise ValidationError(
                "logits_processors cannot be recorded; start without --record-trace",
                param="logits_processors",
            )
        if params.extra_args and not (own or self.reads_extra_args):
            raise ValidationError(
                "extra_args are for logits processors, and this engine has none (--logits-processors)",
                param="extra_args",
            )

    def _check_constrained(self, tokenizer_context: TokenizerContext) -> None:
        """Reject constraints with an adapter whose added tokens the grammar does not cover."""
        if tokenizer_context.vocab_size > self.config.arch.vocab_size:
            raise ValidationError(
                "structured_outputs does not support an adapter that adds tokens to the model's vocabulary",
                param="structured_outputs",
            )


def check_num_listed_ids(num_ids: int, num_sequences: int) -> None:
    """Limit the cost of `stop_token_ids`, `allowed_token_ids` and `logit_bias` before any work per id.

    Raises:
        ValidationError: with the number of ids, of sequences and the limit.
    """
    if num_ids * num_sequences > MAX_LISTED_IDS:
        raise ValidationError(
            f"allowed_token_ids, stop_token_ids and logit_bias list {num_ids} token ids, for each of {num_sequences} "
            f"sequences; the limit is {MAX_LISTED_IDS} in all",
            param="allowed_token_ids",
        )


def _default_params(config: EngineConfig) -> dict[str, Any]:
    """Return the model's generation config, with its token limit capped at the served context."""
    limit, defaults = config.model.max_model_len, dict(config.arch.generation)
    asked = [int(defaults.pop(name)) for name in MAX_TOKENS if name in defaults]
    if asked:
        defaults["max_tokens"] = min(asked[0], limit) if limit > 0 else asked[0]
    return defaults


def _completion_seed(params: SamplingParams, index: int) -> int | None:
    """Return the seed of a completion; seeds are consecutive and wrap around from the greatest to the least."""
    if params.seed is None:
        return None
    seed = params.seed + index
    return seed if seed in INT64_RANGE else seed - 2**64


def _check_stop_tokens_leave_some(params: SamplingParams, tokenizer_context: TokenizerContext) -> None:
    """Check that `min_tokens`, which forbids stop tokens, leaves a token to generate."""
    if not params.min_tokens:
        return
    ends = {*tokenizer_context.end_ids, *params.stop_token_ids}
    allowed = params.allowed_token_ids
    if allowed is not None and ends.issuperset(allowed):
        raise ValidationError(
            f"allowed_token_ids has only tokens that end the generation, and min_tokens ({params.min_tokens}) "
            "forbids these",
            param="allowed_token_ids",
        )
    if allowed is None and len(ends) >= tokenizer_context.vocab_size:
        raise ValidationError(
            "stop_token_ids has every token, and min_tokens forbids these", param="stop_token_ids"
        )


def _check_ids(name: str, ids: Iterable[Any], vocab_size: int) -> None:
    for token_id in ids:
        if type(token_id) is not int or not 0 <= token_id < vocab_size:
            raise ValidationError(
                f"{name} has {token_id!r}, but token ids are integers in [0, {vocab_size - 1}]", param=name
            )
