# SPDX-License-Identifier: Apache-2.0
"""Functions that vLLM's scripts import and quire has in another form."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING, Any

from quire.vllm_names.options import OPTIONS
from quire.vllm_names.row import translated

if TYPE_CHECKING:
    from quire.engine.tokenizer import Tokenizer


def random_uuid() -> str:
    """Return 32 random hex digits, for a request's id."""
    return uuid.uuid4().hex


def get_tokenizer(
    tokenizer_name: str, *, revision: str | None = None, download_dir: str | None = None, **options: Any
) -> Tokenizer:
    """Return the tokenizer of a directory, a GGUF file or a Hugging Face id.

    Raises:
        TypeError: another option than vLLM's.
        ModelLoadError: there is no such model, or no tokenizer in it.
        ConfigError: an option is not supported.
    """
    unknown = translated(options, OPTIONS, ())
    if unknown:
        raise TypeError(f"get_tokenizer() got an unexpected keyword argument {next(iter(unknown))!r}")
    from quire.engine.tokenizer import Tokenizer
    from quire.models.checkpoint import resolve_model_dir

    return Tokenizer.from_dir(resolve_model_dir(tokenizer_name, revision, download_dir))
