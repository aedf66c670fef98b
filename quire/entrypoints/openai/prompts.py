# SPDX-License-Identifier: Apache-2.0
"""The `prompt` field of completion requests -> prompts with token ids.

Invariant: the number of prompts is checked before any is processed, and text is tokenized off the event loop.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from quire.engine.input_processor import check_num_listed_ids
from quire.engine.prompt_forms import TokenizedPrompt
from quire.engine.tokenizer import beside_loop
from quire.entrypoints.fill_in import FillIn
from quire.entrypoints.openai.protocol.requests import (
    ChatFields,
    CompletionRequest,
    GenerationRequest,
    RequestModel,
)
from quire.entrypoints.openai.protocol.shapes import MAX_PROMPTS
from quire.entrypoints.openai.state import ServerState
from quire.entrypoints.text_form import TextForm
from quire.errors import ValidationError
from quire.inputs import EmbedsPrompt, PromptType, TokensPrompt

MAX_SEQUENCES = 1024
FORM = "{name} must be text, a list of texts, a list of token ids, or a list of lists of token ids"


async def completion_prompts(
    server: ServerState, form: TextForm, request: CompletionRequest
) -> list[TokensPrompt]:
    """Return one engine prompt per prompt of the request, in order.

    Raises:
        ValidationError: a prompt is invalid or empty, or there are too many sequences.
    """
    prompts, embeds = _texts_and_ids(request), _embeds(request)
    if embeds:
        _check_beside_embeds(request)
    if num_sequences(request) > MAX_SEQUENCES:
        raise ValidationError(
            f"{len(prompts) + len(embeds)} prompts with n = {_num_each(request)} are {num_sequences(request)} "
            f"sequences, the limit is {MAX_SEQUENCES}",
            param="n",
        )
    lists = (request.stop_token_ids, request.allowed_token_ids, request.logit_bias)
    check_num_listed_ids(sum(len(one or ()) for one in lists), num_sequences(request))
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    num_chars = sum(map(len, texts))
    await beside_loop(num_chars, _check_texts, server, form, texts, request)
    if request.kv_transfer_params and len(prompts) > 1:
        raise ValidationError(
            f"kv_transfer_params is for one prompt, and there are {len(prompts)}; send a request for each",
            param="kv_transfer_params",
        )
    if request.suffix:
        _check_suffix(server, form, request, prompts)
        num_chars += len(request.suffix) * len(prompts)
        tokenized = await beside_loop(num_chars, _fill_in, form.fill_in, texts, request)
    else:
        tokenized = await beside_loop(num_chars, _tokenize_all, form, prompts, request.add_special_tokens)
    if embeds:
        tokenize = server.engine.input_processor.tokenize
        tokenized = [*await beside_loop(sum(map(len, embeds)), _read_embeds, tokenize, embeds), *tokenized]
    _check_languages(server, request)
    return [_with_languages(with_options(prompt, request), request) for prompt in tokenized]


def _check_languages(server: ServerState, request: CompletionRequest) -> None:
    """Reject languages for a model that does not translate.

    Raises:
        ValidationError: names the field.
    """
    part_of = server.engine.config.arch.part_of
    if part_of is not None and part_of.reads_text:
        return
    for field, language in (
        ("source_language", request.source_language),
        ("target_language", request.target_language),
    ):
        if language is not None:
            raise ValidationError(
                f"{field} is for models that translate, and this one has no encoder of text; leave it out",
                param=field,
            )


def _with_languages(prompt: TokensPrompt, request: CompletionRequest) -> TokensPrompt:
    """Add the languages of a translation, which the model's input processor checks."""
    if request.source_language is not None:
        prompt["source_language"] = request.source_language
    if request.target_language is not None:
        prompt["target_language"] = request.target_language
    return prompt


def num_sequences(request: CompletionRequest) -> int:
    """Return the number of sequences of all prompts.

    Raises:
        ValidationError: the prompts are invalid.
    """
    return (len(_texts_and_ids(request)) + len(_embeds(request))) * _num_each(request)


def _texts_and_ids(request: CompletionRequest) -> list[str | list[int]]:
    """Return the prompts that are text or token ids; beside embeddings there may be none, as an empty text."""
    is_empty = request.prompt in ("", [])
    return [] if request.prompt_embeds is not None and is_empty else split_prompts(request.prompt)


def _embeds(request: CompletionRequest) -> list[str]:
    """Return the prompts that are embeddings, which come before the others."""
    given = request.prompt_embeds
    found = [] if given is None else [given] if isinstance(given, str) else given
    if (
        not isinstance(found, list)
        or len(found) > MAX_PROMPTS
        or not all(isinstance(one, str) for one in found)
    ):
        raise ValidationError(
            f"prompt_embeds must be base64 of a safetensors or .npy file, or a list of up to {MAX_PROMPTS} of them",
            param="prompt_embeds",
        )
    return found


def _check_beside_embeds(request: CompletionRequest) -> None:
    """Reject options that need the text of a prompt."""
    for name, value in (
        ("suffix", request.suffix),
        ("echo", request.echo),
        ("truncate_prompt_tokens", request.truncate_prompt_tokens),
    ):
        if value:
            raise ValidationError(
                f"{name} cannot be combined with prompt_embeds, which are no text", param=name
            )


def _read_embeds(tokenize: Callable[[PromptType], TokenizedPrompt], embeds: list[str]) -> list[TokensPrompt]:
    return [tokenize(EmbedsPrompt(prompt_embeds=one)).as_prompt() for one in embeds]


def _num_each(request: CompletionRequest) -> int:
    return max(request.n, request.best_of or 1)


def split_prompts(prompt: Any, name: str = "prompt", most: int = MAX_PROMPTS) -> list[str | list[int]]:
    """Convert the four forms of a prompt field to a list of at most `most` texts and lists of token ids."""
    if isinstance(prompt, str):
        prompts: list[Any] = [prompt]
    elif isinstance(prompt, list) and prompt and all(type(item) is int for item in prompt):
        prompts = [prompt]
    elif isinstance(prompt, list):
        prompts = prompt
    else:
        raise ValidationError(FORM.format(name=name), param=name)
    if not 1 <= len(prompts) <= most:
        raise ValidationError(f"{name} has {len(prompts)} {name}s; 1 to {most} are allowed", param=name)
    for one in prompts:
        _check_prompt(one, name)
    return prompts


def check_text(server: ServerState, form: TextForm, text: str, request: RequestModel) -> None:
    """Reject text that is too long however it is tokenized. Truncated or merely counted text may be longer.

    Raises:
        ValidationError: names the text's size (least number of tokens, or characters) and the limit.
    """
    processor = server.engine.input_processor
    if isinstance(request, GenerationRequest) and request.truncate_prompt_tokens is None:
        processor.check_text(text, form.tokenizer)
    else:
        processor.check_cut_text(text, "messages" if isinstance(request, ChatFields) else "prompt")


def _check_texts(server: ServerState, form: TextForm, texts: list[str], request: RequestModel) -> None:
    for text in texts:
        check_text(server, form, text, request)


def with_options(prompt: TokensPrompt, request: GenerationRequest) -> TokensPrompt:
    """Apply truncation from the left, the prefix-cache salt and the part in a KV transfer."""
    limit = request.truncate_prompt_tokens
    if limit is not None and prompt.get("media"):
        raise ValidationError(
            "truncate_prompt_tokens cannot be combined with media, which must be whole",
            param="truncate_prompt_tokens",
        )
    if limit is not None and len(prompt["prompt_token_ids"]) > limit:
        prompt = TokensPrompt(prompt_token_ids=prompt["prompt_token_ids"][-limit:])
    if request.cache_salt is not None:
        prompt["cache_salt"] = request.cache_salt
    if request.kv_transfer_params is not None:
        prompt["kv_transfer_params"] = request.kv_transfer_params
    return prompt


def _check_prompt(prompt: Any, name: str) -> None:
    if not isinstance(prompt, str) and not (isinstance(prompt, list) and all(type(i) is int for i in prompt)):
        raise ValidationError(FORM.format(name=name), param=name)
    if not prompt:
        raise ValidationError(f"the {name} must not be empty", param=name)


def _check_suffix(
    server: ServerState, form: TextForm, request: CompletionRequest, prompts: list[str | list[int]]
) -> None:
    if not all(isinstance(prompt, str) for prompt in prompts):
        raise ValidationError("suffix needs prompts that are text", param="suffix")
    if request.echo:
        raise ValidationError("echo cannot be combined with suffix", param="echo")
    check_text(server, form, request.suffix or "", request)


def _fill_in(fill_in: FillIn, texts: list[str], request: CompletionRequest) -> list[TokensPrompt]:
    suffix, special = request.suffix or "", request.add_special_tokens
    encoded = [fill_in.encode(text, suffix, add_special_tokens=special) for text in texts]
    pairs = zip(encoded, texts, strict=True)
    return [TokensPrompt(prompt_token_ids=ids, prompt=text) for ids, text in pairs]


def _tokenize_all(
    form: TextForm, prompts: list[str | list[int]], add_special_tokens: bool
) -> list[TokensPrompt]:
    tokenized = []
    for prompt in prompts:
        if isinstance(prompt, str):
            token_ids = form.tokenizer.encode(prompt, add_special_tokens=add_special_tokens)
            tokenized.append(TokensPrompt(prompt_token_ids=token_ids, prompt=prompt))
        else:
            tokenized.append(TokensPrompt(prompt_token_ids=prompt))
    return tokenized
