# SPDX-License-Identifier: Apache-2.0
"""Statistics of the running engine and their outputs."""
