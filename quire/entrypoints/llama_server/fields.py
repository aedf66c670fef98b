# SPDX-License-Identifier: Apache-2.0
"""llama-server's requests -> completion requests.

Invariant: an option becomes a completion's field, is noted as ignored, or is rejected; none is dropped silently.
"""

from __future__ import annotations

from typing import Any

from quire.engine.tokenizer import Tokenizer
from quire.entrypoints.fill_in import FillIn
from quire.entrypoints.llama_server.protocol import REJECTED, WITHOUT_EFFECT, GeneratingRequest, InfillRequest
from quire.entrypoints.openai.protocol.requests import SAMPLERS, EngineRequest
from quire.errors import ValidationError

Fields = dict[str, Any]
Prompt = str | list[int]
NAMES = {"max_tokens": "n_predict", "logprobs": "n_probs"}  # Completion's field names -> llama-server's.
SAME = (*SAMPLERS, *EngineRequest.model_fields, "stream", "stop", "ignore_eos", "grammar", "json_schema")
RANDOM_SEED = 2**32 - 1  # llama.cpp's value of a seed that is drawn anew.
NEVER = -100.0  # Bias of a token that must not occur.
FORM = "prompt must be text, a list of token ids and texts, an object with prompt_string, or a list of these"
# Tokens that introduce a repository and a file in fill-in-the-middle prompts: Qwen-Coder; StarCoder, Granite.
FILE_MARKS = (("<|repo_name|>", "<|file_sep|>"), ("<repo_name>", "<file_sep>"))
REPOSITORY = "myproject\n"
SNIPPET = "\n\n--- snippet ---\n\n"
HERE = "filename\n"  # Name of the file that is filled in; requests have none.


def completion_fields(body: GeneratingRequest, tokenizer: Tokenizer, vocab_size: int) -> Fields:
    """Return a completion's fields without the prompt.

    Raises:
        ValidationError: an option is not supported, or two contradict each other.
    """
    for name, rule in REJECTED.items():
        if getattr(body, name) is not None:
            rule.check(name, getattr(body, name))
    for name, neutral in WITHOUT_EFFECT.items():
        if getattr(body, name) not in (None, *neutral):
            body.notes.ignore(name)
    fields = {name: value for name in SAME if (value := getattr(body, name)) is not None}
    if fields.get("seed") == RANDOM_SEED:
        del fields["seed"]
    if (limit := limit_of(body)) is not None:
        fields["max_tokens"] = max(1, limit)  # of 0 the one token is not shown
    if body.n_probs:
        fields["logprobs"] = body.n_probs
    if body.logit_bias is not None and (biases := _biases(body, tokenizer, vocab_size)):
        fields["logit_bias"] = biases
    return fields


def limit_of(body: GeneratingRequest) -> int | None:
    """Return the most tokens to generate; None: as many as the context holds.

    Raises:
        ValidationError: it is below -1, or given twice.
    """
    if body.n_predict is not None and body.max_tokens is not None:
        raise ValidationError("max_tokens cannot be sent together with n_predict", param="max_tokens")
    name = "n_predict" if body.max_tokens is None else "max_tokens"
    limit = getattr(body, name)
    if limit is not None and limit < -1:
        raise ValidationError(
            f"{name} must be at least 0, or -1 for no limit of its own, got {limit}", param=name
        )
    return None if limit == -1 else limit


def _biases(body: GeneratingRequest, tokenizer: Tokenizer, vocab_size: int) -> dict[str, float]:
    """Return token id -> bias, of ids and of the tokens of texts."""
    given = body.logit_bias
    pairs = list(given.items()) if isinstance(given, dict) else given
    if not isinstance(pairs, list):
        raise _bad_bias()
    biases: dict[str, float] = {}
    for pair in pairs:
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise _bad_bias()
        token, bias = pair
        for token_id in _ids_of(token, tokenizer):
            if token_id < vocab_size:
                biases[str(token_id)] = _bias(bias)
            else:
                body.notes.ignore("logit_bias")
    return biases


def _ids_of(token: Any, tokenizer: Tokenizer) -> list[int]:
    """Return the ids that an id, or a text, stands for; the key of an object is an id if it is a number."""
    if type(token) is int and token >= 0:
        return [token]
    if not isinstance(token, str):
        raise _bad_bias()
    if token.isascii() and token.isdigit() and len(token) < 10:
        return [int(token)]
    return tokenizer.encode(token, add_special_tokens=False)


def _bias(bias: Any) -> float:
    if bias is False:
        return NEVER
    if type(bias) in (int, float):
        return float(bias)
    raise _bad_bias()


def _bad_bias() -> ValidationError:
    return ValidationError(
        "logit_bias must be a list of pairs [token id or text, number or false], or an object of them",
        param="logit_bias",
    )


def prompts_of(prompt: Any, tokenizer: Tokenizer) -> list[Prompt]:
    """Return the prompts of the field `prompt`: a list of numbers and texts is one prompt, any other list is several.

    Raises:
        ValidationError: the field has another form, or asks for images.
    """
    is_several = (
        isinstance(prompt, list)
        and bool(prompt)
        and (
            all(isinstance(one, str) for one in prompt) or any(isinstance(one, list | dict) for one in prompt)
        )
    )
    return [_prompt(one, tokenizer) for one in (prompt if is_several else [prompt])]


def _prompt(prompt: Any, tokenizer: Tokenizer) -> Prompt:
    if isinstance(prompt, dict):
        if prompt.get("multimodal_data"):
            raise ValidationError(
                "prompt.multimodal_data is not supported; send images in /v1/chat/completions", param="prompt"
            )
        prompt = prompt.get("prompt_string")
    if isinstance(prompt, str):
        return prompt
    if not isinstance(prompt, list) or not all(type(one) is int or isinstance(one, str) for one in prompt):
        raise ValidationError(FORM, param="prompt")
    ids: list[int] = []
    for index, part in enumerate(prompt):
        is_text = isinstance(part, str)
        ids += tokenizer.encode(part, add_special_tokens=index == 0) if is_text else [part]
    return ids


def texts_of(prompt: Any) -> str:
    """Return all text of a prompt, whose length bounds the cost of its tokenization."""
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, dict):
        return texts_of(prompt.get("prompt_string"))
    return "".join(map(texts_of, prompt)) if isinstance(prompt, list) else ""


def infill_prompt(body: InfillRequest, fill_in: FillIn, tokenizer: Tokenizer) -> list[int]:
    """Return the token ids of a fill-in-the-middle prompt: other files, the text around the gap, and its beginning.

    Raises:
        ValidationError: `input_extra` is malformed.
    """
    around = fill_in.encode(body.input_prefix, body.input_suffix, add_special_tokens=True)
    num_before = int(around[:1] == [tokenizer.bos_token_id])
    extra = _extra_ids(body, tokenizer)
    begun = (
        tokenizer.encode(body.prompt, add_special_tokens=False, allow_special=False) if body.prompt else []
    )
    return [*around[:num_before], *extra, *around[num_before:], *begun]


def extras_of(body: InfillRequest) -> list[tuple[str, str]]:
    """Return the name and text of each other file.

    Raises:
        ValidationError: one is no object of texts.
    """
    extras = [(one.get("filename", "tmp"), one.get("text")) for one in body.input_extra or ()]
    for index, pair in enumerate(extras):
        if not all(isinstance(text, str) for text in pair):
            raise ValidationError(
                f"input_extra.{index} must be an object with a text, and a filename",
                param=f"input_extra.{index}",
            )
    return [(str(name), str(text)) for name, text in extras]


def _extra_ids(body: InfillRequest, tokenizer: Tokenizer) -> list[int]:
    """Return the tokens of the other files, in the form in which the model was trained if it has one."""

    def encoded(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False, allow_special=False) if text else []

    extras = extras_of(body)
    if not extras:
        return []
    repository, separator = _file_marks(tokenizer)
    if repository is None or separator is None:
        return [token for _, text in extras for token in encoded(SNIPPET + text)]
    ids = [repository, *encoded(REPOSITORY)]
    for name, text in extras:
        ids += [separator, *encoded(f"{name}\n"), *encoded(text)]
    return [*ids, separator, *encoded(HERE)]


def _file_marks(tokenizer: Tokenizer) -> tuple[int | None, int | None]:
    """Return the tokens before a repository's and before a file's name; None without such tokens."""
    for repository, separator in FILE_MARKS:
        found = tokenizer.id_of(repository), tokenizer.id_of(separator)
        if None not in found:
            return found
    return None, None
