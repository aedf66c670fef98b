"""torchao's config, as transformers writes it: one of its config classes, by name, with its fields."""

from __future__ import annotations

from quire.config.encoding import Activations, CheckpointQuantization, Encoding, Option
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
    rounded = _activations(name, fields) if "Dynamic" in name else None
    rules = (*left, *all_but_head(Encoding("torchao", options, rounded)))
    return CheckpointQuantization("torchao", rules, (r"\._weight_act_quant_(scale|zero_point)$",))


def _activations(name: str, fields: JsonObject) -> Activations:
    """Those of a class whose name says that scales are found."""
    if name in _FP8:
        if (
            _granularity(fields, first=True, default="PerTensor") == "PerTensor"
            or "activation_value_lb" in fields
        ):
            return Activations(unlike="a scale for all tokens of a step")
        return Activations("e4m3", bound=fields.optional_number("activation_value_ub"))
    if fields.flag("reduce_range", False) or _granularity(fields, first=True) == "PerTensor":
        return Activations(unlike="a scale for all tokens of a step, or fewer integers")
    mapping = fields.child("act_mapping_type").get("_data")
    default = "ASYMMETRIC" if name in _INTX else "SYMMETRIC"
    return Activations(symmetric=(mapping or default) == "SYMMETRIC")


def _by_row(fields: JsonObject, *, floats: bool) -> dict[str, Option]:
    group = fields.integer("group_size", 0)
    return {"floats": floats, "grid_outputs": _grid_outputs(fields), "grid_inputs": group}


def _grid_outputs(fields: JsonObject) -> int:
    return int(_granularity(fields, first=False) == "PerRow")


def _granularity(fields: JsonObject, *, first: bool, default: str = "PerRow") -> str:
    """Of activations, which is the first of two, or of weights."""
    said = fields.get("granularity")
    one = {"granularity": said[0 if first else -1]} if isinstance(said, list) and said else {}
    granularity = fields.with_values(**one).child("granularity")
    return granularity.choice("_type", ("PerRow", "PerTensor"), default)


def _intx(fields: JsonObject) -> dict[str, Option]:
    granularity = fields.child("granularity" if "granularity" in fields else "weight_granularity")
    kind = granularity.choice("_type", ("PerGroup", "PerAxis"))
    group = granularity.child("_data").integer("group_size") if kind == "PerGroup" else 0
    return {"floats": False, "grid_outputs": 1, "grid_inputs": group}
