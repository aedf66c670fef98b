# SPDX-License-Identifier: Apache-2.0
"""GPTQ's config, as AutoGPTQ and GPTQModel write it, and AWQ's, as AutoAWQ and transformers do."""

from __future__ import annotations

from quire.config.encoding import CheckpointQuantization, Encoding, EncodingRule
from quire.models.json_object import JsonObject
from quire.models.quantized.rules import EVERYTHING, HEAD, all_but_head, beginning, skipping

_BITS = (2, 3, 4, 8)


def read_gptq(config: JsonObject) -> CheckpointQuantization:
    """Read the config; `dynamic` has patterns of modules with their own options, or, after "-:", of float modules."""
    config.choice("pack_dtype", ("int32",), "int32")
    first_version = _is_first_version(config)
    rules = []
    dynamic = config.child("dynamic")
    for key in dynamic.values:
        pattern = beginning(config, "dynamic", key.removeprefix("+:").removeprefix("-:"))
        own = config.with_values(**dynamic.child(key).values)
        rules.append(EncodingRule(pattern, None if key.startswith("-:") else _encoding(own, first_version)))
    if not config.flag("lm_head", False):
        rules.append(EncodingRule(HEAD, None))
    rules.append(EncodingRule(EVERYTHING, _encoding(config, first_version)))
    return CheckpointQuantization("gptq", tuple(rules), unread=(r"\.g_idx$",))


def _is_first_version(config: JsonObject) -> bool:
    """Return whether `format`, formerly `checkpoint_format`, is the first version."""
    old, new = "checkpoint_format", "format"
    if old in config and new in config and config.get(old) != config.get(new):
        raise config.wrong(old, f"what {new} is, {config.get(new)!r}")
    return config.choice(new if new in config else old, ("gptq", "gptq_v2"), "gptq") == "gptq"


def _encoding(config: JsonObject, first_version: bool) -> Encoding:
    bits = config.integer("bits")
    if bits not in _BITS:
        config.refuse("bits", f"one of {', '.join(map(str, _BITS))}")
    options = {
        "bits": bits,
        "group_size": group_size(config, "group_size"),
        "first_version": first_version,
        "symmetric": config.flag("sym", True),
        "reordered": config.flag("desc_act", False),
    }
    return Encoding("gptq", options)


def group_size(config: JsonObject, key: str, default: int = 128) -> int:
    """Return a number of inputs, or -1 for all of them.

    Raises:
        ModelLoadError: it is something else.
    """
    size = config.integer(key, default, low=-1)
    if size == 0:
        raise config.wrong(key, "a positive integer, or -1 for all inputs")
    return size


def read_awq(config: JsonObject) -> CheckpointQuantization:
    """Read the config; AutoAWQ's own files have shorter keys."""
    old = {"bits": "w_bit", "group_size": "q_group_size"}
    config = config.with_aliases(
        {new: key for new, key in old.items() if key in config and new not in config}
    )
    if config.integer("bits") != 4:
        raise config.unsupported("bits", "4")
    layout = "format" if "format" in config else "version"  # GPTQModel's name, and AutoAWQ's
    if config.text(layout, "gemm").lower() != "gemm":
        raise config.unsupported(layout, "gemm")
    encoding = Encoding(
        "awq",
        {"group_size": group_size(config, "group_size"), "zero_points": config.flag("zero_point", True)},
    )
    rules = skipping(config, "modules_to_not_convert")
    return CheckpointQuantization("awq", (*rules, *all_but_head(encoding)))
