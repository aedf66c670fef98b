# SPDX-License-Identifier: Apache-2.0
"""vLLM's values of options that quire has under the same name.

`CHECKPOINT_METHODS` are values of `quantization` that name the format of a checkpoint; start-up compares them with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quire.errors import ConfigError
from quire.vllm_names.row import flag_of, log_once

CHECKPOINT_METHODS = (
    "awq", "gptq", "compressed-tensors", "bitsandbytes", "fbgemm_fp8", "modelopt", "hqq", "torchao", "mxfp4", "gguf",
)  # fmt: skip

_INT4 = "load a checkpoint in floats with --quantization int4 or int8 instead"
_ATTENTION = "kernels have other names: auto, cpu, triton, torch_sdpa, reference"
_FORMAT = "weights are read from safetensors or GGUF"


@dataclass(frozen=True)
class Value:
    """One of vLLM's values: quire's value for it, or None and the reason why it is refused."""

    option: str
    value: str
    to: Any
    why: str = ""


_ROWS = (
    *(Value("quantization", name, None, _INT4) for name in ("moe_wna16", "quark", "inc", "humming", "experts_int8")),
    Value("quantization", "auto_awq", "awq"),
    Value("quantization", "awq_marlin", "awq"),
    Value("quantization", "auto_gptq", "gptq"),
    Value("quantization", "gptq_marlin", "gptq"),
    Value("quantization", "modelopt_fp4", "modelopt"),
    Value("quantization", "gpt_oss_mxfp4", "mxfp4"),
    Value("quantization", "int8_per_channel_weight_only", "int8"),
    Value("quantization", "fp8_per_tensor", None, 'use --quantization fp8 with the key "scale": "tensor"'),
    Value("quantization", "fp8_per_channel", "fp8"),
    Value("kv_cache_dtype", "fp8_e4m3", "fp8"),
    Value("kv_cache_dtype", "fp8_e5m2", None, "fp8 is e4m3 here, which is more exact: use fp8 or int8"),
    Value("kv_cache_dtype", "int8_per_token_head", "int8"),
    Value("kv_cache_dtype", "fp8_per_token_head", "fp8"),
    Value("load_format", "hf", "auto"),
    Value("load_format", "fastsafetensors", "safetensors"),
    *(
        Value("load_format", name, None, _FORMAT)
        for name in ("pt", "npcache", "tensorizer", "sharded_state", "bitsandbytes", "mistral", "runai_streamer",
                     "runai_streamer_sharded", "modelexpress", "instanttensor", "ipc_cache")
    ),
    Value("attention_backend", "TRITON_ATTN", "triton"),
    Value("attention_backend", "CPU_ATTN", "cpu"),
    Value("attention_backend", "TORCH_SDPA", "torch_sdpa"),
    *(
        Value("attention_backend", name, None, _ATTENTION)
        for name in ("FLASH_ATTN", "FLASHINFER", "FLEX_ATTENTION", "ROCM_ATTN", "XFORMERS", "FLASHMLA", "CUTLASS_MLA",
                     "TRITON_MLA", "FLASHINFER_MLA", "FLASH_ATTN_MLA", "CPU_MLA")
    ),
    Value("model_impl", "vllm", "quire"),
    Value("model_impl", "terratorch", None, "use quire or transformers"),
    Value("generation_config", "vllm", "quire"),
    Value("runner", "draft", None, "a draft model is named in --speculative-config"),
    Value("runner", "embed", "pooling"),
    Value("structured_outputs_config.backend", "lm-format-enforcer", None, "use guidance or xgrammar"),
    Value("structured_outputs_config.backend", "outlines", None, "use guidance or xgrammar"),
    Value("structured_outputs_config.backend", "llguidance", "guidance"),
)  # fmt: skip

OPTION_VALUES: Mapping[tuple[str, str], Value] = {(row.option, row.value): row for row in _ROWS}
_OPTIONS = {option.partition(".")[0] for option, _ in OPTION_VALUES}


def translated_values(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return quire's options with vLLM's values replaced.

    Raises:
        ConfigError: a value is vLLM's, and nothing here corresponds to it.
    """
    result = dict(given)
    for option in _OPTIONS & result.keys():
        value = result[option]
        if isinstance(value, dict):
            result[option] = {key: translated_value(f"{option}.{key}", inner) for key, inner in value.items()}
        else:
            result[option] = translated_value(option, value)
    if isinstance(result.get("speculative_config"), dict):
        result["speculative_config"] = _with_method(result["speculative_config"])
    return result


def translated_value(option: str, value: Any) -> Any:
    """Return quire's value of one option, or of one key of it (`option.key`); raises as `translated_values` does."""
    row = OPTION_VALUES.get((option, value)) if isinstance(value, str) else None
    if row is None:
        return value
    if row.to is None:
        raise ConfigError(f"{flag_of(option)} {value} is not supported: {row.why}")
    log_once(flag_of(option), f"{value} is {row.to} in quire")
    return row.to


NGRAM = "[ngram]"  # vLLM's former name of a draft model, for drafts from the text itself.


def _with_method(config: dict[str, Any]) -> dict[str, Any]:
    """Return `speculative_config` with vLLM's default method: a model without one is a draft model."""
    if "method" in config or not config.get("model"):
        return config
    if config["model"] == NGRAM:
        return {key: value for key, value in config.items() if key != "model"} | {"method": "ngram"}
    log_once("--speculative-config", 'a model without a "method" is a draft model')
    return {"method": "draft_model", **config}
