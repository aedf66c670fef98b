"""torchao's config, as transformers writes it: one of its config classes, by name, with its fields."""

from __future__ import annotations

from quire.config.encoding import CheckpointQuantization, Encoding, Option
from quire.models.json_object import JsonObject
from quire.models.quantized.rules import all_but_head, containing, names

_INT8 = ("Int8WeightOnlyConfig", "Int8DynamicActivationInt8WeightConfig")
_FP8 = ("Float8WeightOnlyConfig", "Float8DynamicActivationFloat8WeightConfig")
_INTX = ("IntxWeightOnlyConfig", "Int8DynamicActivationIntxWeightConfig")


def read_torchao(config: JsonObject) -> CheckpointQuantization:
    """Its names say whether activations are rounded, by what they are."""
    kind = config.child("quant_type").child("default")
    name, fields = kind.choice("_type", (*_INT8, *_FP8, *_INTX)), kind.child("_data")
    options = _intx(fields) if name in _INTX else _by_row(fields, floats=name in _FP8)
    left = containing(names(config, "modules_to_not_convert"))
    rules = (*left, *all_but_head(Encoding("torchao", options, weight_only="Dynamic" not in name)))
    return CheckpointQuantization("torchao", rules, (r"\._weight_act_quant_(scale|zero_point)$",))


def _by_row(fields: JsonObject, *, floats: bool) -> dict[str, Option]:
    group = fields.integer("group_size", 0)
    return {"floats": floats, "grid_outputs": _grid_outputs(fields), "grid_inputs": group}


def _grid_outputs(fields: JsonObject) -> int:
    """Of the granularity of weights, which is the last of two."""
    said = fields.get("granularity")
    last = {"granularity": said[-1]} if isinstance(said, list) and said else {}
    granularity = fields.with_values(**last).child("granularity")
    return int(granularity.choice("_type", ("PerRow", "PerTensor"), "PerRow") == "PerRow")


def _intx(fields: JsonObject) -> dict[str, Option]:
    granularity = fields.child("granularity" if "granularity" in fields else "weight_granularity")
    kind = granularity.choice("_type", ("PerGroup", "PerAxis"))
    group = granularity.child("_data").integer("group_size") if kind == "PerGroup" else 0
    return {"floats": False, "grid_outputs": 1, "grid_inputs": group}
