# SPDX-License-Identifier: Apache-2.0
"""Adapters of requests, as the front end completes them: their contents, and those that media imply. Torch-free.

A content names an adapter's cached blocks where these may outlive the process. Prompts with media of some kinds imply
an adapter in models such as Phi-4-multimodal; other prompts have the caller's or none, so their bits are the model's.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path

from msgspec import structs

from quire.adapters import AdapterRequest, LoRARequest, adapter_error
from quire.config import EngineConfig
from quire.lora.peft_config import adapter_content, directory_of
from quire.media import MediaItem

logger = logging.getLogger(__name__)
MOST_CONTENTS = 1000


class LoRAContents:
    """Digests of the adapters that requests name (`quire.adapters.AdapterContents`).

    Invariant: an adapter has one content for as long as it is remembered here; the worker refuses files with another.
    Safe between threads.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._settings = config.lora
        self._contents: OrderedDict[tuple[str, str], str] = OrderedDict()  # (key, path) -> content

    def is_complete(self, request: LoRARequest) -> bool:
        return bool(request.content) or (request.key, request.lora_path) in self._contents

    def completed(self, request: LoRARequest) -> LoRARequest:
        """Return an adapter with its content; its files are read once. Unreadable ones are the worker's to refuse."""
        if request.content:
            return request
        place = request.key, request.lora_path
        known = self._contents.get(place)
        if known is None:
            known = self._contents[place] = self._read(request)
            while len(self._contents) > MOST_CONTENTS:
                self._contents.popitem(last=False)
        return structs.replace(request, content=known)

    def _read(self, request: LoRARequest) -> str:
        try:
            return adapter_content(directory_of(request.lora_path), self._settings)
        except OSError as error:
            logger.info("adapter %r has no digest: %s", request.lora_name, error.strerror)
            return ""


FIRST_NUMBER = 2**62
"""Number of the first one; callers rarely have any of this size."""


class MediaAdapters:
    """Adapters of a prepared config by kind of media; the first kind that a prompt has decides.

    Args:
        completed: adds the digest of an adapter's content where that is needed.
    """

    def __init__(
        self, config: EngineConfig, completed: Callable[[AdapterRequest | None], AdapterRequest | None]
    ) -> None:
        implied = config.lora.default_mm_loras
        self._of_kind = {
            kind: completed(AdapterRequest(Path(path).name, FIRST_NUMBER + number, path))
            for number, (kind, path) in enumerate(implied.items())
        }

    def adapter_of(self, media: Sequence[MediaItem], given: AdapterRequest | None) -> AdapterRequest | None:
        """Return the adapter of a prompt whose caller named `given`.

        Raises:
            ValidationError: the caller's is another one than that of the media.
        """
        kinds = {item.kind for item in media}
        kind = next((kind for kind in self._of_kind if kind in kinds), None)
        if kind is None:
            return given
        own = self._of_kind[kind]
        if given is not None and own is not None and given.lora_path != own.lora_path:
            raise adapter_error(
                f"the request names adapter {given.lora_name!r}, and its media of kind {kind} need the adapter "
                f"{own.lora_name!r} of the model: a request has one adapter, so send the media without the other"
            )
        return own
