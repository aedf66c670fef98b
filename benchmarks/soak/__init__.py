# SPDX-License-Identifier: Apache-2.0
"""A server under mixed traffic and faults, for as long as one likes: `python -m benchmarks.soak --seconds 60`."""
