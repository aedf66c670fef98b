# SPDX-License-Identifier: Apache-2.0
"""`DispatchMode`: torch's dispatch mode without importing torch's compiler."""

from __future__ import annotations

from torch.utils._python_dispatch import TorchDispatchMode


class DispatchMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Base of modes that intercept torch's operations.

    torch imports its compiler on the first operation to exclude the mode from compilation, which takes about a second
    of every start. quire compiles nothing, so this is skipped.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False
