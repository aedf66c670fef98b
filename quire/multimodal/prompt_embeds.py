# SPDX-License-Identifier: Apache-2.0
"""Prompts that are embeddings, whole or in part: one item of a request over placeholder tokens.

Invariant: torch-free, and no pickle. The digest covers the values, their shape and the mask, so no two prompts share a
cached prefix unless both are the same. The file of the values lives as long as its request.
"""

from __future__ import annotations

import hashlib
import io
import math
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.config import EngineConfig
from quire.engine.prompt_forms import check_length
from quire.errors import UnavailableError, ValidationError
from quire.inputs import TokensPrompt
from quire.media import MediaItem
from quire.multimodal.arrays import write_arrays
from quire.multimodal.door.decoding import NPY_MAGIC, read_embeds
from quire.multimodal.door.files import Lease, MediaFiles
from quire.multimodal.door.layout import PlaceholderLayout
from quire.multimodal.door.sources import read_base64

PARAM = "prompt_embeds"
MASK = "prompt_is_token_ids"
KEYS = frozenset({PARAM, MASK, "prompt_token_ids", "cache_salt"})
PLACEHOLDER_ID = 0
Floats = NDArray[np.float32]
NO_LAYOUT = PlaceholderLayout("", [])


class PromptEmbeds:
    """Embeddings of prompts in files; thread-safe."""

    def __init__(self) -> None:
        self._files = MediaFiles(0)
        self._lock = threading.Lock()

    def tokens_prompt(self, config: EngineConfig, prompt: dict[str, Any]) -> TokensPrompt:
        """Return a prompt of token ids and one item for a prompt with the key "prompt_embeds".

        Its value is a matrix [T, hidden size] of floats: an array, a tensor, or the content of a safetensors or .npy
        file, as bytes or in base64. With "prompt_token_ids" (T ids) and "prompt_is_token_ids" (T booleans), the model
        reads the ids where these are true.

        Raises:
            ValidationError: the embeddings are malformed or too many; names the limit.
            UnavailableError: there is no room for a file.
        """
        unknown = sorted(prompt.keys() - KEYS)
        if unknown:
            raise ValidationError(f"{unknown[0]!r:.60} cannot stand beside prompt_embeds", param=PARAM)
        values = _values_of(prompt[PARAM])
        num_tokens, size = values.shape
        if size != config.arch.hidden_size:
            raise ValidationError(
                f"prompt_embeds has the shape [{num_tokens}, {size}], and the model's hidden size is "
                f"{config.arch.hidden_size}",
                param=PARAM,
            )
        check_length(config, num_tokens)
        is_token = _mask_of(prompt, num_tokens)
        ids = [PLACEHOLDER_ID] * num_tokens if is_token is None else _ids_of(prompt, is_token)
        return self._stored(values, ids, is_token, prompt.get("cache_salt"))

    def close(self) -> None:
        """Remove the files; may be called twice."""
        self._files.close()

    def _stored(
        self, values: Floats, ids: list[int], is_token: NDArray[np.bool_] | None, cache_salt: Any
    ) -> TokensPrompt:
        runs = [(0, len(ids))] if is_token is None else _runs(~is_token)
        rows = values if is_token is None else np.ascontiguousarray(values[~is_token])
        digest = _digest(rows, runs)
        try:
            lease = self._lease(digest, rows)
        except OSError as error:
            raise UnavailableError(f"prompt_embeds cannot be stored: {error.strerror}") from None
        item = MediaItem(digest, "embeds", runs[0][0], runs[-1][1], runs, str(self._files.path_of(digest)))
        found = TokensPrompt(prompt_token_ids=ids, media=[item], leases=[lease])
        if cache_salt is not None:
            found["cache_salt"] = cache_salt
        return found

    def _lease(self, digest: bytes, rows: Floats) -> Lease:
        with self._lock:
            if self._files.find(digest) is None:
                num_bytes = write_arrays(self._files.path_of(digest), {"values": rows})
                self._files.add(digest, "embeds", NO_LAYOUT, num_bytes)
            return self._files.lease(digest)


def _values_of(given: Any) -> Floats:
    """Return float32 [T, H] of a file's content, an array or a tensor, all finite."""
    if isinstance(given, str):
        given = read_base64(given, PARAM)
    if isinstance(given, bytes):
        return _from_file(given)
    if callable(detach := getattr(given, "detach", None)):  # a tensor, of a dtype that numpy may lack
        given = detach().float().cpu().numpy()
    try:
        values = np.asarray(given)
    except ValueError:  # rows of different lengths
        raise ValidationError("prompt_embeds must be a matrix of floats", param=PARAM) from None
    if values.dtype.kind != "f" or values.ndim != 2 or not values.size:
        raise ValidationError(
            f"prompt_embeds must be floats of the shape [tokens, hidden size], got {values.dtype} "
            f"{list(values.shape)}",
            param=PARAM,
        )
    with np.errstate(over="ignore"):
        floats = np.ascontiguousarray(values, dtype=np.float32)
    if not np.isfinite(floats).all():
        raise ValidationError("prompt_embeds must be finite numbers of float32", param=PARAM)
    return floats


def _from_file(content: bytes) -> Floats:
    try:
        if content.startswith(NPY_MAGIC):
            _check_npy_size(content)
        values: Floats = np.ascontiguousarray(read_embeds(content)["values"])
    except ValidationError as error:
        raise ValidationError(f"prompt_embeds: {error.message}", param=PARAM) from None
    return values


def _check_npy_size(content: bytes) -> None:
    """Raise ValidationError unless the file has as many bytes as its header says, before room is made for them."""
    file = io.BytesIO(content)
    try:
        version = np.lib.format.read_magic(file)
        reads = (
            np.lib.format.read_array_header_1_0 if version[0] == 1 else np.lib.format.read_array_header_2_0
        )
        shape, _, dtype = reads(file)
    except (ValueError, EOFError, SyntaxError, TypeError) as error:
        raise ValidationError(f"the .npy file is malformed: {type(error).__name__}") from None
    if math.prod(shape) * dtype.itemsize != len(content) - file.tell():
        raise ValidationError(
            f"the .npy file has {len(content) - file.tell()} bytes of values, and its header says {dtype} "
            f"{list(shape)}"
        )


def _mask_of(prompt: dict[str, Any], num_tokens: int) -> NDArray[np.bool_] | None:
    """Return which positions are token ids; None if none is."""
    if (MASK in prompt) != ("prompt_token_ids" in prompt):
        raise ValidationError(f"{MASK!r} and 'prompt_token_ids' go together", param=PARAM)
    if MASK not in prompt:
        return None
    mask = np.asarray(prompt[MASK])
    if mask.dtype != np.bool_ or mask.shape != (num_tokens,) or mask.all():
        raise ValidationError(
            f"{MASK!r} must be {num_tokens} booleans, one for each of prompt_embeds, not all of them true",
            param=PARAM,
        )
    return mask if mask.any() else None


def _ids_of(prompt: dict[str, Any], is_token: NDArray[np.bool_]) -> list[int]:
    """Return the ids of the prompt, placeholders where embeddings stand."""
    given = prompt["prompt_token_ids"]
    if not isinstance(given, list) or len(given) != len(is_token):
        raise ValidationError(
            f"'prompt_token_ids' must be a list of {len(is_token)} ids, one for each of prompt_embeds",
            param=PARAM,
        )
    return [one if own else PLACEHOLDER_ID for one, own in zip(given, is_token.tolist(), strict=True)]


def _runs(is_embedded: NDArray[np.bool_]) -> list[tuple[int, int]]:
    """Return the ranges [first, last) where this is true."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], is_embedded, [False])))).tolist()
    return list(zip(edges[::2], edges[1::2], strict=True))


def _digest(rows: Floats, runs: Sequence[tuple[int, int]]) -> bytes:
    """Return the SHA-256 of the values and of where in the prompt they stand."""
    found = hashlib.sha256(f"quire prompt_embeds 1 {rows.shape} {list(runs)} ".encode())
    found.update(rows.data)
    return found.digest()
