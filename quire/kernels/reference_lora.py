"""Torch oracle of the op that adds low-rank adapters."""

from torch import Tensor

from quire.kernels.lora import LoraStacks


def lora_linear(out: Tensor, x: Tensor, adapter_rows: Tensor, adapters: LoraStacks) -> None:
    slots = sorted({slot for slot in adapter_rows.tolist() if slot >= 0})
    count = len(adapters.a)
    if slots and slots[-1] >= count:
        raise IndexError(f"lora_linear: adapter {slots[-1]} is outside the {count} slots")
    for slot in slots:
        rows = (adapter_rows == slot).nonzero()[:, 0]
        for part, columns in enumerate(adapters.columns()):
            rank = int(adapters.ranks[slot, part])
            shrunk = x[rows].float() @ adapters.a[slot, part, :, :rank].float()
            shrunk = shrunk * adapters.scales[slot, part, :rank]
            added = shrunk @ adapters.b[slot, :rank, columns].float()
            base = out[rows, columns].float()
            if adapters.affine[slot, part]:
                base = base * adapters.factors[slot, columns] + adapters.offsets[slot, columns]
            out[rows, columns] = (base + added).to(out.dtype)
