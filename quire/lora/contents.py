# SPDX-License-Identifier: Apache-2.0
"""Contents of adapters, by which their cached blocks are named where these may outlive the process. Torch-free."""

from __future__ import annotations

import logging
from collections import OrderedDict

from msgspec import structs

from quire.adapters import LoRARequest
from quire.config import EngineConfig
from quire.lora.peft_config import adapter_content, directory_of

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
