"""What every parameter-holding layer has in common: it says which checkpoint tensors it wants, and where they go.

Invariant: a layer knows its own parameters and no file; the loader knows files and no layer. They meet in `Slot`.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from quire.config import EngineConfig
from quire.layers.shard import WHOLE, Shard
from quire.layers.slot import Slot

if TYPE_CHECKING:
    from quire.layers.quantization import QuantMethod

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


LORA_DTYPES = DTYPES | {"int8": torch.int8}


def device_type(config: EngineConfig) -> str:
    """Return torch's name of the device type that the model runs on; the config must be prepared."""
    return config.torch_device or config.device.device


def model_dtype(config: EngineConfig) -> torch.dtype:
    """The precision of large weights; the config must be prepared, so that it is no longer "auto"."""
    return DTYPES[config.model.dtype]


def lora_dtype(config: EngineConfig) -> torch.dtype:
    """What the matrices of adapters are kept in; the config must be prepared."""
    return LORA_DTYPES.get(config.lora.lora_dtype, model_dtype(config))


def activation_dtype(config: EngineConfig) -> torch.dtype:
    """The precision of what flows between layers, and of the small weights it is multiplied with element by element.

    On a GPU it is that of the weights. On a CPU it is float32 whatever they are: 16-bit activations would save no time.
    """
    return torch.float32 if device_type(config) == "cpu" else model_dtype(config)


class Module(nn.Module):
    """A part of a model; a call goes without nn.Module's hooks, which nothing uses and which cost a microsecond."""

    def __call__(self, *args: Any) -> Any:
        return self.forward(*args)

    def take_share(self, shard: Shard) -> None:
        """Compute for the heads of one rank; called once, if there are several."""
        return None


class Layer(Module):
    """Base of layers with parameters; `name` is the full name of the layer in the model."""

    def __init__(self, name: str = "") -> None:
        super().__init__()
        self.name = name
        self.shard = WHOLE

    def create_weights(self, method: "QuantMethod", shard: Shard = WHOLE) -> None:
        """Have parameters, uninitialised, for the share of one rank, of a matrix as `method` wants them.

        A new layer has those of a float layer as a whole; the loader may say otherwise before it fills them.

        Raises:
            ConfigError: the layer cannot be cut so.
        """
        self.shard = shard

    def slots(self, names: Sequence[str]) -> Iterator[tuple[str, Slot]]:
        """Checkpoint tensor name -> slot; several for a tensor of which several parts are taken.

        `names` are the checkpoint's modules that this layer holds: one, or several if it merges them.
        """
        raise NotImplementedError

    def finish_loading(self) -> None:
        """Called once, when all parameters have their values: the time to bring them into another layout."""

    def replaced(self, device_type: str) -> Collection[str]:
        """Names of the parameters that `finish_loading`, on such a device, replaces and lets go of."""
        return ()

    def tensors(self) -> dict[str, Tensor]:
        """Name -> memory of all that a finished layer holds."""
        return dict(self.named_parameters(recurse=False))

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Instead of filling and finishing: hold what `tensors` of such a layer, finished, returned."""
        for name, tensor in tensors.items():
            setattr(self, name, nn.Parameter(tensor, requires_grad=False))


@runtime_checkable
class RowSource(Protocol):
    """A layer whose output may be read by a single linear layer alone."""

    def quantize_rows(self) -> None:
        """From now on give `QuantizedRows` instead of a tensor."""


def parameter(*shape: int, dtype: torch.dtype) -> nn.Parameter:
    """An uninitialised parameter for inference."""
    return nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)
