# SPDX-License-Identifier: Apache-2.0
"""Texts in, and out comes which of them is the odd one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from quire.errors import ValidationError
from quire.inputs import PromptType
from quire.io_processors import IOProcessor
from quire.pooling.outputs import PoolingOutput, PoolingRequestOutput
from quire.pooling_params import PoolingParams


class Outliers(IOProcessor):
    """`{"texts": [...]}`, at least three of them."""

    def prompts(self, data: Any) -> Sequence[PromptType]:
        texts = data.get("texts") if isinstance(data, dict) else None
        if not isinstance(texts, list) or len(texts) < 3 or not all(isinstance(one, str) for one in texts):
            raise ValidationError("data.texts must be a list of at least three texts", param="data")
        return texts

    def params(self, data: Any) -> PoolingParams:
        return PoolingParams(task="embed")

    def reply(self, data: Any, outputs: Sequence[PoolingRequestOutput[PoolingOutput]]) -> Any:
        vectors = np.array([one.outputs.data for one in outputs], np.float64)
        vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
        likeness = ((vectors @ vectors.T).sum(axis=1) - 1) / (len(vectors) - 1)
        return {"odd_one": data["texts"][int(likeness.argmin())], "likeness": likeness.tolist()}
