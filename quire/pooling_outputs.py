# SPDX-License-Identifier: Apache-2.0
"""Former name of `quire.pooling.outputs`, for one release."""

import warnings

from quire.pooling.outputs import *  # noqa: F403

warnings.warn("quire.pooling_outputs is quire.pooling.outputs now", DeprecationWarning, stacklevel=2)
