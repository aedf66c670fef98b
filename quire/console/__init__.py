# SPDX-License-Identifier: Apache-2.0
"""Console: a page for browsers with a chat, and, for the operator, the engine's requests, steps and cache blocks."""
