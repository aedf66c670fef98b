# SPDX-License-Identifier: Apache-2.0
"""bitsandbytes: LLM.int8() (T. Dettmers et al., 2022, arXiv:2208.07339), NF4 and FP4 (2023, arXiv:2305.14314)."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.kernels.formats import format_of
from quire.kernels.formats.books import BookFormat
from quire.kernels.linear import WeightScheme
from quire.layers.quantized.codec import Codec, Coded, Stored, every, inputs, outputs, scheme_of

STORAGES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.uint8, torch.int8, torch.float16, torch.bfloat16, torch.float32, torch.float64)
}
"""Dtypes that files may label bytes with: sharded training needs parameters of one dtype."""
_SCALES_PER_SCALE = 256
"""Blocks whose scales share a scale, where these are quantized, too."""
_FORMATS = ("row", "col32", "col_turing", "col_ampere")
"""Layouts of the integers of LLM.int8(), by their numbers in files."""


@dataclass(frozen=True)
class BnbInt8(Codec):
    """weight int8 [N, K]; SCB [N], the largest magnitude of each output; and perhaps weight_format, its layout."""

    def scheme(self, num_inputs: int, present: Collection[str]) -> WeightScheme | None:
        return scheme_of("int8", 0)

    def tensors(self, num_outputs: int, num_inputs: int) -> Mapping[str, Stored]:
        return {
            "weight": Stored((outputs(), inputs()), (torch.int8,)),
            "SCB": Stored((outputs(),)),
            "weight_format": Stored((every(),), (torch.uint8,), optional=True),
        }

    def decoded(self, tensors: Mapping[str, Tensor]) -> Coded | Tensor:
        data, rows = tensors["weight"], _FORMATS.index("row")
        if "weight_format" in tensors and (found := int(tensors["weight_format"])) != rows:
            known = f" ({_FORMATS[found]})" if found < len(_FORMATS) else ""
            raise ValueError(f"weight_format is {found}{known}; it must be {rows} (row)")
        return Coded.of("int8", 0, data, tensors["SCB"].float().unsqueeze(1) / 127)


@dataclass(frozen=True)
class Bnb4(Codec):
    """Indices into a table of 16 numbers, for the flattened matrix, in blocks that share a scale.

    weight is uint8 [N * K / 2, 1], a byte's high half first, or the same bytes as numbers of `storage`. Also read are
    weight.absmax and weight.quant_map. If scales are quantized, too, absmax indexes weight.nested_quant_map. Blocks of
    its values share a scale of weight.nested_absmax; the offset in weight.quant_state, a JSON object, is added.
    """

    kind: str = "nf4"
    block: int = 64
    nested: bool = False
    storage: str = "uint8"
    cuts = False

    @property
    def _state(self) -> str:
        return f"weight.quant_state.bitsandbytes__{self.kind}"

    @property
    def input_unit(self) -> int:
        return self.block

    def scheme(self, num_inputs: int, present: Collection[str]) -> WeightScheme | None:
        return None if num_inputs % self.block else scheme_of(self.kind, self.block)

    def tensors(self, num_outputs: int, num_inputs: int) -> Mapping[str, Stored]:
        count, stored = -(-num_outputs * num_inputs // self.block), STORAGES[self.storage]
        tensors = {
            "weight": Stored(
                (every(-(-num_outputs * num_inputs // (2 * stored.itemsize))),), (stored,), flat=True
            ),
            "weight.quant_map": Stored((every(16),)),
            "weight.absmax": Stored((every(count),), (torch.uint8,) if self.nested else (torch.float32,)),
            self._state: Stored((every(0),), (torch.uint8,)),
        }
        if self.nested:
            tensors["weight.nested_absmax"] = Stored((every(-(-count // _SCALES_PER_SCALE)),))
            tensors["weight.nested_quant_map"] = Stored((every(256),))
        return tensors

    def decoded(self, tensors: Mapping[str, Tensor]) -> Coded | Tensor:
        state = _State.of(self._state, tensors[self._state])
        if state.block != self.block:
            raise ValueError(f"{self._state} says blocksize {state.block}; it must be {self.block}")
        scales = tensors["weight.absmax"]
        if self.nested:
            outer = tensors["weight.nested_absmax"].repeat_interleave(_SCALES_PER_SCALE)[: len(scales)]
            scales = tensors["weight.nested_quant_map"][scales.int()] * outer + state.offset
        pairs = tensors["weight"].flatten().view(torch.uint8)
        codes, book = torch.stack((pairs >> 4, pairs & 15), 1).flatten(), tensors["weight.quant_map"]
        rows, columns = state.shape
        if not 0 <= len(codes) - rows * columns <= 1:
            raise ValueError(f"{self._state} says shape {state.shape}, and weight has {len(codes)} numbers")
        if columns % self.block == 0:
            self._check(book)
            return Coded.of(self.kind, self.block, codes.view(rows, columns), scales.view(rows, -1))
        values = book[codes.int()] * scales.repeat_interleave(self.block)[: len(codes)]
        return values[: rows * columns].view(rows, columns)

    def _check(self, book: Tensor) -> None:
        """Raise ValueError if the book is not the format's."""
        expected = format_of(scheme_of(self.kind, self.block))
        assert isinstance(expected, BookFormat), "one for each kind"
        if not torch.allclose(book, expected.book.to(book.device), rtol=0.0, atol=1e-6):
            raise ValueError(f"weight.quant_map is not {self.kind}'s")


@dataclass(frozen=True)
class _State:
    """Fields of bitsandbytes' quant_state that are read."""

    block: int
    shape: tuple[int, int]
    offset: float

    @staticmethod
    def of(name: str, tensor: Tensor) -> _State:
        """Parse the bytes of a JSON object.

        Raises:
            ValueError: they are no such object.
        """
        try:
            found = json.loads(bytes(tensor.tolist()))
            rows, columns = map(int, found["shape"])
            return _State(int(found["blocksize"]), (rows, columns), float(found.get("nested_offset", 0.0)))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(
                f"{name} is no JSON object with blocksize and a shape of two: {error!r}"
            ) from error
