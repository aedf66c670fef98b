# SPDX-License-Identifier: Apache-2.0
"""Adapters that prompts with media imply, such as those of Phi-4-multimodal.

Invariant: a prompt without media of these kinds has the caller's adapter or none, so its bits are those of the model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from quire.adapters import AdapterRequest, adapter_error
from quire.config import EngineConfig
from quire.media import MediaItem

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
