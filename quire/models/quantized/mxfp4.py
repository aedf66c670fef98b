"""The config of OpenAI's checkpoints in MXFP4: experts are, and nothing else."""

from __future__ import annotations

from quire.config.encoding import CheckpointQuantization, Encoding, EncodingRule
from quire.models.json_object import JsonObject


def read_mxfp4(config: JsonObject) -> CheckpointQuantization:
    """What else it names, in `modules_to_not_convert`, is no expert."""
    return CheckpointQuantization("mxfp4", (EncodingRule(r".*\.experts\..*", Encoding("mxfp4_blocks")),))
