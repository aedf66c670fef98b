"""Encoders in another form than their checkpoint names: with a head that it may have all the same, or without its own.

Invariant: torch-free. Whether the checkpoint has the head is seen when its tensors are read, which names those missing.
"""

from __future__ import annotations

from dataclasses import replace

from quire.config.arch import ModelArch
from quire.errors import ConfigError
from quire.models.hf_config import architecture_of, read_config
from quire.models.json_object import JsonObject
from quire.models.pooling.architectures import KINDS, Made
from quire.models.registry import ModelRegistry

_FORMS = {"embed": "Model", "classify": "ForSequenceClassification", "reward": "ForTokenClassification"}
"""What `--convert` says -> how the architecture ends that an encoder then is."""


def in_form(arch: ModelArch, file: JsonObject, made: Made, target: str) -> ModelArch:
    """The model as it is for `target`; one whose row is that of a language model has its heads elsewhere.

    A head that the architecture has serves rewards, too.

    Raises:
        ConfigError: there is no such form of it.
    """
    is_fine = made.kind == target or (target == "reward" and made.kind != "embed")
    if not made.is_whole or is_fine:
        return arch
    architecture = architecture_of(file)
    end = next((end for end in KINDS if architecture.endswith(end)), "")
    form = architecture.removesuffix(end) + _FORMS[target]
    if not ModelRegistry.has_row(form):
        raise ConfigError(
            f"--convert is {target}, and {architecture} is served in no such form: there is no {form}"
        )
    values = {**file.values, "architectures": [form]}
    read = read_config(JsonObject(file.where, values, refused=[]), "quire")
    return replace(arch, architecture=form, head=read.head, names=read.names)
