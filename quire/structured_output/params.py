# SPDX-License-Identifier: Apache-2.0
"""Former name of `quire.structured_outputs_params`, for one release."""

import warnings

from quire.structured_outputs_params import *  # noqa: F403

warnings.warn(
    "quire.structured_output.params is quire.structured_outputs_params now", DeprecationWarning, stacklevel=2
)
