"""What an adapter's file has for each module of the model, in the layout of PEFT.

Invariant: every tensor of the file is for one module, and fits it, its partners and the limits, before any is read;
what does not is named, with its file, its tensor and the limit.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from quire.errors import ModelLoadError
from quire.layers.slot import FLOATS
from quire.lora.adapted import TABLES, AdaptedModule, Kind, wrong
from quire.lora.expert_modules import expert_modules, experts_of
from quire.lora.peft_config import PeftConfig
from quire.lora.targets import Target, Targets
from quire.models.safetensors_file import SafetensorsFile
from quire.models.tensor_file import TensorInfo

logger = logging.getLogger(__name__)

_PREFIX = "base_model.model."
_ENDS: Mapping[str, Kind] = {
    ".lora_A.weight": "a",
    ".lora_B.weight": "b",
    ".lora_embedding_A": "a",
    ".lora_embedding_B": "b",
    ".lora_magnitude_vector": "magnitude",
    ".lora_magnitude_vector.weight": "magnitude",
    ".lora_B.bias": "expand_bias",
    ".base_layer.bias": "bias",
    ".bias": "bias",
    ".token_adapter.trainable_tokens_delta": "rows",
    ".token_adapter.base_layer.weight": "base_table",
    ".base_layer.weight": "base_table",
    ".weight": "table",
}
"""Ends of tensors' names; the first that fits counts."""
_WHOLE = ("bias", "weight", *TABLES)
"""What stands in place of a module's own."""
_OF_TABLES = (".lora_embedding_A", ".lora_embedding_B")
"""Ends of the names of tensors of modules whose inputs are tokens, and of no others."""


def adapted_modules(
    file: SafetensorsFile, config: PeftConfig, targets: Targets, max_rank: int, max_added: int = 0
) -> list[AdaptedModule]:
    """All that the file has; rows of embedding and head may be of `max_added` tokens behind the model's.

    Raises:
        ModelLoadError: a tensor has no place, no partner, or the wrong shape or dtype.
    """
    modules: dict[str, dict[Kind, TensorInfo]] = {}
    left_out = {info.name for info in file.tensors.values() if _is_left_out(info, targets)}
    if left_out:
        logger.warning(
            "%s: %d tensors, such as %s, are for parts of the model that are not served: they are left out",
            file.path,
            len(left_out),
            min(left_out),
        )
    for info in file.tensors.values():
        if info.name in left_out:
            continue
        name, kind = _module_of(file, info)
        if targets.is_idle(name):
            continue
        own = modules.setdefault(targets.name_of(name), {})
        if kind in own:
            raise wrong(file, info, f"says again what {own[kind].name!r} says")
        own[kind] = info
    if not modules:
        of_served = " for a part of the model that is served" if left_out else ""
        raise ModelLoadError(f"{file.path}: there is no tensor in it{of_served}")
    for name, target in targets.modules.items():
        if target.is_of_adapters and not modules.get(name, {}).keys() & {"weight", "table"}:
            raise ModelLoadError(
                f"{file.path}: there is no tensor {_PREFIX}{name}.weight, and the model has no head of its own"
            )
    found: list[AdaptedModule] = []
    for name, tensors in modules.items():
        experts = experts_of(name, targets)
        if experts is None:
            checked = _Checked(file, config, name, _as_of(name, tensors, targets), targets, max_added)
            found.append(checked.module(max_rank))
        else:
            found.extend(expert_modules(file, config, name, tensors, experts, max_rank))
    return found


def _is_left_out(info: TensorInfo, targets: Targets) -> bool:
    """Return whether a tensor is for a module that is not served; a module that adapters can change never is."""
    name = info.name.removeprefix(_PREFIX)
    ends = (end for end in _ENDS if name.endswith(end))
    is_target = any(targets.name_of(name.removesuffix(end)) in targets.modules for end in ends)
    return not is_target and targets.is_left_out(name)


def _as_of(name: str, tensors: Mapping[Kind, TensorInfo], targets: Targets) -> Mapping[Kind, TensorInfo]:
    """What a module has: a whole weight is a table's, or that of a layer behind what is pooled."""
    target = targets.modules.get(name)
    if target is None or not target.is_head or "table" not in tensors:
        return tensors
    return {"weight" if kind == "table" else kind: info for kind, info in tensors.items()}


def _module_of(file: SafetensorsFile, info: TensorInfo) -> tuple[str, Kind]:
    """The module that a tensor is for, and what it is of it."""
    for end, kind in _ENDS.items():
        if info.name.startswith(_PREFIX) and info.name.endswith(end):
            return info.name.removeprefix(_PREFIX).removesuffix(end), kind
    raise wrong(
        file, info, f"is neither {_PREFIX}<module>.lora_A.weight nor what else quire knows of adapters"
    )


@dataclass(frozen=True, slots=True)
class _Checked:
    """A module by the names of its tensors' kinds."""

    file: SafetensorsFile
    config: PeftConfig
    name: str
    tensors: Mapping[Kind, TensorInfo]
    targets: Targets
    max_added: int

    def module(self, max_rank: int) -> AdaptedModule:
        """The module, if all of it fits."""
        target = self._target()
        self._check_partners()
        rank = next(iter(self.tensors["a"].shape), 0) if "a" in self.tensors else 0
        tokens = self.config.trained_tokens(self.name) if "rows" in self.tensors else ()
        shapes = _shapes(target, rank, len(tokens))
        for kind, info in self.tensors.items():
            more = self.max_added if kind in ("table", "base_table") else 0
            self._check_tensor(info, shapes.get(kind, (target.outputs,)), more)
        if rank:
            self._check_rank(rank, max_rank)
        if "rows" in self.tensors:
            self._check_tokens(tokens, target)
        if "weight" in self.tensors:  # as a product of the largest rank, in place of the layer's own
            return AdaptedModule(target, self.tensors, target.outputs, 1.0)
        scale = self.config.scale_of(self.name, rank) if rank else 0.0
        return AdaptedModule(target, self.tensors, rank, scale, tokens)

    def _target(self) -> Target:
        target = self.targets.modules.get(self.name)
        if target is None:
            problem = f"is for {self.name}, which is no layer of the model that adapters can change"
            raise wrong(self.file, next(iter(self.tensors.values())), problem)
        if "bias" in self.tensors and not self.targets.has_bias(target):
            raise wrong(self.file, self.tensors["bias"], "is a bias, and the model's layer has none")
        self._check_kind(target)
        return target

    def _check_kind(self, target: Target) -> None:
        """Tables have tensors of their own, and lengths of their columns nobody here knows."""
        for kind, info in self.tensors.items():
            if kind not in (*TABLES, "magnitude") and info.name.endswith(_OF_TABLES) != target.is_table:
                what = "an embedding" if target.is_table else "no embedding"
                raise wrong(self.file, info, f"is for {self.name}, which is {what}")
            if kind not in TABLES and target.no_lengths and self.config.is_dora:
                raise wrong(self.file, info, f"is {target.no_lengths}")
            if kind == "expand_bias" and not target.has_biases:
                raise wrong(self.file, info, f"is a bias, which {self.name} has no place for")
            if kind in TABLES and not target.has_rows:
                problem = f"is a whole weight, and {self.name} is neither embedding nor head"
                raise wrong(self.file, info, problem)

    def _check_partners(self) -> None:
        """All tensors of a product are there, or none of them; that of DoRA where the config says so."""
        product = {kind: info for kind, info in self.tensors.items() if kind not in _WHOLE}
        if product and "weight" in self.tensors:
            problem = f"is the whole weight of {self.name}, which has a product, too"
            raise wrong(self.file, self.tensors["weight"], problem)
        needs: list[Kind] = ["a", "b", "magnitude"] if self.config.is_dora else ["a", "b"]
        for kind in needs if product else ():
            if kind not in product:
                info = next(iter(product.values()))
                ends = [end for end, other in _ENDS.items() if other == kind]
                end = ends[-1] if info.name.endswith(_OF_TABLES) else ends[0]
                raise wrong(self.file, info, f"is there without {_PREFIX}{self.name}{end}")
        if "magnitude" in product and not self.config.is_dora:
            raise wrong(
                self.file, product["magnitude"], f"is DoRA's, and {self.config.where} says no use_dora"
            )
        if "expand_bias" in product and self.config.is_dora:
            raise wrong(self.file, product["expand_bias"], "is a bias, which DoRA has no place for")

    def _check_rank(self, rank: int, max_rank: int) -> None:
        said = self.config.rank_of(self.name)
        if rank > max_rank:
            raise wrong(self.file, self.tensors["a"], f"has rank {rank}; --max-lora-rank is {max_rank}")
        if rank != said:
            raise wrong(self.file, self.tensors["a"], f"has rank {rank}, {self.config.where} says {said}")

    def _check_tokens(self, tokens: Sequence[int], target: Target) -> None:
        known = target.inputs if target.is_table else target.outputs
        outside = [token for token in tokens if token >= known + self.max_added]
        if outside:
            problem = f"is for token {outside[0]} ({self.config.where}), and the model has {known}"
            raise wrong(self.file, self.tensors["rows"], problem)

    def _check_tensor(self, info: TensorInfo, shape: tuple[int, ...], more: int) -> None:
        """Whether it has this shape, or up to so many more rows."""
        if info.dtype not in FLOATS:
            dtype = str(info.dtype).removeprefix("torch.")
            raise wrong(self.file, info, f"is {dtype}; adapters are floats")
        has_rows = info.shape[1:] == shape[1:] and shape[0] <= info.shape[0] <= shape[0] + more
        if len(info.shape) != len(shape) or not has_rows or 0 in shape:
            implied = f"the model's layer implies {list(shape)}"
            if more:
                implied += f", and up to {more} rows more"
            raise wrong(self.file, info, f"has shape {list(info.shape)}; {implied}")


def _shapes(target: Target, rank: int, num_tokens: int) -> dict[Kind, tuple[int, ...]]:
    """Of all tensors but those of [outputs]."""
    table, size = (target.outputs, target.inputs)[:: -1 if target.is_table else 1]
    return {
        "a": (rank, target.inputs),
        "b": (target.outputs, rank),
        "weight": (target.outputs, target.inputs),
        "base_table": (table, size),
        "table": (table, size),
        "rows": (num_tokens, size),
    }
