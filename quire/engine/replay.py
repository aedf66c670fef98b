# SPDX-License-Identifier: Apache-2.0
"""Former name of the replay in `quire.engine.trace`, for one release."""

import warnings

from quire.engine.trace import replay

__all__ = ["replay"]

warnings.warn("quire.engine.replay is quire.engine.trace now", DeprecationWarning, stacklevel=2)
