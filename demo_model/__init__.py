# SPDX-License-Identifier: Apache-2.0
"""The recipe of quire-demo, a toy chat model; everything here is deterministic for a given seed."""
