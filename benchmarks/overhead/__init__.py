# SPDX-License-Identifier: Apache-2.0
"""Cost of serving besides the model: `python -m benchmarks.overhead`."""
