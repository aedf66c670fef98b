# SPDX-License-Identifier: Apache-2.0
"""Config of OpenAI's MXFP4 checkpoints, in which only experts are quantized."""

from __future__ import annotations

from quire.config.encoding import CheckpointQuantization, Encoding, EncodingRule
from quire.models.json_object import JsonObject


def read_mxfp4(config: JsonObject) -> CheckpointQuantization:
    """Read the config; `modules_to_not_convert` names no experts, so it is not read."""
    return CheckpointQuantization("mxfp4", (EncodingRule(r".*\.experts\..*", Encoding("mxfp4_blocks")),))
