# SPDX-License-Identifier: Apache-2.0
"""Base classes of layers with parameters, and the dtypes of weights, adapters and activations.

Invariant: a layer knows its parameters and no file; the loader knows files and no layer. They meet in `Slot`.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from quire.config import EngineConfig
from quire.layers.shard import WHOLE, Shard
from quire.layers.slot import Slot

if TYPE_CHECKING:
    from quire.layers.quantization import QuantMethod

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def device_type(config: EngineConfig) -> str:
    """Return torch's name of the model's device type; the config must be prepared."""
    return config.torch_device or config.device.device


def model_dtype(config: EngineConfig) -> torch.dtype:
    """Return the dtype of large weights; the config must be prepared, so that it is no longer "auto"."""
    return DTYPES[config.model.dtype]


def activation_dtype(config: EngineConfig) -> torch.dtype:
    """Return the dtype of activations and of small weights that multiply them elementwise.

    On a GPU it is the weights' dtype. On a CPU it is always float32: 16-bit activations would save no time.
    """
    return torch.float32 if device_type(config) == "cpu" else model_dtype(config)


class Module(nn.Module):
    """nn.Module whose call skips the hooks, which nothing uses and which cost a microsecond."""

    is_replicated: ClassVar[bool] = False
    """True: each rank has the whole module, which is small."""

    def __call__(self, *args: Any) -> Any:
        return self.forward(*args)

    def apply_shard(self, shard: Shard) -> None:
        """Keep this rank's heads only; called once, under tensor parallelism."""
        return None


class Layer(Module):
    """Base of layers with parameters; `name` is the full name of the layer in the model."""

    def __init__(self, name: str = "") -> None:
        super().__init__()
        self.name = name
        self.shard = WHOLE

    def create_weights(self, method: "QuantMethod", shard: Shard = WHOLE) -> None:
        """Allocate uninitialized parameters for one rank's shard, in the form that `method` stores.

        A new layer has those of a whole float layer; the loader may call this again before it fills them.

        Raises:
            ConfigError: the layer cannot be sharded this way.
        """
        self.shard = shard

    def slots(self, names: Sequence[str]) -> Iterator[tuple[str, Slot]]:
        """Yield (checkpoint tensor name, slot); a tensor has several slots if several parts of it are used.

        `names` are the checkpoint's modules that this layer holds: one, or several if it merges them.
        """
        raise NotImplementedError

    def finish_loading(self) -> None:
        """Repack parameters; called once, when all of them are filled."""

    def replaced(self, device_type: str) -> Collection[str]:
        """Return names of parameters that `finish_loading` replaces and frees on this device type."""
        return ()

    def tensors(self) -> dict[str, Tensor]:
        """Return name -> tensor for everything that a finished layer holds."""
        return dict(self.named_parameters(recurse=False))

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Set a finished layer's tensors, as `tensors` returned them, instead of filling and finishing it."""
        for name, tensor in tensors.items():
            setattr(self, name, nn.Parameter(tensor, requires_grad=False))


@runtime_checkable
class RowSource(Protocol):
    """Layer whose output can be consumed by a single linear layer only."""

    def quantize_rows(self) -> None:
        """Return `QuantizedRows` instead of a tensor from now on."""


def parameter(*shape: int, dtype: torch.dtype) -> nn.Parameter:
    """Return an uninitialized parameter for inference."""
    return nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)
