# SPDX-License-Identifier: Apache-2.0
"""Numerical kernels: the table of ops (`quire.kernels.ops`), the torch oracle, faster implementations."""
