# SPDX-License-Identifier: Apache-2.0
"""Deterministic inference and serving engine for large language models."""

from __future__ import annotations

import importlib
import os
import sys
from typing import TYPE_CHECKING, Any

from quire.version import __version__
from quire.vllm_names.imports import VllmFinder, attributes_of

if TYPE_CHECKING:
    from quire.adapters import LoRARequest
    from quire.config import EngineArgs, EngineConfig
    from quire.config import EngineArgs as AsyncEngineArgs
    from quire.engine.async_llm import AsyncLLM
    from quire.engine.async_llm import AsyncLLM as AsyncLLMEngine
    from quire.engine.llm_engine import LLMEngine
    from quire.entrypoints.llm import LLM
    from quire.inputs import PairPrompt, PromptType, TextPrompt, TokensPrompt
    from quire.models.registry import ModelRegistry
    from quire.multimodal.processors.florence_tasks import florence2_answer
    from quire.outputs import CompletionOutput, RequestOutput
    from quire.pooling.outputs import (
        ClassificationOutput,
        ClassificationRequestOutput,
        EmbeddingOutput,
        EmbeddingRequestOutput,
        PoolingOutput,
        PoolingRequestOutput,
        ScoringOutput,
        ScoringRequestOutput,
    )
    from quire.pooling_params import PoolingParams, TextOptions
    from quire.sampling_params import SamplingParams
    from quire.scheduler.explain import Explanation

_LAZY = {
    "LLM": "quire.entrypoints.llm",
    "LLMEngine": "quire.engine.llm_engine",
    "AsyncLLM": "quire.engine.async_llm",
    "AsyncLLMEngine": "quire.engine.async_llm:AsyncLLM",
    "EngineArgs": "quire.config",
    "AsyncEngineArgs": "quire.config:EngineArgs",
    "EngineConfig": "quire.config",
    "LoRARequest": "quire.adapters",
    "ModelRegistry": "quire.models.registry",
    "SamplingParams": "quire.sampling_params",
    "PromptType": "quire.inputs",
    "TextPrompt": "quire.inputs",
    "TokensPrompt": "quire.inputs",
    "RequestOutput": "quire.outputs",
    "Explanation": "quire.scheduler.explain",
    "CompletionOutput": "quire.outputs",
    "PairPrompt": "quire.inputs",
    "TextOptions": "quire.pooling_params",
    "PoolingParams": "quire.pooling_params",
    "ClassificationOutput": "quire.pooling.outputs",
    "ClassificationRequestOutput": "quire.pooling.outputs",
    "EmbeddingOutput": "quire.pooling.outputs",
    "EmbeddingRequestOutput": "quire.pooling.outputs",
    "PoolingOutput": "quire.pooling.outputs",
    "PoolingRequestOutput": "quire.pooling.outputs",
    "ScoringOutput": "quire.pooling.outputs",
    "ScoringRequestOutput": "quire.pooling.outputs",
    "florence2_answer": "quire.multimodal.processors.florence_tasks",
}

__all__ = [
    "LLM",
    "AsyncEngineArgs",
    "AsyncLLM",
    "AsyncLLMEngine",
    "ClassificationOutput",
    "ClassificationRequestOutput",
    "CompletionOutput",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "EngineArgs",
    "EngineConfig",
    "Explanation",
    "LLMEngine",
    "LoRARequest",
    "ModelRegistry",
    "PairPrompt",
    "PoolingOutput",
    "PoolingParams",
    "PoolingRequestOutput",
    "PromptType",
    "RequestOutput",
    "SamplingParams",
    "ScoringOutput",
    "ScoringRequestOutput",
    "TextOptions",
    "TextPrompt",
    "TokensPrompt",
    "__version__",
    "florence2_answer",
]


def __getattr__(name: str) -> Any:
    """Import public names on first use, so that `import quire` is cheap."""
    if name not in _LAZY:
        return attributes_of(__name__)(name)
    module, _, attribute = _LAZY[name].partition(":")
    return getattr(importlib.import_module(module), attribute or name)


if "QUIRE_LAST_IMPORTS" in os.environ:  # this process is a child (`quire.processes`)
    sys.path.append(os.environ["QUIRE_LAST_IMPORTS"])
sys.meta_path.append(VllmFinder())
