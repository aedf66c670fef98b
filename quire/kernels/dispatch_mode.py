"""`DispatchMode`: torch's dispatch mode without torch's compiler."""

from __future__ import annotations

from torch.utils._python_dispatch import TorchDispatchMode


class DispatchMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Base of modes that look at torch's operations.

    torch tells its compiler to keep out of a mode, and imports it for that with the first operation: about a second of
    every start. We compile nothing, so it need not be told.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False
