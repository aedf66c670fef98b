# SPDX-License-Identifier: Apache-2.0
"""llama-server's own API, translated to completions."""
