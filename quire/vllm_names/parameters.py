# SPDX-License-Identifier: Apache-2.0
"""vLLM's keywords of `SamplingParams` and of the other parameters of a request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from quire.errors import ConfigError, ValidationError
from quire.vllm_names.row import Table, accepted, refused, renamed, suggestion, table_of, translated

SAMPLING = table_of(
    renamed("guided_decoding", "structured_outputs"),
    refused(
        "best_of", "ask for n completions with logprobs=0, and sort by cumulative_logprob", harmless=(1,)
    ),
    refused("use_beam_search", "call LLM.beam_search with BeamSearchParams", harmless=(False,)),
    refused("length_penalty", "it is a field of BeamSearchParams", harmless=(1.0,)),
    refused("early_stopping", "it is a field of BeamSearchParams", harmless=(False,)),
    refused(
        "truncate_prompt_tokens",
        "cut the token ids of the prompt; over HTTP the field of this name does so",
        harmless=(),
    ),
    refused("watermarking", "texts are not watermarked", harmless=(False,)),
    refused(
        "prompt_logprob_token_ids prompt_logprob_start",
        "prompt_logprobs reports the most likely tokens of every position",
    ),
    refused("trace_decode_token_ids", "give the tokens as part of the prompt, with prompt_logprobs"),
    refused("routed_experts_prompt_start", "experts of tokens are not reported", harmless=(0,)),
    accepted("skip_clone output_text_buffer_length", "it follows from the other parameters"),
)
POOLING = table_of(
    renamed("normalize", "use_activation"),
    renamed("softmax", "use_activation"),
    renamed("activation", "use_activation"),
    refused("truncate_prompt_tokens", "give tokenization_kwargs to LLM.embed, classify, encode or score"),
)
LORA = table_of(
    renamed("lora_local_path", "lora_path"),
    accepted("base_model_name long_lora_max_len is_3d_lora_weight", "the adapter's files say it"),
    refused("load_inplace", "give weights that changed another lora_int_id", harmless=(False,)),
)
PARAMETERS: Mapping[str, Table] = {
    "SamplingParams": SAMPLING,
    "BeamSearchParams": {},
    "PoolingParams": POOLING,
    "LoRARequest": LORA,
}
"""Rows by class, and by vLLM's name."""


class KeywordCheck(type(msgspec.Struct)):  # type: ignore[misc]
    """Metaclass of parameters that accept vLLM's keywords."""

    def __call__(cls, *args: Any, **fields: Any) -> Any:
        """Return an instance.

        Raises:
            TypeError: a keyword is neither a field nor one of vLLM's.
            ValidationError: a keyword of vLLM's is not supported; or as the fields raise.
        """
        try:
            return super().__call__(*args, **fields)
        except TypeError:
            own = cls.__struct_fields__
            if fields.keys() <= set(own):
                raise
            return super().__call__(*args, **_translated(cls.__name__, fields, own))


def _translated(kind: str, fields: dict[str, Any], own: tuple[str, ...]) -> dict[str, Any]:
    try:
        result = translated(fields, PARAMETERS[kind], own)
    except ConfigError as error:
        raise ValidationError(str(error)) from None
    for name in result.keys() - set(own):
        raise TypeError(f"{kind} has no field {name!r}{suggestion(name, own)}") from None
    return result
